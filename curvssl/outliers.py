"""Curvature as a scikit-learn outlier detector: of one curvature of the paper or, by default, of both at once."""

import warnings
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, OutlierMixin
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from curvssl.geometry import kernel_neighbors, kernel_scores, neighbors_of, scores
from curvssl.kernels import AnyKernel, kernel_width, resolve, scale_free, squared_distances

LEAST, SHARE, SIZES = 20, 0.05, 5  # five neighbourhoods, from 20 neighbours to 5 % of the points, in equal ratios
BLOCK = 512  # rows that are compared with all points at once
FAR = 1e140  # typical deviations: a point farther away counts as that far, so that squares and their sums are finite
FAR_KERNEL = 1e6  # a kernel does not tell it from infinity, and one such point costs the others no digits
FENCE = 1.5  # Tukey's, in interquartile ranges beyond the quartile: 0.35 % of a normal distribution lie outside


class CurvatureOutlierDetector(OutlierMixin, BaseEstimator):
    """Unsupervised outlier detection by the curvature of each point among its nearest neighbours.

    Let e_a = x_a − x_i be the edges from a point to its k nearest neighbours. By default the score looks at every pair
    of them, and adds what the two curvatures of the paper sum, without their normalisation:

        s_k(i)² = mean over a<b of ⟨e_a, e_b⟩ + ‖e_a − e_b‖²

    The first part is that of Eq. (6): it is large if the neighbours are far away and all on one side. The second is
    that of Eq. (10) for a wide RBF kernel: it is large if the neighbours are far from each other. Each alone is blind
    to something: the first to how dense a place is, the second to the distance of the point from its neighbours. The
    score averages s_k over five sizes of the neighbourhood, from 20 neighbours to 5 % of the points (with 400 points or
    fewer, over 20 neighbours alone), each divided by its median over the training points. So the median point has a
    score of about −1, and a point with −3 is three times as far out. Outliers that form a small cluster are found by
    the large neighbourhoods, single ones by the small.

    With a number of neighbours the score is a curvature of the paper. In Eq. (6) the neighbours of an inner point lie
    on all sides, their directions cancel and the curvature is low; those of an outlier lie in one direction, and its
    curvature is close to the maximum k(k−1)/2. With a shift-invariant kernel (rbf, laplacian) the curvature of Eq. (10)
    is Σ k(x_a, x_b) over pairs of neighbours and does not depend on direction: it is high where the neighbours are
    dense, so outliers have *low* curvature. `score_samples` uses the right sign in all cases.

    Which to use, as measured on public tables (docs/mathematics.md, section 9): the default for mixed data, which are
    fitted and scored with the outliers in. There it has the best mean of twelve detectors, and plain curvature is last,
    because outliers have each other as neighbours. The default for clean data too, where only inliers are fitted and
    new points are scored: there it is above LOF, and below a kNN distance with 5 neighbours. If the inliers are one
    compact class and clean, `n_neighbors=20`, plain curvature, was as good or better. Kernels do not suit new points:
    the score ignores how far away the neighbours are.

    Distances mix the features: bring these to a common scale first, with `StandardScaler` for instance. Place and scale
    of the whole table do not matter: inside, the median of each feature is 0, and the median of all deviations from it,
    zeros apart, about 1. A point more than 1e140 of these away counts as that far, and with a kernel one more than 1e6.
    Kernels for which place or scale do matter (cosine, polynomial, your own, or a number for gamma) get the rows as
    they are.

    The neighbours of a new point are sought among the training points. A row that equals a training point counts as
    that point, and one such duplicate is left out of its neighbours. So `score_samples(X_train)` equals `scores_`, and
    `fit_predict(X)` equals `fit(X).predict(X)`; there is no separate novelty mode.

    Parameters
    ----------
    n_neighbors : "auto" or int, default="auto"
        "auto" is the score above. A number, 2 or more, is the k of Eq. (6) or Eq. (10). Values above n_samples − 1 are
        clipped to it, with a warning.
    kernel : None, str or callable, default=None
        With a number of neighbours: None gives the curvature of Eq. (6); a kernel, as in `curvssl.kernel_curvature`,
        gives that of Eq. (10).
    gamma : float, "median", "scale" or "auto", default="median"
        Width of the kernel, computed from the training points; ignored without a kernel.
    contamination : "auto" or float in (0, 0.5], default="auto"
        A float is the share of the training points below the threshold. "auto" is Tukey's fence: outliers score more
        than 1.5 interquartile ranges below the first quartile of the training scores. No fixed threshold fits all
        data, because the level and the spread of the curvature depend on the dimension and on k: in many dimensions
        the angles between edges are near 60° even for inner points. Quartiles adapt to both, and up to a quarter of
        the points can be outliers without moving them far. The other known choice, to split the scores by 2-means,
        reports outliers in every data set.

    Attributes
    ----------
    scores_ : ndarray of shape (n_samples,)
        Scores of the training points, higher is more normal.
    offset_ : float
        `decision_function` is `score_samples` − `offset_`.
    n_neighbors_ : int or tuple of int
        The number of neighbours in use; with "auto" that of each neighbourhood.
    n_features_in_ : int
        Features seen by `fit`.
    """

    def __init__(
        self,
        n_neighbors: int | str = "auto",
        kernel: AnyKernel | None = None,
        gamma: float | str = "median",
        contamination: float | str = "auto",
    ) -> None:
        self.n_neighbors = n_neighbors
        self.kernel = kernel
        self.gamma = gamma
        self.contamination = contamination

    def fit(self, X: ArrayLike, y: Any = None) -> Self:
        """Store the points, score each one among the others, and set the threshold; `y` is ignored."""
        self._check_parameters()
        points = self._rows(X, ensure_min_samples=3)  # 3: each needs two neighbours
        self.n_neighbors_ = self._neighbors(len(points))
        self._place = {row.tobytes(): i for i, row in enumerate(points + 0.0)}  # + 0.0: −0 equals 0
        kernel = None if self.kernel is None else resolve(self.kernel)
        self._free = kernel is None or (kernel.distance is not None and scale_free(kernel, self.gamma))
        quarter = points / 4  # differences do not overflow
        self._middle = np.median(quarter, axis=0)
        off = np.abs(quarter - self._middle)
        self._exponent = -int(np.frexp(np.median(off[off > 0]))[1]) if off.any() else 0
        self._points = self._comparable(points)
        if self.kernel is not None:
            self._width = kernel_width(torch.tensor(self._points)[None], kernel=self.kernel, gamma=self.gamma).numpy()
        if self.n_neighbors == "auto":
            spread = self._spread(points)
            middle = np.median(spread, axis=0)
            # The median is 0 if most points have as many twins; so is the mean if all points are equal.
            self._scale = np.where(middle > 0, middle, np.where(spread.any(0), spread.mean(0), 1))
            self.scores_ = -(spread / self._scale).mean(1)
        else:
            self.scores_ = self._score(points)
        if isinstance(self.contamination, str):
            first, third = np.percentile(self.scores_, (25, 75))
            self.offset_ = first - FENCE * (third - first)
        else:
            self.offset_ = np.percentile(self.scores_, 100 * self.contamination)
        return self

    def score_samples(self, X: ArrayLike) -> NDArray[np.float64]:
        """How normal each row is among the training points, (n_samples,): higher is more normal."""
        check_is_fitted(self)
        return self._score(self._rows(X, reset=False))

    def decision_function(self, X: ArrayLike) -> NDArray[np.float64]:
        """`score_samples` − `offset_`: negative for outliers."""
        return self.score_samples(X) - self.offset_

    def predict(self, X: ArrayLike) -> NDArray[np.int64]:
        """1 for inliers, −1 for outliers."""
        return np.where(self.decision_function(X) < 0, -1, 1)

    def _rows(self, X: Any, **checks: Any) -> NDArray[np.float64]:
        """X as an array that torch takes, which knows no negative strides, as of X[::-1]."""
        if X is None or type(X) in (str, dict):  # scipy's sparse dictionary is a dict too, and validate_data names it
            raise ValueError(f"X is of type {type(X).__name__}: needed an array of numbers, (n_samples, n_features)")
        return np.ascontiguousarray(validate_data(self, X, dtype=np.float64, **checks))

    def _neighbors(self, n: int) -> Any:
        if self.n_neighbors == "auto":
            return neighborhoods(n)
        asked = int(self.n_neighbors)
        if asked >= n:
            warnings.warn(f"n_neighbors={asked} needs more than the {n} samples given: using {n - 1}", stacklevel=3)
        return min(asked, n - 1)

    def _comparable(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """Rows around 0, in units of a power of two near the typical deviation, and not too far away."""
        if not self._free:
            return rows
        with np.errstate(over="ignore"):
            rows = np.ldexp(rows / 4 - self._middle, self._exponent).clip(-1e300, 1e300)
        far = FAR if self.kernel is None else FAR_KERNEL
        return rows * (far / np.abs(rows).max(1, keepdims=True).clip(far))

    def _score(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        if self.n_neighbors == "auto":
            return -(self._spread(rows) / self._scale).mean(1)
        queries, points = torch.tensor(self._comparable(rows))[None], torch.tensor(self._points)[None]
        k = self.n_neighbors_
        if self.kernel is None:
            nominees = neighbors_of(queries, points, k=k + 1, first=None, centred=True)
            curvature = scores(queries, points, neighbors=_without_twin(queries, points, nominees))
        else:
            kernel, width = resolve(self.kernel), torch.tensor(self._width)
            nominees = kernel_neighbors(
                queries, points, k=k + 1, kernel=kernel, width=width, first=None, centred=self._free
            )
            neighbors = _without_twin(queries, points, nominees)
            curvature = kernel_scores(queries, points, kernel=kernel, width=width, neighbors=neighbors)
            if not curvature.isfinite().all():
                raise ValueError(
                    f"the kernel of rows up to {np.abs(rows).max():.3g} is not finite: standardise them first, with "
                    "StandardScaler for instance"
                )
            if kernel.centred:
                return curvature[0].numpy()
        return -curvature[0].numpy()

    def _spread(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """s_k of each row for each size of its neighbourhood, (m, d) → (m, sizes)."""
        found = []
        for start in range(0, len(rows), BLOCK):
            block = rows[start : start + BLOCK]
            own = [self._place.get(row.tobytes(), -1) for row in block + 0.0]
            square, variance = moments(self._comparable(block), self._points, own=own, sizes=self.n_neighbors_)
            k = np.array(self.n_neighbors_)
            found.append(np.sqrt(square + (2 * k - 1) / (k - 1) * variance))
        return np.concatenate(found)

    def _check_parameters(self) -> None:
        k = self.n_neighbors
        if k == "auto":
            if self.kernel is not None:
                raise ValueError(
                    f"kernel={self.kernel!r} needs a number of neighbours: set n_neighbors, 50 for instance"
                )
        elif not isinstance(k, Integral) or k < 2:
            raise ValueError(f"n_neighbors={k!r} has no pair of neighbours: use 'auto' or an integer of 2 or more")
        share = self.contamination
        if share != "auto" and not (isinstance(share, Real) and 0 < share <= 0.5):
            raise ValueError(f"contamination={share!r} is no share of outliers: use 'auto' or a number in (0, 0.5]")
        if self.kernel is not None:
            resolve(self.kernel)


def neighborhoods(n: int, *, least: int = LEAST, share: float = SHARE) -> tuple[int, ...]:
    """The sizes of the neighbourhoods among n points: from `least` to a share of the points, in equal ratios."""
    first = min(least, n - 1)
    return tuple(int(k) for k in np.unique(np.geomspace(first, max(first, int(share * n)), SIZES).round()))


def moments(
    rows: NDArray[np.float64], points: NDArray[np.float64], *, own: Sequence[int], sizes: Sequence[int]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """H² = ‖Σe_a/k‖² and V = Σ‖e_a‖²/k − H² over the edges of each row to its k nearest points, for each size k:
    (m, d), (n, d) → (m, sizes) twice.

    `own` is the point that a row is, or −1: no point is its own neighbour. If distances tie at the k-th, all of these
    points count.
    """
    slack = (points.shape[1] + 4) * np.finfo(np.float64).eps
    norms = np.square(rows).sum(1)[:, None] + np.square(points).sum(1)
    square = squared_distances(torch.from_numpy(rows), torch.from_numpy(points)).numpy()
    square[square <= slack * norms] = 0  # twins, but for rounding
    known = np.flatnonzero(np.array(own) >= 0)
    square[known, np.array(own)[known]] = np.inf
    last = np.array(sizes) - 1
    means, variances = np.empty((len(rows), len(last))), np.empty((len(rows), len(last)))
    for j, radius in enumerate(np.partition(square, last, axis=1)[:, last].T):
        inside = square <= radius[:, None]
        k = inside.sum(1)
        mean = (inside.astype(np.float64) @ points) / k[:, None] - rows
        means[:, j] = np.square(mean).sum(1)
        variances[:, j] = (np.where(inside, square, 0).sum(1) / k - means[:, j]).clip(0)
    return means, variances


def _without_twin(queries: Tensor, points: Tensor, nominees: Tensor) -> Tensor:
    """k of the k+1 nearest points (1, b, k+1): without the first that equals its query or, if none does, the last."""
    equal = (points[0, nominees[0]] == queries[0, :, None]).all(-1)  # (b, k+1)
    last = nominees.shape[-1] - 1
    dropped = torch.where(equal.any(1), equal.int().argmax(1), last)
    keep = torch.arange(last)
    return nominees.gather(2, (keep + (keep >= dropped[:, None]))[None])
