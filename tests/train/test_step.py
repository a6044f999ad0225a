"""One training step: two views in one pass, the update of the weights, and the means of the terms."""

import copy
import math

import pytest
import torch
from steps import BATCH, draw, make_step, small_net, take
from torch import Tensor, nn

from curvssl import losses
from curvssl.config import demo
from curvssl.data.named import load
from curvssl.models import per_view
from curvssl.train.step import NotFinite, Step


def test_two_views_in_one_pass_are_what_two_passes_would_be():
    apart = small_net().double()
    together = copy.deepcopy(apart)
    per_view(together)
    views = torch.randn(2 * 9, 3, 16, 16, dtype=torch.float64)
    torch.testing.assert_close(together(views), torch.cat([apart(view) for view in views.chunk(2)]))
    for name, value in apart.state_dict().items():  # running means and variances too
        torch.testing.assert_close(together.state_dict()[name], value)
    torch.testing.assert_close(together.eval()(views), apart.eval()(views))


def test_a_batchnorm_with_its_own_forward_keeps_it():
    timm = pytest.importorskip("timm.layers")
    layer = timm.BatchNormAct2d(4)
    together = copy.deepcopy(layer)
    per_view(together)
    x = torch.randn(6, 4, 5, 5)
    torch.testing.assert_close(together(x), torch.cat([layer(view) for view in x.chunk(2)]))


def test_a_step_is_the_textbook_step():
    """Loss by hand from the same views, gradient by autograd, Adam by torch."""
    step = make_step("barlow-twins", "eager", torch.device("cpu"))
    oracle = small_net()
    optimizer = torch.optim.Adam(oracle.parameters(), lr=1e-3, weight_decay=1e-4)
    rows, u = torch.arange(BATCH), draw(step, BATCH)
    step(rows, u, 1e-3)
    images = load("digits").train.images.pixels[rows]
    z0, z1 = (oracle(step.views.makers[0](images, numbers)) for numbers in u[0])
    loss = losses.BarlowTwinsLoss(lambda_emb=demo().lambda_emb)(z0, z1)
    loss.backward()
    assert step.means()["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for ours, theirs in zip(step.net.parameters(), oracle.parameters(), strict=True):
        assert float((ours.grad - theirs.grad).norm()) < 1e-2 * float(theirs.grad.norm()) + 1e-3
        theirs.grad = ours.grad  # Adam turns the rounding of a small gradient into a whole step: use the same
    assert float(step.gradient_norm()) == pytest.approx(
        float(nn.utils.get_total_norm([p.grad for p in oracle.parameters()]))
    )
    optimizer.step()
    for ours, theirs in zip(step.net.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_means_are_those_of_the_steps_since_the_last_reset():
    step = make_step("vicreg", "eager", torch.device("cpu"))
    take(step, 1)
    first = step.means()["loss"]
    step.reset()
    take(step, 2)
    both = step.means()["loss"]
    assert both != first
    again = make_step("vicreg", "eager", torch.device("cpu"))
    take(again, 1)
    assert again.means()["loss"] == first


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_on_cpu_a_step_that_is_not_finite_leaves_the_weights_as_they_were(what: str):
    class Root(nn.Module):
        """A loss that is infinite, or has an infinite gradient where it is 0."""

        def forward(self, z0: Tensor, z1: Tensor) -> Tensor:
            return (z0 - z0).abs().sum().sqrt() if what == "gradient" else z0.sum() / 0

    step = make_step("vicreg", "eager", torch.device("cpu"), criterion=Root())
    before = [p.detach().clone() for p in step.net.parameters()]
    with pytest.raises(NotFinite, match=what):
        take(step, 1)
    assert all(torch.equal(p, old) for p, old in zip(step.net.parameters(), before, strict=True))
    assert step.means()["loss"] == 0


def test_the_step_in_which_the_loss_broke_is_known_afterwards(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Step, "check", lambda *_: None)  # as on a device that is not waited for
    step = make_step("vicreg", "eager", torch.device("cpu"))
    take(step, 3)
    assert step.broken_for() == 0
    with torch.no_grad():
        next(step.net.parameters()).fill_(math.nan)
    take(step, 1)
    step.reset()  # the end of an epoch
    take(step, 2)
    assert step.broken_for() == 3


def test_a_step_of_many_views_is_the_double_loop_over_pairs_of_single_passes():
    """Each view in a pass of its own; the running statistics are those of the two global views."""
    step = make_step("barlow-twins", "eager", torch.device("cpu"), local=2, alpha_chord=3.0)
    oracle = small_net()
    rows, u = torch.arange(BATCH), draw(step, BATCH)
    step(rows, u, 1e-3)
    big, small = step.views(load("digits").train.images.pixels[rows], u)
    passes = [*big.split(BATCH)[:2], *small.split(BATCH), big.split(BATCH)[2]]
    z0, z1 = (oracle(view) for view in passes[:2])
    statistics = {name: buffer.clone() for name, buffer in oracle.named_buffers()}
    *local, blended = (oracle(view) for view in passes[2:])
    twins = losses.BarlowTwinsLoss(lambda_emb=demo().lambda_emb)
    apart = [twins(g, v) for g in (z0, z1) for v in local]
    chord = losses.Chord()(z0, blended, u[-1].flatten())
    loss = (twins(z0, z1) + torch.stack(apart).mean()) / 2 + 3 * chord
    loss.backward()
    assert step.means()["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert step.means()["chord"] == pytest.approx(chord.item(), rel=1e-5)
    for ours, theirs in zip(step.net.parameters(), oracle.parameters(), strict=True):
        assert float((ours.grad - theirs.grad).norm()) < 1e-2 * float(theirs.grad.norm()) + 1e-3
    torch.testing.assert_close(dict(step.net.named_buffers()), statistics)
    torch.testing.assert_close(step.z, torch.cat((z0, z1)).detach(), rtol=1e-4, atol=1e-4)


def test_a_teacher_is_the_average_of_the_weights_and_its_global_views_are_the_targets():
    step = make_step("barlow-twins", "eager", torch.device("cpu"), local=2, alpha_chord=3.0, average=0.9, teacher=True)
    rows, u = torch.arange(BATCH), draw(step, BATCH)
    step(rows, u, 1e-3)
    assert step.average is not None
    for average, first, now in zip(*(n.parameters() for n in (step.average.net, small_net(), step.net)), strict=True):
        torch.testing.assert_close(average, 0.9 * first + 0.1 * now)
    student, teacher = small_net(), small_net()
    student.load_state_dict(step.net.state_dict())
    teacher.load_state_dict(step.average.net.state_dict())
    step.reset()
    step(rows, u, 1e-3)
    big, small = step.views(load("digits").train.images.pixels[rows], u)
    z0, z1, blended, *local = (student(view) for batch in (big, small) for view in batch.split(BATCH))
    t0, t1 = (teacher(view).detach() for view in big.split(BATCH)[:2])
    twins = losses.BarlowTwinsLoss(lambda_emb=demo().lambda_emb)
    together = (twins(t0, z1) + twins(t1, z0)) / 2
    apart = torch.stack([twins(t, z) for t in (t0, t1) for z in local]).mean()
    loss = (together + apart) / 2 + 3 * losses.Chord()(z0, blended, u[-1].flatten())
    loss.backward()
    assert step.means()["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for ours, theirs in zip(step.net.parameters(), student.parameters(), strict=True):
        assert float((ours.grad - theirs.grad).norm()) < 1e-2 * float(theirs.grad.norm()) + 1e-3
    torch.testing.assert_close(dict(step.average.net.named_buffers()), dict(teacher.named_buffers()))


def test_an_average_that_does_not_teach_changes_nothing_of_the_training_and_averages_running_statistics_too():
    plain, averaged = (make_step("vicreg", "eager", torch.device("cpu"), average=decay) for decay in (0.0, 0.5))
    expected = {name: value.clone() for name, value in small_net().state_dict().items()}
    for s in range(3):
        for step in (plain, averaged):
            step(torch.arange(BATCH) + s, draw(step, BATCH), 1e-3)
        for name, value in plain.net.state_dict().items():
            expected[name] = (expected[name] + value) / 2 if value.is_floating_point() else value
    torch.testing.assert_close(averaged.net.state_dict(), plain.net.state_dict(), rtol=0, atol=0)
    assert averaged.average is not None
    found = averaged.average.net.state_dict()
    for name, value in expected.items():
        if value.is_floating_point():
            torch.testing.assert_close(found[name], value)


def test_a_middle_view_is_compared_with_the_global_ones_and_with_nothing_else():
    step = make_step("barlow-twins", "eager", torch.device("cpu"), local=1, alpha_path=3.0)
    rows, u, net = torch.arange(BATCH), draw(step, BATCH), small_net()
    step(rows, u, 1e-3)
    big, small = step.views(load("digits").train.images.pixels[rows], u)
    *first, middle, local = (net(view).detach() for view in (*big.split(BATCH), small))
    ends = torch.cat(first)
    z0, z1, z = ((z - ends.mean(0)) / ends.std(0, correction=0) for z in (*first, middle))
    path = (z - (z0 + z1) / 2).square().mean()
    twins = losses.BarlowTwinsLoss(lambda_emb=demo().lambda_emb)(*first, local)
    assert step.means()["path"] == pytest.approx(path.item(), rel=1e-3)
    assert step.means()["loss"] == pytest.approx((twins + 3 * path).item(), rel=1e-3)


def test_an_own_criterion_is_averaged_over_the_same_pairs():
    class Distance(nn.Module):
        def forward(self, z0: torch.Tensor, z1: torch.Tensor) -> torch.Tensor:
            return (z0 - z1).square().mean()

    step = make_step("own", "eager", torch.device("cpu"), criterion=Distance(), local=1)
    rows, u = torch.arange(BATCH), draw(step, BATCH)
    z0, z1, local = step.embed(rows, u)[0].detach().chunk(3)
    both, *apart = (float((a - b).square().mean()) for a, b in ((z0, z1), (z0, local), (z1, local)))
    step(rows, u, 1e-3)
    assert step.means()["loss"] == pytest.approx((both + sum(apart) / 2) / 2, rel=1e-5)
