"""The four losses against the paper's equations and lightly's losses, and the properties they must have."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import GAMMA, PAIRS
from pipeline import nothing_waits
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from curvssl import BarlowTwinsLoss, Curvature, CurvSSLLoss, KernelCurvSSLLoss, VICRegLoss, kernels
from curvssl.kernels import KERNELS, kernel_width

K = 5
LOSSES: dict[str, Callable[[], Any]] = {
    "barlow": BarlowTwinsLoss,
    "vicreg": VICRegLoss,
    "curvssl": lambda: CurvSSLLoss(k=K),
    "curvature": lambda: Curvature(k=K),
    "median rbf": lambda: KernelCurvSSLLoss(k=K),
    "median laplacian": lambda: KernelCurvSSLLoss(k=K, kernel="laplacian"),
    "scale rbf": lambda: KernelCurvSSLLoss(k=K, gamma="scale"),
    "callable": lambda: KernelCurvSSLLoss(k=K, kernel=lambda a, b: (a @ b.mT + 2).square()),
}
LOSSES |= {name: partial(KernelCurvSSLLoss, k=K, kernel=name, gamma=GAMMA) for name in KERNELS}
every_loss = pytest.mark.parametrize("name", LOSSES)


def views(b: int = 16, d: int = 4, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two embeddings of the same images that are similar, but not equal."""
    z = torch.randn((2, b, d), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return z[0], z[0] + 0.5 * z[1]


def value_and_gradients(loss: Callable[[Tensor, Tensor], Tensor], z0: Tensor, z1: Tensor) -> tuple[Tensor, ...]:
    z0, z1 = z0.detach().clone().requires_grad_(), z1.detach().clone().requires_grad_()
    value = loss(z0, z1)
    return value.detach(), *torch.autograd.grad(value, (z0, z1))


# ---- the equations ----


@pytest.mark.parametrize("eps", [1e-5, 0.1])
@pytest.mark.parametrize("weight", [0.0, 0.0051, 1.0, 3.0])
def test_barlow_twins_matches_the_loops_over_the_cross_correlation(weight: float, eps: float) -> None:
    z0, z1 = views()
    ours = BarlowTwinsLoss(lambda_emb=weight, eps=eps)(z0, z1)
    np.testing.assert_allclose(ours, oracles.barlow(z0.numpy(), z1.numpy(), weight=weight, eps=eps), rtol=1e-12)


@pytest.mark.parametrize("eps", [1e-5, 0.1])
@pytest.mark.parametrize("weight", [0.0, 0.0051, 1.0, 3.0])
@pytest.mark.parametrize("kernel", [None, *KERNELS])
def test_curvssl_matches_the_loops_over_the_whole_matrix_m(kernel: str | None, weight: float, eps: float) -> None:
    z0, z1 = views()
    settings = {"k": K, "lambda_emb": 0.5, "lambda_curv": weight, "alpha_curv": 2.0, "eps": eps}
    c = []
    for z in (z0.numpy(), z1.numpy()):
        near = oracles.nearest(z, k=K, pair=PAIRS[kernel or "linear"])
        scores = oracles.kernel_curvature(z, neighbors=near, pair=PAIRS[kernel]) if kernel else None
        c.append(oracles.curvature(z, neighbors=near) if scores is None else scores)
    expected = oracles.barlow(z0.numpy(), z1.numpy(), weight=0.5, eps=eps)
    expected += 2 * oracles.curvature_loss(*c, weight=weight, eps=eps)
    loss = KernelCurvSSLLoss(kernel=kernel, gamma=GAMMA, **settings) if kernel else CurvSSLLoss(**settings)  # type: ignore[arg-type]
    np.testing.assert_allclose(loss(z0, z1), expected, rtol=1e-9)


def test_defaults_are_the_papers() -> None:
    loss = KernelCurvSSLLoss()
    assert (loss.curvature.k, loss.lambda_emb, loss.lambda_curv, loss.alpha_curv) == (10, 1, 1, 1)
    assert (loss.curvature.kernel, loss.curvature.gamma) == (KERNELS["rbf"], "median")


# ---- lightly ----


@pytest.mark.parametrize("weight", [0.005, 1.0])
def test_barlow_twins_is_lightlys_where_epsilon_is_negligible(weight: float) -> None:
    from lightly.loss import BarlowTwinsLoss as Lightlys  # type: ignore[import-untyped]

    z0, z1 = (1000 * z for z in views(64, 8))  # lightly adds 1e-5 to the variance, we add it to the deviation
    ours = value_and_gradients(BarlowTwinsLoss(lambda_emb=weight, eps=1e-8), z0, z1)
    theirs = value_and_gradients(Lightlys(lambda_param=weight), z0, z1)
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize(("invariance", "variance", "covariance"), [(25, 25, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1)])
@pytest.mark.parametrize("scale", [0.3, 1.0])
def test_vicreg_is_lightlys(invariance: float, variance: float, covariance: float, scale: float) -> None:
    from lightly.loss import VICRegLoss as Lightlys

    z0, z1 = (scale * z for z in views(64, 8))
    loss = VICRegLoss(invariance=invariance, variance=variance, covariance=covariance)
    theirs = value_and_gradients(Lightlys(invariance, variance, covariance), z0, z1)
    for mine, its in zip(value_and_gradients(loss, z0, z1), theirs, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-10, atol=1e-13)


# ---- the parts ----


@every_loss
def test_forward_is_the_weighted_sum_of_the_terms(name: str) -> None:
    loss, (z0, z1) = LOSSES[name](), views()
    terms = loss.terms(z0, z1)
    assert all(term.ndim == 0 for term in terms.values())
    torch.testing.assert_close(loss(z0, z1), loss.weigh(terms))


@every_loss
def test_parts_have_their_own_terms_and_add_up_to_the_loss(name: str) -> None:
    loss = LOSSES[name]()
    z0, z1 = views()
    terms = loss.terms(z0, z1)
    assert [key for _, part in loss.parts() for key in part.names] == list(terms)
    torch.testing.assert_close(sum(weight * part(z0, z1) for weight, part in loss.parts()), loss(z0, z1))
    assert float(loss.weigh({key: float(value) for key, value in terms.items()})) == pytest.approx(float(loss(z0, z1)))


def test_curvssl_is_barlow_twins_plus_the_term_that_stands_alone() -> None:
    z0, z1 = views()
    for settings in ({}, {"kernel": "rbf"}, {"kernel": "laplacian", "gamma": 0.3}):
        make = KernelCurvSSLLoss if settings else CurvSSLLoss
        whole = value_and_gradients(make(k=K, lambda_emb=0.5, lambda_curv=2.0, alpha_curv=3.0, **settings), z0, z1)
        emb = value_and_gradients(BarlowTwinsLoss(lambda_emb=0.5), z0, z1)
        curv = value_and_gradients(Curvature(k=K, lambda_curv=2.0, **settings), z0, z1)
        torch.testing.assert_close(whole, tuple(a + 3 * b for a, b in zip(emb, curv, strict=True)))


def test_weights_are_read_at_every_call() -> None:
    z0, z1 = views()
    loss = KernelCurvSSLLoss(k=K)
    loss.alpha_curv, loss.lambda_emb, loss.lambda_curv = 7.0, 0.2, 3.0
    fresh = KernelCurvSSLLoss(k=K, alpha_curv=7.0, lambda_emb=0.2, lambda_curv=3.0)
    torch.testing.assert_close(loss(z0, z1), fresh(z0, z1))


def test_a_kernel_may_be_a_name_a_function_or_a_value() -> None:
    z0, z1 = views()
    for name, kernel in KERNELS.items():
        by_name, by_function, by_value = (
            KernelCurvSSLLoss(k=K, kernel=chosen)(z0, z1) for chosen in (name, getattr(kernels, name), kernel)
        )
        torch.testing.assert_close(by_function, by_name, rtol=0, atol=0)
        torch.testing.assert_close(by_value, by_name, rtol=0, atol=0)


def test_terms_are_named_and_unweighted() -> None:
    z0, z1 = views()
    weighted = CurvSSLLoss(k=K, lambda_emb=7, lambda_curv=8, alpha_curv=9).terms(z0, z1)
    assert list(weighted) == ["invariance", "redundancy", "curvature_alignment", "curvature_decorrelation", "rho"]
    torch.testing.assert_close(weighted, CurvSSLLoss(k=K).terms(z0, z1))
    vicreg = VICRegLoss(invariance=3, variance=4, covariance=5)
    terms = vicreg.terms(z0, z1)
    torch.testing.assert_close(
        vicreg(z0, z1), 3 * terms["invariance"] + 4 * terms["variance"] + 5 * terms["covariance"]
    )


@pytest.mark.parametrize("kernel", [None, *KERNELS])
def test_alpha_zero_is_barlow_twins(kernel: str | None) -> None:
    z0, z1 = views()
    loss = KernelCurvSSLLoss(k=K, kernel=kernel, alpha_curv=0) if kernel else CurvSSLLoss(k=K, alpha_curv=0)
    torch.testing.assert_close(loss(z0, z1), BarlowTwinsLoss()(z0, z1))


def test_linear_kernel_is_curvssl() -> None:
    z0, z1 = views()
    ours = value_and_gradients(KernelCurvSSLLoss(k=K, kernel="linear"), z0, z1)
    torch.testing.assert_close(ours, value_and_gradients(CurvSSLLoss(k=K), z0, z1))


@given(st.integers(0, 10**6), st.integers(8, 40), st.integers(2, 6), st.sampled_from([None, *KERNELS]))
def test_with_lambda_one_the_curvature_term_is_b_plus_one_minus_twice_the_correlation(
    seed: int, b: int, d: int, kernel: str | None
) -> None:
    z0, z1 = views(b, d, seed=seed)
    loss = KernelCurvSSLLoss(k=K, kernel=kernel, eps=1e-14) if kernel else CurvSSLLoss(k=K, eps=1e-14)
    terms = loss.terms(z0, z1)
    c0, c1 = loss.curvature.scores(torch.stack((z0, z1)))
    rho = np.corrcoef(c0, c1)[0, 1]
    np.testing.assert_allclose(terms["curvature_alignment"] + terms["curvature_decorrelation"], b + 1 - 2 * rho)
    np.testing.assert_allclose(terms["rho"], rho, atol=1e-9)


# ---- precision ----


@every_loss
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_loss_computes_in_at_least_float32_inside_and_outside_autocast(name: str, dtype: torch.dtype) -> None:
    z0, z1 = (z.to(dtype) for z in views(32, 6))
    exact = value_and_gradients(LOSSES[name](), z0.double(), z1.double())
    outside = value_and_gradients(LOSSES[name](), z0, z1)
    leaves = z0.clone().requires_grad_(), z1.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = LOSSES[name]()(*leaves)
    inside = value.detach(), *torch.autograd.grad(value, leaves)
    assert outside[0].dtype == torch.promote_types(dtype, torch.float32)
    assert outside[1].dtype == dtype
    torch.testing.assert_close(inside, outside, rtol=0, atol=0)
    torch.testing.assert_close(outside[0].double(), exact[0], rtol=1e-5, atol=1e-5)
    coarse = max(torch.finfo(dtype).eps, 1e-4)  # a gradient is returned in the dtype of the embedding
    for ours, its in zip(outside[1:], exact[1:], strict=True):
        torch.testing.assert_close(ours.double(), its, rtol=coarse, atol=1e-3)


# A γ that is computed from the points is constant in the gradient: see the next test.
@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"median rbf", "median laplacian", "scale rbf"}))
def test_loss_has_the_gradient_of_its_differences(name: str) -> None:
    z0, z1 = views(9, 3)
    assert torch.autograd.gradcheck(LOSSES[name](), (z0.requires_grad_(), z1.requires_grad_()))


@pytest.mark.parametrize("gamma", ["median", "scale"])
def test_gamma_taken_from_each_view_is_held_fixed_in_the_gradient(gamma: str) -> None:
    z0, _ = views()
    number = float(kernel_width(z0[None], kernel="rbf", gamma=gamma))
    named, given = (value_and_gradients(KernelCurvSSLLoss(k=K, gamma=g), z0, z0.flip(1)) for g in (gamma, number))
    torch.testing.assert_close(named, given)


# ---- degenerate batches ----


def duplicated(z: Tensor) -> Tensor:
    z[3:9] = z[2]
    return z


def constant_feature(z: Tensor) -> Tensor:
    z[:, 1] = 0.7
    return z


def outlier(z: Tensor) -> Tensor:
    z[5] = 1e6
    return z


DEGENERATE: dict[str, Callable[[Tensor], Tensor]] = {
    "all equal": lambda z: z[:1].expand(len(z), -1),
    "all zero": torch.zeros_like,
    "some duplicated": duplicated,
    "half equal": lambda z: z[torch.arange(len(z)) % 2],
    "a constant feature": constant_feature,
    "a batch of k + 1": lambda z: z[: K + 1],
    "an outlier": outlier,
    "two outliers": lambda z: outlier(z.flip(0)).flip(0) + outlier(z.clone()),
    "scale 1e-6": lambda z: 1e-6 * z,
    "scale 1e-6, duplicated": lambda z: 1e-6 * duplicated(z),
    "neighbouring floats": lambda z: 1e-6 * (1 + 1e-7 * z.sign()),
    "scale 1e-18": lambda z: 1e-18 * z,
    "on a line": lambda z: z[:, :1] * torch.ones(4),
    "one feature": lambda z: z[:, :1],
}


@every_loss
@pytest.mark.parametrize("batch", DEGENERATE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_degenerate_batch_has_a_finite_loss_and_finite_gradients(name: str, batch: str, dtype: torch.dtype) -> None:
    z0, z1 = views()
    spoiled = DEGENERATE[batch](z0.to(dtype)), DEGENERATE[batch](z1.to(dtype))
    for a, b in (spoiled, (spoiled[0], spoiled[0]), (spoiled[0], z1[: len(spoiled[0]), : spoiled[0].shape[1]])):
        assert all(part.isfinite().all() for part in value_and_gradients(LOSSES[name](), a, b.to(dtype)))


@pytest.mark.gpu
@every_loss
def test_degenerate_batches_have_finite_losses_and_gradients_on_the_gpu(name: str) -> None:
    for spoil in DEGENERATE.values():
        z0, z1 = (spoil(z.float()).cuda() for z in views())
        assert all(part.isfinite().all() for part in value_and_gradients(LOSSES[name](), z0, z1))


@every_loss
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_embedding_raises_nothing_and_the_terms_show_it(name: str, poison: float) -> None:
    z0, z1 = views()
    z0[3, 1] = poison
    loss = LOSSES[name]()
    assert not value_and_gradients(loss, z0, z1)[0].isfinite()
    assert not all(term.isfinite() for term in loss.terms(z0, z1).values())


@pytest.mark.parametrize("name", ["barlow-twins", "curvature", "rbf"])
@pytest.mark.parametrize("power", [-90, 65, 100])
def test_a_loss_without_epsilon_is_the_same_to_the_last_bit_at_every_power_of_two(name: str, power: int) -> None:
    made: dict[str, Callable[[], Any]] = {
        "barlow-twins": lambda: BarlowTwinsLoss(eps=1e-5 if power > 0 else 1e-40),
        "curvature": lambda: Curvature(k=K),
        "rbf": lambda: Curvature(k=K, kernel="rbf"),
    }
    z0, z1 = (z.float() for z in views())
    near, far = (value_and_gradients(made[name](), s * z0, s * z1) for s in (1.0, 2.0**power))
    torch.testing.assert_close(far[0], near[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(far[1] * 2.0**power, near[1], rtol=1e-3, atol=1e-4)


def test_a_constant_feature_of_any_size_counts_as_constant() -> None:
    z0, z1 = (z.float() for z in views())
    z0[:, 1] = 1234.567  # seven of these over seven is another number
    small = z0.clone()
    small[:, 1] = 0
    torch.testing.assert_close(BarlowTwinsLoss()(z0[:7], z1[:7]), BarlowTwinsLoss()(small[:7], z1[:7]))


def test_a_loss_of_finite_embeddings_that_is_not_finite_is_refused() -> None:
    z0, z1 = (1e20 * z.float() for z in views())
    with pytest.raises(
        ValueError, match=r"the loss of embeddings up to .*e\+20 does not fit into torch.float32: scale"
    ):
        VICRegLoss()(z0, z1)
    for wrong, words in (
        (None, "got a NoneType"),
        (z0.int(), "got a tensor of torch.int32"),
        (z0.to_sparse(), "sparse"),
    ):
        with pytest.raises(ValueError, match=words):
            VICRegLoss()(wrong, wrong)  # type: ignore[arg-type]


# ---- errors ----


@every_loss
@pytest.mark.parametrize(
    ("shape0", "shape1", "words"),
    [
        ((16, 4), (16, 5), r"views of one shape \(b, d\), got \(16, 4\) and \(16, 5\): row i of all"),
        ((16, 4), (12, 4), r"views of one shape"),
        ((16,), (16,), r"views of one shape \(b, d\), got \(16,\) and \(16,\)"),
        ((2, 16, 4), (2, 16, 4), r"views of one shape"),
        ((1, 4), (1, 4), r"a batch of 1 has no statistics: use 2 or more"),
    ],
)
def test_wrong_shapes_are_told_what_is_needed(name: str, shape0: Any, shape1: Any, words: str) -> None:
    for ask in (LOSSES[name](), LOSSES[name]().terms):
        with pytest.raises(ValueError, match=words):
            ask(torch.zeros(shape0), torch.zeros(shape1))


@pytest.mark.parametrize("loss", [CurvSSLLoss, KernelCurvSSLLoss])
def test_k_that_does_not_fit_is_told_what_to_do(loss: Any) -> None:
    with pytest.raises(ValueError, match=r"k=16 needs at least 17 points, got 16: lower k or raise the batch size"):
        loss(k=16)(*views())
    for k in (1, 0, -3):
        with pytest.raises(ValueError, match=rf"k={k} has no pair of neighbours: use 2 or more"):
            loss(k=k)


def test_unknown_kernel_and_gamma_are_told_when_the_loss_is_made() -> None:
    with pytest.raises(ValueError, match=r"unknown kernel 'gauss'; .*known: rbf, .* or any callable"):
        KernelCurvSSLLoss(kernel="gauss")
    with pytest.raises(
        ValueError,
        match=r"unknown gamma 'mean'; did you mean 'median'\? known: median, scale, auto, or a positive number",
    ):
        KernelCurvSSLLoss(gamma="mean")
    with pytest.raises(ValueError, match=r"gamma=1e\+300 needs to be a positive number"):  # float32 has none so large
        KernelCurvSSLLoss(gamma=1e300)


# ---- compiled, captured ----


def compiled_equals_eager(name: str, *, backend: str, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    z0, z1 = (z.to(dtype) for z in views())
    compiled = torch.compile(LOSSES[name](), fullgraph=True, backend=backend)
    eager = value_and_gradients(LOSSES[name](), z0, z1)
    torch.testing.assert_close(value_and_gradients(compiled, z0, z1), eager, rtol=1e-4, atol=1e-4)


@every_loss
def test_loss_compiles_without_a_graph_break_and_equals_eager(name: str) -> None:
    compiled_equals_eager(name, backend="aot_eager", dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:.torch._prims_common.check:FutureWarning")  # inductor's own
def test_loss_generated_by_inductor_equals_eager() -> None:
    compiled_equals_eager("median rbf", backend="inductor", dtype=torch.float32)


@every_loss
def test_loss_asks_no_value_of_an_accelerator(name: str) -> None:
    with FakeTensorMode():  # fake tensors have a device and a shape, but no values that the host could read
        z = torch.randn(2, 16, 4, device="cuda")
        assert LOSSES[name]()(*z).device.type == "cuda"
        value_and_gradients(LOSSES[name](), *torch.randn(2, 16, 4))


@pytest.mark.gpu
@every_loss
def test_loss_with_gradient_is_captured_in_a_cuda_graph(name: str) -> None:
    z0, z1 = (z.float().cuda().requires_grad_() for z in views(256, 16))
    loss = LOSSES[name]()
    with torch.cuda.stream(torch.cuda.Stream()):  # capture requires a warm-up on another stream
        value = loss(z0, z1)
        expected = value.detach(), *torch.autograd.grad(value, (z0, z1))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with nothing_waits(), torch.cuda.graph(graph):
        value = loss(z0, z1)
        captured = value.detach(), *torch.autograd.grad(value, (z0, z1))
    graph.replay()
    torch.testing.assert_close(captured, expected, rtol=1e-4, atol=1e-4)
    double = value_and_gradients(loss, z0.double().cpu(), z1.double().cpu())
    torch.testing.assert_close(captured[0].double().cpu(), double[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weight", [1.0, 0.05])
def test_of_d_features_in_r_dimensions_the_views_agree_best_by_r_over_r_plus_lambda_d_minus_r(weight: float) -> None:
    """The trap of docs/reproduction.md, constructed exactly: r orthogonal signals, each in d/r features."""
    b, d, r = 64, 24, 3
    noise = torch.randn(b, 2 * r, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    signals = torch.linalg.qr(noise - noise.mean(0))[0]  # of mean 0, orthogonal
    loss = BarlowTwinsLoss(lambda_emb=weight, eps=0.0)

    def at(c: float) -> float:
        """The loss if the signals of the two views have correlation c."""
        other = c * signals[:, :r] + (1 - c**2) ** 0.5 * signals[:, r:]
        return float(loss(signals[:, :r].repeat(1, d // r), other.repeat(1, d // r)))

    best = r / (r + weight * (d - r))
    assert at(best) < min(at(best - 1e-3), at(best + 1e-3))
    assert at(best) == pytest.approx(d * (1 - best))
