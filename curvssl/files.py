"""Files that appear whole or not at all, and one process at a time in a folder."""

import contextlib
import fcntl
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from curvssl.config import UserError


def write_atomic(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file so that a crash at any moment leaves the old one or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    write_atomic(path, lambda file: file.write(data))


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


class Busy(UserError):
    """Another process is at it."""


@contextlib.contextmanager
def lock(folder: Path, *, waiting: str | None = None) -> Iterator[None]:
    """One process at a time in a folder; the lock goes with its process, however that ends.

    Where another holds it, `Busy` is raised, or with `waiting` that line is said and the lock waited for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting is None:
                raise Busy(f"another process trains in {folder}: wait for it, or use another --out") from None
            say(waiting)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def say(line: str) -> None:
    """One line for the user, on stderr."""
    print(f"curvssl: {line}", file=sys.stderr, flush=True)
