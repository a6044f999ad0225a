"""Few labels: a linear probe and fine-tuning of a run's encoder, beside the same network trained from scratch.

All three see the same labels. Fine-tuning and training from scratch differ in the initial weights alone: steps, rate,
schedule, augmentation and head are the same. Nothing is chosen on the test images.
"""

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from shlex import quote
from statistics import fmean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvssl.config import AugmentConfig, UserError
from curvssl.data import memory
from curvssl.data.images import Images
from curvssl.data.named import Dataset
from curvssl.data.order import batches, mix, permutation
from curvssl.data.views import Augment
from curvssl.evaluate import heads
from curvssl.evaluate.features import Features, extract_over_ranks
from curvssl.evaluate.probes import linear
from curvssl.evaluate.runs import dataset_of, features_of, here, spread
from curvssl.files import say
from curvssl.models import feature_dim
from curvssl.rundir import Run, provenance

FILE = "finetune.json"
PROBED, TUNED, SCRATCH = "linear probe", "fine-tuned", "from scratch"
WAYS = (PROBED, TUNED, SCRATCH)

# How long: 20 epochs, as in the semi-supervised protocols of SwAV, Barlow Twins and VICReg. They have many labels; from
# scratch a few need more, so 100 epochs where that is at most 1,000 steps.
EPOCHS, EPOCHS_OF_FEW, STEPS_OF_FEW = 20, 100, 1_000
SMALLEST_BATCH, LARGEST_BATCH = 32, 256  # between them, a quarter of the labels
# On held-out training images (500 labels of CIFAR-10 in 16×16, 100 of the digits) rates from 5e-4 to 4e-3 were equal to
# within the noise, the lower ones a little better after pretraining and the higher ones from scratch: this is between.
LR = 2e-3
WEIGHT_DECAY = 0.05
WARMUP = 0.05  # share of the steps over which the rate rises
CROP = 0.5  # a crop shows at least this share of an image; 0.25 and 0.8 were no better there
PROBE_STEPS = 500  # of the linear probe, at least: in fewer steps a head of a few labels is still the random one


def finetune(run: Run, *, labels: Sequence[str], draws: int = 3, source: str = "auto") -> dict[str, Any]:
    """{labels: entry} for each of `labels`, a number a class ("10") or a share of all ("1%").

    What is missing in the run's finetune.json is computed and stored there, one accuracy at a time, so that the same
    call continues after it was killed. Draw number i takes the same labels in every run, and those of a smaller share
    are among those of a larger one.
    """
    asked = {name: parsed(name) for name in labels}
    if not asked:
        raise UserError("no amount of labels was given: a number a class, such as 10, or a share, such as 1%")
    if draws < 1:
        raise UserError(f"draws={draws} needs to be 1 or more")
    data = dataset_of(run, source=source)
    if data.train.labels is None or data.test.labels is None:
        raise UserError(f"{data.name} has no labels to learn from; curvssl quality {quote(str(run.path))} needs none")
    train, test = (features_of(run, data, split) for split in ("train", "test"))
    assert train.y is not None
    found = {}
    for name, (number, share) in asked.items():
        wanted = per_class(train.y, data.classes, number=number, share=share)
        settings = settings_of(run, n=sum(wanted))
        for draw in range(draws):
            entry = entry_of(run, name, settings)
            missing = [way for way in WAYS if len(entry[way]["accuracy"]) == draw]
            rows = drawn(train.y, wanted, seed=draw)
            for way in missing:
                if way == PROBED:
                    accuracy = probed(train, test, rows, classes=len(data.classes), seed=draw)
                else:
                    accuracy = trained(run, data, train, rows, way=way, settings=settings, seed=draw)
                entry = keep(run, name, settings, way, accuracy)
            if missing:
                said = ", ".join(f"{way} {entry[way]['accuracy'][draw]:.1f}" for way in WAYS)
                say(f"{called(name)}, draw {draw + 1} of {draws}: {said}")
        found[name] = entry_of(run, name, settings)
    return found


# --- which labels -----------------------------------------------------------------------------------------------------


def parsed(name: str) -> tuple[int, float]:
    """(labels a class, 0) from "10", or (0, share) from "1%"."""
    if re.fullmatch(r"[0-9]+", name) and int(name) > 0:
        return int(name), 0.0
    if re.fullmatch(r"[0-9]*\.?[0-9]+%", name) and 0 < float(name[:-1]) <= 100:
        return 0, float(name[:-1]) / 100
    raise UserError(f"labels {name} needs to be a number a class, such as 10, or a share above 0%, such as 1% or 100%")


def called(name: str) -> str:
    return name if name.endswith("%") else f"{name} a class"


def per_class(y: Tensor, classes: Sequence[str], *, number: int, share: float) -> list[int]:
    """How many labels of each class: `number`, or its share of the class, but one at least."""
    there = torch.bincount(y, minlength=len(classes)).tolist()
    fewest = min(range(len(classes)), key=there.__getitem__)
    if number > there[fewest]:
        raise UserError(
            f"labels {number} a class are more than the {there[fewest]} training images of class {classes[fewest]}: "
            "ask for fewer, or for a share such as 10%"
        )
    return [number or min(n, max(1, round(share * n))) for n in there]


def drawn(y: Tensor, wanted: Sequence[int], *, seed: int) -> Tensor:
    """Rows of y, sorted: the first ones of each class in an order that depends on the seed alone."""
    order = permutation(len(y), seed=seed, number=-1)
    return torch.cat([order[y[order] == c][:n] for c, n in enumerate(wanted)]).sort().values


# --- three ways to learn from them ------------------------------------------------------------------------------------


def probed(train: Features, test: Features, rows: Tensor, *, classes: int, seed: int) -> float:
    """Accuracy of a linear layer on the frozen features, which are standardised by those of all training images."""
    assert train.y is not None
    assert test.y is not None
    epochs = max(heads.EPOCHS, math.ceil(PROBE_STEPS * min(heads.BATCH_SIZE, len(rows)) / len(rows)))
    labelled = train.h[rows], train.y[rows]
    result = linear(*labelled, test.h, test.y, classes=classes, seeds=(seed,), unlabelled=train.h, epochs=epochs)
    return result.accuracy[0]


def trained(
    run: Run, data: Dataset, train: Features, rows: Tensor, *, way: str, settings: dict[str, Any], seed: int
) -> float:
    """Accuracy of the whole network and a linear layer after training on these rows, with or without pretraining."""
    assert train.y is not None
    shape: dict[str, Any] = {"size": run.config.image_size, "mean": data.mean, "std": data.std}
    channels = max(3, data.train.images.shape[1])
    with torch.random.fork_rng(devices=[here()] if torch.cuda.is_available() else []):
        torch.manual_seed(mix(seed, 0))
        if way == TUNED:
            encoder = run.load_parts()[0]
        else:
            encoder = Run(run.path, dataclasses.replace(run.config, seed=seed)).make_net(channels=channels).encoder
        net = with_head(encoder, feature_dim(encoder, channels=channels, size=shape["size"]), len(data.classes))
        images = data.train.images[rows if train.index is None else train.index[rows]]
        augment = Augment(**shape, **settings["augment"])
        fit(net, images, train.y[rows], augment, steps=settings["steps"], batch_size=settings["batch_size"], seed=seed)
        scores = extract_over_ranks(net, data.test.images, labels=data.test.labels, device=here(), **shape)
    assert scores.y is not None
    return 100 * float((scores.h.argmax(1) == scores.y).double().mean())


def with_head(encoder: nn.Module, d: int, classes: int) -> nn.Module:
    """The encoder and a linear layer that begins at 0. A BatchNorm without parameters stands between them, because the
    scale of the features depends on how the encoder was trained, and the layer's learning rate should not."""
    last = nn.Linear(d, classes)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(encoder, nn.BatchNorm1d(d, affine=False), last)


def fit(
    net: nn.Module, images: Images, labels: Tensor, augment: Augment, *, steps: int, batch_size: int, seed: int
) -> None:
    """Minimise the cross-entropy over augmented images: AdamW, a linear warm-up, then a cosine to 0; bf16 on CUDA."""
    device = here()
    cuda = device.type == "cuda"
    net.to(device).to(memory_format=torch.channels_last).train()
    augment = augment.to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=cuda or None)
    numbers = torch.Generator(device).manual_seed(mix(seed, 1))
    warm = WARMUP * steps
    for s, (pixels, y) in enumerate(labelled_batches(images, labels, size=batch_size, steps=steps, seed=seed)):
        rate = LR * min(1.0, (s + 1) / warm) * (1 + math.cos(math.pi * s / steps)) / 2
        for group in optimizer.param_groups:
            group["lr"] = rate
        x = augment(pixels, torch.rand(len(pixels), augment.draws, generator=numbers, device=device))
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=cuda):
            logits = net(x.contiguous(memory_format=torch.channels_last))
        loss = F.cross_entropy(logits.float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def labelled_batches(
    images: Images, labels: Tensor, *, size: int, steps: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """uint8 images and their labels on the device, one batch a step; all images are there if they fit."""
    device = here()
    fits = memory.fits(images, device=device)
    place = device if fits else torch.device("cpu")
    order, again = itertools.tee(batches(len(labels), size=size, seed=seed, first=0, last=steps, device=place))
    labels = labels.to(place)
    if fits:
        pixels = memory.resident(images, device=device)
        read: Iterator[Tensor] = (pixels[rows] for rows in order)
    else:
        read = images.batches(order, device=device)
    for batch, rows in zip(read, again, strict=True):
        yield batch, labels[rows].to(device)


def settings_of(run: Run, *, n: int) -> dict[str, Any]:
    """How n labels are learned from. Of the run's augmentation, the geometry: crop, flip and rotation."""
    if n < 2:
        raise UserError(f"{n} label is too few to learn from: ask for more")
    size = min(n, max(SMALLEST_BATCH, min(LARGEST_BATCH, n // 4)))
    epoch, config = n // size, run.config.augment
    low, high = (max(CROP, share) for share in config.crop_scale)
    augment = AugmentConfig(
        crop_scale=(low, high),
        crop_ratio=config.crop_ratio,
        flip=config.flip,
        rotation=config.rotation,
        jitter=0,
        grayscale=0,
    )
    settings = {
        "labels": n,
        "steps": max(EPOCHS * epoch, min(EPOCHS_OF_FEW * epoch, STEPS_OF_FEW)),
        "batch_size": size,
        "optimizer": f"AdamW, warm-up over {WARMUP:.0%} of the steps, cosine",
        "lr": LR,
        "weight_decay": WEIGHT_DECAY,
        "probe_steps": PROBE_STEPS,
        "augment": dataclasses.asdict(augment),
    }
    return json.loads(json.dumps(settings))  # as they are read back: tuples are lists


# --- the results ------------------------------------------------------------------------------------------------------


def entry_of(run: Run, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What is stored for these labels and these settings: {way: accuracy of each draw, mean, std}, perhaps of none."""
    entry = run.stored_json(FILE).get(name, {})
    if entry.get("settings") != settings:
        entry = {way: {"accuracy": []} for way in WAYS}
    return entry


def keep(run: Run, name: str, settings: dict[str, Any], way: str, accuracy: float) -> dict[str, Any]:
    """Store one more accuracy. Other entries of the file stay."""
    entry = entry_of(run, name, settings)
    values = [*entry[way]["accuracy"], accuracy]
    std = stdev(values) if len(values) > 1 else 0.0
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    entry |= {way: {"accuracy": values, "mean": fmean(values), "std": std}}
    entry |= {"settings": settings, "provenance": provenance(device=device)}
    run.keep_json(FILE, run.stored_json(FILE) | {name: entry}, by="curvssl finetune RUN")
    return entry


def finetune_rows(results: dict[str, Any]) -> list[list[str]]:
    """Rows of a table: one for each amount of labels, mean ± deviation over the draws."""
    return [
        [called(name), f"{entry['settings']['labels']:,}", *(spread(entry[way]["accuracy"]) for way in WAYS)]
        for name, entry in results.items()
    ]
