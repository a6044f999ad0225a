"""How good is an encoder without labels: measures of its features, and whether a run learns at all.

Each measure is a function of features (n, d), or of several views (n, v, d), to one number, computed in float64. What
has no value, such as the slope of a single eigenvalue, is NaN, and so is every measure of features that hold NaN.
All of them shift with the architecture, the objective, d and n: compare only runs that share these.
To add a measure: one function here, and one line in MEASURES.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from curvssl.geometry import nearest_neighbors
from curvssl.kernels import rescaling, unit

LIDAR_VIEWS = 10  # of each image. LiDAR's authors take 50, which costs five times as much
ROUNDING = 1e-13  # eigenvalues below this share of the largest are float64's rounding


# ---- the spectrum, from which most measures are made


def gram_of(x: Tensor, *, centre: bool = True) -> Tensor:
    """xᵀx or xxᵀ of the features (n, d), whichever is smaller, in float64; centred unless told otherwise.

    Up to a power of four, which no measure feels: so squares of very large or very small features are finite.
    """
    x = x.double()
    x = x * rescaling(x, (0, 1)) if x.numel() else x
    x = x - x.mean(0) if centre else x
    return x.mT @ x if x.shape[0] > x.shape[1] else x @ x.mT


def eigenvalues(gram: Tensor) -> Tensor:
    """The eigenvalues of a Gram matrix (m, m), largest first, rounding set to 0; NaN if an entry is no number.

    They are the squared singular values of the features: of centred ones, n − 1 times the covariance's eigenvalues.
    """
    if not gram.isfinite().all():
        return torch.full((len(gram),), math.nan, dtype=torch.float64)
    found = torch.linalg.eigvalsh(gram.cpu()).flip(0)
    return torch.where(found > ROUNDING * found[0], found, 0)


def exp_entropy(share: Tensor) -> float:
    """exp(−Σ p log p): m for m equal shares, 1 if one share is everything."""
    return float(torch.special.entr(share).sum().exp())


def shares(values: Tensor) -> Tensor:
    """Non-negative values (m,) over their sum; all 0 if they are."""
    return values / values.sum().clamp_min(1e-300)


def rank_from(gram: Tensor) -> float:
    """The effective rank of embeddings from their Gram matrix."""
    return exp_entropy(shares(eigenvalues(gram).sqrt()))


# ---- the measures


def effective_rank(x: Tensor) -> float:
    """exp(−Σ p log p), p = σ/Σσ, over the singular values σ of the centred features. Roy and Vetterli, 2007.

    d if the singular values are equal, 1 if only one is not zero or all points are equal. RankMe is the same without
    centring, and adds ε to p.
    """
    return rank_from(gram_of(x))


def rankme(x: Tensor, *, eps: float = 1e-7) -> float:
    """RankMe: exp(−Σ p log p), p = σ/Σσ + ε, over the singular values σ. Garrido et al., 2022, arXiv:2210.02885.

    d if the singular values are equal, 1 if only one is not zero. As published the features are not centred: a common
    offset is a direction too, so that constant features have RankMe 1.
    """
    return _rankme(eigenvalues(gram_of(x, centre=False)), eps=eps)


def _rankme(found: Tensor, *, eps: float = 1e-7) -> float:
    return exp_entropy(shares(found.sqrt()) + eps)


def alpha_req(x: Tensor) -> float:
    """α-ReQ: minus the slope of log λ_i over log i, by least squares, over the eigenvalues λ_1 ≥ λ_2 ≥ … > 0 of the
    covariance. Agrawal et al., NeurIPS 2022.

    0 if all λ are equal; α for λ_i = i^−α. Fewer than two positive eigenvalues have no slope: NaN.
    """
    return _slope(eigenvalues(gram_of(x)))


def _slope(found: Tensor) -> float:
    log_value = found[found > 0].log()
    log_index = torch.arange(1, len(log_value) + 1, dtype=torch.float64).log()
    log_index = log_index - log_index.mean() if len(log_index) else log_index
    return -_over(float(log_index @ log_value), float(log_index @ log_index))


def nesum(x: Tensor) -> float:
    """NESum: Σ λ_i / λ_1 over the eigenvalues of the covariance. He and Ozay, ICML 2022.

    d for white features, 1 for features on a line; NaN for constant ones.
    """
    return _total_over_first(eigenvalues(gram_of(x)))


def stable_rank(x: Tensor) -> float:
    """Stable rank: ‖X‖_F² / ‖X‖₂² = Σ σ_i² / σ_1². Rudelson and Vershynin, 2007.

    d if the singular values are equal, 1 if only one is not zero; NaN for zeros. NESum is the same after centring.
    """
    return _total_over_first(eigenvalues(gram_of(x, centre=False)))


def _total_over_first(found: Tensor) -> float:
    return _over(float(found.sum()), float(found[0]))


def spectral(x: Tensor) -> dict[str, float]:
    """The four measures above, of features (n, d), from two spectra instead of four."""
    plain, centred = eigenvalues(gram_of(x, centre=False)), eigenvalues(gram_of(x))
    return {
        "rankme": _rankme(plain),
        "alpha_req": _slope(centred),
        "nesum": _total_over_first(centred),
        "stable_rank": _total_over_first(plain),
    }


def selfcluster(x: Tensor) -> float:
    """SelfCluster: (Q − n − n(n−1)/d) / (n² − n − n(n−1)/d), Q = Σ_ij cos²(x_i, x_j). Tsitsulin et al., 2023,
    arXiv:2305.16562.

    n(n−1)/d is what random directions are expected to add to Q, so these have 0; points on one line through the origin
    have 1. A zero has no direction and is left out. NaN for d = 1 and for fewer than two points.
    """
    x = x[(x != 0).any(1)].double()
    n, d = x.shape
    u = unit(x)
    q = float((u.mT @ u if n > d else u @ u.mT).square().sum())  # ‖uᵀu‖ = ‖uuᵀ‖
    random = n * (n - 1) / d
    return _over(q - n - random, n * n - n - random)


def lidar(x: Tensor, *, delta: float = 1e-4, eps: float = 1e-7) -> float:
    """LiDAR: RankMe's entropy of the eigenvalues of Σ_w^−½ Σ_b Σ_w^−½, for v views of each of n images (n, v, d).
    Thilak et al., 2023, arXiv:2312.04000.

        Σ_b = mean over images of (μ_i − μ)(μ_i − μ)ᵀ,   Σ_w = mean over views of (x_iv − μ_i)(x_iv − μ_i)ᵀ + δ I

    The number of directions in which images differ more than views of one image do: at most min(d, n − 1), reached if
    these directions are alike. A direction in which only views differ counts for nothing. NaN for equal images.
    """
    x = x.double()
    if not x.isfinite().all():
        return math.nan
    means = x.mean(1)
    off, within = means - means.mean(0), (x - means[:, None]).flatten(0, 1)
    noise = within.mT @ within / len(within)
    # δ, or rounding if that is larger: else the matrix of large features might not be positive.
    least = noise.trace() * x.shape[-1] * torch.finfo(x.dtype).eps
    noise = noise + least.clamp_min(delta) * torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    # With Σ_w = L Lᵀ, L⁻¹ Σ_b L⁻ᵀ has the same eigenvalues, and so has the Gram matrix of the rows L⁻¹ (μ_i − μ).
    white = torch.linalg.solve_triangular(torch.linalg.cholesky(noise), off.mT, upper=False).mT
    found = eigenvalues(gram_of(white, centre=False))
    return exp_entropy(shares(found) + eps) if found[0] > 0 else math.nan


def twonn(x: Tensor) -> float:
    """Intrinsic dimension by two neighbours: (m − 1) / Σ log(r₂/r₁), the maximum-likelihood estimate, over the m points
    whose distances 0 < r₁ ≤ r₂ to their two nearest neighbours are known. Facco et al., 2017.

    1 for points along a line, 2 on a plane or on the surface of a ball, whatever d is. Equal points count once.
    """
    x = torch.unique(x, dim=0) if x.isfinite().all() else x[:0]
    if len(x) < 3:
        return math.nan
    near, x = nearest_neighbors(x, k=2), x.double()
    r = torch.stack([(x - x[near[:, i]]).norm(dim=1) for i in range(2)])
    return _over(len(x) - 1.0, float((r[1] / r[0]).log().sum()))


def _over(a: float, b: float) -> float:
    return a / b if b else math.nan


@dataclass(frozen=True)
class Measure:
    title: str
    compute: Callable[[Tensor], float]
    good: str  # which values are good
    reading: str  # one line for the reader
    views: bool = False  # of several views (n, v, d), which only `curvssl quality` makes

    def __call__(self, x: Tensor) -> float:
        return self.compute(x)


MEASURES = {
    "rankme": Measure("RankMe", rankme, "higher", "how many directions the features use, at most d"),
    "alpha_req": Measure("α-ReQ", alpha_req, "near 1", "how fast the spectrum falls, 0 for noise"),
    "nesum": Measure("NESum", nesum, "higher", "total variance over that of the strongest direction, 1 to d"),
    "stable_rank": Measure("stable rank", stable_rank, "higher", "NESum without centring: low if an offset rules"),
    "selfcluster": Measure("SelfCluster", selfcluster, "lower", "0 directions spread evenly, 1 all the same direction"),
    "twonn": Measure("TwoNN", twonn, "to compare", "dimension of the surface on which the features lie"),
    "lidar": Measure("LiDAR", lidar, "higher", "directions that tell images apart, not views of one", views=True),
}


def measured(h: Tensor, views: Tensor) -> dict[str, float]:
    """Every measure of features h (n, d), or of those of several views of some images (m, v, d)."""
    found = spectral(h)
    others = {name: measure for name, measure in MEASURES.items() if name not in found}
    return found | {name: measure(views if measure.views else h) for name, measure in others.items()}


# ---- does a run learn?

WINDOW_EPOCHS, WINDOW_STEPS = 5, 100  # the mean over these is compared: at least so many epochs and so many steps
# In results/ the views' correlation ends above 0.5 in every run that learned, and below 0.2 in every run that did not.
AGREEING = 0.25
RISE = 0.005  # a lower correlation has to rise by this from one window to the next; in runs that learned it did by 0.02
ADVICE = "try a longer --warmup-epochs, a lower --lr, or milder views (--augment.crop-scale nearer to 1)"
DEAD_STD = 1e-3  # embeddings whose standard deviation over images is below this have collapsed
DEAD_RANK = 0.02  # so have embeddings, and features, whose effective rank is below this share of the largest possible
CLEAR_RHO = 0.4  # ρ of one batch of 256 varies by ±0.06: only the loss of a ρ that was once so high says something


def agreement(row: Mapping[str, Any], *, d_z: int) -> float:
    """The correlation of the two views' embeddings over the images, about, from the invariance in a row of metrics:
    0 if the views of an image have nothing in common, 1 if they are equal; NaN for a criterion without this term."""
    if "invariance" not in row:
        return math.nan
    if "redundancy" in row:  # Barlow Twins: Σ_u (1 − C_uu)²
        return 1 - math.sqrt(max(0.0, row["invariance"]) / d_z)
    return 1 - _over(row["invariance"], 2 * row["z_std"] ** 2)  # VICReg: mean of (z − z')² = 2 σ² (1 − correlation)


def not_learning(rows: Sequence[Mapping[str, Any]], *, d_z: int) -> str:
    """Why a run with these rows of metrics, to this epoch, does not learn; empty if it does or it is too early to say.

    It does not if the views of an image hardly agree, and agree no more than some epochs before; or if ρ has fallen to
    less than half of what it was.
    """
    if len(rows) < 2 * WINDOW_EPOCHS:
        return ""
    steps = max(1, rows[-1]["step"] - rows[-2]["step"])
    size = max(WINDOW_EPOCHS, -(-WINDOW_STEPS // steps))
    if len(rows) < 2 * size:
        return ""
    before, now = ([agreement(row, d_z=d_z) for row in part] for part in (rows[-2 * size : -size], rows[-size:]))
    epochs = rows[-1]["epoch"] - rows[-1 - size]["epoch"]
    if fmean(now) < AGREEING and fmean(now) - fmean(before) < RISE:
        return (
            f"the two views of an image hardly agree (correlation {fmean(now):z.2f}, and {fmean(before):z.2f} in the "
            f"{epochs} epochs before)"
        )
    rho = [row["rho"] for row in rows]
    means = [fmean(rho[i : i + size]) for i in range(len(rho) - size + 1)]
    if max(means) > CLEAR_RHO and means[-1] < max(means) / 2:
        return f"ρ has fallen to {means[-1]:z.2f} from {max(means):.2f}"
    return ""


def said_last(rows: Sequence[Mapping[str, Any]], *, d_z: int) -> str:
    """What `not_learning` said last during a run, if the views still hardly agree at its end or it is true there.

    In a run that learns nothing the agreement goes up and down a little. So its last epochs alone may look like a rise.
    """
    ends = [agreement(row, d_z=d_z) for row in rows[-WINDOW_EPOCHS:]]
    first = 1 if ends and fmean(ends) < AGREEING else len(rows)
    return next(filter(None, (not_learning(rows[:n], d_z=d_z) for n in range(len(rows), first - 1, -1))), "")


def collapses(row: Mapping[str, Any], *, d_z: int, batch_size: int) -> dict[str, str]:
    """How the embeddings have collapsed in a row of metrics, by name, with what to try; empty if they have not."""
    found = {}
    if row["z_std"] < DEAD_STD:
        found["collapse"] = (
            f"all images get nearly the same embedding (standard deviation {row['z_std']:.1e}): "
            "try a lower --lr, a longer --warmup-epochs, or for vicreg a higher --variance"
        )
    if row["effective_rank"] < max(1.5, DEAD_RANK * min(d_z, batch_size)):
        found["dimensional collapse"] = (
            f"the embeddings use {row['effective_rank']:.1f} of {d_z} dimensions: "
            "try a longer --warmup-epochs, --lambda-emb nearer to 1/d_z (or a higher --covariance), or a larger "
            "--batch-size"
        )
    return found


def warning(rows: Sequence[Mapping[str, Any]], *, d_z: int, batch_size: int) -> str:
    """What is wrong with a run at its end, with what to try: its embeddings have collapsed, or it does not learn."""
    if not rows:
        return ""
    collapsed = collapses(rows[-1], d_z=d_z, batch_size=batch_size)
    said = said_last(rows, d_z=d_z)
    return next(iter(collapsed.values()), f"{said}: {ADVICE}" if said else "")


# ---- a verdict in words

DEAD_SPREAD = 1e-3  # features whose deviation is below this share of their mean are dead: float32 rounds at 1e-7 of it
LOW_RANK = 0.1  # a RankMe below this share of the largest possible one; on digits 0.09 untrained and 0.23 trained
GAIN = 1.2  # LiDAR of a trained encoder over that of the untrained one; on digits 3.3 or more


def verdict(found: Mapping[str, float], untrained: Mapping[str, float], *, h: Tensor, agreed: float) -> str:
    """One sentence on features h (n, d) from their measures, those of the same encoder before training, and the
    agreement of the views at the end of training, which may be NaN."""
    if not h.isfinite().all():
        return "broken: the features hold values that are no numbers; pretrain again with a lower --lr"
    most, used = min(h.shape), effective_rank(h)
    spread = _over(float(h.std(0).norm()), float(h.mean(0).norm()))
    if used < max(1.5, DEAD_RANK * most) or spread < DEAD_SPREAD:
        return f"collapsed: all images get nearly the same features, {used:.1f} of {most} directions are used"
    beside = (
        f"RankMe {found['rankme']:.3g} of {most}, before training {untrained['rankme']:.3g}; "
        f"LiDAR {found['lidar']:.3g}, before training {untrained['lidar']:.3g}"
    )
    if agreed < AGREEING:
        ends = f"the two views of an image agreed to {agreed:z.2f} at the end of training"
        return f"has not learnt: {ends}; {beside}; {ADVICE}"
    if found["lidar"] < GAIN * untrained["lidar"] or found["rankme"] < untrained["rankme"]:
        return f"hardly better than before training: {beside}; train longer, or {ADVICE}"
    if found["rankme"] < LOW_RANK * most:
        return (
            f"low rank: few directions are used, {beside}; train longer, or try a higher --lambda-emb or --covariance"
        )
    return f"healthy: {beside}"


def reading_guide() -> str:
    """How to read the measures, one line each."""
    lines = [f"  {m.title}: {m.reading}; good: {m.good}" for m in MEASURES.values()]
    note = "All of them shift with architecture, objective, data and d: compare only runs that share these."
    return "\n".join(["How to read them (d is the number of features)", *lines, note])
