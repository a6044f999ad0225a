"""What all generators share: how results are read, and how a table looks."""

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1]
ROOT = HERE.parent
STEMS = {"imagenet": "7×7", "small": "3×3"}
FLOPS = {"imagenet": 0.217e9, "small": 3.329e9}  # forward + backward of ResNet-18 per 32×32 view
TABLES: dict[str, Callable[[], str]] = {}  # the name that a document gives → what writes it


def table(make: Callable[[], str]) -> Callable[[], str]:
    """A function that writes a table, under its own name."""
    TABLES[make.__name__] = make
    return make


def read(name: str) -> Any:
    return json.loads((HERE / name).read_text())


def markdown(
    header: Sequence[str], rows: Sequence[Sequence[str]], source: str, where: str = "", *, key: str = "provenance"
) -> str:
    """A table with a line below it about the origin of its numbers: `where`, or by default the JSON's provenance."""
    if not where:
        made = read(source)[key]
        where = f"{made['device']}, torch {made['versions']['torch']}, commit {made['commit']}, {made['created'][:10]}"
    lines = ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]
    return "\n".join([*lines, "", f"<sub>results/{source}: {where}</sub>", ""])


def cells_of(study: str) -> dict[str, Any]:
    """{cell: its JSON}, with the cells of options that the program no longer has, which are in the study's notes."""
    files = {file.name: json.loads(file.read_text()) for file in (HERE / study).glob("*.json")}
    if (HERE / f"{study}-notes.json").exists():
        files |= read(f"{study}-notes.json").get("removed", {}).get("cells", {})
    return {name.removesuffix(".json"): cell for name, cell in sorted(files.items())}


def span(cell: Any) -> tuple[float, float]:
    """When the run of a cell began and ended, in seconds; its JSON is written at the end."""
    end = datetime.fromisoformat(cell["provenance"]["created"]).timestamp()
    return end - cell["seconds_with_probes"], end


def device_minutes(cells: Iterable[Any]) -> float:
    """Minutes in which at least one of the cells was running."""
    spent, until = 0.0, 0.0
    for start, end in sorted(map(span, cells)):
        spent, until = spent + max(0.0, end - max(start, until)), max(until, end)
    return spent / 60
