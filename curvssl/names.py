"""The error message for an unknown name."""

import difflib
from collections.abc import Iterable


def unknown(what: str, name: object, known: Iterable[str]) -> str:
    """The name that was given, the most similar known name, and all known names."""
    known = list(known)
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"unknown {what} {name!r}; {hint}known: {', '.join(known)}"
