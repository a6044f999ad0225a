"""Nearest neighbours: exact also with far outliers, never the point itself, in memory that grows as n."""

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import curvssl.geometry as geometry
from curvssl import curvature, kernel_curvature, nearest_neighbors


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def all_distances(x: Tensor) -> Tensor:
    """Every distance in float64, from the differences; a point has infinite distance to itself."""
    x = x.double()
    distance = torch.stack([(x - row).norm(dim=1) for row in x])
    return distance.fill_diagonal_(torch.inf)


def assert_nearest(index: Tensor, x: Tensor, *, k: int) -> None:
    distance = all_distances(x)
    assert index.shape == (len(x), k)
    assert index.dtype == torch.int64
    # Distances, not indices: points on the float32 grid may be at equal distances.
    torch.testing.assert_close(distance.gather(1, index), distance.sort().values[:, :k], rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "d", "k"), [(300, 16, 10), (11, 3, 10), (2500, 2, 7), (3, 1, 2)])
def test_neighbours_are_the_nearest_of_all_distances(n: int, d: int, k: int, dtype: torch.dtype) -> None:
    x = normal(n, d).to(dtype)
    assert_nearest(nearest_neighbors(x, k=k), x, k=k)


def test_neighbours_are_scikit_learns_and_faiss() -> None:
    import faiss
    from sklearn.neighbors import NearestNeighbors

    x = normal(700, 24).float()
    ours = nearest_neighbors(x, k=10).numpy()
    theirs = NearestNeighbors(n_neighbors=10).fit(x.numpy()).kneighbors(return_distance=False)
    np.testing.assert_array_equal(ours, theirs)
    index = faiss.IndexFlatL2(24)
    index.add(x.numpy())
    np.testing.assert_array_equal(ours, index.search(x.numpy(), 11)[1][:, 1:])  # faiss finds the point itself first


def outlier_everywhere(x: Tensor) -> Tensor:
    x[7] = 1e6
    return x


def outlier_in_one_feature(x: Tensor) -> Tensor:
    x[7, 3] = 1e6
    return x


def far_clusters(x: Tensor) -> Tensor:
    x[::2] += 1e4
    return x


def offset_and_outlier(x: Tensor) -> Tensor:
    return outlier_everywhere(x + 1e4)


@pytest.mark.parametrize(
    "disturb", [outlier_everywhere, outlier_in_one_feature, lambda x: x + 1e4, offset_and_outlier, far_clusters]
)
@pytest.mark.parametrize("compiled", [False, True])
def test_neighbours_are_exact_in_float32_whatever_lies_far_away(
    disturb: Callable[[Tensor], Tensor], compiled: bool
) -> None:
    x = disturb(normal(2600, 16).float())  # enough points for the search that first compares the minima of groups
    search = torch.compile(nearest_neighbors, fullgraph=True, backend="eager") if compiled else nearest_neighbors
    torch._dynamo.reset()
    assert_nearest(search(x, k=10), x, k=10)


@pytest.mark.parametrize("far", [3e19, 1e30, 1e-30])
def test_neighbours_are_exact_at_every_scale_also_of_two_clouds_whose_scales_differ(far: float) -> None:
    cloud = normal(60, 4).float()
    assert_nearest(nearest_neighbors(far * cloud), cloud, k=10)
    both = torch.cat((cloud, far * cloud))
    expected = nearest_neighbors(cloud)
    small, large = (cloud, far * cloud) if far > 1 else (far * cloud, cloud)
    near = nearest_neighbors(torch.cat((small, large)))[:60]
    torch.testing.assert_close(near, expected)  # to one another the points of the small cloud are as before
    assert nearest_neighbors(both.double()).shape == (120, 10)


def test_block_by_block_finds_what_one_block_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(50, 4).float()
    whole = nearest_neighbors(x, k=5), kernel_curvature(x, k=5, kernel="laplacian")
    monkeypatch.setattr(geometry, "_blocks", lambda queries, *_, **__: map(slice, range(0, 50, 7), range(7, 57, 7)))
    assert nearest_neighbors(x, k=5).equal(whole[0])
    torch.testing.assert_close(kernel_curvature(x, k=5, kernel="laplacian"), whole[1])


def test_two_equal_points_are_each_others_nearest_neighbours() -> None:
    x = normal(40, 5).float()
    x[31] = x[4]
    index = nearest_neighbors(x, k=3)
    assert (index[4, 0], index[31, 0]) == (31, 4)


@pytest.mark.parametrize("n", [12, 60])
def test_no_point_is_its_own_neighbour_even_when_all_are_equal(n: int) -> None:
    index = nearest_neighbors(torch.full((n, 3), 0.1), k=10)
    assert (index != torch.arange(n)[:, None]).all()
    assert all(len(set(row)) == 10 for row in index.tolist())


def test_neighbours_are_found_inside_autocast_and_in_half_precision() -> None:
    x = normal(200, 8).to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_nearest(nearest_neighbors(x.float()), x, k=10)
        assert_nearest(nearest_neighbors(x), x, k=10)


def test_rows_of_an_array_or_of_integers_are_points() -> None:
    x = np.random.default_rng(0).integers(0, 1000, (30, 3))
    assert_nearest(nearest_neighbors(x, k=4), torch.as_tensor(x), k=4)  # type: ignore[arg-type]
    torch.testing.assert_close(curvature(x.astype(float)), curvature(torch.as_tensor(x).double()))  # type: ignore[arg-type]


MEMORY = """
import torch
from curvssl import nearest_neighbors
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024
torch.set_num_threads(1)
x = torch.randn(POINTS, 128)
nearest_neighbors(x[:1000])
before = peak()
nearest_neighbors(x)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of resident memory from /proc")
def test_the_search_never_holds_all_distances() -> None:
    """For 18,000 points these are 1,296 MB. benchmarks/losses.py measures how memory grows with n."""
    program = MEMORY.replace("POINTS", "18_000")
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert float(child.stdout) < 1296 / 2


@pytest.mark.gpu
def test_hundred_thousand_points_need_less_than_two_gigabytes_above_the_input() -> None:
    x = torch.randn(100_000, 128, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    index = nearest_neighbors(x)
    assert torch.cuda.max_memory_allocated() - before < 2e9
    rows = torch.arange(0, 100_000, 5_003)
    distance = torch.cdist(x[rows].double().cpu(), x.double().cpu(), compute_mode="donot_use_mm_for_euclid_dist")
    nearest = distance.topk(11, largest=False).values[:, 1:]  # without the point itself
    torch.testing.assert_close(distance.gather(1, index[rows].cpu()), nearest)


def test_one_neighbour_is_the_first_of_two() -> None:
    x = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))
    assert nearest_neighbors(x, k=1).equal(nearest_neighbors(x, k=2)[:, :1])
