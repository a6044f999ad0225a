"""Export a run's encoder to a folder for other programs: weights, what they need to be loaded, and a model card.

Each folder is read back by the program that it is for, and the features of both are compared, before it gets its name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from curvssl.config import UserError
from curvssl.data.views import normalise
from curvssl.evaluate.card import card
from curvssl.files import json_bytes, new_folder, write_bytes
from curvssl.rundir import EXPORTED, ROOTS, Prepare, Run, load_encoder, manifest_of, provenance

CLOSE = 1e-4  # how far features may differ, compared with the largest one, or with 1 if that is smaller
CLOSE_HALF = 1e-2  # if weights were rounded to float16
KEPT = ("data.json", "provenance.json", "probes.json", "quality.json", "finetune.json")  # of the run, where they exist
TORCHVISION = ("resnet18", "resnet50")

Files = dict[str, bytes]


@dataclass(frozen=True)
class Source:
    """What is exported."""

    run: Run
    encoder: nn.Module  # in eval mode, on the CPU
    prepare: Prepare
    half: bool

    def weights(self) -> bytes:
        """As safetensors. `half` rounds all but vectors to float16: a running variance may be too small or too large
        for it, and the vectors of a ResNet-18 are a thousandth of its weights."""
        from safetensors.torch import save

        state = {name: value.contiguous() for name, value in self.encoder.state_dict().items()}
        if self.half:
            state = {name: rounded(value) for name, value in state.items()}
        return save(state, metadata={"channels": str(max(3, self.prepare.channels))})

    def images(self, n: int) -> Tensor:
        """Random images in the size of the encoder, always the same."""
        shape = (n, self.prepare.channels, self.prepare.size, self.prepare.size)
        return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def rounded(value: Tensor) -> Tensor:
    """float16 if it is no vector, no integers, and all of it fits."""
    if value.ndim < 2 or not value.is_floating_point() or value.abs().max() > torch.finfo(torch.float16).max:
        return value
    return value.half()


@torch.no_grad()
def export(run: Run, *, to: str, out: Path, half: bool = False, licence: str = "unknown") -> float:
    """Write the folder `out` for one of TARGETS. Returns the greatest difference between its features and the run's."""
    target = TARGETS[to]
    for module in target.needs:
        if find_spec(module) is None:
            raise UserError(f"export to {to} needs {module}: pip install 'curvssl[{target.extra}]'")
    if half and to == "onnx":
        raise UserError("half is for folders of weights, and onnx is computed in float32: leave it out")
    if out.resolve() == run.path.resolve():
        raise UserError(f"{out} is the run itself: use another --out")
    encoder, _ = run.load_parts()
    if not isinstance(encoder.prepare, Prepare):
        raise UserError(f"{run.path} has no data.json, so mean and standard deviation are not known: pretrain again")
    source = Source(run, encoder, encoder.prepare, half)
    check_free(out, names={*target.names, "README.md"})
    with new_folder(out) as part:
        for name, content in target.files(source).items():
            write_bytes(part / name, content)
        if to == "hub-folder":
            record(part)
        error = difference(source, target.features, part)
        limit = CLOSE_HALF if half else CLOSE
        if not error <= limit:
            raise UserError(
                f"{to} gives features that differ by {error:.1e} from those of {run.path}, more than {limit:g}: "
                "nothing was written; please report this"
            )
        if to == "hub-folder":
            facts = {"of": run.path.resolve().name, "half": half, "difference": error}
            write_bytes(part / EXPORTED, json_bytes(facts | {"provenance": provenance(device="cpu")}))
            record(part)
        write_bytes(part / "README.md", card(run, to=to, prepare=source.prepare, half=half, licence=licence).encode())
    return error


def difference(source: Source, features: Callable[[Source, Path, Tensor], Tensor], part: Path) -> float:
    """The greatest difference of any feature, in units of the largest one, or of 1 if that is smaller."""
    worst = 0.0
    for n in (1, 5):
        images = source.images(n)
        expected, found = source.encoder(source.prepare(images)), features(source, part, images)
        if found.shape != expected.shape:
            return float("nan")
        worst = max(worst, float((found - expected).abs().max() / expected.abs().max().clamp_min(1)))
    return worst


def check_free(out: Path, *, names: set[str]) -> None:
    """An export replaces an earlier one with these files, and nothing else."""
    if out.exists() and (not out.is_dir() or (others := sorted({file.name for file in out.iterdir()} - names))):
        what = f"holds {others[0]}" if out.is_dir() else "is a file"
        raise UserError(f"{out} exists and {what}, which is no part of such an export: use another --out")


# --- a folder for curvssl ---------------------------------------------------------------------------------------------


def hub_files(source: Source) -> Files:
    """A run directory with its encoder alone."""
    there = [name for name in KEPT if (source.run.path / name).exists()]
    files = {name: source.run.manifest.content(name) for name in there}
    config = json_bytes(source.run.config.to_dict())
    return files | {EXPORTED: b"{}", "encoder.safetensors": source.weights(), "config.json": config}


def record(folder: Path) -> None:
    """Write the checksums of such a folder."""
    manifest, names = manifest_of(folder), {file.name for file in folder.glob("*.*")} - {"manifest.json"}
    manifest.record(sorted(names & {"config.json", "data.json"}), by="", new=True)
    manifest.record(["encoder.safetensors"], of=ROOTS, by="")
    manifest.record(sorted(names - {*ROOTS}), of=ROOTS, by="")


def hub_features(source: Source, folder: Path, images: Tensor) -> Tensor:
    encoder: Any = load_encoder(folder)
    return encoder(encoder.prepare(images))


# --- torchvision ------------------------------------------------------------------------------------------------------


def torchvision_files(source: Source) -> Files:
    """The weights have torchvision's names already."""
    name = source.run.config.encoder
    if name not in TORCHVISION:
        other = "timm" if name.startswith("timm:") else "hub-folder"
        raise UserError(f"torchvision has no network like {name}: use --to {other} or onnx")
    return {"model.safetensors": source.weights()}


def torchvision_features(source: Source, folder: Path, images: Tensor) -> Tensor:
    from safetensors.torch import load_file
    from torchvision import models

    config = source.run.config
    net = getattr(models, config.encoder)()
    net.fc = nn.Identity()
    channels = max(3, source.prepare.channels)
    if config.stem == "small":
        net.conv1, net.maxpool = nn.Conv2d(channels, 64, 3, padding=1, bias=False), nn.Identity()
    elif channels != 3:
        net.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    net.load_state_dict(load_file(folder / "model.safetensors"))
    return net.eval()(source.prepare(images))


# --- timm -------------------------------------------------------------------------------------------------------------


def timm_files(source: Source) -> Files:
    """A config.json as timm writes it. Its ResNets give their weights torchvision's names."""
    config = source.run.config
    name = config.encoder.removeprefix("timm:")
    if config.encoder in TORCHVISION and config.stem == "small":
        raise UserError(
            "timm has no ResNet with the 3×3 stem: use --to torchvision, whose card says how timm loads it, or onnx"
        )
    if name == config.encoder and name not in TORCHVISION:
        raise UserError(f"timm has no network like {name}: use --to hub-folder or onnx")
    channels, size = max(3, source.prepare.channels), source.prepare.size
    known: Any = getattr(source.encoder, "pretrained_cfg", {})
    described = {
        "architecture": name,
        "num_classes": 0,
        "pretrained_cfg": {
            "input_size": [channels, size, size],
            "fixed_input_size": bool(known.get("fixed_input_size", False)),
            "interpolation": "bilinear",
            "crop_pct": 1.0,
            "crop_mode": "center",
            "mean": for_each(source.prepare.mean, channels),
            "std": for_each(source.prepare.std, channels),
            "num_classes": 0,
        },
    }
    return {"model.safetensors": source.weights(), "config.json": json_bytes(described)}


def for_each(values: tuple[float, ...], channels: int) -> list[float]:
    return list(values) * channels if len(values) == 1 else list(values)


def timm_features(source: Source, folder: Path, images: Tensor) -> Tensor:
    import timm

    net = timm.create_model(f"local-dir:{folder}", pretrained=True)
    return net.eval()(source.prepare(images))


# --- ONNX -------------------------------------------------------------------------------------------------------------


class FromPixels(nn.Module):
    """uint8 (b, C, size, size) → features (b, d): the preprocessing is part of the graph, except for the resizing."""

    mean: Tensor
    std: Tensor

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.encoder = source.encoder
        for name in ("mean", "std"):
            self.register_buffer(name, torch.tensor(getattr(source.prepare, name)))

    def forward(self, images: Tensor) -> Tensor:
        return self.encoder(normalise(images.float() / 255, self.mean, self.std))


def onnx_files(source: Source) -> Files:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's exporter about itself
        program = torch.onnx.export(
            FromPixels(source).eval(),
            (source.images(2),),
            dynamo=True,
            verbose=False,
            input_names=["images"],
            output_names=["features"],
            dynamic_shapes={"images": {0: torch.export.Dim("batch")}},
        )
    assert program is not None
    model = program.model_proto
    model.doc_string = "uint8 images (batch, channels, height, width) to features (batch, d); see README.md"
    return {"model.onnx": model.SerializeToString()}


def onnx_features(source: Source, folder: Path, images: Tensor) -> Tensor:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


@dataclass(frozen=True)
class Target:
    """One kind of folder: the files in it, what reads it, and the features that this gives."""

    files: Callable[[Source], Files]
    features: Callable[[Source, Path, Tensor], Tensor]
    names: tuple[str, ...]
    needs: tuple[str, ...] = ()
    extra: str = "train"


TARGETS = {
    "onnx": Target(onnx_files, onnx_features, ("model.onnx",), ("onnx", "onnxscript", "onnxruntime"), "export"),
    "timm": Target(timm_files, timm_features, ("model.safetensors", "config.json"), ("timm",), "timm"),
    "torchvision": Target(torchvision_files, torchvision_features, ("model.safetensors",)),
    "hub-folder": Target(
        hub_files, hub_features, ("encoder.safetensors", "config.json", "manifest.json", EXPORTED, *KEPT)
    ),
}
