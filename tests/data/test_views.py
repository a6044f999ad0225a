"""Each operation against torchvision's functional, each distribution against torchvision's random transform."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torchvision.transforms as T
import torchvision.transforms.functional as TF
from scipy.stats import chisquare, ks_2samp  # type: ignore[import-untyped]
from torch import Tensor
from torchvision.transforms import InterpolationMode

from curvssl.config import AugmentConfig, UserError
from curvssl.data import views as augment
from curvssl.data.views import BRIGHTNESS, CONTRAST, SATURATION, Augment, Views

MEAN, STD = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)
OFF = {
    "crop_scale": (1.0, 1.0),
    "flip": 0,
    "rotation": 0,
    "jitter": 0,
    "grayscale": 0,
    "blur": 0,
    "solarize": 0,
}
# torch 2.11's compiler uses a function that torch 2.11 deprecates, and recommends TF32 where we compare in float32.
compiles = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script_method:DeprecationWarning", "ignore:TensorFloat32 tensor cores"
)
STRONG = {"rotation": 20, "blur": 0.5, "solarize": 0.4}


def photos(b: int, c: int = 3, h: int = 32, w: int = 32, seed: int = 0) -> Tensor:
    """Smooth uint8 images with some pure black, white and grey pixels, whose hue is undefined."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(b, c, 5, 5, generator=generator) * 1.6 - 0.3
    x = torch.nn.functional.interpolate(x, size=(h, w), mode="bicubic").clamp(0, 1)
    x[:, :, : h // 6] = x[:, :1, : h // 6]
    return (x * 255).round().to(torch.uint8)


def floats(*shape: int) -> Tensor:
    return photos(*shape).float() / 255


def uniforms(b: int, p: int, seed: int = 0) -> Tensor:
    return torch.rand(b, p, generator=torch.Generator().manual_seed(seed))


def assert_same(ours: Tensor, theirs: list[Tensor], atol: float = 2e-6) -> None:
    torch.testing.assert_close(ours, torch.stack(theirs), atol=atol, rtol=0)


# --- operations -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("height", "width", "size"), [(32, 32, 32), (32, 32, 16), (28, 28, 40), (40, 24, 32), (96, 130, 32)]
)
def test_resample_equals_torchvisions_resized_crop_growing_and_shrinking(height: int, width: int, size: int) -> None:
    x = floats(24, 3, height, width)
    box = augment.crop_box(
        uniforms(24, 22), height=height, width=width, scale=(0.05, 1.0), ratio=(0.5, 2.0)
    )  # (top, left, h, w)
    rows = augment.resample_weights(box[0], box[2], source=height, target=size)
    columns = augment.resample_weights(box[1], box[3], source=width, target=size)
    theirs = [
        TF.resized_crop(image, *(int(v) for v in values), [size, size], antialias=True)
        for image, *values in zip(x, *box, strict=True)
    ]
    assert_same(augment.resample(x, rows, columns), theirs, atol=2e-5)


def test_every_row_of_the_resampling_weights_sums_to_one_inside_the_box() -> None:
    start, length = torch.tensor([0.0, 3.0, 31.0]), torch.tensor([32.0, 7.0, 1.0])
    weights = augment.resample_weights(start, length, source=32, target=20)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 20))
    assert (weights[1, :, :3] == 0).all()
    assert (weights[1, :, 10:] == 0).all()
    assert (weights[2, :, 31] == 1).all()


@pytest.mark.parametrize(("height", "width"), [(32, 32), (17, 24)])
def test_rotate_equals_torchvisions(height: int, width: int) -> None:
    x, degrees = floats(8, 3, height, width), torch.linspace(-180, 170, 8)
    theirs = [
        TF.rotate(image, float(angle), interpolation=InterpolationMode.BILINEAR)
        for image, angle in zip(x, degrees, strict=True)
    ]
    assert_same(augment.rotate(x, degrees), theirs, atol=5e-5)


@pytest.mark.parametrize(
    ("kind", "functional"),
    [(BRIGHTNESS, TF.adjust_brightness), (CONTRAST, TF.adjust_contrast), (SATURATION, TF.adjust_saturation)],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_blend_equals_torchvisions_adjustment(kind: int, functional: Callable[..., Tensor], channels: int) -> None:
    x, factors = floats(9, channels), torch.linspace(0, 2, 9)
    planes = augment.blend(x.unbind(1), factors, torch.full((9,), kind))
    assert_same(torch.stack(planes, 1), [functional(image, float(f)) for image, f in zip(x, factors, strict=True)])


def test_blend_takes_each_images_own_kind() -> None:
    x, factor = floats(3), torch.tensor([0.7, 1.4, 0.2])
    planes = augment.blend(x.unbind(1), factor, torch.tensor([BRIGHTNESS, CONTRAST, SATURATION]))
    theirs = [TF.adjust_brightness(x[0], 0.7), TF.adjust_contrast(x[1], 1.4), TF.adjust_saturation(x[2], 0.2)]
    assert_same(torch.stack(planes, 1), theirs)


def test_shift_hue_equals_torchvisions_adjust_hue() -> None:
    x, turns = floats(11), torch.linspace(-0.5, 0.5, 11)
    planes = augment.shift_hue(x.unbind(1), turns)
    assert_same(torch.stack(planes, 1), [TF.adjust_hue(image, float(t)) for image, t in zip(x, turns, strict=True)])


def test_a_third_of_a_turn_makes_red_green_and_leaves_grey_alone() -> None:
    x = torch.tensor([[1.0, 0.0, 0.0], [0.3, 0.3, 0.3]]).view(2, 3, 1, 1)
    shifted = torch.stack(augment.shift_hue(x.unbind(1), torch.full((2,), 1 / 3)), 1).flatten(1)
    torch.testing.assert_close(shifted, torch.tensor([[0.0, 1.0, 0.0], [0.3, 0.3, 0.3]]), atol=1e-6, rtol=0)


def test_grayscale_equals_torchvisions_where_on_and_is_the_image_elsewhere() -> None:
    x = floats(2)
    ours = torch.stack(augment.grayscale(x.unbind(1), torch.tensor([True, False])), 1)
    assert_same(ours, [TF.rgb_to_grayscale(x[0], num_output_channels=3), x[1]])


@pytest.mark.parametrize("kernel", [3, 9])
def test_gaussian_blur_equals_torchvisions(kernel: int) -> None:
    x, sigma = floats(6, 3, 20, 28), torch.linspace(0.1, 2, 6)
    theirs = [TF.gaussian_blur(image, [kernel] * 2, [float(s)] * 2) for image, s in zip(x, sigma, strict=True)]
    assert_same(augment.gaussian_blur(x, sigma, kernel=kernel), theirs)


def test_solarize_equals_torchvisions_where_on_and_is_the_image_elsewhere() -> None:
    x = floats(2)
    assert_same(augment.solarize(x, torch.tensor([True, False])), [TF.solarize(x[0], 0.5), x[1]])


@pytest.mark.parametrize(("height", "width", "size"), [(32, 32, 32), (48, 48, 32), (64, 96, 32), (20, 20, 32)])
def test_prepare_equals_torchvisions_centre_crop_resize_and_normalise(height: int, width: int, size: int) -> None:
    images = photos(3, 3, height, width)
    squares = TF.resize(TF.center_crop(images.float() / 255, [min(height, width)] * 2), [size, size], antialias=True)
    torch.testing.assert_close(
        augment.prepare(images, size=size, mean=MEAN, std=STD),
        TF.normalize(squares, list(MEAN), list(STD)),
        atol=2e-6,
        rtol=0,
    )


def test_prepare_replicates_grey_to_rgb() -> None:
    images = photos(2, 1, 28, 28)
    x = augment.prepare(images, size=28, mean=(0.1307,), std=(0.3081,))
    expected = ((images.double() / 255 - 0.1307) / 0.3081).float().repeat(1, 3, 1, 1)
    torch.testing.assert_close(x, expected)


# --- distributions ----------------------------------------------------------------------------------------------------


def box_by_the_loop(
    u: np.ndarray, height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[int, int, int, int]:
    """The box of one image in plain Python: one attempt after another, then the central box."""
    for u_area, u_ratio in zip(u[:10], u[10:20], strict=True):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * u_area)
        aspect = math.exp(math.log(ratio[0]) + math.log(ratio[1] / ratio[0]) * u_ratio)
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return int(u[20] * (height - h + 1)), int(u[21] * (width - w + 1)), h, w
    h, w = height, width
    if width / height < ratio[0]:
        h = round(width / ratio[0])
    elif width / height > ratio[1]:
        w = round(height * ratio[1])
    return (height - h) // 2, (width - w) // 2, h, w


@pytest.mark.parametrize(("height", "width"), [(32, 32), (40, 24), (100, 10), (9, 120)])
def test_crop_box_equals_the_loop_over_attempts(height: int, width: int) -> None:
    u = uniforms(500, 22)
    settings = {"scale": (0.2, 1.0), "ratio": (3 / 4, 4 / 3)}
    ours = torch.stack(augment.crop_box(u, height=height, width=width, **settings), 1)
    theirs = [box_by_the_loop(row, height, width, *settings.values()) for row in u.double().numpy()]
    assert ours.int().tolist() == [list(box) for box in theirs]


def test_the_largest_uniform_below_one_keeps_the_box_inside_the_image() -> None:
    u = torch.full((1, 22), 1 - 2**-24)
    u[:, :10] = 0
    top, left, h, w = augment.crop_box(u, height=224, width=224, scale=(0.2, 1.0), ratio=(3 / 4, 4 / 3))
    assert (top + h, left + w) == (224, 224)


@pytest.mark.parametrize(("height", "width"), [(32, 32), (64, 40)])
def test_crop_boxes_are_distributed_as_torchvisions(height: int, width: int) -> None:
    n, scale, ratio = 3000, (0.2, 1.0), (3 / 4, 4 / 3)
    torch.manual_seed(1)
    image = torch.empty(3, height, width)
    theirs = np.array([T.RandomResizedCrop.get_params(image, list(scale), list(ratio)) for _ in range(n)]).T
    ours = torch.stack(augment.crop_box(uniforms(n, 22), height=height, width=width, scale=scale, ratio=ratio)).numpy()
    for quantity in (
        lambda top, left, h, w: top,
        lambda top, left, h, w: left,
        lambda top, left, h, w: h * w,
        lambda top, left, h, w: w / h,
        lambda top, left, h, w: top + h,
        lambda top, left, h, w: left * w,
    ):
        assert ks_2samp(quantity(*ours), quantity(*theirs)).pvalue > 0.01


def test_jitter_parameters_are_distributed_as_torchvisions() -> None:
    n = 4000
    model = Augment(size=32, mean=MEAN, std=STD, brightness=0.4, contrast=0.3, saturation=0.2, hue=0.1, jitter=0.8)
    u = uniforms(n, model.draws)
    factors, kinds, turns, slot = model.jitter_parameters(model.named(u)["jitter"])
    on = (factors != 1).any(1)
    assert abs(on.float().mean() - 0.8) < 4 * math.sqrt(0.8 * 0.2 / n)
    assert (turns[~on] == 0).all()

    torch.manual_seed(2)
    jitter = T.ColorJitter(0.4, 0.3, 0.2, 0.1)
    theirs = [jitter.get_params(jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue) for _ in range(n)]
    for kind in (BRIGHTNESS, CONTRAST, SATURATION):
        ours = factors[on][kinds[on] == kind]
        assert len(ours) == on.sum()
        assert ks_2samp(ours.numpy(), [row[1 + kind] for row in theirs]).pvalue > 0.01
    assert ks_2samp(turns[on].numpy(), [row[4] for row in theirs]).pvalue > 0.01

    orders: Counter[tuple[int | str, ...]] = Counter()
    for kind, where in zip(kinds.tolist(), slot.int().tolist(), strict=True):
        orders[(*kind[:where], "hue", *kind[where:])] += 1
    assert len(orders) == 24
    assert chisquare(list(orders.values())).pvalue > 0.01


def test_flip_grayscale_blur_and_solarize_happen_at_their_rates() -> None:
    n = 2000
    images = photos(1, 3, 8, 8).expand(n, -1, -1, -1)
    plain = augment.prepare(images, size=8, mean=(0.0,), std=(1.0,))
    for name, rate in {"flip": 0.5, "grayscale": 0.2, "blur": 0.3, "solarize": 0.7}.items():
        model = Augment(size=8, mean=(0.0,), std=(1.0,), **{**OFF, name: rate})
        changed = (model(images, uniforms(n, model.draws)) - plain).abs().amax((1, 2, 3)) > 0
        assert abs(changed.float().mean() - rate) < 4 * math.sqrt(rate * (1 - rate) / n), name


def test_rotation_is_uniform_between_minus_and_plus_the_angle() -> None:
    dot = torch.zeros(400, 1, 65, 65, dtype=torch.uint8)
    dot[:, :, 32, 57:62] = 255
    model = Augment(size=65, mean=(0.0,), std=(1.0,), **{**OFF, "rotation": 30})
    views = model(dot, uniforms(400, 1))[:, 0]
    right, down = torch.meshgrid(torch.arange(65.0) - 32, torch.arange(65.0) - 32, indexing="xy")
    angle = torch.rad2deg(torch.atan2(-(views * down).sum((1, 2)), (views * right).sum((1, 2))))
    torch.testing.assert_close(angle, 60 * uniforms(400, 1)[:, 0] - 30, atol=0.3, rtol=0)


# --- the whole recipe -------------------------------------------------------------------------------------------------


def view_by_torchvision(model: Augment, image: Tensor, u: Tensor) -> Tensor:
    """One view with torchvision's functional; the model's own functions turn u (1, draws) into parameters."""
    recipe, named = model.recipe, model.named(u)
    size = {"height": image.shape[-2], "width": image.shape[-1]}
    box = augment.crop_box(named["crop"], **size, scale=recipe.crop_scale, ratio=recipe.crop_ratio)
    x = TF.resized_crop(image.float() / 255, *(int(v) for v in box), [model.size] * 2, antialias=True)
    if named["flip"] < recipe.flip:
        x = TF.hflip(x)
    x = TF.rotate(x, float((2 * named["rotation"] - 1) * recipe.rotation), interpolation=InterpolationMode.BILINEAR)
    factors, kinds, turns, slot = (v[0].tolist() for v in model.jitter_parameters(named["jitter"]))
    adjust = (TF.adjust_brightness, TF.adjust_contrast, TF.adjust_saturation)
    for index in range(4):
        if index == slot:
            x = TF.adjust_hue(x, turns)
        if index < 3:
            x = adjust[kinds[index]](x, factors[index])
    if named["grayscale"] < recipe.grayscale:
        x = TF.rgb_to_grayscale(x, num_output_channels=3)
    if named["blur"][0, 0] < recipe.blur:
        sigma = 0.1 + 1.9 * float(named["blur"][0, 1])
        x = TF.gaussian_blur(x, [model.blur_kernel] * 2, [sigma] * 2)
    if named["solarize"] < recipe.solarize:
        x = TF.solarize(x, 0.5)
    return TF.normalize(x, list(MEAN), list(STD))


@pytest.mark.parametrize(("height", "width", "size"), [(32, 32, 32), (60, 48, 32), (100, 110, 64)])
def test_views_equal_torchvisions_image_by_image(height: int, width: int, size: int) -> None:
    model = Augment(size=size, mean=MEAN, std=STD, **STRONG)
    assert list(model.uniforms) == ["crop", "flip", "rotation", "jitter", "grayscale", "blur", "solarize"]
    images, u = photos(64, 3, height, width), uniforms(64, model.draws)
    theirs = torch.stack([view_by_torchvision(model, image, row[None]) for image, row in zip(images, u, strict=True)])
    gap = (model(images, u) - theirs).abs()
    # Solarize jumps at one half, so a pixel that equals one half up to rounding may fall on either side.
    assert (gap > 2e-4).float().mean() < 1e-3


def test_the_same_uniforms_give_the_same_views_and_others_give_others() -> None:
    model = Augment(size=32, mean=MEAN, std=STD, **STRONG)
    images = photos(8)
    first, again = (model(images, uniforms(8, model.draws)) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.allclose(first, model(images, uniforms(8, model.draws, seed=1)), atol=0.1)


def test_a_row_of_a_batch_is_the_view_of_that_image_alone() -> None:
    model = Augment(size=32, mean=MEAN, std=STD, **{**STRONG, "solarize": 0})
    images, u = photos(16), uniforms(16, model.draws)
    alone = torch.cat([model(images[i : i + 1], u[i : i + 1]) for i in range(16)])
    torch.testing.assert_close(model(images, u), alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("channels", "out"), [(1, 3), (3, 3), (5, 5)])
@pytest.mark.parametrize("recipe", [{}, STRONG, OFF, {"hue": 0}, {"brightness": 0, "contrast": 0, "saturation": 0}])
def test_any_number_of_channels_gives_contiguous_float32_views(channels: int, out: int, recipe: dict) -> None:
    model = Augment(size=24, mean=(0.5,) * channels, std=(0.2,) * channels, **recipe)
    views = model(photos(4, channels, 40, 30), uniforms(4, model.draws))
    assert views.shape == (4, out, 24, 24)
    assert views.dtype == torch.float32
    assert views.is_contiguous()
    assert views.isfinite().all()


def test_grey_images_are_jittered_in_brightness_and_contrast_and_stay_grey() -> None:
    images = photos(16, 1)
    model = Augment(size=32, mean=(0.0,), std=(1.0,), **{**OFF, "jitter": 1.0, "grayscale": 1.0})
    u = uniforms(16, model.draws)
    views = model(images, u)
    assert torch.equal(views[:, 0], views[:, 1])
    assert torch.equal(views[:, 0], views[:, 2])
    factors, kinds, _, _ = model.jitter_parameters(model.named(u)["jitter"])
    for image, factor, kind, view in zip(images.float() / 255, factors.tolist(), kinds.tolist(), views, strict=True):
        for f, k in zip(factor, kind, strict=True):
            image = (TF.adjust_brightness, TF.adjust_contrast, TF.adjust_saturation)[k](image, f)
        torch.testing.assert_close(view, image.expand(3, -1, -1), atol=2e-6, rtol=0)


def test_more_than_three_channels_keep_their_colours_apart_from_brightness_and_contrast() -> None:
    images = photos(8, 5)
    only_colour = {**OFF, "jitter": 1.0, "brightness": 0, "contrast": 0, "grayscale": 1.0}
    model = Augment(size=32, mean=(0.0,), std=(1.0,), **only_colour)
    torch.testing.assert_close(model(images, uniforms(8, model.draws)), images.float() / 255)


def test_an_operation_that_is_off_takes_no_uniforms() -> None:
    def draws(**recipe: object) -> int:
        return Augment(size=32, mean=MEAN, std=STD, **{**OFF, **recipe}).draws

    assert draws() == 0
    assert draws(crop_scale=(0.2, 1.0)) == 22
    assert draws(flip=0.5) == draws(rotation=5) == draws(grayscale=0.2) == draws(solarize=0.1) == 1
    assert draws(blur=0.1) == 2
    assert draws(jitter=0.8) == 7
    assert draws(jitter=0.8, hue=0) == 5
    assert draws(jitter=0.8, hue=0, brightness=0, contrast=0, saturation=0) == 0


def test_with_everything_off_the_view_is_the_evaluation_transform() -> None:
    images = photos(2, 3, 40, 48)
    model = Augment(size=32, mean=MEAN, std=STD, **OFF)
    assert torch.equal(model(images, torch.empty(2, 0)), augment.prepare(images, size=32, mean=MEAN, std=STD))


def test_the_keywords_are_the_fields_of_the_configuration() -> None:
    config = AugmentConfig(rotation=10, blur=0.5)
    assert Augment(size=32, mean=MEAN, std=STD, **dataclasses.asdict(config)).recipe == config


def test_autocast_leaves_the_views_in_full_precision() -> None:
    model = Augment(size=32, mean=MEAN, std=STD)
    images, u = photos(4), uniforms(4, model.draws)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        views = model(images, u)
    assert torch.equal(views, model(images, u))


def test_the_module_has_nothing_to_save_or_train() -> None:
    model = Augment(size=32, mean=MEAN, std=STD)
    assert not model.state_dict()
    assert not list(model.parameters())


def test_errors_say_what_came_and_what_is_needed() -> None:
    model = Augment(size=32, mean=(0.5, 0.5), std=(0.2, 0.2))
    with pytest.raises(UserError, match="mean and std have 2 entries for images of 3 channels: give 1 or 3"):
        model(photos(2), uniforms(2, model.draws))
    with pytest.raises(ValueError, match=r"torch.float32 images .* need uint8"):
        model(floats(2), uniforms(2, model.draws))
    with pytest.raises(ValueError, match=rf"u \(2, 3\), need uint8 and \(2, {model.draws}\)"):
        model(photos(2), uniforms(2, 3))
    with pytest.raises(UserError, match="flip=2"):
        Augment(size=32, mean=MEAN, std=STD, flip=2)


@compiles
@pytest.mark.parametrize("recipe", [{**STRONG, "solarize": 0}, {}])
def test_compiled_with_fullgraph_gives_the_same_views(recipe: dict) -> None:
    """Traced as one graph; the code that inductor makes of it runs in tests of the device and of the compiled step."""
    model = Augment(size=16, mean=MEAN, std=STD, **recipe)
    images, u = photos(4, 3, 20, 20), uniforms(4, model.draws)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    torch.testing.assert_close(compiled(images, u), model(images, u), atol=2e-5, rtol=0)


@compiles
@pytest.mark.gpu
def test_captured_in_a_cuda_graph_gives_the_views_of_the_cpu() -> None:
    model = Augment(size=32, mean=MEAN, std=STD, **{**STRONG, "solarize": 0})
    images, u = photos(32), uniforms(32, model.draws)
    expected = model(images, u)
    model = model.cuda()
    static_images, static_u = images.cuda().roll(1, 0), u.cuda().roll(1, 0)
    for step in (model, torch.compile(model, fullgraph=True)):
        warm = torch.cuda.Stream()
        with torch.cuda.stream(warm):
            step(static_images, static_u)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            views = step(static_images, static_u)
        static_images.copy_(images)
        static_u.copy_(u)
        graph.replay()
        torch.testing.assert_close(views.cpu(), expected, atol=1e-4, rtol=0)


# --- many views -------------------------------------------------------------------------------------------------------


def many(n: int, *, blends: bool = False) -> Views:
    local = Augment(size=8, mean=MEAN, std=STD, crop_scale=(0.05, 0.25))
    return Views(Augment(size=16, mean=MEAN, std=STD), local=local, n=n, blends=blends)


def seen(views: Views, images: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    u = views.draw(len(images), generator=torch.Generator().manual_seed(0))
    return views(images, u), u


def test_global_views_are_the_same_with_and_without_local_ones_and_blends() -> None:
    images = photos(6)
    (alone,), _ = seen(many(0), images)
    (both, local), _ = seen(many(3, blends=True), images)
    assert (alone.shape, both.shape, local.shape) == ((12, 3, 16, 16), (18, 3, 16, 16), (18, 3, 8, 8))
    assert torch.equal(both[:12], alone)


def test_local_views_are_those_of_their_own_augmentation() -> None:
    images, views = photos(6), many(3)
    (_, local), (_, u) = seen(views, images)
    for view, numbers in zip(local.chunk(3), u, strict=True):
        torch.testing.assert_close(view, views.makers[1](images, numbers))


def test_a_blend_mixes_the_first_view_of_two_neighbouring_images() -> None:
    (batch,), u = seen(many(0, blends=True), photos(4))
    first, _, blend = batch.chunk(3)
    t = u[-1].flatten()
    for i, other in enumerate((1, 0, 3, 2)):
        torch.testing.assert_close(blend[i], t[i] * first[i] + (1 - t[i]) * first[other])


def test_a_middle_view_is_made_from_the_mean_of_the_uniform_numbers() -> None:
    images, augment = photos(4), Augment(size=16, mean=MEAN, std=STD)
    views = Views(augment, local=Augment(size=8, mean=MEAN, std=STD), n=1, middle=True)
    assert views.passes == (3, 1)
    (batch, _), u = seen(views, images)
    assert [part.shape[0] for part in u] == [2, 1]  # it draws none of its own
    for view, numbers in zip(batch.chunk(3), (*u[0], (u[0][0] + u[0][1]) / 2), strict=True):
        torch.testing.assert_close(view, augment(images, numbers))
    torch.testing.assert_close(views.t(u), torch.full((4,), 0.5))


def test_batches_of_views_are_in_channels_last() -> None:
    for batch in seen(many(2, blends=True), photos(4))[0]:
        assert batch.is_contiguous(memory_format=torch.channels_last)


def test_a_second_view_may_have_an_augmentation_of_its_own() -> None:
    images = photos(4)
    first = Augment(size=16, mean=MEAN, std=STD, **OFF)
    second = Augment(size=16, mean=MEAN, std=STD, **{**OFF, "solarize": 1.0})
    views = Views(first, second=second, blends=True)
    assert views.passes == (3,)
    (batch,), u = seen(views, images)
    one, other, blend = batch.chunk(3)
    torch.testing.assert_close(one, first(images, u[0][0]))
    torch.testing.assert_close(other, second(images, u[1][0]))
    assert not torch.equal(one, other)
    t = float(u[-1][0, 0, 0])
    torch.testing.assert_close(blend[0], t * one[0] + (1 - t) * one[1])


@pytest.mark.parametrize("ratio", [(1e-3, 1e-3), (1e3, 1e3), (1e-3, 1e3)])
def test_the_longest_crops_that_are_allowed_give_finite_views(ratio: tuple[float, float]) -> None:
    model = Augment(size=16, mean=MEAN, std=STD, crop_ratio=ratio)
    assert model(photos(8), uniforms(8, model.draws)).isfinite().all()
