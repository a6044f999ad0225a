"""Atomic writing of files, and a lock that lets only one process at a time use a folder."""

import contextlib
import errno
import fcntl
import itertools
import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from curvssl.config import UserError


def write_atomic(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file so that a crash at any moment leaves the old file or the new one, never a part."""
    with part_of(path, write) as part:
        os.replace(part, path)


@contextlib.contextmanager
def part_of(path: Path, write: Callable[[BinaryIO], object]) -> Iterator[Path]:
    """A file that is on disk in full and takes the place of `path` when it is renamed; if it is not, it is deleted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _clear_parts(path.parent, of=re.escape(path.name))
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        if path.is_char_device() or path.is_block_device():  # root could replace /dev/null
            raise OSError(errno.EINVAL, "is a device, not a file", str(path))
        with open(part, "wb") as file:
            with contextlib.suppress(OSError):  # not every file system has locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                write(file)
            except RuntimeError as error:  # torch's, on a full disk; the system's own, before it, says what happened
                raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None
            file.flush()
            os.fsync(file.fileno())
        yield part
    except OSError as error:
        if error.errno is None:  # numpy's, if not all bytes were written
            raise OSError(errno.EIO, f"{error}: is the disk full?", str(path)) from None
        if error.filename in (None, part, str(part)):  # a write that fails knows no name
            error.filename = str(path)
        raise
    finally:
        with contextlib.suppress(OSError):  # the disk may be read-only
            part.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder that takes the place of `path`, and of the files in it, once it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for name in os.listdir(path.parent):  # what killed processes left
        left = re.fullmatch(rf"\.{re.escape(path.name)}\.([0-9]{{1,9}})\.part", name, re.DOTALL)
        if left and not _lives(int(left[1])):
            shutil.rmtree(path.with_name(name), ignore_errors=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.mkdir()
    try:
        yield part
        for file in path.iterdir() if path.exists() else ():
            file.unlink()
        part.rename(path)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:
        return error.errno != errno.ESRCH
    return True


def _clear_parts(folder: Path, *, of: str = ".+") -> None:
    """Delete the parts that killed writers left. A writer that lives has a lock on its part."""
    for name in os.listdir(folder):
        if re.fullmatch(rf"\.{of}\.[0-9]+\.part", name, re.DOTALL):
            with contextlib.suppress(OSError):
                check_regular(folder / name)
                with open(folder / name, "rb") as file:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    os.unlink(folder / name)


def write_bytes(path: Path, data: bytes) -> None:
    write_atomic(path, lambda file: file.write(data))


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, json_bytes(value))


def json_bytes(value: Any) -> bytes:
    # A file name that is not UTF-8 has lone surrogates: \udc.., which is also how JSON writes them.
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode(errors="backslashreplace")


def set_aside(path: Path) -> Path:
    """Give what is at this path another name, so that nothing is lost when a new file takes its place."""
    for number in itertools.count(1):
        kept = path.with_name(f"{path.name}.damaged" + (f".{number}" if number > 1 else ""))
        if not os.path.lexists(kept):
            path.rename(kept)
            return kept
    raise AssertionError("there is always a next number")


def check_regular(path: str | Path) -> None:
    """An OSError unless this is a file, or a link to one: whoever opens a named pipe waits for a writer, for ever."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
        raise OSError(f"{path} is {kinds.get(stat.S_IFMT(mode), 'a device')}, not a file")


class Busy(UserError):
    """Another process holds the lock."""


@contextlib.contextmanager
def lock(folder: Path, *, waiting: str | None = None) -> Iterator[None]:
    """Let only one process at a time use a folder; the lock ends with its process, however that ends.

    If another process holds it, raise `Busy`; or with `waiting`, print that line and wait for the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)  # this does not wait, even if it is a named pipe
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting is None:
                raise Busy(f"another process trains in {folder}: wait for it, or use another --out") from None
            say(waiting)
            fcntl.flock(file, fcntl.LOCK_EX)
        _clear_parts(folder)
        yield
    finally:
        os.close(file)


def say(line: str) -> None:
    """Print one line for the user on stderr."""
    print(f"curvssl: {printable(line)}", file=sys.stderr, flush=True)


def count(n: int, what: str) -> str:
    """As in "1 image" and "2,000 images"."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def printable(text: str) -> str:
    """Text in one line: a file name may hold newlines, and characters that a terminal takes for commands."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", lambda found: repr(found[0])[1:-1], text)
