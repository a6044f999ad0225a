"""Encoders and projectors: shapes, weights from the seed, errors."""

import dataclasses
import math
from pathlib import Path

import numpy as np
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


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_the_imagenet_stem_is_torchvisions_resnet_without_its_classifier(name: str):
    import torchvision

    torch.manual_seed(0)
    theirs = getattr(torchvision.models, name)(weights=None)
    theirs.fc = nn.Identity()
    ours = make_encoder(name, stem="imagenet")
    assert ours.load_state_dict(theirs.state_dict(), strict=True).missing_keys == []
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(ours.eval()(x), theirs.eval()(x))


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_the_small_stem_keeps_the_resolution(name: str):
    small, imagenet = (make_encoder(name, stem=stem) for stem in ("small", "imagenet"))
    x = torch.zeros(1, 3, 32, 32)
    assert small.maxpool(small.conv1(x)).shape[2:] == (32, 32)
    assert imagenet.maxpool(imagenet.conv1(x)).shape[2:] == (8, 8)


@pytest.mark.parametrize(
    ("encoder", "d_h"),
    [
        *(("resnet18", 512), ("resnet50", 2048), ("resnet-mini", 128), ("timm:test_resnet", 96)),
        *(("timm:vit_tiny_patch16_224", 192), ("timm:convnext_atto", 320)),
    ],
)
@pytest.mark.parametrize("channels", [3, 4])
def test_every_encoder_gives_one_vector_an_image(encoder: str, d_h: int, channels: int):
    net = make_encoder(encoder, stem="small", channels=channels, size=32)
    assert feature_dim(net, channels=channels, size=32) == net.eval()(torch.zeros(2, channels, 32, 32)).shape[1] == d_h


def test_the_seed_decides_the_weights_and_the_callers_random_state_is_left_alone():
    before = torch.get_rng_state()
    one, same, other = (make_net(**NET, norm=False, seed=seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["encoder.stem.0.weight"], other["encoder.stem.0.weight"])


@pytest.mark.parametrize("size", [16, 32, 224])
def test_a_vit_has_one_position_for_each_patch_of_the_image_size(size: int):
    net = make_encoder("timm:vit_tiny_patch16_224", size=size)
    assert net.pos_embed.shape[1] == 1 + (size // 16) ** 2  # the class token also has a position
    assert feature_dim(net, channels=3, size=size) == 192


@pytest.mark.parametrize(
    "encoder", ["resnet18", "resnet50", "timm:resnet10t", "timm:convnext_atto", "timm:vit_tiny_patch16_224"]
)
def test_a_seed_gives_the_weights_that_torchvision_or_timm_make_of_it(encoder: str):
    import timm
    import torchvision

    torch.manual_seed(3)
    if encoder.startswith("timm:"):
        theirs = timm.create_model(encoder.removeprefix("timm:"), num_classes=0)
    else:
        theirs = getattr(torchvision.models, encoder)(weights=None)
        theirs.fc = nn.Identity()
    ours = make_net(**NET | {"encoder": encoder, "stem": "imagenet", "size": 224}, norm=False, seed=3).encoder
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert all(torch.equal(weight, theirs.state_dict()[name]) for name, weight in ours.state_dict().items())


@pytest.mark.parametrize(
    ("name", "said"),
    [("resnet81", "did you mean 'resnet18'"), ("mini", "'resnet-mini'"), ("timm:resnt18", "did you mean 'resnet18'")],
)
def test_an_unknown_encoder_is_answered_with_a_near_one(name: str, said: str):
    with pytest.raises(UserError) as error:
        make_encoder(name)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("encoder", "size", "said"),
    [
        ("convnext_atto", 8, r"the encoder does not take images of 8×8 \(.*\): use another --image-size or --encoder$"),
        ("halonet26t", 24, r"the encoder does not take images of 24×24 \(AssertionError\): use another"),
        ("gcvit_xxtiny", 24, r"the encoder does not take images of 24×24 \(division by zero\): use another"),
        ("vit_tiny_patch16_224", 24, "patches of 16×16, which do not fill 24×24: use --image-size 16 or 32$"),
        ("vit_small_patch16_224", 8, "use --image-size 16, or --encoder timm:vit_small_patch8_224$"),
        ("mixer_s16_224", 40, "patches of 16×16, which do not fill 40×40: use --image-size 32 or 48$"),
    ],
)
def test_an_encoder_that_cannot_take_the_images_says_so_in_one_line(encoder: str, size: int, said: str):
    with pytest.raises(UserError, match=said) as error:
        make_net(**NET | {"encoder": f"timm:{encoder}", "size": size}, norm=False, seed=0)
    assert "\n" not in str(error.value)


def test_an_encoder_that_gives_no_vector_says_so():
    with pytest.raises(UserError, match=r"the encoder gives \(3, 8, 8\) an image, not one vector"):
        feature_dim(nn.Identity(), channels=3, size=8)


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


@pytest.fixture(scope="module")
def few_digits(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of a dataset small enough for large backbones."""
    from sklearn.datasets import load_digits

    path = tmp_path_factory.mktemp("data") / "digits.npy"
    np.save(path, (load_digits().images[:64] * (255 / 16)).astype(np.uint8))
    return f"array:{path}"


@pytest.mark.parametrize(
    ("encoder", "size", "d_h"),
    [
        ("resnet50", 8, 2048),
        ("timm:test_resnet", 16, 96),
        ("timm:vit_tiny_patch16_224", 32, 192),
        ("timm:convnext_atto", 32, 320),
    ],
)
def test_a_backbone_trains_and_loads(encoder: str, size: int, d_h: int, few_digits: str, tmp_path: Path):
    shape = {"encoder": encoder, "stem": "small", "image_size": size, "holdout": 0.1}
    config = dataclasses.replace(TINY, dataset=few_digits, epochs=1, batch_size=16, monitor_every=0, **shape)
    run = curvssl.pretrain(config, out=tmp_path, progress=False)
    last = rows(run.path)[-1]
    assert last["step"] >= 2
    assert math.isfinite(last["loss"])
    before, after = run.make_net(channels=3).encoder, curvssl.load_encoder(run.path)
    trained = dict(after.named_parameters())
    assert [name for name, weight in before.named_parameters() if torch.equal(weight, trained[name])] == []
    assert after(torch.rand(2, 3, size, size)).shape == (2, d_h)
