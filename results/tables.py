"""Writes every table in README and docs, and README's figure, from the JSON files next to this file; --check fails if
one is out of date.

A table is between `<!-- table NAME -->` and `<!-- end -->`; NAME is a function with @table in generators/.
"""

import re
import sys

from generators import accuracy, curvature, reliability, speed  # noqa: F401 (they fill TABLES)
from generators.base import ROOT, TABLES

MARK = re.compile(r"(<!-- table ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def rewritten(text: str) -> str:
    return MARK.sub(lambda m: m[1] + TABLES[m[2]]() + m[4], text)


def main() -> None:
    stale = []
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = document.read_text()
        if rewritten(text) != text:
            stale.append(document.name)
            if "--check" not in sys.argv:
                document.write_text(rewritten(text))
    if accuracy.figure_is_stale():
        stale.append(accuracy.FIGURE.name)
        if "--check" not in sys.argv:
            accuracy.draw_figure()
    if stale and "--check" in sys.argv:
        sys.exit(f"not up to date with results/: {', '.join(stale)}; run python results/tables.py")


if __name__ == "__main__":
    main()
