"""The run directory: config, metrics, checkpoints, encoder of one run, and all that is made from them.

Files appear whole or not at all, and manifest.json has their checksums. To store something else that is made from a
run: `run.keep_json` or `run.keep_arrays`, and to get it back: `run.stored_json` or `run.stored_arrays`, which give
nothing if it has to be made again.
"""

import hashlib
import io
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from curvssl.config import PretrainConfig, UserError, differences
from curvssl.files import json_bytes, say, set_aside, write_bytes
from curvssl.manifest import Manifest, Wrong
from curvssl.methods import OWN

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from curvssl.models import Net

WEIGHTS = ("projector.safetensors", "encoder.safetensors")
ROOTS = ("config.json", "data.json", *WEIGHTS)  # all that is made from a run is made from these
TRAINED = (*ROOTS, "own.json", "provenance.json", "metrics.jsonl", "bad-images.txt")  # and checkpoints
AGAIN = "the same curvssl pretrain command"
EXPORTED = "export.json"


@dataclass(frozen=True)
class Run:
    """One run directory."""

    path: Path
    config: PretrainConfig

    @classmethod
    def read(cls, path: str | Path) -> "Run":
        """An existing run."""
        path = Path(path)
        file, manifest = path / "config.json", manifest_of(path)
        if not manifest.exists and not file.exists():
            raise UserError(f"{path} is not a run directory: it has no config.json; give the --out of a pretraining")
        try:
            values = json.loads(manifest.content("config.json") if manifest.exists else file.read_bytes())
            if not isinstance(values, dict):
                raise TypeError("it does not hold settings")
            config = PretrainConfig.from_dict(values)
        except (json.JSONDecodeError, UnicodeDecodeError, TypeError, AttributeError) as error:
            raise UserError(f"{file} cannot be read ({error}): restore it, or use another --out") from None
        except Wrong:
            raise
        except UserError as error:
            raise UserError(f"{file}: {error}") from None
        if not manifest.exists:
            raise UserError(f"{path} has no {manifest.file.name}, as before there were any: {manifest.accepting}")
        return cls(path, config)

    @classmethod
    def create(cls, path: str | Path, config: PretrainConfig) -> "Run":
        """A new run, or the existing one if it has the same configuration. Call it under `lock`."""
        path = Path(path)
        new = cls(path, config)
        # A run that stopped before it learned anything, perhaps because of a mistyped name, is replaced.
        if not new.begun:
            new.keep_json("config.json", config.to_dict(), of=(), by=AGAIN)
        elif new.manifest.exists:
            new.settled("config.json", config.to_dict())
        elif not (path / "config.json").exists():
            raise UserError(f"{path} holds files of a run, and no config.json: restore it, or use another --out")
        run = cls.read(path)
        if changed := differences(run.config, config):
            raise UserError(f"{path} holds a run with other settings ({changed}): use another --out")
        return new

    @property
    def begun(self) -> bool:
        """Whether something was learned."""
        there = any(os.path.lexists(self.path / name) for name in (*WEIGHTS, "metrics.jsonl"))
        return there or bool(self.checkpoints())

    # ---- files ----

    @property
    def writable(self) -> bool:
        """Whether files can be kept here. They cannot in another user's run, or on a medium that is read only."""
        return os.access(self.path, os.W_OK)

    @property
    def manifest(self) -> Manifest:
        return manifest_of(self.path)

    def keep(self, name: str, write: Callable[[BinaryIO], object], *, by: str, of: Iterable[str] = ROOTS) -> Path:
        """Write a file that was made from others of this run by a command such as "curvssl probe RUN"."""
        self.manifest.keep(name, write, of=of, by=by)
        return self.path / name

    def keep_json(self, name: str, value: Any, *, by: str, of: Iterable[str] = ROOTS) -> Path:
        return self.keep(name, lambda file: file.write(json_bytes(value)), by=by, of=of)

    def keep_arrays(self, name: str, *, by: str, **arrays: Any) -> Path:
        import numpy as np

        return self.keep(name, lambda file: np.savez(file, **arrays), by=by)

    def stored(self, name: str) -> bytes | None:
        """A file's content; None if it has to be made again: it is missing, damaged, or of an older encoder."""
        try:
            return self.manifest.content(name)
        except Wrong as wrong:
            if wrong.reason != "is missing":
                say(f"{wrong.path} {wrong.reason}, and is made again")
            return None

    def stored_json(self, name: str) -> dict[str, Any]:
        """What `keep_json` wrote; empty if it has to be made again."""
        content = self.stored(name)
        return {} if content is None else json.loads(content)

    def stored_arrays(self, name: str) -> "dict[str, np.ndarray] | None":
        """What `keep_arrays` wrote; None if it has to be made again."""
        from curvssl.data.arrays import arrays_in

        content = self.stored(name)
        return None if content is None else arrays_in(content, path=self.path / name)

    def read_json(self, name: str) -> dict[str, Any]:
        """A file that this command does not make again: an error if it is not as it was written, empty if there never
        was one."""
        return json.loads(self.manifest.content(name)) if self.knows(name) else {}

    def knows(self, name: str) -> bool:
        """Whether there is such a file, or should be."""
        return os.path.lexists(self.path / name) or name in self.manifest.entries()

    def settled(self, name: str, value: Any) -> dict[str, Any]:
        """What a file holds. If it is damaged or missing and held this value, it is written again."""
        from curvssl import ranks

        try:
            return json.loads(self.manifest.content(name))
        except Wrong as wrong:
            entry = self.manifest.entries().get(name)
            if entry is None or entry["sha256"] != hashlib.sha256(json_bytes(value)).hexdigest():
                raise
            say(f"{wrong.path} {wrong.reason}, and is written again: it held what is known anyway")
            if ranks.is_main():
                self.keep_json(name, value, of=(), by=entry["by"])
            return json.loads(json_bytes(value))

    # ---- metrics ----

    def metrics(self) -> list[dict[str, Any]]:
        """One row per epoch, without lines that cannot be read: a crash may leave a half-written one.

        They are in the manifest when training has ended; until then, checkpoints have a copy.
        """
        file = self.path / "metrics.jsonl"
        if file.name in self.manifest.entries():
            return [row for line in self.manifest.content(file.name).splitlines() if (row := _row(line)) is not None]
        return [row for row in self._lines() if row is not None]

    def _lines(self) -> list[dict[str, Any] | None]:
        """The rows of all lines, None for one that cannot be read."""
        file = self.path / "metrics.jsonl"
        return [_row(line) for line in file.read_bytes().splitlines()] if file.is_file() else []

    def append_metrics(self, row: dict[str, Any]) -> None:
        with open(self.path / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def rewind_metrics(self, step: int, rows: list[dict[str, Any]] | None = None) -> None:
        """Delete the rows after the checkpoint from which training resumes, and half-written lines.

        `rows` are those that the checkpoint has. If the file has lost or changed one of them, they are written again.
        """
        if step == 0:
            (self.path / "bad-images.txt").unlink(missing_ok=True)  # of an earlier run
            self.manifest.forget("bad-images.txt")
        self.manifest.forget("metrics.jsonl")
        file, lines = self.path / "metrics.jsonl", self._lines()
        kept = [json.dumps(row) + "\n" for row in lines if row is not None and row["step"] <= step]
        known = kept if rows is None else [json.dumps(row) + "\n" for row in rows]
        lost = lines[:-1].count(None)  # the last one was only not finished
        if kept != known or (lost and rows is None):
            copy = f"; {self._copy(file)} has it as it was" if os.path.lexists(file) else ""
            if rows is None:
                say(f"{lost} of {len(lines)} lines of {file} cannot be read and are left out{copy}")
            else:
                say(f"{file} is not what it was at step {step}: it is written again from the checkpoint{copy}")
        write_bytes(file, "".join(known).encode())

    def _copy(self, file: Path) -> str:
        if not file.is_file():
            return set_aside(file).name
        copy = file.with_suffix(".damaged.jsonl")
        write_bytes(copy, file.read_bytes())
        return copy.name

    # ---- checkpoints ----

    def checkpoints(self, *, missing: bool = False) -> list[Path]:
        """Oldest first; with `missing`, also those that only the manifest has. Other files, such as checkpoint-best.pt,
        are the user's own."""
        names = {file.name for file in self.path.glob("checkpoint-*.pt")}
        names |= {*self.manifest.entries()} if missing else set()
        own = (self.path / name for name in names if re.fullmatch(r"checkpoint-[0-9]+\.pt", name))
        return sorted(own, key=lambda file: int(file.stem.split("-")[1]))

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        import torch

        self.keep(f"checkpoint-{state['step']}.pt", lambda file: torch.save(state, file), of=("config.json",), by=AGAIN)
        old = self.checkpoints()[:-2]
        for file in old:
            file.unlink()
        self.manifest.forget(*(file.name for file in old))

    def load_checkpoint(self) -> dict[str, Any] | None:
        """The newest checkpoint that is as it was written. One that is not is reported and kept under another name; one
        that the system does not let us read is an error, because it may be as good as ever."""
        import torch

        known = self.checkpoints(missing=True)
        for file in reversed(known):
            try:
                content = self.manifest.content(file.name)
                return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            except Wrong as wrong:
                reason = wrong.reason
            except UserError:
                raise
            except Exception as error:  # what was taken as it is can raise almost any error
                reason = f"cannot be read ({type(error).__name__})"
            there = os.path.lexists(file)
            kept = f"; {set_aside(file).name} has it" if there else ""
            self.manifest.forget(file.name)
            say(f"{file} {reason}: {'beginning again' if file == known[0] else 'going back to the one before'}{kept}")
        return None

    # ---- the result ----

    @property
    def finished(self) -> bool:
        """Whether the weights are as they were written. If not, the same command makes them again."""
        try:
            for name in self.weights:
                self.manifest.check(name)
        except Wrong:
            return False
        return True

    @property
    def exported(self) -> bool:
        """Whether this is a folder of `curvssl export --to hub-folder`: a run of which only the encoder was kept."""
        return self.knows(EXPORTED)

    @property
    def weights(self) -> tuple[str, ...]:
        """The files of weights."""
        return WEIGHTS[1:] if self.exported else WEIGHTS

    def save_net(self, net: "Net", *, channels: int) -> None:
        """The encoder is written last, because a run with an encoder counts as finished."""
        from safetensors.torch import save

        if (self.path / "metrics.jsonl").exists():
            self.manifest.record(["metrics.jsonl"], of=("config.json",), by="")
        for file in WEIGHTS:
            try:
                if os.path.lexists(self.path / file):
                    self.manifest.check(file)
            except Wrong as wrong:
                say(f"{wrong.path} {wrong.reason}, and is made again; {set_aside(wrong.path).name} has it as it was")
            part = getattr(net, file.split(".")[0])
            weights = {k: v.detach().cpu().contiguous() for k, v in part.state_dict().items()}
            data = save(weights, metadata={"channels": str(channels)})
            made_from = ("config.json", "data.json", *(name for name in WEIGHTS[:1] if name != file))
            self.keep(file, lambda opened, data=data: opened.write(data), of=made_from, by=AGAIN)  # type: ignore[misc]

    def make_net(self, *, channels: int, encoder: "nn.Module | None" = None) -> "Net":
        """The untrained network of this run. An encoder that was given in Python must be given again."""
        from curvssl.models import make_net

        c = self.config
        if c.encoder == OWN and encoder is None:
            raise UserError(
                f"the encoder of {self.path} was given to curvssl.pretrain in Python: "
                "curvssl.load_encoder(path, encoder=…) puts its weights into such a module"
            )
        return make_net(
            encoder=encoder or c.encoder,
            stem=c.stem,
            channels=channels,
            size=c.image_size,
            width=c.projector_width,
            depth=c.projector_depth,
            d_z=c.d_z,
            norm=c.projector_norm,
            seed=c.seed,
            views={"--global-size": c.global_size, "--local-size": c.local_size if c.local_views else 0},
        )

    def load_net(self, *, encoder: "nn.Module | None" = None) -> "Net":
        """Encoder and projector of a finished run, in eval mode; an own encoder's weights are loaded into `encoder`."""
        self.need_projector()
        return self._loaded(encoder)

    def load_parts(self, *, encoder: "nn.Module | None" = None) -> "tuple[nn.Module, nn.Module | None]":
        """Encoder and projector as in `load_net`; an exported encoder has no projector."""
        net = self._loaded(encoder)
        return net.encoder, None if self.exported else net.projector

    def need_projector(self) -> None:
        if self.exported:
            raise UserError(
                f"{self.path} is an exported encoder without a projector, so it has no z: give the run it came from"
            )

    def _loaded(self, encoder: "nn.Module | None") -> "Net":
        from safetensors.torch import load

        if not any(os.path.lexists(self.path / name) for name in WEIGHTS):
            raise UserError(f"{self.path} has no encoder.safetensors yet: run its pretraining to the end first")
        weights: dict[str, dict[str, Any]] = {}
        for file in self.weights:
            name, data = file.split(".")[0], self.manifest.content(file)
            weights[name] = load(data)
            described = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])  # its length, then JSON
            channels = int(described["__metadata__"]["channels"])
        net = self.make_net(channels=channels, encoder=encoder)
        for name, values in weights.items():
            getattr(net, name).load_state_dict(values)  # weights that were stored as float16 become float32
        if known := self.read_json("data.json"):
            Prepare.give(net.encoder, self.config.image_size, known)
        return net.eval()


def load_encoder(path: str | Path, *, encoder: "nn.Module | None" = None) -> "nn.Module":
    """The trained encoder of a finished run, in eval mode: from a run directory, an exported folder, or the
    encoder.safetensors in it. `encoder.prepare(images)` makes its input from uint8 images.

    If the run was given its encoder in Python, the weights are loaded into `encoder`, a module of the same kind.
    """
    path = Path(path)
    return Run.read(path.parent if path.suffix == ".safetensors" else path).load_parts(encoder=encoder)[0]


class Prepare:
    """How an encoder's input is made; the attribute `prepare` of what `load_encoder` returns.

    It is no module, so state_dict does not see it, and it asks the encoder where its weights are, so `.to(device)` is
    enough. A deep copy of the encoder has its own.
    """

    def __init__(
        self, encoder: "nn.Module", *, size: int, channels: int, mean: tuple[float, ...], std: tuple[float, ...]
    ) -> None:
        self.encoder, self.size, self.channels = encoder, size, channels
        self.mean, self.std = mean, std  # of pixels in 0..1; one entry, or one for each channel

    @classmethod
    def give(cls, encoder: "nn.Module", size: int, known: dict[str, Any]) -> None:
        """Set the attribute from a run's data.json. A method of that name in the user's own encoder stays."""
        if isinstance(getattr(encoder, "prepare", None), cls | None):
            statistics = {name: tuple(known[name]) for name in ("mean", "std")}
            encoder.prepare = cls(encoder, size=size, channels=known["channels"], **statistics)  # type: ignore[assignment]

    def __call__(self, images: Any) -> "Tensor":
        """uint8 tensor or array (N, C, H, W) of any size → float32 (N, 3 or C, size, size), on the encoder's device.

        The central square is resized, grey becomes RGB, and each channel is normalised.
        """
        import numpy as np
        import torch

        from curvssl.data.views import prepare

        if not isinstance(images, torch.Tensor):
            array = np.array(images)
            images = torch.from_numpy(array) if array.dtype == np.uint8 else array
        takes = (1, 3) if self.channels in (1, 3) else (self.channels,)
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in takes:
            raise UserError(
                f"got images {images.dtype} {tuple(images.shape)}: needed are uint8 (N, {self.channels}, H, W)"
            )
        place = next(self.encoder.parameters(), torch.empty(0)).device
        return prepare(images.to(place), size=self.size, mean=self.mean, std=self.std)


def provenance(*, device: str) -> dict[str, Any]:
    """Where a number comes from: command, versions, machine, commit."""
    packages = ("curvssl", "torch", "torchvision", "numpy", "scikit-learn", "timm", "umap-learn")
    versions = {"python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "command": shlex.join([Path(sys.argv[0]).name.replace("__main__.py", "curvssl"), *sys.argv[1:]]),
        "commit": commit(),
        "versions": versions,
        "device": device,
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def commit() -> str | None:
    """The commit of the source, marked if files differ from it; None outside a checkout. $CURVSSL_COMMIT overrides."""
    if "CURVSSL_COMMIT" in os.environ:
        return os.environ["CURVSSL_COMMIT"]
    here = Path(__file__).parent
    try:
        git = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def manifest_of(path: Path) -> Manifest:
    return Manifest(path / "manifest.json", path)


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None
