"""Configurations: JSON, presets, defaults, and which values are refused."""

import dataclasses
import inspect
import json
import math
import re
from typing import Any

import pytest

from curvssl import losses
from curvssl.config import (
    CHOICES,
    PRESETS,
    AugmentConfig,
    Colours,
    PretrainConfig,
    UserError,
    all_but_the_seed,
    demo,
    unknown,
)
from curvssl.methods import METHODS

PAPER = {
    "optimizer": "adam",
    "lr": 1e-3,
    "weight_decay": 1e-4,
    "batch_size": 256,
    "d_z": 128,
    "k": 10,
    "lambda_emb": 1,
    "lambda_curv": 1,
    "alpha_curv": 1,
    "encoder": "resnet18",
    "projector_depth": 2,
    "kernel": "rbf",
}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_configuration_survives_json(preset: str):
    config = PRESETS[preset]()
    assert PretrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("preset", "dataset", "epochs"), [("paper-mnist", "mnist", 100), ("paper-cifar10", "cifar10", 500)]
)
def test_a_paper_preset_has_what_the_paper_states(preset: str, dataset: str, epochs: int):
    config = PRESETS[preset]()
    stated = PAPER | {"dataset": dataset, "epochs": epochs}
    assert {name: getattr(config, name) for name in stated} == stated


def test_no_preset_mirrors_digits():
    mirrored = {config.dataset for config in (make() for make in PRESETS.values()) if config.augment.flip}
    assert not mirrored & {"mnist", "svhn"}


def test_the_defaults_are_the_papers():
    config = PretrainConfig()
    assert {name: getattr(config, name) for name in PAPER} == PAPER


@pytest.mark.parametrize(
    ("images", "size"), [(3, 16), (127, 16), (128, 16), (256, 32), (900, 64), (2047, 128), (2048, 256), (10**6, 256)]
)
def test_a_batch_size_of_0_becomes_one_with_eight_steps_an_epoch(images: int, size: int):
    config = PRESETS["default"]().suited(images=images, image_size=64, device="cpu")
    assert config.batch_size == size
    assert config.suited(images=1, image_size=32, device="cuda") == config  # chosen once


@pytest.mark.parametrize(
    ("image_size", "device", "stem"),
    [(32, "cuda", "small"), (64, "cuda", "small"), (96, "cuda", "imagenet"), (32, "cpu", "imagenet")],
)
def test_the_stem_that_nobody_chose_is_small_for_small_views_on_a_gpu(image_size: int, device: str, stem: str):
    config = PRESETS["default"]().suited(images=1000, image_size=image_size, device=device)
    assert (config.image_size, config.stem, config.left_open) == (image_size, stem, ())
    given = dataclasses.replace(PRESETS["default"](), image_size=48, stem="small")
    suited = given.suited(images=1000, image_size=image_size, device=device)
    assert (suited.image_size, suited.stem) == (48, "small")


def test_a_configuration_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        demo().lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("name", CHOICES)
def test_a_mistyped_choice_is_answered_with_the_nearest_one(name: str):
    right = CHOICES[name][-1]
    with pytest.raises(UserError, match=f"unknown {name} '{right}x'; did you mean '{right}'"):
        PretrainConfig(**{name: right + "x"})


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"epochs": 0}, "epochs=0 needs to be 1 or more"),
        ({"batch_size": -1}, "batch_size=-1 needs to be 0 or more"),
        ({"lr": 0.0}, "lr=0.0 needs to be a positive number"),
        ({"lr": math.nan}, "lr=nan"),
        ({"lr": math.inf}, "lr=inf"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0 needs to be 0 or more"),
        ({"seed": -1}, "seed=-1 needs to be 0 or more"),
        ({"seed": 2**63}, "seed=9223372036854775808 needs to be below 2^63"),
        ({"seed": 10**400}, "needs to be below 2^63"),
        ({"epochs": 10**400}, "needs to be below 2^63"),
        ({"momentum": 1.5}, "momentum=1.5 needs to be between 0 and 1"),
        ({"holdout": 0.9}, "holdout=0.9"),
        ({"k": 1}, "k=1 has no pair of neighbours"),
        ({"k": 64, "batch_size": 64}, "batch_size=64 needs more than k=64: lower k or raise batch_size"),
        ({"warmup_epochs": 200.0}, "warmup_epochs=200.0 is longer than the run's epochs=100"),
        ({"gamma": -1.0}, "gamma=-1.0 needs to be a positive number"),
        ({"gamma": math.inf}, "gamma=inf needs to be a positive number"),
        ({"gamma": math.nan}, "gamma=nan needs to be a positive number"),
        ({"kernel": "rfb"}, "unknown kernel 'rfb'; did you mean 'rbf'"),
        ({"alpha_curv": -1.0}, "alpha_curv=-1.0 needs to be 0 or more"),
        ({"gamma": "medin"}, "unknown gamma 'medin'; did you mean 'median'"),
        ({"average": 1.0}, "average=1.0 needs to be 0 or more, and below 1"),
        ({"teacher": True}, "the teacher is an average of the weights: give average=0.99, say"),
    ],
)
def test_a_value_that_cannot_be_is_refused_when_the_configuration_is_made(setting: dict[str, Any], said: str):
    with pytest.raises(UserError) as error:
        PretrainConfig(**setting)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"flip": 1.1}, "flip=1.1 needs to be between 0 and 1"),
        ({"hue": 0.6}, "hue=0.6 needs to be between 0 and 0.5"),
        ({"rotation": -1.0}, "rotation=-1.0"),
        ({"crop_scale": (0.5, 1.2)}, "crop_scale=(0.5, 1.2) needs 0 < low ≤ high ≤ 1"),
        ({"crop_ratio": (2.0, 1.0)}, "crop_ratio=(2.0, 1.0) needs 0.001 ≤ low ≤ high ≤ 1000"),
        ({"crop_ratio": (1.0, math.inf)}, "crop_ratio=(1.0, inf) needs 0.001 ≤ low ≤ high"),
        ({"crop_ratio": (math.nan, 1.0)}, "crop_ratio=(nan, 1.0) needs 0.001 ≤ low ≤ high"),
    ],
)
def test_an_augmentation_that_cannot_be_is_refused(setting: dict[str, Any], said: str):
    with pytest.raises(UserError) as error:
        AugmentConfig(**setting)
    assert said in str(error.value)


@pytest.mark.parametrize("values", [{"views": 3}, {"augment": {"views": 3}}])
def test_an_unknown_setting_in_a_file_was_written_by_a_newer_version(values: dict[str, Any]):
    with pytest.raises(UserError, match="'views' is unknown, so it was written by a newer version"):
        PretrainConfig.from_dict(values)


def test_a_name_like_no_other_gets_the_list_alone():
    assert str(unknown("thing", "zzz", ("one", "two"))) == "unknown thing 'zzz'; known: one, two"


@pytest.mark.parametrize("method", METHODS)
def test_a_method_says_what_its_loss_takes_and_with_which_defaults(method: str):
    loss = getattr(losses, METHODS[method].loss)
    taken = {name: parameter.default for name, parameter in inspect.signature(loss).parameters.items()}
    assert {name: setting.default for name, setting in METHODS[method].settings.items()} == taken
    made = METHODS[method].make(**PretrainConfig(method=method).loss_settings())
    assert isinstance(made, loss)


def test_two_configurations_share_a_key_if_they_differ_in_nothing_that_is_learned_but_the_seed():
    base = demo()
    same = [{"seed": 3}, {"device": "cpu"}, {"step": "eager"}, {"checkpoint_seconds": 1.0}]
    other = [{"lr": 0.1}, {"alpha_curv": 2.0}, {"augment": AugmentConfig(flip=0.1)}]
    keys = [all_but_the_seed(dataclasses.replace(base, **change).to_dict()) for change in (*same, *other)]
    assert set(keys[: len(same)]) == {all_but_the_seed(base.to_dict())}
    assert len(set(keys)) == 1 + len(other)


def test_other_views_have_the_colours_of_the_first_unless_told_otherwise():
    config = PretrainConfig(local_views=4, augment=AugmentConfig(hue=0.2, crop_scale=(0.3, 1.0)))
    assert config.second_augment() == config.augment
    assert config.local_augment() == AugmentConfig(hue=0.2, crop_scale=(0.05, 0.25))
    told = dataclasses.replace(config, local=Colours(hue=0.0, blur=0.5), local_crop_scale=(0.1, 0.4))
    assert told.local_augment() == AugmentConfig(hue=0.0, blur=0.5, crop_scale=(0.1, 0.4))
    solarized = dataclasses.replace(told, second=Colours(solarize=0.2))
    assert solarized.second_augment() == dataclasses.replace(config.augment, solarize=0.2)
    assert PretrainConfig.from_dict(json.loads(json.dumps(solarized.to_dict()))) == solarized


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"local_views": -1}, "local_views=-1 needs to be 0 or more"),
        ({"limit": -1}, "limit=-1 needs to be 0 or more"),
        ({"local_views": 2, "local_size": 0}, "local_size=0 needs to be 1 or more"),
        ({"global_size": -1}, "global_size=-1 needs to be 0 or more"),
        ({"local_views": 2, "local_crop_scale": (0.5, 0.1)}, "local views: crop_scale="),
        ({"local_views": 2, "local": Colours(hue=2.0)}, "local views: hue=2.0"),
        ({"second": Colours(blur=2.0)}, "second view: blur=2.0"),
        ({"alpha_chord": -1.0}, "alpha_chord=-1.0 needs to be 0 or more"),
        ({"alpha_chord": 1.0, "batch_size": 255}, "batch_size=255 has no pairs to blend for alpha_chord"),
        ({"alpha_chord": 1.0, "method": "own"}, "an own criterion sees no blends"),
        ({"alpha_path": 1.0, "alpha_chord": 1.0}, "a step has room for one: set one to 0"),
        ({"alpha_path": 1.0, "second": Colours(blur=0.5)}, "alpha_path needs two global views that are made alike"),
    ],
)
def test_views_that_make_no_sense_are_refused(changes: dict[str, Any], words: str):
    with pytest.raises(UserError, match=re.escape(words)):
        PretrainConfig(**changes)
