"""Losses on several processes (gloo): every rank has the loss of the whole batch, DDP the gradient of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from curvssl import BarlowTwinsLoss, Curvature, CurvSSLLoss, KernelCurvSSLLoss, VICRegLoss
from curvssl import ranks as distributed
from curvssl.losses import Chord, Sum, ViewPath
from curvssl.paper.arms import NTXent, Profile

IMAGES, FEATURES, EMBEDDING = 24, 6, 4  # 24 images: 12 for each of 2 ranks, 8 for each of 3
LOSSES: dict[str, nn.Module] = {
    "barlow": BarlowTwinsLoss(lambda_emb=0.3),
    "vicreg": VICRegLoss(),
    "curvssl": CurvSSLLoss(k=9, lambda_curv=0.7),  # more neighbours than any of 3 ranks has images
    "rbf": KernelCurvSSLLoss(k=9, alpha_curv=3.0),
    "curvature alone": Curvature(k=9),
    "kernel curvature alone": Curvature(k=5, kernel="rbf", lambda_curv=0.3),
    "laplacian": KernelCurvSSLLoss(k=5, kernel="laplacian", gamma="median"),
    "polynomial": KernelCurvSSLLoss(k=5, kernel="polynomial", gamma="scale"),
    "cosine": KernelCurvSSLLoss(k=5, kernel="cosine"),
    "linear": KernelCurvSSLLoss(k=5, kernel="linear"),
    "nt-xent": NTXent(),
    "profile": Profile(k=9),
}
MANY: dict[str, nn.Module] = {  # over all views
    "barlow over views": BarlowTwinsLoss(lambda_emb=0.3),
    "vicreg over views": VICRegLoss(),
    "curvssl with the chord": Sum(CurvSSLLoss(k=9), (2.0, Chord())),
    "barlow with the path": Sum(BarlowTwinsLoss(), (2.0, ViewPath())),
}
Outcome = dict[str, Any]


def images() -> Tensor:
    """Two global and two local views of each image, and a last one for blends, (5, IMAGES, FEATURES)."""
    noise = torch.randn((5, IMAGES, FEATURES), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return noise[:1] + 0.4 * noise


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(FEATURES, EMBEDDING, dtype=torch.float64)


def outcome(name: str, network: nn.Module, x: Tensor) -> Outcome:
    """The results of one step: the terms, the loss, and the gradients of the network's parameters."""
    loss: Any = (LOSSES | MANY)[name]
    z = network(x.flatten(0, 1)).unflatten(0, x.shape[:2])
    t = x[0, :, 0].sigmoid()  # any number between 0 and 1 for each image
    terms = loss.terms_of(z, t=t) if name in MANY else loss.terms(z[0], z[1])
    value = loss.weigh(terms)
    value.backward()
    gradients = {name.removeprefix("module."): p.grad for name, p in network.named_parameters()}
    return {"loss": value.detach(), "terms": {n: t.detach() for n, t in terms.items()}, "gradients": gradients}


def work(rank: int, folder: str) -> None:
    """One process: the last of three ranks, or one of three ranks and then of two."""
    torch.set_num_threads(1)
    for ranks in (3, 2):
        if rank < ranks:
            work_as(rank, ranks, f"{folder}/{ranks}")


def work_as(rank: int, ranks: int, folder: str) -> None:
    """One rank: compute every loss on its part of the batch, and write the outcomes to the folder."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    x = images().chunk(ranks, 1)[rank]
    found: Outcome = {name: outcome(name, nn.parallel.DistributedDataParallel(model()), x) for name in LOSSES | MANY}
    single = torch.full((2, 3), float(rank), dtype=torch.float64, requires_grad=True)
    everyone = distributed.gather(single)
    (gradient,) = torch.autograd.grad((everyone * (1 + rank)).sum(), single)
    found["gather"] = everyone.detach(), gradient
    summed = distributed.total(single)
    (gradient,) = torch.autograd.grad((summed * (1 + rank)).sum(), single)
    found["total"] = summed.detach(), gradient
    found["place"] = distributed.rank(), distributed.world_size()
    try:
        CurvSSLLoss(k=IMAGES)(x[0], x[1])
    except ValueError as error:
        found["error"] = str(error)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks and three ranks found, each in a folder, all from one start of three processes."""
    folder = tmp_path_factory.mktemp("ranks")
    for ranks in (2, 3):
        (folder / str(ranks)).mkdir()
    mp.spawn(work, args=(str(folder),), nprocs=3)
    return folder


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest, folder: Path) -> list[Outcome]:
    """The outcomes of all ranks."""
    return [torch.load(folder / f"{request.param}/{rank}.pt") for rank in range(request.param)]


@pytest.mark.parametrize("name", LOSSES | MANY)
def test_every_rank_has_the_loss_and_the_terms_of_one_process_with_the_whole_batch(
    name: str, ranks: list[Outcome]
) -> None:
    whole = outcome(name, model(), images())
    for one in ranks:
        torch.testing.assert_close(one[name]["loss"], whole["loss"], rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(one[name]["terms"], whole["terms"], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES | MANY)
def test_ranks_give_the_gradient_of_one_process_with_the_whole_batch(name: str, ranks: list[Outcome]) -> None:
    whole = outcome(name, model(), images())
    assert whole["gradients"]["weight"].abs().max() > 1e-3
    for one in ranks:
        torch.testing.assert_close(one[name]["gradients"], whole["gradients"], rtol=1e-10, atol=1e-12)


def test_gather_puts_the_ranks_in_order_and_gives_back_the_sum_of_their_gradients(ranks: list[Outcome]) -> None:
    expected = torch.arange(len(ranks), dtype=torch.float64).repeat_interleave(2)[:, None].expand(-1, 3)
    for one in ranks:
        everyone, gradient = one["gather"]
        torch.testing.assert_close(everyone, expected)
        assert (gradient == sum(range(1, len(ranks) + 1))).all()


def test_total_is_the_sum_and_gives_back_the_sum_of_the_gradients(ranks: list[Outcome]) -> None:
    for one in ranks:
        summed, gradient = one["total"]
        assert (summed == sum(range(len(ranks)))).all()
        assert (gradient == sum(range(1, len(ranks) + 1))).all()


def test_rank_knows_its_place_and_k_is_measured_against_the_whole_batch(ranks: list[Outcome]) -> None:
    for rank, one in enumerate(ranks):
        assert one["place"] == (rank, len(ranks))
        assert one["error"].startswith(f"k={IMAGES} needs at least {IMAGES + 1} points, got {IMAGES}")


def test_one_process_alone_is_its_own_world() -> None:
    x = images()[0]
    assert (distributed.rank(), distributed.world_size()) == (0, 1)
    assert distributed.gather(x) is x
    assert distributed.total(x) is x
