"""Features of a frozen encoder: correct, and the encoder does not change."""

from pathlib import Path

import numpy as np
import pytest
import torch
from pipeline import TINY
from torch import Tensor, nn

from curvssl.config import UserError
from curvssl.data.images import TensorImages
from curvssl.data.views import prepare
from curvssl.evaluate.features import Features, extract, load, raw_pixels, save
from curvssl.rundir import Run

VIEW = {"size": 8, "mean": (0.5,) * 3, "std": (0.25,) * 3}


def pixels(n: int = 30) -> Tensor:
    return torch.randint(0, 256, (n, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def images(n: int = 30) -> TensorImages:
    return TensorImages.of(pixels(n))


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers)


def state(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


def test_features_are_the_network_in_eval_mode_applied_to_the_prepared_images():
    f, g = encoder(), nn.Linear(6, 4)
    labels = torch.arange(30)
    features = extract(f, images(), **VIEW, projector=g, labels=labels, batch_size=7)
    with torch.no_grad():
        h = f.eval()(prepare(pixels(), **VIEW))
        torch.testing.assert_close(features.h, h)
        torch.testing.assert_close(features.z, g(h))
    assert features.h.dtype == torch.float32
    assert features.y is labels
    assert features.has_labels


def test_the_batch_size_does_not_change_the_features():
    f = encoder()
    torch.testing.assert_close(
        extract(f, images(), **VIEW, batch_size=1).h, extract(f, images(), **VIEW, batch_size=64).h
    )


def test_weights_buffers_and_modes_are_bit_identical_before_and_after():
    f, g = encoder().train(), nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    f[1].eval()  # a BatchNorm that the user froze stays frozen
    before = [state(f), state(g)]
    modes = [module.training for net in (f, g) for module in net.modules()]
    extract(f, images(), **VIEW, projector=g)
    for net, old in zip((f, g), before, strict=True):
        for name, value in net.state_dict().items():
            assert torch.equal(value, old[name]), name
            assert value.dtype == old[name].dtype
    assert [module.training for net in (f, g) for module in net.modules()] == modes


def test_modes_come_back_when_the_encoder_fails():
    class Broken(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("broken")

    f = Broken(2, 2).train()
    with pytest.raises(RuntimeError, match="broken"):
        extract(f, images(), **VIEW)
    assert f.training


def test_features_are_ordinary_tensors_that_autograd_accepts():
    features = extract(encoder(), images(), **VIEW)
    weight = torch.ones(6, requires_grad=True)
    (features.h @ weight).sum().backward()
    torch.testing.assert_close(weight.grad, features.h.sum(0))


def test_features_are_computed_in_float32_whoever_asks_for_them():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = extract(encoder(), images(), **VIEW).h
    torch.testing.assert_close(inside, extract(encoder(), images(), **VIEW).h, rtol=0, atol=0)


def test_an_encoder_without_pooling_and_an_empty_set_are_refused_in_one_line():
    with pytest.raises(UserError, match="not one vector"):
        extract(nn.Conv2d(3, 2, 3), images(), **VIEW)
    with pytest.raises(UserError, match="no image"):
        extract(encoder(), images(0), **VIEW)


def test_raw_pixels_are_the_bytes_over_255():
    x = torch.tensor([[[[0, 51], [102, 255]]]], dtype=torch.uint8)
    torch.testing.assert_close(raw_pixels(x), torch.tensor([[0, 0.2, 0.4, 1.0]]))
    assert raw_pixels(pixels()).shape == (30, 3 * 8 * 8)


@pytest.mark.parametrize("whole", [True, False], ids=["h, z and y", "h alone"])
def test_what_is_saved_is_loaded_bit_for_bit(tmp_path: Path, whole: bool):
    h, z, y = torch.randn(5, 3), torch.randn(5, 2), torch.arange(5)
    features = Features(h, z, y) if whole else Features(h)
    run = Run.create(tmp_path, TINY)
    save(features, run, "features-test.npz")
    again = load(run, "features-test.npz")
    assert again is not None
    assert torch.equal(again.h, h)
    for ours, theirs in ((again.z, features.z), (again.y, features.y)):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)
    assert sorted(np.load(tmp_path / "features-test.npz").files) == (["h", "y", "z"] if whole else ["h"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "features-test.npz", "manifest.json"]


def test_a_missing_a_truncated_and_a_foreign_file_are_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run, path = Run.create(tmp_path, TINY), tmp_path / "features-test.npz"
    assert load(run, path.name) is None
    save(Features(torch.randn(50, 30)), run, path.name)
    assert load(run, path.name) is not None
    path.write_bytes(path.read_bytes()[:1000])
    assert load(run, path.name) is None
    np.savez(path, h=np.zeros((50, 30), dtype=np.float32))
    assert load(run, path.name) is None
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all("features-test.npz has changed since it was written" in line for line in lines)


@pytest.mark.gpu
def test_cuda_gives_the_features_of_the_cpu():
    on_cpu = extract(encoder(), images(), **VIEW).h
    on_cuda = extract(encoder(), images(), **VIEW, device="cuda").h
    assert on_cuda.device.type == "cpu"
    torch.testing.assert_close(on_cuda, on_cpu, rtol=1e-5, atol=1e-6)  # with TF32 the error would be 1e-3
