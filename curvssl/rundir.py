"""The run directory: config, metrics, checkpoints and encoder of one run. Files appear whole or not at all."""

import io
import json
import os
import platform
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from curvssl.config import FREE, PretrainConfig, UserError
from curvssl.files import say, write_atomic, write_bytes, write_json
from curvssl.methods import OWN

if TYPE_CHECKING:
    from torch import Tensor, nn

    from curvssl.models import Net


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
        file = path / "config.json"
        if not file.exists():
            raise UserError(f"{path} is not a run directory: it has no config.json; give the --out of a pretraining")
        try:
            values = json.loads(file.read_bytes())
            if not isinstance(values, dict):
                raise TypeError("it does not hold settings")
            return cls(path, PretrainConfig.from_dict(values))
        except (json.JSONDecodeError, UnicodeDecodeError, TypeError) as error:
            raise UserError(f"{file} cannot be read ({error}): restore it, or use another --out") from None
        except UserError as error:
            raise UserError(f"{file}: {error}") from None

    @classmethod
    def create(cls, path: str | Path, config: PretrainConfig) -> "Run":
        """A new run, or the existing one if it has the same configuration. Call it under `lock`."""
        path = Path(path)
        new = cls(path, config)
        # A run that stopped before it learned anything, perhaps because of a mistyped name, is replaced.
        if not (path / "config.json").exists() or not (new.finished or new.checkpoints() or new.metrics()):
            write_json(path / "config.json", config.to_dict())
        run = cls.read(path)
        stored, asked = _flat(run.config.to_dict()), _flat(config.to_dict())
        changed = [f"{n} {stored[n]} → {asked[n]}" for n in asked if stored[n] != asked[n] and n not in FREE]
        if changed:
            raise UserError(f"{path} holds a run with other settings ({'; '.join(changed)}): use another --out")
        return new

    # ---- metrics ----

    def metrics(self) -> list[dict[str, Any]]:
        """One row per epoch, without lines that cannot be read: a crash may leave a half-written one."""
        return [row for row in self._lines() if row is not None]

    def _lines(self) -> list[dict[str, Any] | None]:
        """The rows of all lines, None for one that cannot be read."""
        file = self.path / "metrics.jsonl"
        return [_row(line) for line in (file.read_bytes().splitlines() if file.exists() else [])]

    def append_metrics(self, row: dict[str, Any]) -> None:
        with open(self.path / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def rewind_metrics(self, step: int) -> None:
        """Delete the rows after the checkpoint from which training resumes, and half-written lines."""
        if step == 0:
            (self.path / "bad-images.txt").unlink(missing_ok=True)  # of an earlier run
        file, lines = self.path / "metrics.jsonl", self._lines()
        if lost := lines[:-1].count(None):  # the last one was only not finished
            copy = file.with_suffix(".damaged.jsonl")
            write_bytes(copy, file.read_bytes())
            say(f"{lost} of {len(lines)} lines of {file} cannot be read and are left out; {copy.name} has them")
        kept = [json.dumps(row) + "\n" for row in lines if row is not None and row["step"] <= step]
        write_bytes(file, "".join(kept).encode())

    # ---- checkpoints ----

    def checkpoints(self) -> list[Path]:
        """Oldest first. Other files, such as checkpoint-best.pt, are the user's own."""
        own = (file for file in self.path.glob("checkpoint-*.pt") if re.fullmatch(r"checkpoint-[0-9]+\.pt", file.name))
        return sorted(own, key=lambda file: int(file.stem.split("-")[1]))

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        import torch

        write_atomic(self.path / f"checkpoint-{state['step']}.pt", lambda file: torch.save(state, file))
        for old in self.checkpoints()[:-2]:
            old.unlink()

    def load_checkpoint(self) -> dict[str, Any] | None:
        """The newest checkpoint that is whole. One that is not is reported and kept under another name; one that the
        system does not let us read is an error, because it may be as good as ever."""
        import torch

        for file in reversed(self.checkpoints()):
            try:
                content = file.read_bytes()
            except OSError as error:
                raise UserError(
                    f"{file} cannot be read ({error.strerror or error}): mend that and start again, nothing was changed"
                ) from None
            try:
                return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            except Exception as error:  # a damaged file can raise almost any error, an OSError too
                kept = file.with_name(f"{file.name}.damaged")
                say(f"{file} cannot be read ({type(error).__name__}): going back to the one before; see {kept.name}")
                file.rename(kept)
        return None

    # ---- the result ----

    @property
    def finished(self) -> bool:
        """Whether there is a whole encoder. If it was cut off, the same command makes it again from the checkpoint."""
        parts = ("encoder",) if self.exported else ("encoder", "projector")
        return all(_whole(self.path / f"{part}.safetensors") for part in parts)

    @property
    def exported(self) -> bool:
        """Whether this is a folder of `curvssl export --to hub-folder`: a run of which only the encoder was kept."""
        return (self.path / EXPORTED).exists()

    def save_net(self, net: "Net", *, channels: int) -> None:
        """The projector is written first, because a run with an encoder counts as finished."""
        from safetensors.torch import save

        for name in ("projector", "encoder"):
            weights = {k: v.detach().cpu().contiguous() for k, v in getattr(net, name).state_dict().items()}
            write_bytes(self.path / f"{name}.safetensors", save(weights, metadata={"channels": str(channels)}))

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
            local_size=c.local_size if c.local_views else None,
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

        if not self.finished:
            raise UserError(f"{self.path} has no whole encoder.safetensors yet: run its pretraining to the end first")
        weights: dict[str, dict[str, Any]] = {}
        for name in ("encoder",) if self.exported else ("encoder", "projector"):
            data = (self.path / f"{name}.safetensors").read_bytes()  # safe_open takes no path that is not UTF-8
            weights[name] = load(data)
            described = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])  # its length, then JSON
            channels = int(described["__metadata__"]["channels"])
        net = self.make_net(channels=channels, encoder=encoder)
        for name, values in weights.items():
            getattr(net, name).load_state_dict(values)  # weights that were stored as float16 become float32
        if known := self.read_json("data.json"):
            Prepare.give(net.encoder, self.config.image_size, known)
        return net.eval()

    def read_json(self, name: str) -> dict[str, Any]:
        file = self.path / name
        return json.loads(file.read_bytes()) if file.exists() else {}


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
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
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


def _whole(file: Path) -> bool:
    """Whether a safetensors file has a header, and all the bytes that the header promises."""
    try:
        with open(file, "rb") as opened:
            n = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(n)) if 0 < n < file.stat().st_size else {}
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        return bool(ends) and file.stat().st_size == 8 + n + max(ends)
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError):
        return False


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
