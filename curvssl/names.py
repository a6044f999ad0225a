"""The answer to a name that is not in a list."""

import difflib
from collections.abc import Iterable


def unknown(what: str, name: object, known: Iterable[str]) -> str:
    """What came, the nearest name that there is, and all that there are."""
    known = list(known)
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"unknown {what} {name!r}; {hint}known: {', '.join(known)}"
