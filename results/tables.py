"""Rewrites every table in README and docs from the JSON beside this file; --check fails if one is not up to date.

A table stands between `<!-- table NAME -->` and `<!-- end -->`; NAME is a function below.
"""

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
MARK = re.compile(r"(<!-- table ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def read(name: str) -> Any:
    return json.loads((HERE / name).read_text())


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], source: str) -> str:
    """A table and, below it, where its numbers come from."""
    lines = ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]
    made = json.loads((HERE / source).read_text())["provenance"]
    where = f"{made['device']}, torch {made['versions']['torch']}, commit {made['commit']}, {made['created'][:10]}"
    return "\n".join([*lines, "", f"<sub>results/{source}: {where}</sub>", ""])


def demo() -> str:
    found = read("demo.json")
    rows = [[name, *(f"{p['mean']:.1f} ± {p['std']:.1f}" if p["std"] else f"{p['mean']:.1f}" for p in probes.values())]
            for name, probes in found["accuracy"].items()]  # fmt: skip
    return markdown(("", *next(iter(found["accuracy"].values()))), rows, "demo.json")


TABLES: dict[str, Callable[[], str]] = {function.__name__: function for function in (demo,)}


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
    if stale and "--check" in sys.argv:
        sys.exit(f"not up to date with results/: {', '.join(stale)}; run python results/tables.py")


if __name__ == "__main__":
    main()
