"""The model card of an exported encoder: what it is, its recipe, its numbers, its input, and how to load it."""

import json
from typing import Any

from curvssl.evaluate.finetune import FILE as FINETUNE
from curvssl.evaluate.finetune import WAYS, finetune_rows
from curvssl.evaluate.runs import COLUMNS, probe_rows
from curvssl.methods import title_of
from curvssl.rundir import Prepare, Run

SMALL_STEM = "net.conv1, net.maxpool = nn.Conv2d({channels}, 64, 3, padding=1, bias=False), nn.Identity()  # 3×3 stem"
OTHER_CHANNELS = "net.conv1 = nn.Conv2d({channels}, 64, 7, stride=2, padding=3, bias=False)"

CURVSSL = """
```python
import curvssl

encoder = curvssl.load_encoder(".")  # this folder; every command of curvssl that takes a run takes it, too
h = encoder(encoder.prepare(images))  # uint8 (N, {channels}, H, W) of any size
```
"""
TORCHVISION = """
```python
from safetensors.torch import load_file
from torch import nn
from torchvision.models import {name}

net = {name}()
net.fc = nn.Identity(){stem}
net.load_state_dict(load_file("{weights}"))
h = net.eval()(x)  # float32 (N, {rgb}, {size}, {size}), normalised as above
```
"""
OWN_STEM_IN_TIMM = """
timm has no ResNet with this stem, but its `{name}` takes these weights after the same change:

```python
import timm
from safetensors.torch import load_file
from torch import nn

net = timm.create_model("{name}", num_classes=0){stem}
net.load_state_dict(load_file("{weights}"))
h = net.eval()(x)
```
"""
TIMM = """
```python
import timm

net = timm.create_model("local-dir:.", pretrained=True).eval()  # this folder; or hf-hub:NAME, where it was uploaded
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(net))  # for a PIL image
h = net(x)  # float32 (N, {rgb}, {size}, {size}), normalised as above
```
"""
ONNX = """
```python
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
(h,) = session.run(None, {{"images": pixels}})  # uint8 array (N, {channels}, {size}, {size})
```
"""


def card(run: Run, *, to: str, prepare: Prepare, half: bool, licence: str) -> str:
    """README.md of an exported folder, in the format of model hubs: YAML, then Markdown."""
    config = run.config
    network = config.encoder + (" with the 3×3 stem" if config.encoder.startswith("resnet") and small(run) else "")
    library = {"hub-folder": "curvssl"}.get(to, to)
    parts = [
        front_matter(licence=licence, library_name=library, pipeline_tag="image-feature-extraction"),
        f"# {network}, pretrained with {title_of(config.method)} on {config.dataset}\n",
        "An image encoder, trained without labels by `curvssl pretrain`. It maps an image to a vector of features. "
        f"Licence of the weights: {licence}.\n",
        "## Input\n",
        input_text(prepare, inside=to == "onnx"),
        "## How to load it\n" + loading(run, to=to, prepare=prepare),
        *numbers(run),
        "## Recipe\n",
        recipe(run, half=half),
    ]
    return "\n".join(parts)


def small(run: Run) -> bool:
    return run.config.encoder in ("resnet18", "resnet50") and run.config.stem == "small"


def front_matter(**fields: str) -> str:
    lines = [f"{name.replace('licence', 'license')}: {json.dumps(value)}" for name, value in fields.items()]
    return "\n".join(["---", *lines, 'tags: ["self-supervised-learning", "curvssl"]', "---", ""])


def input_text(prepare: Prepare, *, inside: bool) -> str:
    size, grey = prepare.size, prepare.channels == 1
    mean, std = (", ".join(f"{value:.6g}" for value in values) for values in (prepare.mean, prepare.std))
    lines = (
        f"The central square of an image{' in grey' if grey else ''}, resized to {size}×{size} with antialiasing; with "
        f"torchvision: `CenterCrop(min(image.size))`, then `Resize({size})`.",
        f"Then x = (pixel / 255 − mean) / std, with mean {mean} and std {std}"
        f"{', and grey is repeated to three channels' if grey else ''}{': the graph does this' if inside else ''}.",
    )
    return "\n".join(lines) + "\n"


def loading(run: Run, *, to: str, prepare: Prepare) -> str:
    """Python that loads the folder from inside it."""
    name, rgb = run.config.encoder, max(3, prepare.channels)
    words: dict[str, Any] = {"name": name, "channels": prepare.channels, "rgb": rgb, "size": prepare.size}
    words["weights"] = "encoder.safetensors" if to == "hub-folder" else "model.safetensors"
    change = SMALL_STEM if small(run) else OTHER_CHANNELS if rgb != 3 else ""
    words["stem"] = "\n" + change.format(channels=rgb) if change else ""
    text = {"hub-folder": CURVSSL, "timm": TIMM, "onnx": ONNX}.get(to, "").format(**words)
    if name in ("resnet18", "resnet50") and to in ("hub-folder", "torchvision"):
        text += ("\nWithout curvssl, as torchvision's network:\n" if text else "") + TORCHVISION.format(**words)
        text += OWN_STEM_IN_TIMM.format(**words) if small(run) else ""
    return text


def numbers(run: Run) -> list[str]:
    """Accuracy on the test images, from probes.json and finetune.json, if they are there."""
    parts = []
    if probes := run.read_json("probes.json"):
        floors = {name: probes.pop(name) for name in ("raw pixels", "random encoder") if name in probes}
        rows = probe_rows({"this encoder": probes} | floors)
        parts += [f"## Accuracy of probes, and retrieval\n\nIn percent, of the test images of {run.config.dataset}.\n"]
        parts += [markdown(("", *COLUMNS), rows)]
    if results := run.read_json(FINETUNE):
        parts += ["## Accuracy with few labels\n\nIn percent of the test images, over several draws of labels.\n"]
        parts += [markdown(("labels", "number", *WAYS), finetune_rows(results))]
    return parts


def markdown(header: Any, rows: Any) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def recipe(run: Run, *, half: bool) -> str:
    """All settings of the run, and where it was made."""
    data, made = run.read_json("data.json"), run.read_json("provenance.json")
    facts = {
        "training images": f"{data['images']:,} of {data['channels']}×{data['height']}×{data['width']}, without labels",
        "pretrained on": made.get("device"),
        "commit": made.get("commit"),
        "torch": made.get("versions", {}).get("torch"),
        "weights": "float16, but for vectors" if half else "float32",
    }
    lines = [f"- {name}: {value}\n" for name, value in facts.items() if value]
    settings = json.dumps(run.config.to_dict(), indent=1, ensure_ascii=False)
    return f"{''.join(lines)}\nAll settings of `curvssl pretrain`:\n\n```json\n{settings}\n```\n"
