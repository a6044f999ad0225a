"""The manifest: the SHA-256 of every file that we keep, and of the files that it was made from.

A run directory has one, manifest.json, and so has a pack, NAME.manifest.json. A file is compared with it before it is
used, so that one that was damaged, replaced or made from something older is never taken for what it should be.

    with part_of(path, write):        the new content is on disk, under another name
        manifest.json is replaced     it has the new SHA-256, and under "before" the old one
        the file is replaced          a kill between the two leaves the old file, which is still known
        manifest.json is replaced     without "before"

A JSON that is copied between machines on its own, such as a cell of a study, has its SHA-256 inside: `seal`.
"""

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, BinaryIO

from curvssl.config import UserError
from curvssl.files import check_regular, json_bytes, part_of, set_aside, write_json

FORMAT = 1  # of manifest.json
SEAL = "sha256"  # the key of the checksum in a sealed JSON
Entry = dict[str, Any]  # sha256 of the content, bytes; from {name: sha256}; by: the command that makes it again; before


class Wrong(UserError):
    """A file is not what the manifest says: missing, changed, unknown to it, or made from what has changed since."""

    def __init__(self, path: Path, reason: str, remedy: str) -> None:
        super().__init__(f"{path} {reason}: {remedy}")
        self.path, self.reason = path, reason


@dataclass(frozen=True)
class Manifest:
    """The manifest in this file, which describes files of the same folder."""

    file: Path
    subject: Path  # what a command is given: the run directory, or the pack

    @property
    def exists(self) -> bool:
        return os.path.lexists(self.file)

    def entries(self) -> dict[str, Entry]:
        """{name: entry}; empty if there is no manifest."""
        try:
            check_regular(self.file)
            found = json.loads(self.file.read_bytes())
            if found["format"] > FORMAT:
                raise UserError(f"{self.file} was written by a newer version: update curvssl")
            for entry in found["files"].values():
                while entry is not None:
                    if not (isinstance(entry["sha256"], str) and isinstance(entry["by"], str)):
                        raise TypeError("an entry is incomplete")
                    entry["from"].items()
                    entry = entry.get("before")
            return found["files"]
        except FileNotFoundError:
            return {}
        except UserError:
            raise
        except OSError as error:
            raise UserError(f"{self.file} cannot be read ({error.strerror or error}): mend or restore it") from None
        except Exception as error:  # a damaged file can raise almost any error
            raise UserError(f"{self.file} is damaged ({type(error).__name__}): {self.accepting}") from None

    @property
    def accepting(self) -> str:
        return f"restore it, or take what is there as it is: curvssl verify {quote(str(self.subject))} --accept"

    # ---- writing

    def keep(self, name: str, write: Callable[[BinaryIO], object], *, of: Iterable[str] = (), by: str) -> None:
        """Write a file and its entry; `of` are the files that it was made from, `by` the command that makes it again,
        with RUN for the subject; empty if there is none.

        A crash at any moment leaves the old file or the new one, and an entry for it.
        """
        path = self.file.parent / name
        with part_of(path, write) as part:
            sha256 = digest(part)
            with self._locked():
                files = self.entries()
                entry: Entry = {"sha256": sha256, "bytes": part.stat().st_size, "by": by}
                entry["from"] = {source: files[source]["sha256"] for source in of if source in files}
                before = {"before": files[name]} if name in files else {}
                self._write(files | {name: entry | before})
                if path.is_dir() and not path.is_symlink():
                    set_aside(path)
                os.replace(part, path)
                self._write(files | {name: entry})

    def record(self, names: Iterable[str], *, of: Iterable[str] = (), by: str, new: bool = False) -> None:
        """Take files as they are, after those that they were made from; with `new`, forget all others."""
        with self._locked():
            files = {} if new else self.entries()
            for name in names:
                path = self.file.parent / name
                sources = {source: files[source]["sha256"] for source in of if source in files}
                files[name] = {"sha256": digest(path), "bytes": path.stat().st_size, "by": by, "from": sources}
            self._write(files)

    def begin(self, name: str, *, by: str) -> None:
        """A new manifest, of a file that is still to be written: who looks for it before is told that it is missing."""
        with self._locked():
            self._write({name: {"sha256": "", "bytes": 0, "by": by, "from": {}}})

    def forget(self, *names: str) -> None:
        with self._locked():
            files = self.entries()
            if any(name in files for name in names):
                self._write({name: entry for name, entry in files.items() if name not in names})

    def _write(self, files: dict[str, Entry]) -> None:
        write_json(self.file, {"format": FORMAT, "files": files})

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time changes the manifest: two may evaluate one run."""
        folder = os.open(self.file.parent, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # not every file system has locks
                fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    # ---- checking

    def content(self, name: str) -> bytes:
        """All bytes of a file that is as it was written, or `Wrong`."""
        path = self.file.parent / name
        with self._reading(name):
            check_regular(path)
            data = path.read_bytes()
            self._compare(name, hashlib.sha256(data).hexdigest())
            return data

    def check(self, name: str) -> None:
        """`Wrong` if a file is not as it was written; it may be larger than the memory."""
        with self._reading(name):
            self._compare(name, digest(self.file.parent / name))

    def _compare(self, name: str, sha256: str) -> None:
        files = self.entries()
        entry = files.get(name)
        if entry is None:
            raise self._wrong(name, f"is not in {self.file.name}" if files else f"has no {self.file.name} beside it")
        while entry["sha256"] != sha256:
            entry = entry.get("before")
            if entry is None:
                raise self._wrong(name, f"has changed since it was written (SHA-256 {sha256[:12]}…)")
        for source, then in entry["from"].items():
            if files.get(source, {}).get("sha256") != then:
                raise self._wrong(name, f"was made from another {source}")

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        path = self.file.parent / name
        try:
            yield
        except FileNotFoundError:
            raise self._wrong(name, "is missing") from None
        except OSError as error:
            if error.errno is None:  # a folder, or a named pipe
                raise self._wrong(name, "is no file") from None
            # What the system does not let us read may be as good as ever: it is never made again.
            raise UserError(f"{path} cannot be read ({error.strerror}): mend that; nothing was changed") from None

    def _wrong(self, name: str, reason: str) -> Wrong:
        by = self.entries().get(name, {}).get("by", "").replace("RUN", quote(str(self.subject)))
        return Wrong(self.file.parent / name, reason, f"{by} makes it again" if by else self.accepting)


def digest(path: Path) -> str:
    """The SHA-256 of a file's content."""
    check_regular(path)
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- a JSON that has its checksum inside


def seal(value: dict[str, Any]) -> dict[str, Any]:
    """The value with its SHA-256, which does not depend on the layout of the file."""
    bare = {key: part for key, part in value.items() if key != SEAL}
    return bare | {SEAL: hashlib.sha256(json_bytes(bare)).hexdigest()}


def sealed(path: Path, *, remedy: str) -> dict[str, Any]:
    """The value in a sealed JSON that is as it was written, or `Wrong`."""
    try:
        check_regular(path)
        value = json.loads(path.read_bytes())
        if not isinstance(value, dict) or SEAL not in value:
            accepting = f"curvssl verify {quote(str(path))} --accept"
            raise Wrong(path, "has no checksum", f"take it as it is: {accepting}; or {remedy}")
        if seal(value)[SEAL] != value[SEAL]:
            raise Wrong(path, "has changed since it was written", remedy)
        return value
    except Wrong:
        raise
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}): mend or restore it") from None
    except Exception as error:  # a damaged file can raise almost any error
        raise Wrong(path, f"cannot be read ({type(error).__name__})", remedy) from None
