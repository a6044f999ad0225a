"""The error message for an unknown name."""

import difflib
from collections.abc import Iterable


def unknown(what: str, name: object, known: Iterable[str]) -> str:
    """The name that was given, the known name that is similar to it or has a similar part, and all known names."""
    known = list(known)
    whole = {part: one for one in reversed(known) for part in (*one.split("-"), one)}
    close = difflib.get_close_matches(str(name), whole, n=1, cutoff=0.6)  # less is no misspelling
    hint = f"did you mean {whole[close[0]]!r}? " if close else ""
    return f"unknown {what} {name!r}; {hint}known: {', '.join(known)}"
