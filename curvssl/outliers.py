"""Curvature as a scikit-learn outlier detector: a point is an outlier if all its neighbours lie on one side."""

import warnings
from numbers import Integral, Real
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, OutlierMixin
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from curvssl.geometry import kernel_neighbors, kernel_scores, neighbors_of, scores
from curvssl.kernels import AnyKernel, kernel_width, resolve

FENCE = 1.5  # Tukey's, in interquartile ranges beyond the quartile: 0.35 % of a normal distribution lie outside


class CurvatureOutlierDetector(OutlierMixin, BaseEstimator):
    """Unsupervised outlier detection by the curvature of each point among its nearest neighbours.

    Inside a cloud of points the neighbours lie on all sides, their directions cancel and the curvature is low. The
    neighbours of an outlier lie in one direction, and its curvature is close to the maximum k(k−1)/2. With a
    shift-invariant kernel (rbf, laplacian) the curvature is Σ k(x_a, x_b) over pairs of neighbours and does not depend
    on direction: it is high where the neighbours are dense, so outliers have *low* curvature. `score_samples` uses the
    right sign in both cases.

    The neighbours of a new point are sought among the training points. A row that equals a training point counts as
    that point, and one such duplicate is left out of its neighbours. So `score_samples(X_train)` equals `scores_`, and
    `fit_predict(X)` equals `fit(X).predict(X)`; there is no separate novelty mode.

    Parameters
    ----------
    n_neighbors : int, default=10
        Neighbours of each point, k: 2 or more. Values above n_samples − 1 are clipped to it, with a warning.
    kernel : None, str or callable, default=None
        None gives the curvature of Eq. (6). A kernel, as in `curvssl.kernel_curvature`, gives that of Eq. (10).
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
    n_neighbors_ : int
        The number of neighbours in use.
    n_features_in_ : int
        Features seen by `fit`.
    """

    def __init__(
        self,
        n_neighbors: int = 10,
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
        points = validate_data(self, X, dtype=np.float64, ensure_min_samples=3)  # 3: each needs two neighbours
        self.n_neighbors_ = min(self.n_neighbors, len(points) - 1)
        if self.n_neighbors_ < self.n_neighbors:
            warnings.warn(
                f"n_neighbors={self.n_neighbors} needs more than the {len(points)} samples given: "
                f"using {self.n_neighbors_}",
                stacklevel=2,
            )
        self._points = points
        if self.kernel is not None:
            self._width = kernel_width(torch.tensor(points)[None], kernel=self.kernel, gamma=self.gamma).numpy()
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
        return self._score(validate_data(self, X, dtype=np.float64, reset=False))

    def decision_function(self, X: ArrayLike) -> NDArray[np.float64]:
        """`score_samples` − `offset_`: negative for outliers."""
        return self.score_samples(X) - self.offset_

    def predict(self, X: ArrayLike) -> NDArray[np.int64]:
        """1 for inliers, −1 for outliers."""
        return np.where(self.decision_function(X) < 0, -1, 1)

    def _score(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        queries, points = torch.tensor(rows)[None], torch.tensor(self._points)[None]
        k = self.n_neighbors_
        if self.kernel is None:
            nominees = neighbors_of(queries, points, k=k + 1, first=None)
            curvature = scores(queries, points, neighbors=_without_twin(queries, points, nominees))
        else:
            kernel, width = resolve(self.kernel), torch.tensor(self._width)
            nominees = kernel_neighbors(queries, points, k=k + 1, kernel=kernel, width=width, first=None)
            neighbors = _without_twin(queries, points, nominees)
            curvature = kernel_scores(queries, points, kernel=kernel, width=width, neighbors=neighbors)
            if kernel.centred:
                return curvature[0].numpy()
        return -curvature[0].numpy()

    def _check_parameters(self) -> None:
        if not isinstance(self.n_neighbors, Integral) or self.n_neighbors < 2:
            raise ValueError(f"n_neighbors={self.n_neighbors!r} has no pair of neighbours: use an integer of 2 or more")
        share = self.contamination
        if share != "auto" and not (isinstance(share, Real) and 0 < share <= 0.5):
            raise ValueError(f"contamination={share!r} is no share of outliers: use 'auto' or a number in (0, 0.5]")
        if self.kernel is not None:
            resolve(self.kernel)


def _without_twin(queries: Tensor, points: Tensor, nominees: Tensor) -> Tensor:
    """k of the k+1 nearest points (1, b, k+1): without the first that equals its query or, if none does, the last."""
    equal = (points[0, nominees[0]] == queries[0, :, None]).all(-1)  # (b, k+1)
    last = nominees.shape[-1] - 1
    dropped = torch.where(equal.any(1), equal.int().argmax(1), last)
    keep = torch.arange(last)
    return nominees.gather(2, (keep + (keep >= dropped[:, None]))[None])
