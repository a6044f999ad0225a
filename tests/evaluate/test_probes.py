"""Probes against scikit-learn, torch.nn and loops, and which data they may use."""

import json

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from curvssl.config import UserError
from curvssl.evaluate.features import Features
from curvssl.evaluate.heads import LINEAR, MLP, _draw, predict, train_heads
from curvssl.evaluate.probes import PROBES, RETRIEVAL, retrieval, standardised, summary
from curvssl.evaluate.runs import probe_features

Data = tuple[Tensor, Tensor, Tensor, Tensor]


def blobs(*, n: int = 600, d: int = 12, classes: int = 4, spread: float = 1.6, seed: int = 0) -> Data:
    """Overlapping Gaussian clouds, half for training: no classifier is right on all points."""
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, d, generator=g)
    y = torch.arange(n) % classes
    x = centres[y] + spread * torch.randn(n, d, generator=g)
    return x[: n // 2], y[: n // 2], x[n // 2 :], y[n // 2 :]


def xor(n: int = 1200) -> Data:
    """The label is the sign of x₁x₂: no line separates the classes."""
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] * x[:, 1] > 0).long()
    return x[: n // 2], y[: n // 2], x[n // 2 :], y[n // 2 :]


def test_linear_agrees_with_scikit_learns_logistic_regression():
    from sklearn.linear_model import LogisticRegression

    h, y, h_test, y_test = blobs(n=2000)
    x, x_test = standardised(h, h_test)
    theirs = LogisticRegression(C=np.inf, max_iter=1000).fit(x.numpy(), y.numpy())
    ours = PROBES["linear"](h, y, h_test, y_test, classes=4)
    for accuracy in ours.accuracy:
        assert abs(accuracy - 100 * theirs.score(x_test.numpy(), y_test.numpy())) < 1.5
    assert (ours.predictions.numpy() == theirs.predict(x_test.numpy())).mean() > 0.95


def test_a_linear_head_converges_to_scikit_learns_ridge_penalised_minimum():
    from sklearn.linear_model import LogisticRegression

    h, y, h_test, _ = blobs(n=400)
    x, x_test = standardised(h, h_test)
    # Mean loss + (decay/2)‖w‖² is scikit-learn's C Σ loss + ½‖w‖² with C = 1/(n · decay). Our bias has weight decay, so
    # theirs is the weight of a column of ones. 200 rows are one batch: gradient descent without noise.
    one, one_test = (np.pad(t.double().numpy(), ((0, 0), (0, 1)), constant_values=1) for t in (x, x_test))
    theirs = LogisticRegression(C=1 / (200 * 0.01), fit_intercept=False, tol=1e-8, max_iter=1000).fit(one, y.numpy())
    rows = torch.arange(200)[None]
    params = train_heads(LINEAR, x, y, rows=rows, heads=[(0, 0.3)], classes=4, weight_decay=0.01, epochs=600)
    ours = predict(LINEAR, params, x_test, rows=rows, covariance=torch.eye(12))[0]
    np.testing.assert_allclose(ours, theirs.predict_proba(one_test), atol=1e-4)


def test_a_hidden_layer_solves_xor_and_a_line_cannot():
    data = xor()
    assert min(PROBES["mlp"](*data, classes=2).accuracy) > 93
    assert max(PROBES["linear"](*data, classes=2).accuracy) < 62


def test_knn_is_the_weighted_vote_of_a_loop_in_float64():
    h, y, h_test, y_test = blobs(n=240)
    ours = PROBES["knn"](h, y, h_test, y_test, classes=4)
    bank, queries = h.double().numpy(), h_test.double().numpy()
    for i, q in enumerate(queries):
        s = np.array([a @ q / np.sqrt((a @ a) * (q @ q)) for a in bank])
        votes = np.zeros(4)
        for j in np.argsort(-s)[:20]:
            votes[y[j]] += np.exp(s[j] / 0.07)
        assert ours.predictions[i] == votes.argmax()
        assert ours.confidence[i] == pytest.approx(votes.max() / votes.sum(), rel=1e-4)
    assert ours.accuracy == (pytest.approx(100 * (ours.predictions == y_test).double().mean().item()),)


def test_knn_agrees_with_scikit_learn():
    from sklearn.neighbors import KNeighborsClassifier

    h, y, h_test, y_test = blobs()
    theirs = KNeighborsClassifier(20, metric="cosine", weights=lambda distance: np.exp((1 - distance) / 0.07))
    theirs.fit(h.double().numpy(), y.numpy())
    predictions = PROBES["knn"](h, y, h_test, y_test, classes=4).predictions.numpy()
    assert (predictions == theirs.predict(h_test.double().numpy())).all()


def test_knn_with_fewer_images_than_neighbours_asks_them_all():
    h, y, h_test, y_test = blobs(n=20)
    assert PROBES["knn"](h, y, h_test, y_test, classes=4).settings["k"] == 10


@pytest.mark.parametrize("head", [LINEAR, MLP], ids=["linear", "mlp"])
def test_two_heads_are_two_torch_nn_networks_trained_with_torch_optim(head):
    h, y, h_test, _ = blobs(n=700)
    x, x_test = (t.double() for t in standardised(h, h_test))
    seeds, lr, decay, epochs = (3, 8), 0.05, 1e-2, 4
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # so that a difference cannot be rounding
    try:
        rows = torch.stack([torch.arange(350), torch.arange(350).flip(0)])
        heads = [(seeds[0], lr), (seeds[1], lr / 2)]
        params = train_heads(head, x, y, rows=rows, heads=heads, classes=4, weight_decay=decay, epochs=epochs)
        ours = predict(
            head, params, x_test, rows=torch.arange(350).expand(2, -1), covariance=torch.cov(x.T, correction=0)
        )
        for i, (seed, rate) in enumerate(heads):
            first, order = _draw(head, seed, d=12, classes=4, n=350, epochs=epochs)
            theirs = _with_torch_nn(x[rows[i]], y[rows[i]], x_test, first, order, lr=rate, decay=decay)
            torch.testing.assert_close(ours[i], theirs, rtol=1e-6, atol=1e-8)
    finally:
        torch.set_default_dtype(usual)


def _with_torch_nn(
    x: Tensor, y: Tensor, x_test: Tensor, first: list[Tensor], order: Tensor, *, lr: float, decay: float
) -> Tensor:
    """The usual implementation of the probe: modules, torch.optim.SGD and its cosine schedule, batches of 256."""
    net: nn.Module
    if len(first) == 2:
        net = nn.Linear(12, 4)
        start = [first[0].T, first[1][0]]
    else:
        # momentum=None averages the statistics of all batches; below there is one batch, the whole training set.
        net = nn.Sequential(
            nn.Linear(12, 512, bias=False), nn.BatchNorm1d(512, momentum=None), nn.ReLU(), nn.Linear(512, 4)
        )
        start = [first[0].T, first[1][0], first[2][0], first[3].T, first[4][0]]
    with torch.no_grad():
        for parameter, value in zip(net.parameters(), start, strict=True):
            parameter.copy_(value)
    batches = order[: len(order) // 256 * 256].view(-1, 256)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(batches))
    for batch in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.reset_running_stats()
                net(x)
                # torch stores the unbiased variance; ours divides by n, as in the training batches.
                module.running_var *= (len(x) - 1) / len(x)
        return net.eval()(x_test).softmax(-1)


@pytest.mark.parametrize("name", ["linear", "mlp"])
def test_a_seeds_result_does_not_depend_on_the_other_seeds_of_the_pass(name: str):
    data = blobs()
    together = PROBES[name](*data, classes=4, seeds=(5, 1, 2))
    alone = [PROBES[name](*data, classes=4, seeds=(seed,)) for seed in (5, 1, 2)]
    torch.testing.assert_close(together.confidence, alone[0].confidence, rtol=0, atol=1e-3)
    assert (together.predictions == alone[0].predictions).double().mean() > 0.99
    for ours, theirs in zip(together.accuracy, alone, strict=True):
        assert ours == pytest.approx(theirs.accuracy[0], abs=1)
    # The seeds give different results, or the test above would prove nothing.
    assert not torch.allclose(alone[0].confidence, alone[1].confidence, rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", PROBES)
def test_the_same_seed_gives_the_same_bits(name: str):
    data = blobs()
    one, two = (PROBES[name](*data, classes=4, seeds=(7,)) for _ in range(2))
    assert torch.equal(one.confidence, two.confidence)
    assert torch.equal(one.predictions, two.predictions)


@pytest.mark.parametrize("name", PROBES)
def test_shuffled_test_labels_change_the_accuracy_to_chance_and_nothing_else(name: str):
    h, y, h_test, y_test = blobs(n=2000)
    shuffled = y_test[torch.randperm(len(y_test), generator=torch.Generator().manual_seed(0))]
    honest = PROBES[name](h, y, h_test, y_test, classes=4, seeds=(0,))
    blind = PROBES[name](h, y, h_test, shuffled, classes=4, seeds=(0,))
    assert torch.equal(honest.predictions, blind.predictions)
    assert torch.equal(honest.confidence, blind.confidence)
    assert honest.settings == blind.settings
    assert blind.accuracy[0] == pytest.approx(25, abs=5)  # 1000 images: three and a half standard deviations
    assert honest.accuracy[0] > 60


@pytest.mark.parametrize("name", PROBES)
def test_permuted_training_labels_give_chance(name: str):
    h, y, h_test, y_test = blobs(n=2000)
    shuffled = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(0))]
    assert PROBES[name](h, shuffled, h_test, y_test, classes=4, seeds=(0,)).accuracy[0] == pytest.approx(25, abs=6)


@pytest.mark.parametrize("name", PROBES)
def test_a_result_has_an_accuracy_a_seed_predictions_and_confidence(name: str):
    h, y, h_test, y_test = blobs()
    result = PROBES[name](h, y, h_test, y_test, classes=4, seeds=(0, 1))
    assert len(result.accuracy) == (1 if name == "knn" else 2)
    assert result.predictions.shape == result.confidence.shape == (300,)
    assert result.predictions.dtype == torch.int64
    assert ((result.confidence > 0) & (result.confidence <= 1 + 1e-6)).all()
    assert result.accuracy[0] == pytest.approx(100 * (result.predictions == y_test).double().mean().item())


def test_retrieval_agrees_with_scikit_learns_average_precision_and_a_count():
    from sklearn.metrics import average_precision_score

    h, y, h_test, y_test = blobs(n=1000)
    found = retrieval(h, y, h_test, y_test, classes=4)
    assert tuple(found) == RETRIEVAL
    a, b = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (h_test.double().numpy(), h.double().numpy()))
    s, same = a @ b.T, y_test.numpy()[:, None] == y.numpy()
    precision = [average_precision_score(hit, row) for hit, row in zip(same, s, strict=True)]
    assert found["mAP"] == pytest.approx(100 * np.mean(precision), abs=1e-3)
    for k in (1, 5, 10):
        hits = [hit[np.argsort(-row)[:k]].any() for hit, row in zip(same, s, strict=True)]
        assert found[f"recall@{k}"] == pytest.approx(100 * np.mean(hits))
    assert 25 < found["mAP"] < found["recall@1"] < found["recall@5"] < found["recall@10"] <= 100


def test_retrieval_of_two_queries_by_hand():
    """The first finds its class at places 2 and 4 of 4: (1/2 + 2/4) / 2. The second has none to find."""
    angle = torch.tensor([0.1, 0.2, 0.3, 0.4])
    h, query = torch.stack((angle.cos(), angle.sin()), dim=1), torch.tensor([[1.0, 0.0]])
    labels = torch.tensor([1, 0, 1, 0])
    alone = retrieval(h, labels, query, torch.tensor([0]), classes=3)
    assert alone == pytest.approx({"recall@1": 0, "recall@5": 100, "recall@10": 100, "mAP": 50})
    both = retrieval(h, labels, query.expand(2, 2), torch.tensor([0, 2]), classes=3)
    assert both == pytest.approx({"recall@1": 0, "recall@5": 50, "recall@10": 50, "mAP": 25})


@pytest.mark.parametrize("name", ["linear", "mlp"])
def test_the_scale_and_the_offset_of_a_feature_do_not_matter(name: str):
    h, y, h_test, y_test = blobs()
    scale, offset = torch.logspace(-2, 2, 12), torch.linspace(-3, 3, 12)
    plain = PROBES[name](h, y, h_test, y_test, classes=4, seeds=(0,))
    moved = PROBES[name](h * scale + offset, y, h_test * scale + offset, y_test, classes=4, seeds=(0,))
    assert (plain.predictions == moved.predictions).double().mean() > 0.98


@pytest.mark.parametrize("name", PROBES)
def test_dead_and_collapsed_features_give_finite_results(name: str):
    h, y, h_test, y_test = blobs()
    h, h_test = h.clone(), h_test.clone()
    h[:, 3] = h_test[:, 3] = 0
    assert PROBES[name](h, y, h_test, y_test, classes=4, seeds=(0,)).accuracy[0] > 55
    collapsed = PROBES[name](torch.ones_like(h), y, torch.ones_like(h_test), y_test, classes=4, seeds=(0,))
    assert collapsed.confidence.isfinite().all()
    assert collapsed.accuracy[0] == pytest.approx(25, abs=1)


def test_the_summaries_of_all_probes_are_ready_for_json_with_mean_and_deviation():
    h, y, h_test, y_test = blobs(n=200)
    results = probe_features(Features(h, y=y), Features(h_test, y=y_test), seeds=(0, 1, 2), classes=4)
    assert json.loads(json.dumps(results)) == results
    assert list(results) == ["linear", "mlp", "knn", "retrieval"]
    assert results.pop("retrieval") == retrieval(h, y, h_test, y_test, classes=4)
    for probe in results.values():
        assert probe["mean"] == pytest.approx(np.mean(probe["accuracy"]))
        expected = np.std(probe["accuracy"], ddof=1) if len(probe["accuracy"]) > 1 else 0
        assert probe["std"] == pytest.approx(expected)
    assert results["knn"] == summary(PROBES["knn"](h, y, h_test, y_test, classes=4))


def test_what_a_user_can_get_wrong_is_one_line():
    h, y, h_test, y_test = blobs(n=40)
    with pytest.raises(UserError, match="NaN"):
        PROBES["knn"](h * torch.nan, y, h_test, y_test, classes=4)
    with pytest.raises(UserError, match="one label an image"):
        PROBES["linear"](h, y[:-1], h_test, y_test, classes=4)
    with pytest.raises(UserError, match=r"0 … 2"):
        PROBES["mlp"](h, y, h_test, y_test, classes=3)
    with pytest.raises(UserError, match="columns"):
        PROBES["knn"](h, y, h_test[:, :3], y_test, classes=4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROBES)
def test_cuda_and_cpu_agree(name: str):
    data = blobs(n=4000)
    on_cpu, on_cuda = (PROBES[name](*data, classes=4, seeds=(0, 1), device=device) for device in ("cpu", "cuda"))
    torch.testing.assert_close(on_cuda.confidence, on_cpu.confidence, rtol=0, atol=0.02)
    assert on_cuda.accuracy == pytest.approx(on_cpu.accuracy, abs=0.5)
    assert on_cuda.settings == on_cpu.settings
