"""Tables of the campaigns: damage, kills, random inputs, memory."""

import functools
from collections.abc import Callable

from generators.base import HERE, markdown, read, table


def of_campaign(make: Callable[[], str]) -> Callable[[], str]:
    """A table of the campaigns of benchmarks/faults.py, or where to find it."""

    @functools.wraps(make)
    def made() -> str:
        return make() if (HERE / "faults.json").exists() else "Not run yet: `make faults`.\n"

    return made


VERIFY_COLUMNS = {"verify_seconds": "`curvssl verify`, s", "sha256sum_seconds": "`sha256sum`, s"}
DAMAGE_VERDICTS = {"told": "told", "mended": "mended", "same": "the same", "failed": "failed"}


@table
@of_campaign
def faults_damage() -> str:
    """What each kind of damage did."""
    found = read("faults.json")["corruption"]["by_damage"]
    rows = [[kind, *verdict_columns(counts)] for kind, counts in found.items()]
    totals = [sum(int(row[i]) for row in rows) for i in range(1, 6)]
    return markdown(("damage", "cases", *DAMAGE_VERDICTS.values()), [*rows, ["all", *map(str, totals)]], "faults.json")


def verdict_columns(counts: dict[str, int]) -> list[str]:
    """The number of cases, then of each verdict; whatever is no verdict of ours has failed."""
    good = [counts.get(name, 0) for name in ("told", "mended", "same")]
    return [str(n) for n in (sum(counts.values()), *good, sum(counts.values()) - sum(good))]


@table
@of_campaign
def faults_files() -> str:
    """The same by file."""
    found = read("faults.json")["corruption"]["by_file"]
    names = {
        "stopped/OLDER": "stopped/checkpoint-*.pt, the older",
        "stopped/NEWER": "stopped/checkpoint-*.pt, the newer",
        "run/FEATURES IN ANOTHER FOLDER": "run/features-in-*.npz",
    }
    rows = [[f"`{names.get(name, name)}`", *verdict_columns(counts)] for name, counts in sorted(found.items())]
    return markdown(("file", "cases", *DAMAGE_VERDICTS.values()), rows, "faults.json")


@table
@of_campaign
def faults_kills() -> str:
    names = {
        "begin": "pretrain",
        "two ranks": "pretrain over two ranks",
        "data": "the cache's first write",
        "pack": "pack, over an older pack",
    }
    found = read("faults.json")["kills"]
    rows = [
        [names.get(name, name), *(str(counts.get(key, 0)) for key in ("kills", "worlds", "same", "failed"))]
        for name, counts in found.items()
    ]
    totals = [sum(int(row[i]) for row in rows) for i in range(1, 5)]
    header = ("killed", "kills", "worlds", "the same to the last bit", "failed")
    return markdown(header, [*rows, ["all", *map(str, totals)]], "faults.json")


@table
@of_campaign
def faults_rest() -> str:
    found = read("faults.json")
    disks = found["full_or_read_only_disk"]
    rows = [
        [
            "a full or a read-only disk: a line, then the same result",
            str(sum(disks.values())),
            str(disks.get("failed", 0)),
        ]
    ]
    for key, what in (
        ("changed_data", "changed images: a line, exit code 2"),
        ("two_processes", "two processes on one run: refused, or the same result"),
    ):
        verdicts = list(found[key].values())
        rows.append([what, str(len(verdicts)), str(verdicts.count("failed"))])
    return markdown(("", "cases", "failed"), rows, "faults.json")


@table
@of_campaign
def faults_verify() -> str:
    found = read("faults.json")["verify"]
    row = [f"{found['files']} files, {found['megabytes']} MB", *(f"{found[name]:.2f}" for name in VERIFY_COLUMNS)]
    return markdown(("a run of the usual size", *VERIFY_COLUMNS.values()), [row], "faults.json")


@table
def fuzz() -> str:
    """Random inputs to the library, by function and outcome."""
    found = read("fuzz.json")
    outcomes = ("right", "refused", "shown", "finite", "FAULT")
    total = {outcome: sum(counts[outcome] for counts in found["counts"].values()) for outcome in outcomes}
    rows = [
        [name, f"{sum(counts.values()):,}", *(f"{counts[outcome]:,}" for outcome in outcomes)]
        for name, counts in (*found["counts"].items(), ("**all**", total))
    ]
    header = ("function", "cases", "right", "refused", "not finite, and shown", "rounding decides", "wrong")
    return markdown(header, rows, "fuzz.json")


@table
def memory() -> str:
    """The memory of a process during long runs."""
    rows, made = [], []
    for device in ("cpu", "cuda"):
        found = read(f"memory-{device}.json")
        made.append(f"{found['provenance']['device']}, commit {found['provenance']['commit']}")
        for part in ("process", "cuda"):
            if part in found:
                marks = [f"{mark:.1f}" for mark in found[part]["MB_at_10_20_40_60_80_100_percent"]]
                slope = f"{found[part]['MB_per_1000_steps']:+.3f}"
                rows.append([f"{device}, {part}", f"{found['steps']:,}", *marks, slope])
    header = ("memory in MB", "steps", "at 10 %", "20 %", "40 %", "60 %", "80 %", "100 %", "MB per 1,000 steps")
    return markdown(header, rows, "memory-cpu.json, results/memory-cuda.json", "; ".join(made))
