"""The objectives by name, with the settings that a run may give them. Nothing heavy is imported before one is made.

To add one: a class in losses.py, and one entry here. The command line, the report, the studies and the tests read it.
"""

from typing import Any, NamedTuple


class Setting(NamedTuple):
    """One keyword of a loss: its default, which is the loss's own, what it means, and its type where that is wider."""

    default: Any
    help: str
    kind: Any = None


class Method(NamedTuple):
    title: str
    loss: str  # a class of losses.py
    settings: dict[str, Setting]

    def make(self, **settings: Any) -> Any:
        """The loss; a ValueError says which setting it cannot take."""
        from curvssl import losses

        return getattr(losses, self.loss)(**settings)


K = {"k": Setting(10, "neighbours per point")}
EMBEDDING = {
    "lambda_emb": Setting(1.0, "weight of C's off-diagonal in L_emb, Eq. (14)"),
    "eps": Setting(
        1e-5, "added to standard deviations, Eq. (12) and (17); the paper gives no number, this is BatchNorm's"
    ),
}
CURVATURE = K | {
    "lambda_curv": Setting(1.0, "weight of M's off-diagonal in L_curv, Eq. (19)"),
    "alpha_curv": Setting(1.0, "weight of L_curv, Eq. (20); 0 is Barlow Twins"),
}
KERNEL = {
    "kernel": Setting("rbf", "rbf, laplacian, linear, polynomial or cosine"),
    "gamma": Setting(
        "median",
        "width of the kernel: a number, median (a median of medians, over 512 points at most), scale or auto",
        float | str,
    ),
}
# The paper gives no weights for VICReg: these are the ones of VICReg's own paper.
VICREG = {
    "invariance": Setting(25.0, "weight of the distance between views in VICReg; defaults of VICReg's own paper"),
    "variance": Setting(25.0, "weight of the variance hinge in VICReg"),
    "covariance": Setting(1.0, "weight of the covariances in VICReg"),
}

METHODS = {
    "barlow-twins": Method("Barlow Twins", "BarlowTwinsLoss", EMBEDDING),
    "vicreg": Method("VICReg", "VICRegLoss", VICREG),
    "curvssl": Method("CurvSSL", "CurvSSLLoss", EMBEDDING | CURVATURE),
    "kernel-curvssl": Method("kernel CurvSSL", "KernelCurvSSLLoss", EMBEDDING | CURVATURE | KERNEL),
}

# Every setting of every method, one field each of a run's configuration; methods share those of one name.
SETTINGS = {name: setting for method in METHODS.values() for name, setting in method.settings.items()}
OWN = "own"  # the name of what was given to `curvssl.pretrain` as an object


def title_of(method: str) -> str:
    """How a method is called in tables and on the page."""
    return METHODS[method].title if method in METHODS else {OWN: "own criterion"}.get(method, method)
