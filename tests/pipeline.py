"""Shared by the tests of the pipeline: the real command line, a small recipe, and runs trained once per session."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from curvssl.config import PretrainConfig, demo
from curvssl.rundir import Run
from curvssl.train.loop import pretrain

# 8×8 views cost a sixth of the demo's 16×16 and learn nearly as well.
SHORT = dataclasses.replace(demo(), image_size=8, epochs=4, warmup_epochs=1, monitor_every=2)
# Two epochs of ten steps, on half of the digits.
TINY = dataclasses.replace(SHORT, epochs=2, monitor_every=1, k=5, batch_size=70, holdout=0.5)
CLOCKS = ("seconds", "views_per_s")  # the columns of metrics.jsonl that may differ between two equal runs


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Make it an error if the host waits for the CUDA device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


# Whenever one device function calls another, the interpreter searches triton.language for functions to replace, which
# takes half of its time. Everything in this process is interpreted, so the replacements may stay.
REPLACE_ONCE = """
import triton.language as tl
from triton.runtime import interpreter
replace, replaced = interpreter._patch_lang, set()
def once(fn):
    seen = frozenset(value.__name__ for value in fn.__globals__.values() if value is tl or value is tl.core)
    if seen not in replaced:
        replaced.add(seen)
        replace(fn)
    return interpreter._LangPatchScope()  # of nothing to be put back
interpreter._patch_lang = once
"""


def in_tritons_interpreter(code: str) -> None:
    """Run a script in its own process: the interpreter is chosen when triton is imported."""
    pytest.importorskip("triton", reason="the kernels are written in Triton, which this platform does not have")
    tests = Path(__file__).parent
    path = os.pathsep.join(
        [
            str(tests),
            *(str(tests / room) for room in ("data", "gpu", "train")),
            *filter(None, [os.environ.get("PYTHONPATH")]),
        ]
    )
    settings = {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, "-c", REPLACE_ONCE + code]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def flags(config: PretrainConfig) -> list[str]:
    """The command-line flags that differ from the preset demo."""
    mine, base = config.to_dict(), demo().to_dict()
    return ["--preset", "demo", *(w for n in mine if mine[n] != base[n] for w in (f"--{n}", str(mine[n])))]


def start(*arguments: object, **settings: Any) -> subprocess.Popen[str]:
    """The real command in its own process, on one thread: sums then do not depend on how many cores are free."""
    command = [sys.executable, "-m", "curvssl", *map(str, arguments)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes | settings)


def finish(process: subprocess.Popen[str], *, code: int = 0) -> tuple[str, str]:
    """What a process wrote to stdout and stderr, after it ended with the expected exit code."""
    out, err = process.communicate(timeout=600)
    assert process.returncode == code, err
    assert "Traceback" not in err
    return out, err


def weights(path: Path) -> tuple[bytes, bytes]:
    """Both networks of a finished run, to the last bit."""
    return (path / "encoder.safetensors").read_bytes(), (path / "projector.safetensors").read_bytes()


def rows(path: Path) -> list[dict[str, Any]]:
    """The metrics of a run without the columns that depend on the clock."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in CLOCKS} for line in lines]


@functools.cache
def folder() -> Path:
    """A folder for shared runs, deleted when the tests end."""
    keeper = tempfile.TemporaryDirectory()
    folder.keeper = keeper  # type: ignore[attr-defined]
    return Path(keeper.name)


@contextmanager
def one_thread() -> Iterator[None]:
    """Small networks gain nothing from a second thread, and lose much when another process needs the core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def trained(method: str) -> Run:
    """A finished run of the short recipe, about four seconds. Tests only read it."""
    with one_thread():
        return pretrain(dataclasses.replace(SHORT, method=method), out=folder() / method, progress=False)
