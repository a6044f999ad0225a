"""The runs that reproduce the paper: a study is a function that returns one configuration per cell.

A cell whose loss is no method has an `Arm` beside its configuration."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from curvssl.config import (
    PRESETS,
    AugmentConfig,
    Colours,
    PretrainConfig,
    default,
    fast_cifar10,
    paper_cifar10,
    paper_mnist,
    unknown,
)
from curvssl.methods import OWN
from curvssl.paper.arms import Arm

Study = dict[str, PretrainConfig]


class Cell(NamedTuple):
    config: PretrainConfig
    arm: Arm | None = None
    baseline: str = ""  # the cell that it is compared with, without its seed


SEEDS = (0, 1, 2)
PAPERS = ("barlow-twins", "vicreg", "curvssl", "kernel-curvssl")  # the methods of Table 1


def faithful() -> Study:
    """Table 1 with the presets: the smallest declared departures from the paper with which training works."""
    return cells(paper_mnist(), paper_cifar10(), methods=PAPERS, seeds=SEEDS)


def literal() -> Study:
    """Table 1 with only what the paper states: no warm-up, no schedule."""
    return cells(*map(bare, (paper_mnist(), paper_cifar10())), methods=PAPERS, seeds=SEEDS)


def bare(preset: PretrainConfig) -> PretrainConfig:
    """A preset without the settings that the study `recipe` chose: the usual crops, no warm-up, no schedule."""
    usual = {"mnist": (0.8, 1.0), "cifar10": (0.2, 1.0)}[preset.dataset]
    augment = dataclasses.replace(preset.augment, crop_scale=usual)
    open_settings: dict[str, Any] = {"projector_width": 512, "projector_norm": False, "gamma": "median"}
    return dataclasses.replace(preset, warmup_epochs=0.0, schedule="constant", augment=augment, **open_settings)


def alpha() -> Study:
    """The effect of the weight α_curv on CIFAR-10 at 100 epochs, paired over two seeds; α = 0 is Barlow Twins.

    In so short a run the warm-up is half of all epochs: ten epochs would lead into the trap of docs/reproduction.md."""
    base = dataclasses.replace(paper_cifar10(), epochs=100, warmup_epochs=50)
    study = cells(base, methods=("barlow-twins",), seeds=SEEDS[:2])
    for weight in (1.0, 10.0, 100.0):
        setting: dict[str, Any] = {"alpha_curv": weight}
        weighed = dataclasses.replace(base, **setting)
        curved = cells(weighed, methods=("curvssl", "kernel-curvssl"), seeds=SEEDS[:2])
        study |= {f"{name}-alpha{weight:g}": config for name, config in curved.items()}
    return study


def recipe() -> Study:
    """Settings that the paper leaves open, evaluated on held-out training images. On CIFAR-10: one change at a time at
    50 epochs, the promising ones at 200, and changes to the best of these. On MNIST: the crop."""
    start = dataclasses.replace(bare(paper_cifar10()), epochs=50, warmup_epochs=10, schedule="cosine", holdout=0.1)
    study: Study = {}

    def add(method: str, name: str, base: PretrainConfig = start, **changes: Any) -> PretrainConfig:
        cell = f"{base.dataset}-{method}-{name}"
        study[cell] = dataclasses.replace(base, method=method, **changes)
        return study[cell]

    def twins(name: str, **changes: Any) -> PretrainConfig:
        return add("barlow-twins", name, **changes)

    twins("constant", schedule="constant")
    twins("cosine")
    twins("cosine-norm", projector_norm=True)
    twins("cosine-wide", projector_width=2048)
    twins("cosine-wide-norm", projector_width=2048, projector_norm=True)
    twins("cosine-crop.08", augment=views(crop=0.08))
    twins("cosine-crop.4", augment=views(crop=0.4))
    twins("cosine-colour.8", augment=views(colour=0.8))
    twins("cosine-blur", augment=views(blur=0.5))
    twins("cosine-warm20", warmup_epochs=20)
    for gamma in ("median", "scale", "auto"):
        add("kernel-curvssl", f"cosine-{gamma}", gamma=gamma)
    add("vicreg", "cosine")
    add("vicreg", "cosine-wide", projector_width=2048)

    twins("200-constant", epochs=200, schedule="constant")
    twins("200-cosine", epochs=200)
    slower = twins("200-cosine-warm40", epochs=200, warmup_epochs=40)
    twins("200-cosine-warm40-wide", base=slower, projector_width=2048)
    best = twins("200-cosine-warm40-crop.08", base=slower, augment=views(crop=0.08))
    twins("200-cosine-warm40-colour.8", base=slower, augment=views(colour=0.8))

    twins("200-best-constant", base=best, schedule="constant")
    twins("200-best-narrow", base=best, projector_width=256)
    twins("200-best-crop.05", base=best, augment=views(crop=0.05))
    twins("200-best-colour.2", base=best, augment=views(crop=0.08, colour=0.2))
    slowest = dataclasses.replace(best, schedule="constant", warmup_epochs=80)
    for colour in (0.4, 0.6, 0.8):
        name = f"200-best-constant-warm80-colour{short(colour)}"
        twins(name, base=slowest, augment=views(crop=0.08, colour=colour))
    add("vicreg", "200-best-constant", base=best, schedule="constant")

    digits = dataclasses.replace(bare(paper_mnist()), schedule="cosine", warmup_epochs=10, holdout=0.1)
    for crop in (0.8, 0.5, 0.3):
        twins(f"crop{short(crop)}", base=digits, augment=dataclasses.replace(digits.augment, crop_scale=(crop, 1.0)))
    return study


def views(*, crop: float = 0.2, colour: float = 0.4, blur: float = 0.0) -> AugmentConfig:
    """CIFAR-10's usual views with another least area of a crop, another strength of colour jitter, or a blur."""
    factors: dict[str, Any] = dict.fromkeys(("brightness", "contrast", "saturation"), colour)
    return AugmentConfig(crop_scale=(crop, 1.0), hue=colour / 4, blur=blur, **factors)


def short(share: float) -> str:
    """0.08 → .08."""
    return f"{share:g}".removeprefix("0")


def precision() -> Study:
    """Is the fast step as accurate? bf16 captured against fp32 eager, MNIST at 20 epochs, three seeds each."""
    base = dataclasses.replace(bare(paper_mnist()), epochs=20, warmup_epochs=4)
    study: Study = {}
    for kind, step in (("fp32", "eager"), ("bf16", "captured")):
        chosen = dataclasses.replace(base, precision=kind, step=step)
        curved = cells(chosen, methods=("curvssl",), seeds=SEEDS)
        study |= {f"{name}-{kind}-{step}": config for name, config in curved.items()}
    return study


def twins_of_many_views() -> PretrainConfig:
    """What the studies of views and of recipes start from: Barlow Twins, 3×3 stem, 40 epochs, held-out images."""
    own_weight: dict[str, Any] = {"lambda_emb": 0.0051}  # Barlow Twins' own
    return dataclasses.replace(
        paper_cifar10(),
        method="barlow-twins",
        stem="small",
        epochs=40,
        warmup_epochs=4,
        schedule="cosine",
        holdout=0.1,
        monitor_every=0,
        projector_width=2048,
        projector_depth=3,
        d_z=1024,
        augment=views(),
        **own_weight,
    )


def many_views() -> Study:
    """What local views and the chord bring, two seeds: at 40 epochs, and with as many epochs as take the GPU time of 40
    with two views (results/gpu-views-595dc09.json has the steps' times)."""
    base = twins_of_many_views()
    chord = 1024.0  # as many as dimensions: L_emb is a sum over dimensions, the chord a mean
    equal = {(0, 0.0): 40, (4, 0.0): 26, (8, 0.0): 20, (0, chord): 28, (4, chord): 20, (8, chord): 17}  # epochs
    study: Study = {}
    for epochs, seed in ((40, 0), (40, 1), (None, 0), (None, 1)):
        for (n, alpha), fewer in equal.items():
            taken = epochs or fewer
            name = f"cifar10-barlow-twins-local{n}{f'-chord{alpha:g}' if alpha else ''}-{taken}-seed{seed}"
            study[name] = dataclasses.replace(base, local_views=n, alpha_chord=alpha, epochs=taken, seed=seed)
    return study


def strong() -> Study:
    """The way to a strong encoder: changes to Barlow Twins with two and four views, one at a time, at 40 epochs, what
    pays again at 150, on held-out training images. The cell without a change is that of the study `views`."""
    start = dataclasses.replace(twins_of_many_views(), local_views=4)
    # solo-learn's LARS, rate 0.3 and decay 1e-4 on a tenth of the loss, is this on the whole of it
    lars = {"optimizer": "lars", "lr": 0.03, "weight_decay": 1e-3}
    # the first view keeps its colours, all others are compared with it
    coloured = Colours(jitter=0.8, grayscale=0.2)
    plain = dataclasses.replace(start.augment, jitter=0, grayscale=0)
    wider = {**lars, "local_crop_scale": (0.1, 0.4)}
    # whole images have about the size that the same objects have in global views of 24×24
    smaller = {**wider, "global_size": 24}
    further: dict[str, dict[str, Any]] = {
        "eight": {"local_views": 8},
        "teacher.99": {"average": 0.99, "teacher": True},
        "crop.08": {"augment": views(crop=0.08)},
        "dz2048": {"d_z": 2048},
        "lambda.01": {"lambda_emb": 0.01},
        "rate.06": {"lr": 0.06},
        "solarize": {"second": Colours(solarize=0.2)},
        "size12": {"local_size": 12},
        "b512": {"batch_size": 512, "lr": 0.06},
        "lambda.0025": {"lambda_emb": 0.0025},
        "decay3e-4": {"weight_decay": 3e-4},
        "adam": {name: getattr(start, name) for name in lars},
        "weak-first": {"augment": plain, "second": coloured, "local": coloured},
        "average.999": {"average": 0.999},
        "teacher.996": {"average": 0.996, "teacher": True},
    }
    changes: dict[str, dict[str, Any]] = {
        "lars": lars,
        "local.1-.4": {"local_crop_scale": (0.1, 0.4)},
        "lars-global24": smaller,
        "lars-global20": {**smaller, "global_size": 20},
        "lars-global16": {**smaller, "global_size": 16},
        "lars-local.1-.4": wider,
        **{f"lars-global24-{name}": {**smaller, **change} for name, change in further.items()},
        "lars-local0": {**lars, "local_views": 0},
    }
    longer = {"epochs": 150, "warmup_epochs": 10}
    changes |= {f"150-{name}": {**changes[name], **longer} for name in changes if name not in ("lars", "local.1-.4")}
    return {f"cifar10-{name}": dataclasses.replace(start, **change) for name, change in changes.items()}


def presets() -> Study:
    """The fast and the strong presets as they are, on test images, with their time. All seeds of one preset come before
    the next, and last come those whose data only torchvision fetches."""
    chosen = {name: make() for name, make in PRESETS.items() if name.startswith(("fast-", "strong-"))}
    return {
        f"{config.dataset}-{name.partition('-')[0]}-seed{seed}": dataclasses.replace(config, seed=seed)
        for name, config in chosen.items()
        for seed in SEEDS
    }


def small_batches() -> Study:
    """Settings for batches of 32 and 64, on held-out training images: what benchmarks/small_batches.py leaves open.
    With 256 images the first is the cell cifar10-barlow-twins-local0-40-seed0 of the study `views`."""
    base = twins_of_many_views()
    study: Study = {}
    for batch in (64, 32):
        share = batch / base.batch_size
        lars = {"optimizer": "lars", "lr": 0.03, "weight_decay": 1e-3}
        changes: dict[str, dict[str, Any]] = {
            "": {},
            "-lars": lars,
            "-lars-rate": lars | {"lr": 0.03 * share},  # of SGD, which LARS is, the rate follows the batch
            "-rate": {"lr": base.lr * share**0.5},  # of Adam its root
            "-lambda": {"lambda_emb": 2 * base.lambda_emb},  # less was worse on a CPU
        }
        for name, change in changes.items():
            study[f"cifar10-barlow-twins-b{batch}{name}"] = dataclasses.replace(base, batch_size=batch, **change)
    return study


# The time of a step over that of its baseline's, for the arms of docs/curvature.md whose step is another one
# (python benchmarks/gpu.py --parts views arms).
RATIOS = {
    "chord": 1.195,
    "fast, chord": 1.417,
    "fast, local views, chord": 1.292,
    "path": 1.173,
    "profile": 1.069,
    "bank": 1.128,
    "kernel bank": 1.319,
    "vicreg, curvature": 1.005,
    "vicreg, kernel": 1.011,
    "nt-xent, curvature": 1.006,
    "nt-xent, kernel": 1.012,
    "fast, kernel": 1.019,
    "fast, local views, kernel": 1.012,
}
EQUAL = 1.02  # a step that takes so much longer still counts as equal

# Arms that were more than a point below their baseline with seed 0: by the rule of docs/curvature.md they get no other.
GIVEN_UP = (
    *("curvssl-alpha0.1", "curvssl-alpha0.3", "curvssl-alpha30"),
    *("kernel-curvssl-alpha10-d16", "kernel-curvssl-alpha10-d32"),
    *("late-kernel-alpha10", "late-kernel-alpha30", "late-kernel-alpha100"),
    *("chord128", "chord400", "chord1200", "path400"),
    *("profile-alpha3", "profile-alpha10"),
    *("bank-alpha3", "bank-kernel-alpha10", "bank-kernel-alpha30"),
    "vicreg-alpha0.3",
)


class Arms:
    """Collects the arms of a study of curvature, each with its baseline."""

    def __init__(self, base: PretrainConfig) -> None:
        self.base, self.arms = base, dict[str, Cell]()

    def add(self, name: str, *, over: str = "", step: str = "", arm: Arm | None = None, **changes: Any) -> None:
        """One arm: what changes in the configuration, and a loss that is no method. `over` is its baseline, `step` the
        entry of RATIOS by which it has fewer epochs."""
        ratio = RATIOS[step] if step else 1.0
        changes |= {"method": OWN} if arm else {}
        config = dataclasses.replace(self.base, **changes)
        if ratio > EQUAL:  # the warm-up is shortened with the run
            shorter = round(config.epochs / ratio)
            warmup = round(config.warmup_epochs * shorter / config.epochs)
            config = dataclasses.replace(config, epochs=shorter, warmup_epochs=warmup)
        self.arms[f"cifar10-{name}"] = Cell(config, arm, f"cifar10-{over}" if over else "")

    def cells(self) -> dict[str, Cell]:
        """Each arm with every seed. What was given up has the first seed alone, and so has a baseline that no other arm
        needs. Seeds come first, so that an interrupted study has complete rows."""
        going = {name: cell for name, cell in self.arms.items() if name.removeprefix("cifar10-") not in GIVEN_UP}
        needed = {cell.baseline for cell in going.values()}
        going = {name: cell for name, cell in going.items() if cell.baseline or name in needed}
        return {
            f"{name}-seed{seed}": cell._replace(config=dataclasses.replace(cell.config, seed=seed))
            for seed in SEEDS
            for name, cell in (self.arms if seed == SEEDS[0] else going).items()
        }


def paper_in_short() -> PretrainConfig:
    """The recipe of the first look (`alpha`), with held-out images."""
    return dataclasses.replace(
        paper_cifar10(), method="barlow-twins", epochs=100, warmup_epochs=50, holdout=0.1, monitor_every=0
    )


def curvature() -> dict[str, Cell]:
    """Does the paper's term ever help? The first stage of what docs/curvature.md registers, on held-out images: the
    first look (`alpha`) with more weights, neighbourhoods, dimensions and batch sizes."""
    arms = Arms(paper_in_short())
    arms.add("barlow-twins")
    for method, acts in (("curvssl", 3.0), ("kernel-curvssl", 10.0)):  # about where the term begins to act
        term: dict[str, Any] = {"over": "barlow-twins", "method": method}
        for weight in (0.1, 0.3, 1.0, 3.0, 10.0, 30.0):
            arms.add(f"{method}-alpha{weight:g}", **term, alpha_curv=weight)
        for k in (5, 20, 50):
            arms.add(f"{method}-alpha{acts:g}-k{k}", **term, alpha_curv=acts, k=k)
    kernel: dict[str, Any] = {"method": "kernel-curvssl", "alpha_curv": 10.0}
    for gamma in ("scale", "auto"):
        arms.add(f"kernel-curvssl-alpha10-{gamma}", over="barlow-twins", **kernel, gamma=gamma)
    regimes: list[dict[str, Any]] = [{"d_z": 16}, {"d_z": 32}, {"batch_size": 32}, {"batch_size": 64}]
    for regime in regimes:
        ((name, value),) = regime.items()
        baseline = f"barlow-twins-{name[0]}{value}"
        arms.add(baseline, **regime)
        arms.add(f"kernel-curvssl-alpha10-{name[0]}{value}", over=baseline, **kernel, **regime)
    return arms.cells()


def curvature_arms() -> dict[str, Cell]:
    """The second stage: other forms of the term, other losses, fewer images and longer runs, with the recipe of the
    first. Barlow Twins itself is a cell of the first stage."""
    arms = Arms(paper_in_short())
    twins = "barlow-twins"
    for kernel, weights in ((None, (3.0, 10.0)), ("rbf", (10.0, 30.0, 100.0))):
        for alpha in weights:
            name = f"late{'-kernel' * (kernel is not None)}-alpha{alpha:g}"
            arms.add(name, over=twins, arm=Arm(twins, alpha, kernel=kernel, late=True))
    # For random embeddings the largest weight gives the chord, and the path, a gradient of about twice that of L_emb.
    for alpha in (128.0, 400.0, 1200.0):
        arms.add(f"chord{alpha:g}", over=twins, step="chord", alpha_chord=alpha)
    for alpha in (40.0, 400.0):
        arms.add(f"path{alpha:g}", over=twins, step="path", alpha_path=alpha)
    for alpha in (3.0, 10.0):
        arms.add(f"profile-alpha{alpha:g}", over=twins, step="profile", arm=Arm(twins, alpha, "profile"))
    arms.add("bank-alpha3", over=twins, step="bank", arm=Arm(twins, 3.0, "bank"))
    for alpha in (10.0, 30.0):
        arm = Arm(twins, alpha, "bank", kernel="rbf")
        arms.add(f"bank-kernel-alpha{alpha:g}", over=twins, step="kernel bank", arm=arm)
    # For random embeddings the term then has about the share of the gradient that plain 3, and kernel 3 and 10, have
    # beside Barlow Twins, which is a sum over dimensions.
    arms.add("vicreg", method="vicreg")
    arms.add("nt-xent", arm=Arm("nt-xent"))
    for loss, plain, weights in (("vicreg", 0.3, (0.5, 1.5)), ("nt-xent", 0.01, (0.01, 0.05))):
        arms.add(f"{loss}-alpha{plain:g}", over=loss, step=f"{loss}, curvature", arm=Arm(loss, plain))
        for alpha in weights:
            arm = Arm(loss, alpha, kernel="rbf")
            arms.add(f"{loss}-kernel-alpha{alpha:g}", over=loss, step=f"{loss}, kernel", arm=arm)
    for limit, epochs in ((1_000, 1000), (5_000, 400), (10_000, 300)):  # 3,000, 7,600 and 11,700 steps
        few: dict[str, Any] = {"limit": limit, "epochs": epochs, "warmup_epochs": epochs / 2}
        arms.add(f"barlow-twins-few{limit}", **few)
        over = f"barlow-twins-few{limit}"
        arms.add(f"kernel-curvssl-alpha10-few{limit}", over=over, method="kernel-curvssl", alpha_curv=10.0, **few)
    long: dict[str, Any] = {"epochs": 1000, "warmup_epochs": 160}  # the share of the preset's 80 in 500
    arms.add("barlow-twins-long", **long)
    for method, alpha in (("curvssl", 3.0), ("kernel-curvssl", 10.0)):
        arms.add(f"{method}-alpha{alpha:g}-long", over="barlow-twins-long", method=method, alpha_curv=alpha, **long)
    # The paper's recipe learns nothing from 1,000 images. With the default preset these are 3,000 steps as well.
    suited = default().suited(images=1_000, image_size=32, device="cuda")
    few = {"method": "barlow-twins", "dataset": "cifar10", "limit": 1_000, "epochs": 200, "holdout": 0.1}
    fewest = Arms(dataclasses.replace(suited, monitor_every=0, **few))
    fewest.add("default-few1000")
    for alpha in (1.0, 3.0):
        term: dict[str, Any] = {"method": "kernel-curvssl", "alpha_curv": alpha}
        fewest.add(f"default-few1000-kernel-alpha{alpha:g}", over="default-few1000", **term)
    arms.arms |= fewest.arms
    return arms.cells()


def curvature_fast() -> dict[str, Cell]:
    """The third stage, on a strong recipe, with two views and with six, at 40 epochs: the term, the chord and the flow,
    whose baseline has a teacher as well."""
    short: dict[str, Any] = {"epochs": 40, "warmup_epochs": 4, "holdout": 0.1, "monitor_every": 0}
    arms = Arms(dataclasses.replace(fast_cifar10(), **short))
    recipes: dict[str, dict[str, Any]] = {"fast": {"local_views": 0}, "fast, local views": {}}
    for name, views in recipes.items():
        cell = name.replace(", local views", "-local4")
        arms.add(cell, **views)
        for alpha in (1.0, 3.0):  # about the share of the gradient that 3 and 10 have in the other stages
            term: dict[str, Any] = {"method": "kernel-curvssl", "alpha_curv": alpha, **views}
            arms.add(f"{cell}-kernel-alpha{alpha:g}", over=cell, step=f"{name}, kernel", **term)
        for alpha in (100.0, 300.0):
            arms.add(f"{cell}-chord{alpha:g}", over=cell, step=f"{name}, chord", alpha_chord=alpha, **views)
        taught: dict[str, Any] = {"average": 0.99, "teacher": True, **views}
        arms.add(f"{cell}-teacher", **taught)
        for share, k in ((0.5, 5), (1.0, 5), (0.5, 20)):
            arm = Arm("barlow-twins", share, "flow", k=k)
            arms.add(f"{cell}-flow{share:g}-k{k}", over=f"{cell}-teacher", arm=arm, **taught)
    return arms.cells()


STUDIES: dict[str, Callable[[], Mapping[str, PretrainConfig | Cell]]] = {
    "faithful": faithful,
    "literal": literal,
    "alpha": alpha,
    "recipe": recipe,
    "precision": precision,
    "views": many_views,
    "strong": strong,
    "presets": presets,
    "small-batches": small_batches,
    "curvature": curvature,
    "curvature-arms": curvature_arms,
    "curvature-fast": curvature_fast,
}


def cells(*presets: PretrainConfig, methods: Sequence[str], seeds: Sequence[int]) -> Study:
    """One cell per seed, preset and method. Seeds come first, so that an interrupted study has complete rows."""
    return {
        f"{preset.dataset}-{method}-seed{seed}": dataclasses.replace(preset, method=method, seed=seed)
        for seed in seeds
        for preset in presets
        for method in methods
    }


def study_of(name: str) -> dict[str, Cell]:
    if name not in STUDIES:
        raise unknown("study", name, STUDIES)
    return {cell: Cell(of) if isinstance(of, PretrainConfig) else of for cell, of in STUDIES[name]().items()}
