"""Exported encoders: each is read by the program that it is for, and gives the features of the run."""

import copy
import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from PIL import Image
from pipeline import TINY, one_thread
from torch import Tensor
from torchvision.transforms import functional

import curvssl
from curvssl.cli import main
from curvssl.config import AugmentConfig, PretrainConfig, UserError
from curvssl.data.named import load
from curvssl.evaluate import runs as evaluate
from curvssl.evaluate.export import rounded
from curvssl.evaluate.probes import PROBES
from curvssl.report.collect import curvature_measure, curvature_of_views
from curvssl.rundir import Run
from curvssl.train.loop import pretrain

ROOT = Path(__file__).parents[2]
MEAN, STD = [0.49, 0.48, 0.45], [0.25, 0.24, 0.26]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run on the digits, with the probes of 300 labels."""
    config = dataclasses.replace(TINY, method="vicreg", epochs=1, warmup_epochs=0)
    with one_thread():
        run = pretrain(config, out=tmp_path_factory.mktemp("run"), progress=False)
        run.keep_json("probes.json", probes_of(run), by="curvssl probe RUN")
    return run


def probes_of(run: Run) -> dict[str, Any]:
    train, test = (evaluate.features_of(run, load("digits"), split) for split in ("train", "test"))
    assert train.y is not None
    few = dataclasses.replace(train, h=train.h[::5], y=train.y[::5])
    return evaluate.probe_features(few, test, seeds=(0, 1, 2), classes=10)


@pytest.fixture(scope="module")
def halved(run: Run) -> Path:
    out = run.path.with_name("halved")
    main(["export", str(run.path), "--to", "hub-folder", "--half", "--license", "cc0-1.0", "--out", str(out)])
    return out


def finished(path: Path, *, channels: int = 3, **settings: Any) -> Run:
    """A run of 32×32 images with the weights that its training would begin with, and running statistics unlike 0, 1."""
    run = Run.create(path, PretrainConfig(image_size=32, dataset="cifar10", **settings))
    net = run.make_net(channels=max(3, channels))
    for name, value in net.encoder.state_dict().items():
        if "running" in name:
            value.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(len(name)))
    shape = {"channels": channels, "height": 32, "width": 32}
    statistics = {"mean": MEAN[:channels], "std": STD[:channels]}
    known = {"name": "cifar10", "images": 50_000, "sha256": {}, **shape, **statistics}
    run.keep_json("data.json", known, of=(), by="")
    run.save_net(net, channels=max(3, channels))
    return run


def pixels(n: int = 3, channels: int = 3, size: int = 32) -> Tensor:
    return torch.randint(0, 256, (n, channels, size, size), dtype=torch.uint8)


def normalised(images: Tensor) -> Tensor:
    return (images / 255 - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def in_its_card(folder: Path, monkeypatch: pytest.MonkeyPatch, **given: Any) -> list[dict[str, Any]]:
    """The names that every Python block of the folder's card defines, run inside the folder: h and others."""
    monkeypatch.chdir(folder)
    made = []
    with torch.no_grad():
        for block in re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL):
            names = dict(given)
            exec(block, names)
            made.append(names)
    return made


def test_timm_and_torchvision_load_a_resnet_and_give_its_features_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    run = finished(tmp_path / "run", encoder="resnet18", stem="imagenet")
    images = pixels()
    encoder: Any = curvssl.load_encoder(run.path)
    with torch.no_grad():
        expected = encoder(normalised(images))
    for to in ("torchvision", "timm"):
        main(["export", str(run.path), "--to", to, "--out", str(tmp_path / to)])
        assert f"for {to}, read back: features differ by 0.0e+00 at most" in capsys.readouterr().out
        (names,) = in_its_card(tmp_path / to, monkeypatch, x=normalised(images))
        assert torch.equal(names["h"], expected)
    photo = torch.arange(40 * 40 * 3).remainder(251).to(torch.uint8).view(40, 40, 3)
    ours = encoder.prepare(photo.permute(2, 0, 1)[None])[0]
    assert (
        names["transform"](Image.fromarray(photo.numpy())) - ours
    ).abs().max() < 4 * 2 / 255  # Pillow rounds to 1/255 twice


def test_the_card_says_how_torchvision_and_timm_load_the_3x3_stem_which_timm_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = finished(tmp_path / "run", encoder="resnet18", stem="small")
    main(["export", str(run.path), "--to", "hub-folder", "--out", str(tmp_path / "hub")])
    images = pixels(1)
    made = in_its_card(tmp_path / "hub", monkeypatch, images=images, x=normalised(images))
    assert len(made) == 3  # curvssl, torchvision, timm
    with torch.no_grad():
        expected = curvssl.load_encoder(run.path)(normalised(images))
    assert torch.allclose(made[0]["h"], expected, atol=1e-6)
    assert all(torch.equal(names["h"], expected) for names in made[1:])
    with pytest.raises(SystemExit):
        main(["export", str(run.path), "--to", "timm", "--out", str(tmp_path / "timm")])


def test_the_weights_in_the_repository_load_as_their_card_says_and_its_numbers_are_those_of_the_study(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    folder, images = ROOT / "weights/cifar10-resnet18", pixels(2, size=40)
    main(["verify", str(folder)])
    assert "as they were written" in capsys.readouterr().out
    assert sum(file.stat().st_size for file in folder.iterdir()) < 25e6
    x = functional.resize(images, [32, 32]) / 255 - torch.tensor((0.4914, 0.482158, 0.446531))[:, None, None]
    x = x / torch.tensor((0.247032, 0.243485, 0.261588))[:, None, None]
    ours, *others = in_its_card(folder, monkeypatch, images=images, x=x)
    assert [len(others), *ours["h"].shape] == [2, 2, 512]  # torchvision, timm
    for names in others:  # torchvision rounds resized pixels to integers
        assert float((names["h"] - ours["h"]).norm() / ours["h"].norm()) < 0.01
    cell = json.loads((ROOT / "results/presets/cifar10-strong-seed0.json").read_text())
    stored = Run.read(folder)
    kept = stored.read_json("probes.json")
    assert {probe: kept[probe] for probe in PROBES} == {probe: cell["probes"][probe] for probe in PROBES}
    assert stored.config == PretrainConfig.from_dict(cell["config"])


def test_a_backbone_of_timm_with_a_fixed_size_goes_back_to_timm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = finished(tmp_path / "run", encoder="timm:test_vit")
    main(["export", str(run.path), "--to", "timm", "--out", str(tmp_path / "timm")])
    x = normalised(pixels())
    (names,) = in_its_card(tmp_path / "timm", monkeypatch, x=x)
    with torch.no_grad():
        assert torch.equal(names["h"], curvssl.load_encoder(run.path)(x))


def test_onnxruntime_gives_the_features_from_pixels_for_any_number_of_images(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    main(["export", str(run.path), "--to", "onnx", "--out", str(tmp_path / "onnx")])
    assert sorted(file.name for file in (tmp_path / "onnx").iterdir()) == ["README.md", "model.onnx"]
    encoder: Any = curvssl.load_encoder(run.path)
    for n in (1, 7):
        images = pixels(n, channels=1, size=8)
        (names,) = in_its_card(tmp_path / "onnx", monkeypatch, pixels=images.numpy())
        with torch.no_grad():
            torch.testing.assert_close(
                torch.from_numpy(names["h"]), encoder(encoder.prepare(images)), rtol=0, atol=1e-4
            )


def test_an_exported_encoder_is_the_runs_to_the_last_bit_and_no_more_than_it(run: Run, tmp_path: Path):
    main(["export", str(run.path), "--to", "hub-folder", "--out", str(tmp_path / "hub")])
    ours, theirs = curvssl.load_encoder(run.path), curvssl.load_encoder(tmp_path / "hub" / "encoder.safetensors")
    assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in ours.state_dict().items())
    kept = {"README.md", "config.json", "data.json", "encoder.safetensors", "export.json", "probes.json"}
    assert {file.name for file in (tmp_path / "hub").iterdir()} == kept | {"provenance.json", "manifest.json"}
    main(["verify", str(tmp_path / "hub")])
    assert Run.read(tmp_path / "hub").config == run.config


def test_probes_do_not_see_that_weights_were_rounded_to_half_their_bits(run: Run, halved: Path):
    data = load("digits")
    ours, theirs = (evaluate.features_of(each, data, "test").h for each in (run, Run.read(halved)))
    assert 0 < (theirs - ours).abs().max() < 2e-3 * ours.abs().max()
    before, after = run.read_json("probes.json"), probes_of(Run.read(halved))
    for name in PROBES:
        image = 100 / len(ours)  # rounding may cost or bring one image, not two
        assert np.allclose(after[name]["accuracy"], before[name]["accuracy"], rtol=0, atol=1.01 * image), name
    sizes = [(path / "encoder.safetensors").stat().st_size for path in (run.path, halved)]
    assert sizes[1] < 0.52 * sizes[0]


def test_commands_take_an_exported_folder_in_the_place_of_a_run(
    run: Run, halved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    np.save(tmp_path / "images.npy", load("digits").test.images.pixels[:50, 0].numpy())
    main(["embed", str(halved), str(tmp_path / "images.npy"), "--out", str(tmp_path / "f.npz")])
    assert capsys.readouterr().out.strip() == f"{tmp_path / 'f.npz'}: h (50, 128)"  # and no z
    main(["compare", str(halved), str(run.path)])
    said = capsys.readouterr()
    assert said.out.splitlines()[-1].split()[:3] == ["digits", "VICReg", "1"]
    assert f"{run.path} has the settings and the seed of {halved}, and does not count again" in said.err
    main(["export", str(halved), "--to", "hub-folder", "--half", "--out", str(tmp_path / "again")])
    weights = [(path / "encoder.safetensors").read_bytes() for path in (halved, tmp_path / "again")]
    assert weights[0] == weights[1]
    assert curvssl.pretrain(run.config, out=halved, progress=False).finished  # nothing is trained over it
    assert not (halved / "metrics.jsonl").exists()


def test_a_map_of_z_needs_a_projector_and_says_so_in_one_line(halved: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["map", str(halved), "--of", "z"])
    (line,) = capsys.readouterr().err.splitlines()
    assert "is an exported encoder without a projector, so it has no z" in line


def test_the_page_of_an_exported_encoder_has_the_curvature_of_h(halved: Path):
    exported, data = Run.read(halved), load("digits")
    still = AugmentConfig(crop_scale=(1, 1), crop_ratio=(1, 1), flip=0, jitter=0, grayscale=0)
    run = dataclasses.replace(exported, config=dataclasses.replace(exported.config, augment=still))
    n = run.config.batch_size
    images, measure = data.test.images[:n], curvature_measure(run, n=n)
    scores = curvature_of_views(run, data, images, torch.arange(n), measure=measure).double().numpy()
    encoder: Any = curvssl.load_encoder(halved)
    h = encoder(encoder.prepare(images.pixels)).detach().double().numpy()
    want = oracles.curvature(h, neighbors=oracles.nearest(h, k=run.config.k))
    np.testing.assert_allclose(scores, np.stack([want, want]), atol=1e-3)


def test_the_card_has_the_runs_numbers_its_licence_and_its_recipe(run: Run, halved: Path):
    text = (halved / "README.md").read_text()
    assert text.startswith('---\nlicense: "cc0-1.0"\nlibrary_name: "curvssl"\n')
    linear = run.read_json("probes.json")["linear"]["accuracy"]
    assert f"| this encoder | {np.mean(linear):.1f} ± {np.std(linear, ddof=1):.1f} |" in text
    table = re.findall(r"^\|  \| linear .*?\n\n", text, re.DOTALL | re.MULTILINE)[0].splitlines()[:3]
    assert {line.count("|") for line in table} == {9}, table  # a name, three probes and four figures of retrieval
    assert "mean 0.305427 and std 0.375779, and grey is repeated to three channels." in text
    settings = json.loads(re.findall(r"```json\n(.*?)```", text, re.DOTALL)[0])
    assert PretrainConfig.from_dict(settings) == run.config


def test_vectors_integers_and_numbers_beyond_float16_are_not_rounded():
    assert rounded(torch.tensor([[0.1]])).dtype == torch.float16
    for value in (torch.tensor([1e-9]), torch.tensor(3), torch.tensor([[7]]), torch.tensor([[7e4]])):
        assert torch.equal(rounded(value), value)
        assert rounded(value).dtype == value.dtype


def test_nothing_of_the_users_is_overwritten(run: Run, tmp_path: Path):
    export = ["export", str(run.path), "--to", "hub-folder", "--out"]
    main([*export, str(tmp_path / "hub"), "--half"])
    main([*export, str(tmp_path / "hub")])  # an earlier export is replaced
    assert json.loads((tmp_path / "hub" / "export.json").read_text())["half"] is False
    (tmp_path / "hub" / "notes.txt").touch()
    for out in (tmp_path / "hub", run.path):
        names = sorted(file.name for file in out.iterdir())
        with pytest.raises(SystemExit):
            main([*export, str(out)])
        assert sorted(file.name for file in out.iterdir()) == names
    assert [file.name for file in tmp_path.iterdir()] == ["hub"]  # no part is left


# ---- encoder.prepare


def test_prepare_makes_the_encoders_input_from_images_of_any_size(run: Run):
    encoder: Any = curvssl.load_encoder(run.path)
    assert (encoder.prepare.size, encoder.prepare.mean, encoder.prepare.std) == (8, (0.305427,), (0.375779,))
    photo = np.random.default_rng(0).integers(0, 256, (30, 20), dtype=np.uint8)
    square = Image.fromarray(photo[5:25]).resize((8, 8), Image.Resampling.BILINEAR)
    square = np.asarray(square, dtype=np.float32)
    expected = torch.from_numpy((square / 255 - 0.305427) / 0.375779)
    made = encoder.prepare(photo[None, None])
    assert made.shape == (1, 3, 8, 8)
    assert (made - expected).abs().max() < 2 / 255 / 0.375779  # Pillow rounds to whole grey values, twice
    data = load("digits").test
    with torch.no_grad():
        h = encoder(encoder.prepare(data.images.pixels))
    torch.testing.assert_close(h, evaluate.features_of(run, load("digits"), "test").h, rtol=0, atol=1e-5)


def test_prepare_follows_its_encoder_and_is_no_part_of_its_state(run: Run):
    encoder: Any = curvssl.load_encoder(run.path)
    assert encoder.state_dict().keys() == run.make_net(channels=3).encoder.state_dict().keys()
    twin = copy.deepcopy(encoder)
    assert twin.prepare.encoder is twin
    there = twin.eval().to("meta")
    assert there.prepare(pixels(2, channels=1, size=8)).device.type == "meta"
    assert encoder.prepare(pixels(2, channels=1, size=8)).device.type == "cpu"
    file = io.BytesIO()
    torch.save(encoder, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.prepare.encoder is loaded


@pytest.mark.parametrize(
    "images",
    [torch.rand(1, 1, 8, 8), pixels(1, channels=2), pixels()[0], np.zeros((1, 1, 8, 8))],
    ids=["floats", "two channels", "one image", "float64"],
)
def test_other_images_are_refused_in_one_line(run: Run, images: Any):
    encoder: Any = curvssl.load_encoder(run.path)
    with pytest.raises(UserError, match=r"needed are uint8 \(N, 1, H, W\)"):
        encoder.prepare(images)
