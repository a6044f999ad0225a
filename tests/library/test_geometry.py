"""Curvature against loops in float64, other libraries, values by hand and mathematical laws."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import GAMMA, PAIRS, SOLIDS
from pipeline import nothing_waits
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import curvssl.geometry as geometry
from curvssl import angular_defect, curvature, kernel_curvature, nearest_neighbors, polyhedron_curvature
from curvssl.kernels import KERNELS

Score = Callable[[Tensor], Tensor]
SCORES: dict[str, Score] = {"curvature": lambda x: curvature(x, k=4)}
SCORES |= {name: partial(kernel_curvature, k=4, kernel=name, gamma=GAMMA) for name in KERNELS}
SCORES["callable"] = lambda x: kernel_curvature(x, k=4, kernel=lambda a, b: (a @ b.mT + 2).square())


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# ---- curvature, Eq. (6), and curvature of polyhedra, Eq. (5) ----


def test_curvature_matches_the_double_loop_in_float64() -> None:
    x = normal(40, 6)
    expected = oracles.curvature(x.numpy(), neighbors=oracles.nearest(x.numpy(), k=10))
    np.testing.assert_allclose(curvature(x), expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(curvature(x.float()), expected, rtol=1e-4, atol=1e-4)


def test_polyhedron_curvature_matches_the_loop_in_float64() -> None:
    x, neighbors = normal(30, 6), torch.randint(30, (30, 7), generator=torch.Generator().manual_seed(0))
    neighbors += neighbors == torch.arange(30)[:, None]
    neighbors %= 30
    expected = oracles.polyhedron_curvature(x.numpy(), neighbors=neighbors.numpy())
    np.testing.assert_allclose(polyhedron_curvature(x, neighbors), expected, rtol=1e-10, atol=1e-12)


def test_hexagon_centre_has_curvature_minus_three() -> None:
    angle = torch.arange(6) * torch.pi / 3
    x = torch.cat((torch.zeros(1, 2), torch.stack((angle.cos(), angle.sin()), 1)))
    torch.testing.assert_close(curvature(x, k=6)[0], torch.tensor(-3.0))


@pytest.mark.parametrize("k", [2, 3, 10])
def test_parallel_edges_have_curvature_k_times_k_minus_one_over_two(k: int) -> None:
    line = torch.arange(k + 1.0)[:, None] * torch.tensor([1.0, 2.0])
    torch.testing.assert_close(curvature(line, k=k)[0], torch.tensor(k * (k - 1) / 2))


def test_edges_in_pairs_of_opposites_have_curvature_minus_k_over_two() -> None:
    x = torch.cat((torch.zeros(1, 3), torch.eye(3), -torch.eye(3)))
    torch.testing.assert_close(curvature(x, k=6)[0], torch.tensor(-3.0))


# name: sum of the cosines of the face angles, sum over all pairs of edges, Descartes's defect
BY_HAND = {
    "tetrahedron": (3 / 2, 3 / 2, np.pi),
    "cube": (0, 0, np.pi / 2),
    "octahedron": (4 / 2, 4 / 2, 2 * np.pi / 3),  # the two pairs of opposite edges are at right angles
    "dodecahedron": (3 * np.cos(0.6 * np.pi), 3 * np.cos(0.6 * np.pi), np.pi / 5),
    "icosahedron": (5 / 2, 5 / 2 + 5 * np.cos(0.6 * np.pi), np.pi / 3),  # edges two apart: the angle of a pentagon
}


@pytest.mark.parametrize("name", SOLIDS)
def test_platonic_solid_has_the_curvatures_and_the_defect_known_by_hand(name: str) -> None:
    solid = SOLIDS[name]
    faces, pairs, defect = BY_HAND[name]
    x, neighbors = torch.as_tensor(solid.vertices), torch.as_tensor(solid.neighbors)
    np.testing.assert_allclose(polyhedron_curvature(x, neighbors), faces, atol=1e-12)
    np.testing.assert_allclose(curvature(x, neighbors=neighbors), pairs, atol=1e-12)
    np.testing.assert_allclose(angular_defect(x, solid.faces), defect, atol=1e-12)
    euler = len(x) - len(solid.edges) + len(solid.faces)
    assert euler == 2
    np.testing.assert_allclose(angular_defect(x, solid.faces).sum(), 2 * np.pi * euler)


def test_torus_has_total_defect_zero_in_quadrangles_in_triangles_and_in_both() -> None:
    vertices, quads = oracles.torus(9, 7)
    triangles = [face for a, b, c, d in quads for face in ([a, b, c], [a, c, d])]
    for faces in (quads, torch.tensor(triangles), quads[:20] + triangles[40:]):
        defect = angular_defect(torch.as_tensor(vertices), faces)
        assert abs(defect.sum()) < 1e-11
        assert defect.max() > 0.05  # outside, as on a sphere
        assert defect.min() < -0.05  # inside, as on a saddle


def test_moved_torus_keeps_total_defect_zero_because_only_topology_counts() -> None:
    vertices, quads = oracles.torus(6, 5)
    triangles = [face for a, b, c, d in quads for face in ([a, b, c], [a, c, d])]
    moved = torch.as_tensor(vertices) + 0.2 * normal(30, 3)
    assert abs(angular_defect(moved, triangles).sum()) < 1e-11


# ---- kernel curvature, Eq. (10) ----


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_curvature_matches_the_double_loop_in_float64(name: str) -> None:
    x = normal(25, 4)
    near = oracles.nearest(x.numpy(), k=6, pair=PAIRS[name])
    expected = oracles.kernel_curvature(x.numpy(), neighbors=near, pair=PAIRS[name])
    np.testing.assert_allclose(kernel_curvature(x, k=6, kernel=name, gamma=GAMMA), expected, rtol=1e-10, atol=1e-12)
    given_neighbors = kernel_curvature(x, kernel=name, gamma=GAMMA, neighbors=torch.as_tensor(near))
    np.testing.assert_allclose(given_neighbors, expected, rtol=1e-10, atol=1e-12)


def test_linear_kernel_gives_back_curvature_also_with_duplicates() -> None:
    x = normal(60, 8)
    x[9] = x[20]
    torch.testing.assert_close(kernel_curvature(x, kernel="linear"), curvature(x), rtol=1e-12, atol=1e-12)


def test_linear_kernel_gives_back_curvature_far_from_the_origin() -> None:
    x = normal(30, 2) * 1e-84
    x[:, 0] = -7.8e144  # the same for all, so that every edge is exact
    torch.testing.assert_close(kernel_curvature(x, k=5, kernel="linear"), curvature(x, k=5), rtol=1e-12, atol=1e-12)
    assert curvature(x, k=5).abs().max() > 1


def test_cosine_kernel_gives_curvature_of_the_neighbours_by_angle() -> None:
    x = normal(30, 5)
    near = torch.as_tensor(oracles.nearest(x.numpy(), k=6, pair=PAIRS["cosine"]))
    torch.testing.assert_close(kernel_curvature(x, k=6, kernel="cosine"), curvature(x, neighbors=near))


def test_callable_kernel_is_the_named_one() -> None:
    x = normal(30, 5)
    for name in KERNELS:
        ours = kernel_curvature(x, k=6, kernel=name, gamma=GAMMA)
        given = kernel_curvature(x, k=6, kernel=lambda a, b, name=name: KERNELS[name](a, b, gamma=GAMMA))
        torch.testing.assert_close(given, ours, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", [name for name, kernel in KERNELS.items() if kernel.centred])
def test_gather_from_one_gram_matrix_equals_the_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def value_and_gradient() -> tuple[Tensor, Tensor]:
        x = (normal(50, 4) + 30).requires_grad_()
        c = kernel_curvature(x, k=6, kernel=name)
        return c.detach(), torch.autograd.grad(c.square().sum(), x)[0]

    gathered = value_and_gradient()
    monkeypatch.setattr(geometry, "GRAM_POINTS", 49)
    for ours, theirs in zip(gathered, value_and_gradient(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("gamma", ["median", "scale", "auto"])
def test_named_gamma_is_its_number_in_value_and_gradient(gamma: str) -> None:
    x = normal(31, 4).requires_grad_()
    number = float(geometry.kernel_width(x[None], kernel="rbf", gamma=gamma))
    named, given = kernel_curvature(x, gamma=gamma), kernel_curvature(x, gamma=number)
    torch.testing.assert_close(named, given)
    ours, theirs = (torch.autograd.grad(c.square().sum(), x)[0] for c in (named, given))
    torch.testing.assert_close(ours, theirs)


# ---- laws ----

sets = st.tuples(st.integers(0, 10**6), st.integers(6, 30), st.integers(2, 6))  # seed, n, d


@given(sets, st.floats(0.01, 100), st.floats(-10, 10))
def test_curvature_does_not_feel_rotation_translation_or_scale(
    drawn: tuple[int, int, int], scale: float, shift: float
) -> None:
    seed, n, d = drawn
    x, rotation = normal(n, d, seed=seed), torch.linalg.qr(normal(d, d, seed=seed + 1)).Q
    moved = scale * x @ rotation + shift
    torch.testing.assert_close(curvature(moved, k=5), curvature(x, k=5), rtol=1e-7, atol=1e-7)
    moved_kernel, kernel = (kernel_curvature(points, k=5, gamma="median") for points in (moved, x))
    torch.testing.assert_close(moved_kernel, kernel, rtol=1e-7, atol=1e-7)  # because γ follows the scale


@given(sets)
def test_scores_move_with_the_points_when_these_are_permuted(drawn: tuple[int, int, int]) -> None:
    seed, n, d = drawn
    x, order = normal(n, d, seed=seed), torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    for score in SCORES.values():
        torch.testing.assert_close(score(x[order]), score(x)[order], rtol=1e-8, atol=1e-8)


@given(sets, st.booleans())
def test_scores_stay_within_their_bounds(drawn: tuple[int, int, int], coarse: bool) -> None:
    seed, n, d = drawn
    x = normal(n, d, seed=seed)
    if coarse:
        x = x.round()  # many duplicates
    for score in SCORES.values():  # ‖Σφ‖² ≥ 0 below, all cosines 1 above
        c = score(x)
        assert (c >= -4 / 2 - 1e-9).all()
        assert (c <= 4 * 3 / 2 + 1e-9).all()


# ---- gradients ----


@pytest.mark.parametrize("name", SCORES)
def test_score_has_the_gradient_of_its_differences(name: str) -> None:
    assert torch.autograd.gradcheck(SCORES[name], normal(9, 3).requires_grad_())


def test_polyhedron_curvature_and_defect_have_the_gradient_of_their_differences() -> None:
    solid = SOLIDS["octahedron"]
    x = (torch.as_tensor(solid.vertices) + 0.1 * normal(6, 3)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: polyhedron_curvature(x, torch.as_tensor(solid.neighbors)), x)
    assert torch.autograd.gradcheck(lambda x: angular_defect(x, solid.faces), x)


def test_zero_edges_contribute_nothing_and_have_a_zero_gradient() -> None:
    x = normal(12, 3)
    x[1:5] = x[0]  # the four nearest neighbours of point 0 are equal to it: no edge has a direction
    x.requires_grad_()
    c = curvature(x, k=4)
    assert (c[:5] == 0).all()
    assert (torch.autograd.grad(c[:5].sum(), x, retain_graph=True)[0] == 0).all()
    assert torch.autograd.grad(c.sum(), x)[0].isfinite().all()


def test_one_duplicate_leaves_the_curvature_of_the_other_edges() -> None:
    x = normal(12, 3)
    x[1] = x[0]
    others = nearest_neighbors(x, k=6)[:, 1:]
    torch.testing.assert_close(curvature(x, k=6)[:2], curvature(x, neighbors=others)[:2])


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-18, 1e-6, 1.0, 1e6])
def test_scores_and_gradients_are_finite_in_float32_at_any_scale_with_duplicates(name: str, scale: float) -> None:
    x = (scale * normal(12, 3)).float()
    x[1:4] = x[0]
    x.requires_grad_()
    c = SCORES[name](x)
    assert c.isfinite().all()
    assert torch.autograd.grad(c.sum(), x)[0].isfinite().all()


@pytest.mark.parametrize("power", [-100, -60, 65, 100, 125])
def test_float32_scores_are_the_same_to_the_last_bit_at_every_power_of_two(power: int) -> None:
    x = normal(30, 3).float().requires_grad_()
    far = (x.detach() * 2.0**power).requires_grad_()
    for score in (curvature, kernel_curvature, lambda x: kernel_curvature(x, kernel="laplacian")):
        values = score(x), score(far)
        torch.testing.assert_close(values[0], values[1], rtol=0, atol=0)
        near, scaled = (torch.autograd.grad(value.sum(), at)[0] for value, at in zip(values, (x, far), strict=True))
        if abs(power) <= 100:  # beyond, the gradient itself is subnormal
            torch.testing.assert_close(scaled * 2.0**power, near, rtol=0, atol=0)


@pytest.mark.parametrize("number", [1.1e24, 3.3e24, -6.9586e24])
def test_a_column_that_is_the_same_for_all_points_changes_nothing_however_large(number: float) -> None:
    x = normal(9, 2)
    wide = torch.cat((torch.full((9, 1), number, dtype=x.dtype), x), 1)
    for kernel in ("rbf", "laplacian", "linear"):
        scores = [kernel_curvature(points, k=6, kernel=kernel) for points in (x, wide)]
        torch.testing.assert_close(*scores, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("measure", [nearest_neighbors, curvature, kernel_curvature])
@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.tensor([[0.0, torch.nan]] * 12), "points hold values from nan to nan: needed finite numbers"),
        (torch.tensor([[0.0, torch.inf]] * 12), "points hold values from 0.0 to inf: needed finite numbers"),
        (normal(12, 2).to(torch.complex64), "points are complex"),
        (normal(12, 2).to_sparse(), "points are sparse"),
        (normal(12, 0), r"points have shape \(12, 0\): needed one dimension or more"),
        (None, "points are of type NoneType: needed a tensor or an array of numbers"),
        ([["a"]] * 12, "points are of type list: needed a tensor or an array of numbers"),
    ],
)
def test_what_is_no_point_is_refused(measure: Score, x: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        measure(x)


def test_integers_keep_all_their_digits() -> None:
    x = torch.tensor([[0], [3], [4]]) + 2**40  # equal in float32
    assert nearest_neighbors(x, k=1).tolist() == [[1], [2], [1]]
    assert curvature(x, k=2).tolist() == [1, -1, 1]


def test_faces_that_are_no_lists_of_vertices_are_refused() -> None:
    for faces in (None, [0, 1, 2], [["a", 1, 2]], [[0.5, 1, 2]]):
        with pytest.raises(ValueError, match="faces are not lists of vertex numbers"):
            angular_defect(X, faces)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_scores_compute_in_at_least_float32_also_inside_autocast(name: str, dtype: torch.dtype) -> None:
    x = normal(20, 4).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = SCORES[name](x)
    assert inside.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(inside, SCORES[name](x), rtol=0, atol=0)
    torch.testing.assert_close(inside.double(), SCORES[name](x.double()), rtol=2e-4, atol=2e-4)


# ---- compiled, captured ----

SOLID = SOLIDS["octahedron"]
TRACED: dict[str, Score] = SCORES | {
    "rbf, median": lambda x: kernel_curvature(x, k=4),
    "laplacian, median": lambda x: kernel_curvature(x, k=4, kernel="laplacian"),
    "rbf, scale": lambda x: kernel_curvature(x, k=4, gamma="scale"),
    "neighbours": lambda x: x[nearest_neighbors(x, k=4)],
    "polyhedron": lambda x: polyhedron_curvature(x, nearest_neighbors(x, k=4)),
    "defect": lambda x: angular_defect(x, SOLID.faces),
}


def compiled_equals_eager(score: Score, *, backend: str, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    x = normal(20, 3).to(dtype).requires_grad_()
    values = score(x), torch.compile(score, fullgraph=True, backend=backend)(x)
    torch.testing.assert_close(values[1], values[0])
    eager, compiled = (torch.autograd.grad(value.square().sum(), x)[0] for value in values)
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", TRACED)
def test_score_compiles_without_a_graph_break_and_equals_eager(name: str) -> None:
    compiled_equals_eager(TRACED[name], backend="aot_eager", dtype=torch.float64)


def test_curvature_generated_by_inductor_equals_eager() -> None:
    compiled_equals_eager(TRACED["curvature"], backend="inductor", dtype=torch.float32)


@pytest.mark.parametrize("name", TRACED)
def test_score_asks_no_value_of_an_accelerator(name: str) -> None:
    with FakeTensorMode():  # fake tensors have a device and a shape, but no values that the host could read
        assert TRACED[name](torch.randn(20, 3, device="cuda")).device.type == "cuda"
        x = torch.randn(20, 3, dtype=torch.float64, requires_grad=True)
        TRACED[name](x).sum().backward()
        assert x.grad is not None


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(TRACED.keys() - {"defect"}))  # its faces come from the host
def test_score_is_captured_in_a_cuda_graph(name: str) -> None:
    x = normal(64, 3).float().cuda().requires_grad_()
    score = TRACED[name]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        expected = torch.autograd.grad(score(x).square().sum(), x)[0]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with nothing_waits(), torch.cuda.graph(graph):
        gradient = torch.autograd.grad(score(x).square().sum(), x)[0]
    graph.replay()
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4)


# ---- errors ----

X = normal(8, 3)


@pytest.mark.parametrize("score", [nearest_neighbors, curvature, kernel_curvature])
@pytest.mark.parametrize(
    ("x", "k", "words"),
    [
        (X, 8, r"k=8 needs at least 9 points, got 8: lower k or raise"),
        (X, 0, r"k=0 has no (pair of neighbours: use 2|neighbour: use 1) or more"),
        (X[0], 2, r"expected points as rows, \(n, d\), got shape \(3,\): reshape"),
        (X[None], 2, r"got shape \(1, 8, 3\)"),
    ],
)
def test_wrong_points_are_told_what_to_do(score: Callable[..., Tensor], x: Tensor, k: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        score(x, k=k)


@pytest.mark.parametrize("score", [curvature, kernel_curvature])
def test_one_neighbour_makes_no_pair(score: Callable[..., Tensor]) -> None:
    with pytest.raises(ValueError, match=r"k=1 has no pair of neighbours: use 2 or more"):
        score(X, k=1)


@pytest.mark.parametrize("shape", [(7, 3), (8,), (8, 1)])
def test_wrong_neighbours_are_told_what_is_needed(shape: tuple[int, ...]) -> None:
    for score in (polyhedron_curvature, lambda x, n: curvature(x, neighbors=n)):
        with pytest.raises(ValueError, match=r"needed \(8, k\), one row a point, k of 2 or more"):
            score(X, torch.zeros(shape, dtype=torch.int64))


def test_unknown_kernel_unknown_gamma_and_a_face_of_two_vertices_are_told() -> None:
    with pytest.raises(ValueError, match="unknown kernel 'gauss'; known: rbf"):
        kernel_curvature(X, k=2, kernel="gauss")
    with pytest.raises(ValueError, match="unknown gamma 'mean'; did you mean 'median'"):
        kernel_curvature(X, k=2, gamma="mean")
    with pytest.raises(ValueError, match=r"face \[0, 1\] has 2 vertices: a polygon needs 3 or more"):
        angular_defect(X, [[0, 1]])


@pytest.mark.parametrize("row", [-1, 6])
def test_a_neighbour_that_is_no_row_is_told(row: int) -> None:
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    neighbors = torch.tensor([[1, 2]] * 5 + [[0, row]])
    low, high = min(row, 0), max(row, 2)
    for measure in (curvature, kernel_curvature, polyhedron_curvature):
        with pytest.raises(ValueError, match=rf"neighbors are {low} … {high}: needed row numbers of x, 0 … 5"):
            measure(x, neighbors=neighbors)
        with pytest.raises(ValueError, match=r"neighbors are torch\.float32"):
            measure(x, neighbors=neighbors.float())
    with pytest.raises(ValueError, match=r"vertices outside 0 … 5"):
        angular_defect(x, [[0, 1, row]])
