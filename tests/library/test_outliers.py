"""The outlier detector against scikit-learn's estimator checks, values by hand, and LocalOutlierFactor."""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import BaseEstimator, clone
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import LocalOutlierFactor
from sklearn.utils.estimator_checks import parametrize_with_checks

from curvssl import CurvatureOutlierDetector, curvature, kernel_curvature

KERNELS_THAT_RANK = (None, "linear", "rbf", "laplacian")  # cosine and polynomial depend on the origin


def cloud_with_outliers(*, inner: int = 300, outer: int = 15, d: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """A Gaussian cloud, and outliers of norm 12 around it; the labels are 1 for the outliers."""
    rng = np.random.default_rng(0)
    far = rng.normal(size=(outer, d))
    far *= 12 / np.linalg.norm(far, axis=1, keepdims=True)
    return np.concatenate((rng.normal(size=(inner, d)), far)), np.repeat((0, 1), (inner, outer))


@pytest.mark.filterwarnings("ignore:n_neighbors=10 needs more")  # some checks use only ten samples
@parametrize_with_checks(
    [
        CurvatureOutlierDetector(),
        CurvatureOutlierDetector(n_neighbors=5, kernel="rbf"),
        CurvatureOutlierDetector(n_neighbors=5, kernel="laplacian", contamination=0.1),
    ]
)
def test_scikit_learns_own_checks_pass(estimator: BaseEstimator, check: Callable[..., object]) -> None:
    check(estimator)


def test_hexagon_centre_scores_three_and_a_far_point_scores_minus_fifteen() -> None:
    angles = np.arange(6) * np.pi / 3
    hexagon = np.stack((np.cos(angles), np.sin(angles)), 1)
    detector = CurvatureOutlierDetector(n_neighbors=6).fit(np.concatenate((hexagon, [[0.0, 0.0]])))
    assert detector.scores_[-1] == pytest.approx(3)  # six edges that cancel: c = −k/2
    centre, far = detector.score_samples([[0.0, 0.0], [1e9, 0.0]])
    assert centre == pytest.approx(3)
    assert far == pytest.approx(-15)  # six parallel edges: c = k(k−1)/2


@pytest.mark.parametrize("kernel", KERNELS_THAT_RANK)
def test_planted_outliers_are_ranked_first(kernel: str | None) -> None:
    x, planted = cloud_with_outliers(outer=3, d=3)
    detector = CurvatureOutlierDetector(kernel=kernel).fit(x)
    assert roc_auc_score(planted, -detector.scores_) > 0.99
    assert (detector.predict(x)[planted == 1] == -1).all()


@pytest.mark.parametrize("d", [2, 10, 50])
def test_outliers_are_told_apart_nearly_as_well_as_by_lof(d: int) -> None:
    x, planted = cloud_with_outliers(outer=5, d=d)
    lof = LocalOutlierFactor(n_neighbors=10).fit(x)
    ours = roc_auc_score(planted, -CurvatureOutlierDetector().fit(x).scores_)
    assert ours > roc_auc_score(planted, -lof.negative_outlier_factor_) - 0.05


def test_scores_of_the_training_points_are_minus_their_curvature() -> None:
    x, _ = cloud_with_outliers()
    expected = -curvature(torch.tensor(x)).numpy()
    detector = CurvatureOutlierDetector().fit(x)
    np.testing.assert_allclose(detector.scores_, expected, atol=1e-10)
    np.testing.assert_array_equal(detector.score_samples(x), detector.scores_)


@pytest.mark.parametrize(("kernel", "sign"), [("rbf", 1), ("laplacian", 1), ("linear", -1), ("polynomial", -1)])
def test_kernel_scores_are_the_kernel_curvature_with_the_sign_that_fits(kernel: str, sign: int) -> None:
    x, _ = cloud_with_outliers()
    expected = sign * kernel_curvature(torch.tensor(x), kernel=kernel).numpy()
    np.testing.assert_allclose(CurvatureOutlierDetector(kernel=kernel).fit(x).scores_, expected, atol=1e-9)


def test_equal_training_points_are_each_others_neighbours() -> None:
    x = np.repeat(np.random.default_rng(0).normal(size=(20, 3)), 2, axis=0)
    detector = CurvatureOutlierDetector(n_neighbors=5).fit(x)
    np.testing.assert_allclose(detector.scores_, -curvature(torch.tensor(x), k=5).numpy(), atol=1e-12)


def test_the_score_of_a_new_point_is_that_of_the_same_point_in_the_training_set() -> None:
    x, _ = cloud_with_outliers()
    # The score of the last row depends only on the other rows, so it may be left out of `fit`.
    detector = CurvatureOutlierDetector().fit(x[:-1])
    assert detector.score_samples(x[-1:])[0] == pytest.approx(-curvature(torch.tensor(x))[-1].item())


def test_a_share_of_contamination_is_the_share_of_training_points_found() -> None:
    x, _ = cloud_with_outliers(inner=180, outer=20)
    assert (CurvatureOutlierDetector(contamination=0.1).fit_predict(x) == -1).mean() == pytest.approx(0.1)


@pytest.mark.parametrize("d", [2, 10, 100])
def test_auto_finds_few_outliers_where_there_are_none(d: int) -> None:
    x = np.random.default_rng(1).normal(size=(500, d))
    assert (CurvatureOutlierDetector().fit_predict(x) == -1).mean() < 0.08


def test_auto_is_tukeys_fence() -> None:
    x, _ = cloud_with_outliers()
    detector = CurvatureOutlierDetector().fit(x)
    q1, q3 = np.quantile(detector.scores_, [0.25, 0.75])
    assert detector.offset_ == pytest.approx(q1 - 1.5 * (q3 - q1))
    np.testing.assert_allclose(detector.decision_function(x), detector.score_samples(x) - detector.offset_)


def test_too_many_neighbours_are_clipped_with_a_warning() -> None:
    x, _ = cloud_with_outliers(inner=6, outer=2)
    with pytest.warns(UserWarning, match="using 7"):
        detector = CurvatureOutlierDetector(n_neighbors=10).fit(x)
    assert detector.n_neighbors_ == 7
    np.testing.assert_allclose(detector.scores_, CurvatureOutlierDetector(n_neighbors=7).fit(x).scores_)


@pytest.mark.parametrize("kernel", [None, "rbf"])
def test_pickle_and_clone_keep_what_they_should(kernel: str | None) -> None:
    x, _ = cloud_with_outliers()
    detector = CurvatureOutlierDetector(n_neighbors=7, kernel=kernel, contamination=0.05).fit(x)
    again = pickle.loads(pickle.dumps(detector))
    np.testing.assert_array_equal(again.decision_function(x), detector.decision_function(x))
    fresh = clone(detector)
    assert fresh.get_params() == detector.get_params()
    assert not hasattr(fresh, "offset_")


def test_a_callable_kernel_is_accepted() -> None:
    x, _ = cloud_with_outliers()
    ours = CurvatureOutlierDetector(kernel=lambda a, b: a @ b.mT).fit(x)
    np.testing.assert_allclose(ours.scores_, CurvatureOutlierDetector().fit(x).scores_, atol=1e-9)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"n_neighbors": 1}, "2 or more"),
        ({"n_neighbors": 2.5}, "integer"),
        ({"contamination": 0.7}, r"\(0, 0.5\]"),
        ({"contamination": "few"}, r"\(0, 0.5\]"),
        ({"kernel": "sigmoid"}, "known: rbf"),
        ({"kernel": "rbf", "gamma": "wide"}, "median"),
    ],
)
def test_a_wrong_parameter_is_refused_with_a_remedy(parameters: dict[str, Any], message: str) -> None:
    x, _ = cloud_with_outliers()
    with pytest.raises(ValueError, match=message):
        CurvatureOutlierDetector(**parameters).fit(x)
