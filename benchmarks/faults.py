"""What damage, kills and full disks do to the real commands: nothing may be lost, and nothing may be silent.

    python benchmarks/faults.py [--out results/faults.json] [--corruptions 1000] [--kills 200] [--seed 0]
    python benchmarks/faults.py --short            some seconds of it, as `make test` runs it

Every case has its own copy of a small world: a folder of images, its pack, two evaluated runs, a stopped one, the cells
of a study and a cache. A command runs in a process that was forked from this one, so that it starts at once. What it
gives is compared, to the last bit, with what it gives in the untouched world.

    told      exit code 2, and one line that names the file
    mended    the same result, and a line that names the file
    same      the same result, and no line
    failed    anything else: another result, a traceback, a hang, a line that does not name the file
"""

import argparse
import contextlib
import dataclasses
import hashlib
import importlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Sums must not depend on free cores, and a fork copies only one thread.
os.environ |= {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "NUMBA_THREADING_LAYER": "workqueue"}

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from curvssl.cli import main as curvssl
from curvssl.config import AugmentConfig, demo
from curvssl.data import named, sources
from curvssl.evaluate import features, maps
from curvssl.files import write_json
from curvssl.paper import studies
from curvssl.rundir import Run, provenance

for needed in ("train.loop", "evaluate.runs", "report.collect", "report.seen", "paper.reproduce", "verify", "models"):
    importlib.import_module(f"curvssl.{needed}")  # here, and not in every fork
for needed in ("safetensors.torch", "sklearn.metrics", "torch.utils.tensorboard", "torchvision", "curvssl.outliers"):
    importlib.import_module(needed)

PATIENCE = 120  # seconds; a command of this world takes two
CLOCKS = ("seconds", "views_per_s", "created", "command", "seconds_with_probes")
NEAR: dict[str, Any] = {"k": 5}  # a field that is made at run time
TINY = dataclasses.replace(
    demo(),
    dataset="array:images.npy",
    image_size=8,
    epochs=3,
    warmup_epochs=1,
    batch_size=24,
    **NEAR,
    d_z=8,
    projector_width=16,
    monitor_every=3,
    holdout=0.2,
    checkpoint_seconds=0.0,
    augment=AugmentConfig(crop_scale=(0.6, 1.0), flip=0, jitter=0, grayscale=0),
)
RUN = [w for n, v in TINY.to_dict().items() if n not in ("augment", "second", "local") and v != demo().to_dict()[n]
       for w in (f"--{n.replace('_', '-')}", str(v))]  # fmt: skip
PRETRAIN = ["pretrain", "--preset", "demo", *RUN, "--augment.rotation", "0"]
CELLS = {"tiny-vicreg-seed0": dataclasses.replace(TINY, method="vicreg", dataset="tiny", seed=0)}


# ---- commands in processes of their own


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("curvssl: ")]


def start(arguments: list[str], *, world: Path, log: str = "log", **environment: str) -> int:
    """The command in a fork of this process, in the world's folder; its output goes to files beside it."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        os.chdir(world)
        os.environ.update(environment, CURVSSL_DATA="cache", CURVSSL_COMMIT="0123456789ab")
        for number, name in ((1, f"{log}.out"), (2, f"{log}.err")):
            os.dup2(os.open(world.parent / f"{world.name}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        curvssl(arguments)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def wait(pid: int, *, world: Path, log: str = "log", patience: float = PATIENCE) -> Outcome:
    """How a command ended; -1 if it had to be ended."""
    ends = time.monotonic() + patience
    code = -1
    while time.monotonic() < ends:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.002)
    else:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    out, err = ((world.parent / f"{world.name}.{log}.{kind}").read_text(errors="replace") for kind in ("out", "err"))
    return Outcome(code, out, err)


def run(arguments: list[str], *, world: Path) -> Outcome:
    return wait(start(arguments, world=world), world=world)


# ---- what a command gives, without what depends on the clock


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: timeless(part) for key, part in value.items() if key not in CLOCKS and key != "sha256"}
    return [timeless(part) for part in value] if isinstance(value, list) else value


def digest(*files: Path) -> str:
    found = hashlib.sha256()
    for file in files:
        if file.suffix in (".json", ".jsonl"):
            text = file.read_text()
            parts = text.splitlines() if file.suffix == ".jsonl" else [text]
            found.update(json.dumps([timeless(json.loads(part)) for part in parts]).encode())
        elif file.suffix == ".npz":
            with np.load(file) as arrays:
                for name in sorted(arrays.files):
                    found.update(name.encode() + arrays[name].tobytes())
        else:
            found.update(file.read_bytes())
    return found.hexdigest()


def trained(folder: str) -> Callable[[Path, Outcome], str]:
    names = ("encoder.safetensors", "projector.safetensors", "metrics.jsonl")
    return lambda world, ended: digest(*(world / folder / name for name in names))


def made(*files: str) -> Callable[[Path, Outcome], str]:
    return lambda world, ended: digest(*(world / file for file in files))


def said(world: Path, ended: Outcome) -> str:
    return re.sub(r"[0-9.]+ minutes", "", ended.out)


COMMANDS: dict[str, tuple[list[str], Callable[[Path, Outcome], str]]] = {
    "pretrain": ([*PRETRAIN, "--out", "run"], trained("run")),
    "resume": ([*PRETRAIN, "--out", "stopped"], trained("stopped")),
    "begin": ([*PRETRAIN, "--out", "new"], trained("new")),
    "probe": (["probe", "run", "--seeds", "1", "--no-floors"], made("run/probes.json", "run/predictions-test.npz")),
    "quality": (["quality", "run"], made("run/quality.json")),
    "map": (["map", "run"], made("run/map-h-all.npz")),
    "inspect": (["inspect", "run"], made("run/inspect.json")),
    "finetune": (["finetune", "run", "--labels", "2", "--draws", "1"], made("run/finetune.json")),
    "search": (["search", "run", "images/dark/00.png", "--in", "others", "--out", "s.json"], made("s.json")),
    "export": (
        ["export", "run", "--to", "hub-folder", "--out", "hub"],
        made("hub/encoder.safetensors", "hub/README.md"),
    ),
    "embed by an export": (["embed", "hub", "images", "--out", "e.npz"], made("e.npz")),
    "verify an export": (["verify", "hub"], said),
    "compare": (["compare", "run"], said),
    "embed": (["embed", "run", "images", "--out", "e.npz"], made("e.npz")),
    "embed a pack": (["embed", "run", "images.npy", "--out", "e.npz"], made("e.npz")),
    "report": (["report", "run", "--out", "page.html"], made("page.html")),
    "verify": (["verify", "run"], said),
    "verify a pack": (["verify", "images.npy"], said),
    "pack": (["pack", "images", "images.npy", "--image-size", "8"], made("images.npy", "images.labels.npz")),
    "status": (["reproduce", "--study", "tiny", "--status"], said),
    "table": (["reproduce", "--study", "tiny", "--table"], said),
    "reproduce": (["reproduce", "--study", "tiny"], made("results/tiny/tiny-vicreg-seed0.json")),
    "data": (["data", "tiny"], said),
}
EVALUATE = ("probe", "quality", "map", "inspect", "search", "export", "embed", "report")
EXPORT = ("embed by an export", "verify an export")
READERS: dict[str, tuple[str, ...]] = {  # which commands read which file
    "run/config.json": ("pretrain", "compare", "verify", *EVALUATE),
    "run/data.json": ("pretrain", "verify", *EVALUATE),
    "run/manifest.json": ("pretrain", "compare", "verify", *EVALUATE),
    "run/provenance.json": ("report", "verify"),
    "run/metrics.jsonl": ("pretrain", "quality", "report", "verify"),
    "run/encoder.safetensors": ("pretrain", "compare", "verify", *EVALUATE),
    "run/projector.safetensors": ("pretrain", "compare", "verify", *EVALUATE),
    "run/features-train.npz": ("probe", "verify"),
    "run/features-test.npz": ("probe", "map", "report", "verify"),
    "run/predictions-test.npz": ("compare", "report", "verify"),
    "run/probes.json": ("compare", "export", "report", "verify"),
    "run/quality.json": ("quality", "export", "verify"),
    "run/inspect.json": ("report", "verify"),
    "run/map-h-all.npz": ("report", "verify"),
    "run/views.npz": ("report", "verify"),
    "run/finetune.json": ("finetune", "export", "verify"),
    "run/FEATURES IN ANOTHER FOLDER": ("search", "verify"),
    "run/map-h-all.png": ("verify",),
    "hub/config.json": EXPORT,
    "hub/data.json": EXPORT,
    "hub/export.json": EXPORT,
    "hub/manifest.json": EXPORT,
    "hub/encoder.safetensors": EXPORT,
    "stopped/config.json": ("resume",),
    "stopped/data.json": ("resume",),
    "stopped/manifest.json": ("resume",),
    "stopped/metrics.jsonl": ("resume",),
    "stopped/provenance.json": ("resume",),
    "stopped/OLDER": ("resume",),
    "stopped/NEWER": ("resume",),
    "images.npy": ("begin", "pretrain", "probe", "embed a pack", "verify a pack"),
    "images.labels.npz": ("begin", "probe", "embed a pack", "verify a pack"),
    "images.manifest.json": ("begin", "probe", "embed a pack", "verify a pack"),
    "results/tiny/tiny-vicreg-seed0.json": ("status", "table"),
    "cache/tiny/train-images.npy": ("data",),
    "cache/tiny/train-labels.npy": ("data",),
    "cache/tiny/test-images.npy": ("data",),
    "cache/tiny/test-labels.npy": ("data",),
    "cache/tiny/sha256.json": ("data",),
}


# ---- the world


def tiny_set(*, root: Path, source: str) -> named.Dataset:
    """A data set of our own in the cache, as a user would add one: 80 and 20 images of noise in two classes."""

    def fetch() -> sources.Arrays:
        numbers = np.random.default_rng(0)
        labels = np.arange(100, dtype=np.uint8) % 2
        images = numbers.normal(80 + 60 * labels[:, None, None, None], 40, (100, 1, 8, 8)).clip(0, 255).astype(np.uint8)
        return {"train-images": images[:80], "train-labels": labels[:80],
                "test-images": images[80:], "test-labels": labels[80:]}  # fmt: skip

    arrays = sources.stored("tiny", {"memory": fetch}, root=root, source=source)
    return named._measured("tiny", arrays, ("dark", "bright"), root=root)


def build(world: Path, *, short: bool) -> None:
    """Make everything in the world with the real commands; in short, without what takes longest."""
    numbers = np.random.default_rng(1)
    for folder, seed in (("images", 0), ("others", 1)):
        for i in range(100):
            path = world / folder / ("dark", "bright")[i % 2] / f"{i:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = numbers.normal(80 + 60 * (i % 2) + 5 * seed, 40, (8, 8)).clip(0, 255)
            Image.fromarray(pixels.astype(np.uint8)).save(path)

    def done(*arguments: str) -> None:
        ended = run(list(arguments), world=world)
        assert ended.code == 0, ended.err

    done("pack", "others", "others.npy", "--image-size", "8")
    done(*COMMANDS["pack"][0])
    done(*COMMANDS["data"][0])
    for name, seed in (("run", "0"), ("other", "1")):
        done(*PRETRAIN, "--out", name, "--seed", seed)
        if short:
            continue
        done("probe", name)
        done("quality", name)
        done("map", name)
        done("inspect", name)
        done("report", name, "--out", f"{name}.html")
        done(*["search", name, *COMMANDS["search"][0][2:]])
        done(*["finetune", name, *COMMANDS["finetune"][0][2:]])
    if not short:
        done(*COMMANDS["export"][0])
    done(*COMMANDS["probe" if short else "reproduce"][0])
    for file in (*world.glob("other/checkpoint-*.pt"), *world.glob("runs/**/checkpoint-*.pt")):
        file.unlink()  # they are not needed, and each case copies the world
    pid = start([*PRETRAIN, "--out", "stopped"], world=world)
    rows = world / "stopped/metrics.jsonl"
    while len(list(rows.parent.glob("checkpoint-*.pt"))) < 2 or not rows.exists() or not rows.stat().st_size:
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    wait(pid, world=world)
    assert not (world / "stopped/encoder.safetensors").exists()


@contextlib.contextmanager
def copied(world: Path) -> Iterator[Path]:
    """A copy of the world that is deleted afterwards."""
    with tempfile.TemporaryDirectory(dir=world.parent) as folder:
        yield shutil.copytree(world, Path(folder) / "world", symlinks=True)


# ---- corruption


def flipped(data: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(8 * len(data))
    changed = bytearray(data)
    changed[place // 8] ^= 1 << place % 8
    return bytes(changed)


def swapped(file: Path, world: Path) -> None:
    relative = file.relative_to(world).as_posix()
    other = world / relative.replace("run/", "other/").replace("images.", "others.")
    if other == file or not other.exists():  # of a stopped run, a cell or a cache: another file of the same folder
        beside = (f for f in sorted(file.parent.iterdir()) if f.is_file() and f != file and f.name != "lock")
        other = next(beside, world / "other/config.json")
    shutil.copyfile(other, file)


DAMAGE: dict[str, Callable[[Path, Path, random.Random], object]] = {
    "a flipped bit": lambda file, world, draw: file.write_bytes(flipped(file.read_bytes(), draw)),
    "cut off": lambda file, world, draw: os.truncate(file, draw.randrange(1, file.stat().st_size)),
    "emptied": lambda file, world, draw: os.truncate(file, 0),
    "garbage": lambda file, world, draw: file.write_bytes(draw.randbytes(file.stat().st_size)),
    "of another run": lambda file, world, draw: swapped(file, world),
    "a folder": lambda file, world, draw: (file.unlink(), file.mkdir()),
    "a named pipe": lambda file, world, draw: (file.unlink(), os.mkfifo(file)),
    "deleted": lambda file, world, draw: file.unlink(),
}
MORE_FLIPS = 5  # a flipped bit is tried this many times as often


def damaged_file(name: str, world: Path) -> Path:
    if name in ("stopped/OLDER", "stopped/NEWER"):
        points = sorted((world / "stopped").glob("checkpoint-*.pt"), key=lambda file: int(file.stem.split("-")[1]))
        return points[-2 if name.endswith("OLDER") else -1]
    if name == "run/FEATURES IN ANOTHER FOLDER":
        found = (world / "run").glob("features-in-*.npz")
        return max(found, key=lambda file: file.stat().st_mtime_ns, default=world / name)
    return world / name


def judged(ended: Outcome, same: bool, file: Path) -> str:
    """told, mended or same; or what failed. A damaged manifest accuses a file that it describes."""
    names = [one.name for one in file.parent.iterdir()] if "manifest" in file.name else []
    named = any(name in line for line in ended.lines for name in (file.name, *names))
    if "Traceback" in ended.err:
        return "traceback"
    if ended.code == -1:
        return "hang"
    if ended.code == 2:
        return "told" if named else "not named"
    if ended.code != 0:
        return f"exit code {ended.code}"
    if not file.exists() and f"missing: {file.stem}" in ended.out:  # a study names the cells that it lacks
        return "told"
    return "silent" if not same else "mended" if named else "same"


GOOD = ("told", "mended", "same")


def corrupt(world: Path, expected: dict[str, str], *, cases: int, draw: random.Random, short: bool) -> list[Any]:
    """Each case: one file, one damage, one command. All combinations come before any is repeated with other bits."""
    kinds = [*DAMAGE, *["a flipped bit"] * (MORE_FLIPS - 1)]
    every = [
        (file, kind, command)
        for file, commands in READERS.items()
        for command in commands
        for kind in kinds
        if command in expected and damaged_file(file, world).exists() and not (short and command == "begin")
    ]
    draw.shuffle(every)
    found = []
    for i in range(cases):
        name, kind, command = every[i % len(every)]
        with copied(world) as place:
            if "ANOTHER FOLDER" in name:  # their name has the path of the folder, which is new in this copy
                run(COMMANDS["search"][0], world=place)
            file = damaged_file(name, place)
            DAMAGE[kind](file, place, draw)
            arguments, result = COMMANDS[command]
            ended = run(arguments, world=place)
            same = ended.code == 0 and result(place, ended) == expected[command]
            verdict = judged(ended, same, file)
        found.append({"file": name, "damage": kind, "command": command, "verdict": verdict})
        if not (i + 1) % 100:
            print(f"{i + 1} of {cases} cases", flush=True)
        if verdict not in GOOD:
            print(f"{name}, {kind}, {command}: {verdict}\n{ended.err[-1500:]}", flush=True)
    return found


# ---- kills

KILLED = ("begin", "two ranks", "probe", "pack", "report", "reproduce", "data")
BEFORE: dict[str, tuple[str, ...]] = {  # what is not there yet when the killed command begins
    "probe": ("run/features-train.npz", "run/features-test.npz", "run/probes.json", "run/predictions-test.npz"),
    "report": ("run/features-test.npz", "run/views.npz", "run/probes.json", "run/predictions-test.npz"),
    "reproduce": ("results", "runs"),
    "data": ("cache",),
}


def begun(name: str, place: Path) -> list[int]:
    """Start a command; over two ranks these are two processes."""
    if name != "two ranks":
        return [start(COMMANDS[name][0], world=place)]
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [start([*PRETRAIN, "--out", "new"], world=place, log=f"rank{r}", RANK=str(r), LOCAL_RANK=str(r), **shared)
            for r in range(2)]  # fmt: skip


def ended(name: str, pids: list[int], place: Path, *, patience: float = PATIENCE) -> list[Outcome]:
    logs = ["log"] if name != "two ranks" else ["rank0", "rank1"]
    return [wait(pid, world=place, log=log, patience=patience) for pid, log in zip(pids, logs, strict=True)]


def killed(world: Path, name: str, *, kills: int, draw: random.Random) -> dict[str, Any]:
    """Kill a command at random moments, up to three times in one world, then let it finish: the result is as ever."""
    result = COMMANDS.get(name, COMMANDS["begin"])[1]

    def prepare(place: Path) -> None:
        for file in BEFORE.get(name, ()):
            shutil.rmtree(place / file) if (place / file).is_dir() else (place / file).unlink()
        if name == "pack":  # over an older one, of other images
            for suffix in (".npy", ".labels.npz", ".manifest.json"):
                (place / f"others{suffix}").replace(place / f"images{suffix}")

    with copied(world) as place:
        prepare(place)
        since = time.monotonic()
        first = ended(name, begun(name, place), place)
        assert all(one.code == 0 for one in first), first[0].err
        expected, length = result(place, first[0]), time.monotonic() - since
    verdicts: Counter[str] = Counter()
    done = worlds = 0
    while done < kills:
        with copied(world) as place:
            prepare(place)
            before = done
            for _ in range(draw.randint(1, 3)):
                pids = begun(name, place)
                time.sleep(draw.uniform(0, length))
                victims = draw.sample(pids, draw.randint(1, len(pids)))
                for pid in victims:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
                # A rank without its peer ends soon, or torchrun ends it.
                outcomes = ended(name, pids, place, patience=15)
                done += sum(one.code == -signal.SIGKILL for one in outcomes)
                if all(one.code == 0 for one in outcomes) or done >= kills:
                    break
            if done == before:  # all came too late: the first run was slower than these
                length *= 0.9
                continue
            worlds += 1
            last = ended(name, begun(name, place), place)
            fine = all(one.code == 0 and "Traceback" not in one.err for one in last)
            verdict = "same" if fine and result(place, last[0]) == expected else "failed"
            verdicts[verdict] += 1
            if verdict == "failed":
                print(f"killed {name}: {[one.code for one in last]}\n{last[0].err[-2000:]}", flush=True)
    return {"kills": done, "worlds": worlds, **verdicts}


# ---- full and read-only disks, changed data, two processes


def mounted(size: int, folder: Path) -> bool:
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    return subprocess.run(command, capture_output=True).returncode == 0


def remounted(options: str, folder: Path) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True, capture_output=True)


def full_disks(world: Path, expected: dict[str, str], *, cases: int, draw: random.Random) -> dict[str, int]:
    """A disk that is full, or read-only, in the middle: one line, and the same result once there is room."""
    verdicts: Counter[str] = Counter()
    for i in range(cases):
        command = ("begin", "pack", "probe", "reproduce")[i % 4]
        read_only = i % 8 >= 6
        with copied(world) as place:
            disk = place.parent / "disk"
            if not mounted(2**30, disk):
                return {"not tried, for want of the right to mount": cases}
            try:
                inside = Path(shutil.copytree(place, disk / "world", symlinks=True))
                for file in BEFORE.get(command, ()):
                    shutil.rmtree(inside / file) if (inside / file).is_dir() else (inside / file).unlink()
                used = shutil.disk_usage(disk).used
                remounted("ro" if read_only else f"size={used + draw.randrange(4096, 600_000)}", disk)
                first = command_on(inside, command, logs=place.parent)
                remounted("rw,size=1g", disk)
                last = command_on(inside, command, logs=place.parent)
                right = last.code == 0 and COMMANDS[command][1](inside, last) == expected[command]
                told = first.code == 0 or (first.code == 2 and len(first.lines) >= 1)
                clean = "Traceback" not in first.err + last.err
                verdict = "failed" if not (right and told and clean) else "same" if first.code == 0 else "told"
                verdicts[verdict] += 1
                if verdict == "failed":
                    print(f"full disk, {command}: {first.code} {last.code}\n{first.err[-1500:]}\n{last.err[-1500:]}")
            finally:
                subprocess.run(["umount", "-l", str(disk)], check=False)
    return dict(verdicts)


def command_on(inside: Path, command: str, *, logs: Path) -> Outcome:
    """A command in a folder on a full disk: its output goes elsewhere."""
    link = logs / "here"
    with contextlib.suppress(FileExistsError):
        link.symlink_to(inside)
    return run(COMMANDS[command][0], world=link)


def changed_data(world: Path) -> dict[str, str]:
    """Images that change or vanish between a stop and the next command are noticed."""

    def row(place: Path) -> None:
        data = bytearray((place / "images.npy").read_bytes())
        data[-1] ^= 1
        (place / "images.npy").write_bytes(data)

    def repacked(place: Path) -> None:
        for suffix in (".npy", ".labels.npz", ".manifest.json"):
            (place / f"others{suffix}").replace(place / f"images{suffix}")

    def relabelled(place: Path) -> None:
        first, second = place / "images/dark/00.png", place / "images/bright/00.png"
        first.rename(second)
        run(COMMANDS["pack"][0], world=place)

    verdicts = {}
    for what, change in {"a pixel": row, "all images": repacked, "a label": relabelled}.items():
        for command in ("resume", "probe"):
            with copied(world) as place:
                change(place)
                (place / "run/features-test.npz").unlink()
                found = run(COMMANDS[command][0], world=place)
                told = found.code == 2 and "images" in found.lines[-1] and "Traceback" not in found.err
                verdicts[f"{what}, {command}"] = "told" if told else "failed"
                if not told:
                    print(f"changed data, {what}, {command}: {found.code}\n{found.err[-1500:]}", flush=True)
    return verdicts


def together(world: Path, expected: dict[str, str]) -> dict[str, str]:
    """Two processes on one run: training is refused to the second, and evaluations give what they give alone."""
    verdicts = {}
    for first, second in (("begin", "begin"), ("resume", "resume"), ("probe", "probe"), ("probe", "quality")):
        with copied(world) as place:
            pids = [start(COMMANDS[c][0], world=place, log=f"two{i}") for i, c in enumerate((first, second))]
            both = [wait(pid, world=place, log=f"two{i}") for i, pid in enumerate(pids)]
            codes = sorted(one.code for one in both)
            last = both[[one.code for one in both].index(0)] if 0 in codes else both[0]
            right = all(COMMANDS[c][1](place, last) == expected[c] for c in {first, second}) if 0 in codes else False
            allowed = ([0, 0], [0, 2]) if first in ("begin", "resume") else ([0, 0],)
            clean = not any("Traceback" in one.err for one in both)
            fine = right and codes in allowed and clean
            verdicts[f"{first} and {second}"] = "same" if fine else "failed"
            if not fine:
                print(f"{first} and {second}: {codes}\n{both[0].err[-900:]}\n{both[1].err[-900:]}", flush=True)
    return verdicts


# ---- how long it takes to compare all files of a run


def verified(folder: Path) -> dict[str, Any]:
    """`curvssl verify` of a run of the usual size, ResNet-18 with features as many as CIFAR-10's, beside sha256sum of
    the same files: seconds of one core, whatever else it does, of the fastest of five, with the files in memory."""
    short = ["--dataset", "digits", "--epochs", "1", "--monitor-every", "0", "--checkpoint-seconds", "0"]
    world = folder / "usual"
    world.mkdir()
    ended = run(["pretrain", "--preset", "paper-cifar10", *short, "--batch-size", "256", "--out", "run"], world=world)
    assert ended.code == 0, ended.err
    usual = Run.read(world / "run")
    for split, n in (("train", 50_000), ("test", 10_000)):
        made = features.Features(h=torch.rand(n, 512), z=torch.rand(n, usual.config.d_z), y=torch.arange(n) % 10)
        features.save(made, usual, f"features-{split}.npz")
    names = [str(usual.path / name) for name in usual.manifest.entries()]
    commands = {
        "verify": [sys.executable, "-m", "curvssl", "verify", str(usual.path)],
        "sha256sum": ["sha256sum", *names],
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(5):
        for name, command in commands.items():
            before = os.times()
            subprocess.run(command, check=True, capture_output=True)
            after = os.times()
            spent = after.children_user + after.children_system - before.children_user - before.children_system
            seconds[name].append(spent)
    size = sum(os.path.getsize(name) for name in names)
    return {"files": len(names), "megabytes": round(size / 1e6)} | {
        f"{name}_seconds": round(min(every), 2) for name, every in seconds.items()
    }


# ---- all of it

SHORT = ("pretrain", "resume", "begin", "compare", "verify", "data")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--corruptions", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # tqdm's own lock is one for all forks: a fork that is killed while it holds it would leave the others waiting.
    tqdm.set_lock(threading.RLock())
    tqdm.monitor_interval = 0
    sources.SHA256["tiny"] = None
    named.DATASETS["tiny"] = tiny_set
    studies.STUDIES["tiny"] = lambda: CELLS
    origin = provenance(device="cpu")
    since, draw, short = time.monotonic(), random.Random(options.seed), options.short
    if not short:
        maps.umap(torch.rand(20, 4))  # what it compiles is compiled for every fork
    room = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=room) as folder:
        world = Path(folder) / "world"
        world.mkdir()
        build(world, short=short)
        print(f"the world was made in {time.monotonic() - since:.0f} s", flush=True)
        expected = {}
        for name, (arguments, result) in COMMANDS.items():
            if not short or name in SHORT:
                with copied(world) as place:
                    found = run(arguments, world=place)
                    assert found.code == 0, found.err
                    expected[name] = result(place, found)
        assert expected["resume"] == expected["begin"] == expected["pretrain"]
        cases = corrupt(world, expected, cases=options.corruptions, draw=draw, short=short)
        shares = {"begin": 0.3, "two ranks": 0.15, "pack": 0.15, "data": 0.1}
        shares |= {"probe": 0.1, "report": 0.1, "reproduce": 0.1} if not short else {}
        kills = {
            name: killed(world, name, kills=round(options.kills * share), draw=draw)
            for name, share in shares.items()
            if round(options.kills * share)
        }
        rest: dict[str, Any] = {}
        if not short:
            rest["full or read-only disk"] = full_disks(world, expected, cases=options.kills // 5, draw=draw)
            rest["changed data"] = changed_data(world)
            rest["two processes"] = together(world, expected)
            rest["verify"] = verified(Path(folder))
    failed = [case for case in cases if case["verdict"] not in GOOD]
    by_file: dict[str, Counter[str]] = {}
    for case in cases:
        by_file.setdefault(case["file"], Counter())[case["verdict"] if case["verdict"] in GOOD else "failed"] += 1
    lost = sum(found.get("failed", 0) for found in kills.values())
    others = sum(json.dumps(found).count("failed") for found in rest.values())
    print(f"{len(cases)} corruptions, {len(failed)} failed; {sum(found['kills'] for found in kills.values())} kills, "
          f"{lost} failed; {others} others failed; {time.monotonic() - since:.0f} s")  # fmt: skip
    if options.out:
        found = {
            "corruption": {"cases": len(cases), "by_file": by_file, "failed": failed,
                           "by_damage": {kind: Counter(c["verdict"] for c in cases if c["damage"] == kind)
                                         for kind in DAMAGE}},
            "kills": kills,
            **{name.replace(" ", "_").replace("-", "_"): value for name, value in rest.items()},
            "seed": options.seed,
            "provenance": origin,
        }  # fmt: skip
        write_json(options.out, found)
    sys.exit(1 if failed or lost or others else 0)


if __name__ == "__main__":
    main()
