"""The outlier detector against scikit-learn's estimator checks, values by hand, and LocalOutlierFactor."""

import math
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

# Cosine and polynomial kernels depend on the origin.
RANKING: list[dict[str, Any]] = [{}, *({"n_neighbors": 10, "kernel": k} for k in (None, "linear", "rbf", "laplacian"))]


def cloud_with_outliers(*, inner: int = 300, outer: int = 15, d: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """A Gaussian cloud, and outliers of norm 12 around it; the labels are 1 for the outliers."""
    rng = np.random.default_rng(0)
    far = rng.normal(size=(outer, d))
    far *= 12 / np.linalg.norm(far, axis=1, keepdims=True)
    return np.concatenate((rng.normal(size=(inner, d)), far)), np.repeat((0, 1), (inner, outer))


@parametrize_with_checks(
    [
        CurvatureOutlierDetector(),
        CurvatureOutlierDetector(n_neighbors=5),
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


def both_curvatures(x: np.ndarray, i: int, *, k: int) -> float:
    """s_k of one point: the equation, pair by pair."""
    edges = np.delete(x, i, axis=0) - x[i]
    edges = edges[(edges**2).sum(1).argsort()[:k]]
    a, b = (edges[ends] for ends in np.triu_indices(k, 1))
    return math.sqrt(((a * b).sum(1) + ((a - b) ** 2).sum(1)).mean())


def test_the_default_score_is_its_equation() -> None:
    x, _ = cloud_with_outliers(inner=600, outer=40, d=3)
    detector = CurvatureOutlierDetector().fit(x)
    assert detector.n_neighbors_ == (20, 22, 25, 28, 32)  # 20 · 1.6^(j/4), to 5 % of 640
    spread = np.array([[both_curvatures(x, i, k=k) for k in detector.n_neighbors_] for i in range(640)])
    medians = np.median(spread, axis=0)
    np.testing.assert_allclose(detector.scores_, -(spread / medians).mean(1), rtol=1e-9)
    # The last row's s_k depends on the other rows only; the medians stay those of the fit.
    new = np.array([0.5, -2.0, 9.0])
    extended = np.concatenate((x, [new]))
    parts = [both_curvatures(extended, 640, k=k) / m for k, m in zip(detector.n_neighbors_, medians, strict=True)]
    assert detector.score_samples([new])[0] == pytest.approx(-np.mean(parts))


def test_three_points_on_a_line_by_hand() -> None:
    # From 0: edges 1 and 3, ⟨e_a,e_b⟩ + ‖e_a − e_b‖² = 3 + 4. From 1: −1 and 2, −2 + 9. From 3: −3 and −2, 6 + 1.
    detector = CurvatureOutlierDetector().fit([[0.0], [1.0], [3.0]])
    assert detector.n_neighbors_ == (2,)
    np.testing.assert_allclose(detector.scores_, [-1, -1, -1])  # 7, 7 and 7: with one pair there is no outlier
    assert detector.score_samples([[7.0]])[0] == pytest.approx(-2)  # edges −4 and −6: √((24 + 4) / 7)


def test_the_default_score_does_not_change_with_place_scale_rotation_or_order() -> None:
    x, _ = cloud_with_outliers()
    scores = CurvatureOutlierDetector().fit(x).scores_
    rotation = np.linalg.qr(np.random.default_rng(1).normal(size=(5, 5)))[0]
    np.testing.assert_allclose(CurvatureOutlierDetector().fit(1e-3 * x @ rotation + 10).scores_, scores, rtol=1e-6)
    np.testing.assert_allclose(CurvatureOutlierDetector().fit(x[::-1]).scores_, scores[::-1], rtol=1e-9)


def test_a_small_cluster_far_away_scores_below_every_point_of_a_large_one() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate((rng.normal(size=(300, 2)), 0.01 * rng.normal(size=(15, 2)) + 30, [[60.0, 0.0]]))
    scores = CurvatureOutlierDetector().fit(x).scores_
    assert scores[300:].max() < scores[:300].min()
    assert scores.argmin() == 315  # the single point is twice as far away
    lof = LocalOutlierFactor(n_neighbors=10).fit(x).negative_outlier_factor_
    assert np.median(lof[300:315]) > lof[:300].min()  # the cluster looks normal to neighbourhoods of ten


@pytest.mark.parametrize("parameters", [{}, {"n_neighbors": 10}, {"n_neighbors": 10, "kernel": "rbf"}])
def test_a_point_at_any_distance_is_an_outlier_and_any_scale_gives_the_same_scores(parameters: dict[str, Any]) -> None:
    x, _ = cloud_with_outliers(d=4)
    detector = CurvatureOutlierDetector(**parameters).fit(x)
    for size in (1e9, 1e200, 1.7e308):
        assert detector.predict([[size] * 4]) == [-1]
    for scale in (1e-300, 1e300):
        scores = CurvatureOutlierDetector(**parameters).fit(x * scale).scores_
        np.testing.assert_allclose(scores, detector.scores_, rtol=1e-9, atol=1e-9)
    # One such point in the table costs the others no digits: nobody has it as a neighbour.
    far = CurvatureOutlierDetector(**({"n_neighbors": 10} | parameters)).fit(np.concatenate((x, [[1e200] * 4])))
    alone = CurvatureOutlierDetector(**({"n_neighbors": 10} | parameters)).fit(x)
    np.testing.assert_allclose(
        far.scores_[:-1], alone.scores_, rtol=1e-6, atol=1e-2 if parameters.get("kernel") else 1e-9
    )


def test_what_is_no_table_is_refused() -> None:
    for wrong in (None, "rows", {}):
        with pytest.raises(ValueError, match="needed an array of numbers"):
            CurvatureOutlierDetector().fit(wrong)


@pytest.mark.parametrize("copies", [2, 60])
def test_twins_are_neighbours_and_do_not_make_a_score_infinite(copies: int) -> None:
    x = np.concatenate((np.repeat([[0.0, 0.1], [7.3, 0.0]], copies, axis=0), [[3.0, 40.0]]))
    scores = CurvatureOutlierDetector().fit(x).scores_
    assert np.isfinite(scores).all()
    assert scores.argmin() == len(x) - 1
    np.testing.assert_array_equal(CurvatureOutlierDetector().fit(np.ones((20, 3))).scores_, np.zeros(20))


@pytest.mark.parametrize("parameters", RANKING)
def test_planted_outliers_are_ranked_first(parameters: dict[str, Any]) -> None:
    x, planted = cloud_with_outliers(outer=3, d=3)
    detector = CurvatureOutlierDetector(**parameters).fit(x)
    assert roc_auc_score(planted, -detector.scores_) > 0.99
    assert (detector.predict(x)[planted == 1] == -1).all()


@pytest.mark.parametrize("parameters", [{}, {"n_neighbors": 10}])
@pytest.mark.parametrize("d", [2, 10, 50])
def test_outliers_are_told_apart_nearly_as_well_as_by_lof(d: int, parameters: dict[str, Any]) -> None:
    x, planted = cloud_with_outliers(outer=5, d=d)
    lof = LocalOutlierFactor(n_neighbors=10).fit(x)
    ours = roc_auc_score(planted, -CurvatureOutlierDetector(**parameters).fit(x).scores_)
    assert ours > roc_auc_score(planted, -lof.negative_outlier_factor_) - 0.05


def test_scores_of_the_training_points_are_minus_their_curvature() -> None:
    x, _ = cloud_with_outliers()
    expected = -curvature(torch.tensor(x)).numpy()
    np.testing.assert_allclose(CurvatureOutlierDetector(n_neighbors=10).fit(x).scores_, expected, atol=1e-10)


@pytest.mark.parametrize("parameters", RANKING)
def test_a_training_point_scores_the_same_when_it_comes_again(parameters: dict[str, Any]) -> None:
    x, _ = cloud_with_outliers()
    detector = CurvatureOutlierDetector(**parameters).fit(x)
    np.testing.assert_array_equal(detector.score_samples(x), detector.scores_)
    np.testing.assert_allclose(detector.score_samples(x[-20:]), detector.scores_[-20:], rtol=1e-9)


@pytest.mark.parametrize(("kernel", "sign"), [("rbf", 1), ("laplacian", 1), ("linear", -1), ("polynomial", -1)])
def test_kernel_scores_are_the_kernel_curvature_with_the_sign_that_fits(kernel: str, sign: int) -> None:
    x, _ = cloud_with_outliers()
    expected = sign * kernel_curvature(torch.tensor(x), kernel=kernel).numpy()
    np.testing.assert_allclose(
        CurvatureOutlierDetector(n_neighbors=10, kernel=kernel).fit(x).scores_, expected, atol=1e-9
    )


def test_equal_training_points_are_each_others_neighbours() -> None:
    x = np.repeat(np.random.default_rng(0).normal(size=(20, 3)), 2, axis=0)
    detector = CurvatureOutlierDetector(n_neighbors=5).fit(x)
    np.testing.assert_allclose(detector.scores_, -curvature(torch.tensor(x), k=5).numpy(), atol=1e-12)


def test_the_score_of_a_new_point_is_that_of_the_same_point_in_the_training_set() -> None:
    x, _ = cloud_with_outliers()
    # The score of the last row depends only on the other rows, so it may be left out of `fit`.
    detector = CurvatureOutlierDetector(n_neighbors=10).fit(x[:-1])
    assert detector.score_samples(x[-1:])[0] == pytest.approx(-curvature(torch.tensor(x))[-1].item())


def test_a_share_of_contamination_is_the_share_of_training_points_found() -> None:
    x, _ = cloud_with_outliers(inner=180, outer=20)
    assert (CurvatureOutlierDetector(contamination=0.1).fit_predict(x) == -1).mean() == pytest.approx(0.1)


@pytest.mark.parametrize("parameters", [{}, {"n_neighbors": 10}])
@pytest.mark.parametrize("d", [2, 10, 100])
def test_auto_finds_few_outliers_where_there_are_none(d: int, parameters: dict[str, Any]) -> None:
    draws = [np.random.default_rng(seed).normal(size=(500, d)) for seed in range(3)]
    found = [CurvatureOutlierDetector(**parameters).fit_predict(x) == -1 for x in draws]
    assert np.mean(found) < 0.08


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


@pytest.mark.parametrize("parameters", [{}, {"n_neighbors": 7}, {"n_neighbors": 7, "kernel": "rbf"}])
def test_pickle_and_clone_keep_what_they_should(parameters: dict[str, Any]) -> None:
    x, _ = cloud_with_outliers()
    detector = CurvatureOutlierDetector(**parameters, contamination=0.05).fit(x)
    again = pickle.loads(pickle.dumps(detector))
    np.testing.assert_array_equal(again.decision_function(x), detector.decision_function(x))
    fresh = clone(detector)
    assert fresh.get_params() == detector.get_params()
    assert not hasattr(fresh, "offset_")


def test_a_callable_kernel_is_accepted() -> None:
    x, _ = cloud_with_outliers()
    ours = CurvatureOutlierDetector(n_neighbors=10, kernel=lambda a, b: a @ b.mT).fit(x)
    np.testing.assert_allclose(ours.scores_, CurvatureOutlierDetector(n_neighbors=10).fit(x).scores_, atol=1e-9)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"n_neighbors": 1}, "2 or more"),
        ({"n_neighbors": 2.5}, "integer"),
        ({"contamination": 0.7}, r"\(0, 0.5\]"),
        ({"contamination": "few"}, r"\(0, 0.5\]"),
        ({"n_neighbors": "few"}, "'auto'"),
        ({"kernel": "rbf"}, "set n_neighbors"),
        ({"n_neighbors": 10, "kernel": "sigmoid"}, "known: rbf"),
        ({"n_neighbors": 10, "kernel": "rbf", "gamma": "wide"}, "median"),
    ],
)
def test_a_wrong_parameter_is_refused_with_a_remedy(parameters: dict[str, Any], message: str) -> None:
    x, _ = cloud_with_outliers()
    with pytest.raises(ValueError, match=message):
        CurvatureOutlierDetector(**parameters).fit(x)


@pytest.mark.parametrize("settings", [{}, {"n_neighbors": 5}, {"n_neighbors": 5, "kernel": "rbf"}])
def test_rows_in_reverse_order_give_the_scores_in_reverse_order(settings: dict[str, Any]) -> None:
    """X[::-1] has negative strides, which torch does not take."""
    x, _ = cloud_with_outliers(inner=40, outer=3)
    detector = CurvatureOutlierDetector(**settings)
    np.testing.assert_allclose(detector.fit(x[::-1]).scores_, detector.fit(x).scores_[::-1])
    np.testing.assert_allclose(detector.score_samples(x[::-1]), detector.score_samples(x)[::-1])
