"""Kernels against scikit-learn's, and γ against its definitions."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from sklearn.metrics import pairwise
from sklearn.svm import SVC
from torch import Tensor

from curvssl.kernels import (
    KERNELS,
    MEDIAN_POINTS,
    directions,
    inverse_root,
    kernel_width,
    resolve,
    squared_distances,
    unit,
)

GAMMA = 0.3
SKLEARN: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "rbf": lambda a, b: pairwise.rbf_kernel(a, b, gamma=GAMMA),
    "laplacian": lambda a, b: pairwise.laplacian_kernel(a, b, gamma=GAMMA),
    "linear": pairwise.linear_kernel,
    "polynomial": lambda a, b: pairwise.polynomial_kernel(a, b, degree=3, gamma=GAMMA, coef0=1),
    "cosine": pairwise.cosine_similarity,
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_scikit_learn_has_every_kernel() -> None:
    assert SKLEARN.keys() == KERNELS.keys()


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_is_scikit_learns_over_every_batch_of_rows(name: str) -> None:
    a, b = normal(2, 3, 7, 5), normal(2, 3, 4, 5, seed=1)
    a[0, 0, 0] = 0  # a zero vector has cosine 0 with every vector
    gram = KERNELS[name](a, b, gamma=GAMMA)
    assert gram.shape == (2, 3, 7, 4)
    for i, j in np.ndindex(2, 3):
        np.testing.assert_allclose(gram[i, j], SKLEARN[name](a[i, j].numpy(), b[i, j].numpy()), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_has_the_gradient_of_its_differences(name: str) -> None:
    a, b = normal(4, 3).requires_grad_(), normal(5, 3, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: KERNELS[name](a, b, gamma=GAMMA), (a, b))


@pytest.mark.parametrize("name", ["rbf", "laplacian"])
def test_point_has_similarity_one_with_itself(name: str) -> None:
    x = normal(6, 4)
    torch.testing.assert_close(KERNELS[name](x, x, gamma=GAMMA).diagonal(), torch.ones(6, dtype=torch.float64))


def test_squared_distances_never_dip_below_zero_in_float32() -> None:
    x = 100 + 1e-3 * normal(50, 8).float()  # ‖a‖²+‖b‖²−2ab is rounding noise here
    assert (squared_distances(x, x) >= 0).all()


def test_unit_has_length_one_and_zero_stays_zero_with_zero_gradient() -> None:
    x = normal(4, 3)
    x[2] = 0
    x.requires_grad_()
    u = unit(x)
    torch.testing.assert_close(u.norm(dim=1), torch.tensor([1, 1, 0, 1], dtype=torch.float64))
    (gradient,) = torch.autograd.grad(u.sum(), x)
    assert gradient.isfinite().all()
    assert (gradient[2] == 0).all()


@pytest.mark.parametrize("size", [1e-18, 1e-14, 1e-6, 1.0, 1e6, 1e18])
def test_unit_has_a_finite_gradient_at_every_length_in_float32(size: float) -> None:
    x = (size * normal(20, 5)).float().requires_grad_()
    (gradient,) = torch.autograd.grad(unit(x)[:, 0].sum(), x)
    assert gradient.isfinite().all()
    if 1e-14 <= size <= 1e18:  # u(sx) = u(x), so its gradient is that of u at x, divided by s
        wide = (x.detach().double() / size).requires_grad_()
        (expected,) = torch.autograd.grad((wide[:, 0] / wide.norm(dim=1)).sum(), wide)
        torch.testing.assert_close((gradient.double() * size), expected, rtol=1e-4, atol=1e-5)


def test_inverse_root_is_the_inverse_root_and_zero_at_zero() -> None:
    square = torch.tensor([0.0, 0.25, 4.0, 1e-20])
    torch.testing.assert_close(inverse_root(square), torch.tensor([0, 2, 0.5, 1e10]))


# ---- gamma ----


def width(x: Tensor, *, gamma: float | str, kernel: str = "rbf") -> np.ndarray:
    out = kernel_width(x, kernel=kernel, gamma=gamma)
    assert out.shape == (len(x), 1, 1)
    return out.flatten().numpy()


def median_distance(x: np.ndarray, *, order: int) -> float:
    """The median over the points of each point's median distance to the others."""
    n = len(x)
    assert n % 2 == 0, "with an even number of others a median is a convention"
    medians = [np.median([np.linalg.norm(x[i] - x[j], ord=order) for j in range(n) if j != i]) for i in range(n)]
    return float(np.sort(medians)[n // 2 - 1])  # the lower of the two in the middle


def test_gamma_is_the_number_given() -> None:
    np.testing.assert_array_equal(width(normal(2, 7, 3), gamma=0.25), [0.25, 0.25])


@pytest.mark.parametrize("gamma", ["scale", "auto"])
def test_gamma_scale_and_auto_are_those_of_scikit_learns_svc(gamma: str) -> None:
    x = 3 * normal(2, 9, 4)
    fitted = [SVC(gamma=gamma).fit(view.numpy(), [0, 1] * 4 + [0])._gamma for view in x]
    np.testing.assert_allclose(width(x, gamma=gamma), fitted, rtol=1e-12)


def test_gamma_median_is_one_over_twice_the_squared_median_distance() -> None:
    x = normal(2, 8, 3)
    np.testing.assert_allclose(width(x, gamma="median"), [0.5 / median_distance(v.numpy(), order=2) ** 2 for v in x])


def test_gamma_median_of_the_laplacian_is_one_over_the_median_city_block_distance() -> None:
    x = normal(2, 8, 3)
    expected = [1 / median_distance(v.numpy(), order=1) for v in x]
    np.testing.assert_allclose(width(x, gamma="median", kernel="laplacian"), expected)


def test_gamma_median_is_one_if_most_points_are_equal() -> None:
    for x in normal(60, 12, 6):  # a matrix product leaves 1e-16 between equal points, in some of these sets
        twins = torch.cat((x[:5], x[5:6].expand(7, -1)))[torch.randperm(12)]
        np.testing.assert_array_equal(width(twins[None], gamma="median", kernel="polynomial"), [1])


def test_gamma_median_looks_at_evenly_spaced_points_of_a_large_set() -> None:
    x = normal(1, 2 * MEDIAN_POINTS + 2, 2)
    every_third = x[:, ::3]
    np.testing.assert_allclose(width(x, gamma="median"), width(every_third, gamma="median"))


def test_gamma_median_does_not_feel_a_common_offset_in_float32() -> None:
    x = normal(1, 65, 8)
    exact = width(x, gamma="median")
    np.testing.assert_allclose(width(x.float() + 1000, gamma="median"), exact, rtol=1e-3)


@pytest.mark.parametrize("gamma", ["median", "scale"])
@pytest.mark.parametrize("kernel", ["rbf", "laplacian"])
def test_gamma_of_equal_points_is_one(gamma: str, kernel: str) -> None:
    np.testing.assert_array_equal(width(torch.ones(1, 5, 2), gamma=gamma, kernel=kernel), [1])


@pytest.mark.parametrize("gamma", ["median", "scale", "auto", 0.5])
def test_gamma_is_no_part_of_the_gradient(gamma: float | str) -> None:
    assert not kernel_width(normal(1, 5, 2).requires_grad_(), kernel="rbf", gamma=gamma).requires_grad


# ---- names ----


def test_callable_is_taken_as_it_is() -> None:
    a, b = normal(3, 2), normal(4, 2, seed=1)
    assert resolve(lambda a, b: (a @ b.mT).square())(a, b, gamma=9.0).equal((a @ b.mT).square())


def test_unknown_kernel_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown kernel 'gauss'; .*known: rbf, laplacian, .*, or any callable"):
        resolve("gauss")


def test_unknown_gamma_is_answered_with_what_there_is() -> None:
    with pytest.raises(
        ValueError,
        match=r"unknown gamma 'mean'; did you mean 'median'\? known: median, scale, auto, or a positive number",
    ):
        kernel_width(normal(1, 5, 2), kernel="rbf", gamma="mean")


@pytest.mark.parametrize("gamma", [0.0, -1.0, float("nan"), float("inf")])
def test_gamma_that_is_not_positive_is_refused(gamma: float) -> None:
    with pytest.raises(ValueError, match=r"needs to be a positive number"):
        width(normal(1, 4, 2), gamma=gamma)


def test_a_vector_has_a_direction_from_2e_minus_34_on():
    vectors = torch.tensor([[1.9e-34], [2e-34], [3.8e-34]], requires_grad=True)
    u, exists = directions(vectors)
    assert u.squeeze(1).tolist() == pytest.approx([0, 1, 1])
    assert exists.squeeze(1).tolist() == [False, True, True]
    (gradient,) = torch.autograd.grad(u.sum(), vectors)
    assert gradient.isfinite().all()
