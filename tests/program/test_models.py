import dataclasses
from pathlib import Path

import pytest
import torch
from pipeline import TINY, rows
from safetensors.torch import load_file
from torch import nn

import curvssl
from curvssl.config import UserError
from curvssl.models import feature_dim, make_encoder, make_net, make_projector

NET = {"encoder": "resnet-mini", "stem": "small", "channels": 3, "size": 8, "width": 16, "depth": 2, "d_z": 4}


@pytest.mark.parametrize(("depth", "shapes"), [(1, [(7, 5)]), (2, [(7, 9), (9, 5)]), (3, [(7, 9), (9, 9), (9, 5)])])
@pytest.mark.parametrize("norm", [False, True])
def test_a_projector_of_depth_n_has_n_linear_layers(depth: int, shapes: list[tuple[int, int]], norm: bool):
    projector = make_projector(7, width=9, depth=depth, d_z=5, norm=norm)
    linear = [m for m in projector if isinstance(m, nn.Linear)]
    assert [(m.in_features, m.out_features) for m in linear] == shapes
    assert sum(isinstance(m, nn.ReLU) for m in projector) == depth - 1
    z = projector(torch.randn(32, 7))
    assert z.shape == (32, 5)
    if norm:
        assert torch.allclose(z.mean(0), torch.zeros(5), atol=1e-5)
        assert torch.allclose(z.std(0, unbiased=False), torch.ones(5), atol=1e-3)


def test_the_imagenet_stem_is_torchvisions_resnet18_without_its_classifier():
    from torchvision.models import resnet18

    torch.manual_seed(0)
    theirs = resnet18(weights=None)
    theirs.fc = nn.Identity()
    ours = make_encoder("resnet18", stem="imagenet")
    assert ours.load_state_dict(theirs.state_dict(), strict=True).missing_keys == []
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(ours.eval()(x), theirs.eval()(x))


def test_the_small_stem_keeps_the_resolution():
    small, imagenet = (make_encoder("resnet18", stem=stem) for stem in ("small", "imagenet"))
    x = torch.zeros(1, 3, 32, 32)
    assert small.maxpool(small.conv1(x)).shape[2:] == (32, 32)
    assert imagenet.maxpool(imagenet.conv1(x)).shape[2:] == (8, 8)


@pytest.mark.parametrize(("encoder", "d_h"), [("resnet18", 512), ("resnet-mini", 128), ("timm:test_resnet", 96)])
@pytest.mark.parametrize("channels", [3, 4])
def test_every_encoder_gives_one_vector_an_image(encoder: str, d_h: int, channels: int):
    net = make_encoder(encoder, stem="small", channels=channels)
    assert feature_dim(net, channels=channels, size=32) == net.eval()(torch.zeros(2, channels, 32, 32)).shape[1] == d_h


def test_the_seed_decides_the_weights_and_the_callers_random_state_is_left_alone():
    before = torch.get_rng_state()
    one, same, other = (make_net(**NET, norm=False, seed=seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["encoder.stem.0.weight"], other["encoder.stem.0.weight"])


@pytest.mark.parametrize(
    ("name", "said"),
    [("resnet81", "did you mean 'resnet18'"), ("mini", "'resnet-mini'"), ("timm:resnt18", "did you mean 'resnet18'")],
)
def test_an_unknown_encoder_is_answered_with_a_near_one(name: str, said: str):
    with pytest.raises(UserError) as error:
        make_encoder(name)
    assert said in str(error.value)


def test_an_encoder_that_cannot_take_the_images_says_so():
    with pytest.raises(UserError, match="the encoder does not take images of 8×8"):
        make_net(**NET | {"encoder": "timm:vit_tiny_patch16_224"}, norm=False, seed=0)


def test_a_pretrained_encoder_loads_strictly_into_torchvisions_resnet18(tmp_path: Path):
    from torchvision.models import resnet18

    config = dataclasses.replace(TINY, encoder="resnet18", stem="imagenet", epochs=1, batch_size=512)
    run = curvssl.pretrain(config, out=tmp_path, progress=False)
    theirs = resnet18(weights=None)
    theirs.fc = nn.Identity()
    theirs.load_state_dict(load_file(run.path / "encoder.safetensors"), strict=True)
    x = torch.randn(4, 3, 8, 8)
    for path in (run.path, run.path / "encoder.safetensors"):
        ours = curvssl.load_encoder(path)
        assert not ours.training
        assert torch.equal(ours(x), theirs.eval()(x))
    untrained = run.make_net(channels=3).encoder.state_dict()
    assert not torch.equal(untrained["conv1.weight"], theirs.conv1.weight)


def test_a_timm_backbone_trains(tmp_path: Path):
    config = dataclasses.replace(TINY, encoder="timm:test_resnet", image_size=16, epochs=1, batch_size=512)
    run = curvssl.pretrain(config, out=tmp_path, progress=False)
    before, after = run.make_net(channels=3).encoder.state_dict(), curvssl.load_encoder(run.path).state_dict()
    assert before.keys() == after.keys()
    assert not torch.equal(before["conv1.0.weight"], after["conv1.0.weight"])
    assert rows(run.path)[-1]["step"] == 2
