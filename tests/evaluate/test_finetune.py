"""Learning from few labels: which labels are drawn, that the comparison is fair, and that nothing is computed twice."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pipeline import TINY, one_thread
from torch import Tensor, nn

from curvssl.cli import main
from curvssl.config import UserError
from curvssl.data.named import describe, load
from curvssl.data.views import Augment
from curvssl.evaluate import finetune as few
from curvssl.evaluate.features import Features
from curvssl.evaluate.probes import linear
from curvssl.evaluate.runs import features_of
from curvssl.rundir import Run


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Few steps, and one thread."""
    monkeypatch.setattr(few, "EPOCHS", 1)
    monkeypatch.setattr(few, "STEPS_OF_FEW", 4)
    monkeypatch.setattr(few, "PROBE_STEPS", 60)
    with one_thread():
        yield


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A finished run on the digits; what it learned does not matter here."""
    run = Run.create(tmp_path / "run", TINY)
    run.keep_json("data.json", describe(load("digits")), of=(), by="")
    run.save_net(run.make_net(channels=3), channels=3)
    return run


def labels_of(*counts: int) -> Tensor:
    """So many of class 0, 1, …, shuffled."""
    y = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return y[torch.randperm(len(y), generator=torch.Generator().manual_seed(3))]


# ---- which labels


def test_a_number_is_drawn_of_every_class_and_a_share_of_each_class():
    y = labels_of(50, 200, 10)
    for number, share, expected in (
        (7, 0, [7, 7, 7]),
        (0, 0.1, [5, 20, 1]),
        (0, 0.01, [1, 2, 1]),
        (0, 1, [50, 200, 10]),
    ):
        wanted = few.per_class(y, "abc", number=number, share=share)
        rows = few.drawn(y, wanted, seed=0)
        assert torch.bincount(y[rows]).tolist() == expected
        assert len(rows.unique()) == len(rows)


def test_a_draw_depends_on_its_number_and_holds_the_smaller_ones():
    y = labels_of(100, 100)
    small, other, large = (few.drawn(y, [n, n], seed=seed) for n, seed in ((5, 0), (5, 1), (30, 0)))
    assert torch.equal(small, few.drawn(y, [5, 5], seed=0))
    assert not torch.equal(small, other)
    assert set(small.tolist()) < set(large.tolist())


def test_an_amount_is_a_number_or_a_share():
    assert [few.parsed(name) for name in ("10", "1%", "0.5%", "100%")] == [(10, 0), (0, 0.01), (0, 0.005), (0, 1)]
    for name in ("0", "-3", "ten", "0%", "101%", "%", "1.5", ""):
        with pytest.raises(UserError, match="needs to be a number a class, such as 10, or a share"):
            few.parsed(name)


def test_more_labels_than_the_smallest_class_has_are_refused():
    with pytest.raises(UserError, match="labels 11 a class are more than the 10 training images of class c"):
        few.per_class(labels_of(50, 200, 10), "abc", number=11, share=0)


# ---- how they are learned from


@pytest.mark.parametrize(
    ("labels", "batch_size", "steps"),
    [(10, 10, 100), (100, 32, 300), (500, 125, 400), (5_000, 256, 1_000), (50_000, 256, 3_900)],
)
def test_many_labels_are_seen_twenty_times_and_few_a_hundred_times(labels: int, batch_size: int, steps: int):
    settings = few.settings_of(Run(Path("run"), TINY), n=labels)
    assert (settings["batch_size"], settings["steps"]) == (batch_size, steps)


def test_a_feature_that_the_few_labelled_images_lack_does_no_harm_to_the_probe():
    generator = torch.Generator().manual_seed(0)
    y = labels_of(200, 200)
    h = 0.1 * torch.randn(400, 2, generator=generator) + y[:, None]
    h[:, 1] = (torch.rand(400, generator=generator) < 0.5).float()
    rows = torch.cat([((y == c) & (h[:, 1] == 0)).nonzero()[:3, 0] for c in (0, 1)])  # in all of them feature 1 is 0
    assert few.probed(Features(h, y=y), Features(h, y=y), rows, classes=2, seed=0) > 99
    standardised_by_them = linear(h[rows], y[rows], h, y, classes=2, seeds=(0,)).accuracy[0]
    assert standardised_by_them < 80  # the same without the other images: feature 1 is scaled up beyond all measure


def test_training_learns_what_the_labels_say_and_takes_its_rate_from_the_cosine(monkeypatch: pytest.MonkeyPatch):
    digits = load("digits")
    rows = few.drawn(digits.train.labels, [5] * 10, seed=0)
    torch.manual_seed(0)
    net = few.with_head(nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU()), 32, 10)
    rates: list[float] = []
    monkeypatch.setattr(
        torch.optim.AdamW,
        "step",
        lambda self, step=torch.optim.AdamW.step: (rates.append(self.param_groups[0]["lr"]), step(self)),
    )
    augment = Augment(size=8, mean=digits.mean, std=digits.std, crop_scale=(1, 1), flip=0, jitter=0, grayscale=0)
    images, y = digits.train.images[rows], digits.train.labels[rows]
    few.fit(net, images, y, augment, steps=100, batch_size=25, seed=0)
    x = augment(images.pixels, torch.rand(50, 0))
    assert (net.eval()(x).argmax(1) == y).float().mean() > 0.95
    expected = few.LR * np.minimum(1, np.arange(1, 101) / 5) * (1 + np.cos(np.pi * np.arange(100) / 100)) / 2
    assert np.allclose(rates, expected)


@pytest.mark.usefixtures("quick")
def test_fine_tuning_begins_at_the_runs_weights_and_scratch_at_those_of_the_draw(
    run: Run, monkeypatch: pytest.MonkeyPatch
):
    begun: list[tuple[dict[str, Any], Any, dict[str, Any]]] = []
    fit = few.fit

    def watched(net: Any, images: Any, labels: Tensor, augment: Augment, **settings: Any) -> None:
        begun.append((copy.deepcopy(net[0].state_dict()), augment.recipe, settings | {"labels": labels}))
        fit(net, images, labels, augment, **settings)

    monkeypatch.setattr(few, "fit", watched)
    other = run.make_net(channels=3)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(0.1)
    run.save_net(other, channels=3)
    digits = load("digits")
    train = features_of(run, digits, "train")
    rows, settings = few.drawn(train.y, [3] * 10, seed=4), few.settings_of(run, n=30)
    for way in (few.TUNED, few.SCRATCH):
        few.trained(run, digits, train, rows, way=way, settings=settings, seed=4)
    (tuned, recipe, told), (scratch, same_recipe, told_too) = begun
    assert all(torch.equal(value, tuned[name]) for name, value in other.encoder.state_dict().items())
    fresh = Run(run.path, dataclasses.replace(run.config, seed=4)).make_net(channels=3).encoder.state_dict()
    assert all(torch.equal(value, scratch[name]) for name, value in fresh.items())
    assert recipe == same_recipe
    assert (recipe.rotation, recipe.flip, recipe.jitter, tuple(recipe.crop_scale)) == (10, 0, 0, (0.6, 1.0))
    assert torch.equal(told.pop("labels"), told_too.pop("labels"))
    assert told == told_too


def test_images_that_are_not_in_memory_come_with_their_own_labels(monkeypatch: pytest.MonkeyPatch):
    digits = load("digits")
    made = []
    for fits in (True, False):
        monkeypatch.setattr(few.memory, "fits", lambda images, device, fits=fits: fits)
        made.append(list(few.labelled_batches(digits.train.images, digits.train.labels, size=100, steps=16, seed=0)))
    for (pixels, y), (streamed, same_y) in zip(*made, strict=True):
        assert torch.equal(pixels, streamed)
        assert torch.equal(y, same_y)
        rows = (digits.train.images.pixels.flatten(1)[:, None] == pixels.flatten(1)[:3]).all(-1).int().argmax(0)
        assert torch.equal(digits.train.labels[rows], y[:3])


# ---- the command


@pytest.mark.usefixtures("quick")
def test_the_command_prints_and_keeps_every_draw_and_goes_on_where_it_was_killed(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    command = ["finetune", str(run.path), "--labels", "3", "1%", "--draws", "2"]
    main(command)
    printed = capsys.readouterr().out
    whole = run.read_json("finetune.json")
    assert whole.keys() == {"3", "1%"}
    assert (whole["3"]["settings"]["labels"], whole["1%"]["settings"]["labels"]) == (30, 10)
    assert printed.splitlines()[0].split() == ["labels", "number", "linear", "probe", "fine-tuned", "from", "scratch"]
    for line, name, shown in zip(printed.splitlines()[2:], ("3", "1%"), ("3 a class", "1%"), strict=True):
        means = [np.mean(whole[name][way]["accuracy"]) for way in few.WAYS]
        stds = [np.std(whole[name][way]["accuracy"], ddof=1) for way in few.WAYS]
        cells = [f"{mean:.1f} ± {std:.1f}" for mean, std in zip(means, stds, strict=True)]
        assert line.split() == " ".join([shown, str(whole[name]["settings"]["labels"]), *cells]).split()

    computed: list[tuple[str, int]] = []
    train = few.trained
    monkeypatch.setattr(
        few, "trained", lambda *a, way, seed, **k: (computed.append((way, seed)), train(*a, way=way, seed=seed, **k))[1]
    )
    main(command)
    assert capsys.readouterr().out == printed
    assert computed == []  # nothing was computed again

    killed = json.loads(json.dumps(whole))  # as after a kill in the second draw
    del killed["3"]["fine-tuned"]["accuracy"][1:], killed["3"]["from scratch"]["accuracy"][1:]
    run.keep_json("finetune.json", killed, by="curvssl finetune RUN")
    main(command)
    assert computed == [("fine-tuned", 1), ("from scratch", 1)]
    assert capsys.readouterr().out == printed  # to the last digit, as if it had never been stopped
    assert [run.read_json("finetune.json")[name][way] for name in whole for way in few.WAYS] == [
        whole[name][way] for name in whole for way in few.WAYS
    ]


@pytest.mark.usefixtures("quick")
def test_an_entry_of_other_settings_is_computed_anew(run: Run):
    other = few.settings_of(run, n=30) | {"lr": 1.0}
    entry = {way: {"accuracy": [1.5, 2.5]} for way in few.WAYS} | {"settings": other}
    run.keep_json("finetune.json", {"3": entry, "5": entry}, by="curvssl finetune RUN")
    again = few.finetune(run, labels=["3"], draws=1)
    assert all(len(again["3"][way]["accuracy"]) == 1 for way in few.WAYS)
    assert again["3"]["settings"]["lr"] == few.LR
    assert run.read_json("finetune.json")["5"] == entry  # the others stay


def test_no_amount_of_labels_is_no_empty_table(run: Run):
    with pytest.raises(UserError, match="no amount of labels was given: a number a class"):
        few.finetune(run, labels=[])


def test_data_without_labels_are_told_so(run: Run, tmp_path: Path):
    np.save(tmp_path / "pixels.npy", load("digits").train.images.pixels[:200].numpy())
    unlabelled = Run.create(tmp_path / "other", dataclasses.replace(TINY, dataset=f"array:{tmp_path / 'pixels.npy'}"))
    unlabelled.keep_json("data.json", describe(load(unlabelled.config.dataset)), of=(), by="")
    with pytest.raises(UserError, match="has no labels to learn from; curvssl quality"):
        few.finetune(unlabelled, labels=["10"])
