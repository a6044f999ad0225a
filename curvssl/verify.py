"""Compare files with their checksums, or take them as they are: `curvssl verify`."""

import json
from pathlib import Path
from typing import Any

from curvssl.config import PretrainConfig, UserError
from curvssl.files import check_regular, say, write_json
from curvssl.manifest import Manifest, Wrong, seal, sealed
from curvssl.rundir import AGAIN, ROOTS, TRAINED, WEIGHTS, Run, manifest_of


def verify(path: Path, *, accept: bool = False) -> int:
    """Compare all files of a run directory, a pack (.npy) or a cell (.json) with their checksums; returns their number.

    A line names each file that is not as it was written, and then it is an error. With `accept`, what is there is taken
    as it is, unless it cannot be read.
    """
    if path.suffix == ".json":
        if path.name.endswith("manifest.json") or path.name in manifest_of(path.parent).entries():
            raise UserError(f"{path} is a part of a run or a pack, not a result of a study: give the run or the pack")
        if accept:
            write_json(path, seal(parsed(path)))
        sealed(path, remedy="restore it, or delete it and make it again")
        return 1
    if path.suffix == ".npy":
        return verify_pack(path, accept=accept)
    manifest = manifest_of(path)
    if accept:
        accept_run(path, manifest)
    Run.read(path)
    names, wrong = [*manifest.entries()], 0
    for name in names:
        try:
            manifest.check(name)
        except Wrong as error:
            say(str(error))
            wrong += 1
    if wrong:
        raise UserError(f"{wrong} of {len(names)} files of {path} are not as they were written")
    return len(names)


def accept_run(path: Path, manifest: Manifest) -> None:
    """Record the files of a run as they are. What was made from it and cannot be read will be made again."""
    config = path / "config.json"
    if not config.exists():
        raise UserError(f"{path} is not a run directory: it has no config.json; give the --out of a pretraining")
    run = Run(path, PretrainConfig.from_dict(parsed(config)))
    trained = [name for name in TRAINED if (path / name).exists()]
    for name in trained:
        parsed(path / name)
    made = []
    for file in sorted([*path.glob("*.json"), *path.glob("*.npz")]):
        if file.name not in (*TRAINED, manifest.file.name):
            try:
                parsed(file)
                made.append(file.name)
            except UserError as error:
                say(f"{error}; it is made again when it is needed")
    finished = all(name in trained for name in WEIGHTS)
    manifest.record([name for name in trained if name in ROOTS and name not in WEIGHTS], by=AGAIN, new=True)
    manifest.record([n for n in trained if n not in ROOTS and (finished or n != "metrics.jsonl")], by="")
    manifest.record([file.name for file in run.checkpoints() if file.is_file()], of=("config.json",), by=AGAIN)
    for i, name in enumerate(WEIGHTS):
        manifest.record([name] if name in trained else [], of=("config.json", "data.json", *WEIGHTS[:i]), by=AGAIN)
    manifest.record(made, of=ROOTS, by="curvssl report RUN")


def verify_pack(path: Path, *, accept: bool) -> int:
    """Compare every image of a pack, and what lies next to it, with their checksums; returns the number of images."""
    from curvssl.data.arrays import PACK_AGAIN, PACKING, ArrayImages, manifest_of_pack, open_array

    manifest, beside = manifest_of_pack(path), path.with_suffix(".labels.npz")
    if accept and beside.exists():
        manifest.record([beside.name], by=PACKING, new=True)
    opened = open_array(path)
    if opened.crc32 is None:
        raise UserError(f"{path} has no checksums, like any array that was not packed: {PACK_AGAIN}")
    return sum(len(batch) for batch in ArrayImages.of(opened).split(64))


def parsed(path: Path) -> Any:
    """What a file of ours holds, or an error if it cannot be read at all."""
    try:
        check_regular(path)
        if path.suffix == ".npz":
            from curvssl.data.arrays import read_arrays

            return read_arrays(path)
        if path.suffix == ".json":
            value = json.loads(path.read_bytes())
            if not isinstance(value, dict):
                raise ValueError("it holds no settings and no results")
            return value
        if path.suffix == ".safetensors" and not whole(path):
            raise ValueError("it was cut off, or its header has changed")
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}): restore it, or remove it") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): restore it, or remove it") from None


def whole(file: Path) -> bool:
    """Whether a safetensors file has a header, and all the bytes that the header promises."""
    try:
        with open(file, "rb") as opened:
            n = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(n)) if 0 < n < file.stat().st_size else {}
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        return bool(ends) and file.stat().st_size == 8 + n + max(ends)
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError):
        return False
