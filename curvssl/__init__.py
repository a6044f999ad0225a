"""Self-supervised learning by curvature alignment. Names are imported when they are first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from curvssl.config import AugmentConfig, PretrainConfig, UserError
    from curvssl.geometry import angular_defect, curvature, kernel_curvature, nearest_neighbors, polyhedron_curvature
    from curvssl.losses import BarlowTwinsLoss, Chord, Curvature, CurvSSLLoss, KernelCurvSSLLoss, VICRegLoss, blend
    from curvssl.outliers import CurvatureOutlierDetector
    from curvssl.rundir import Run, load_encoder
    from curvssl.train.loop import pretrain

__version__ = "0.1.0"

_HOME = {
    "AugmentConfig": "config",
    "BarlowTwinsLoss": "losses",
    "Chord": "losses",
    "CurvSSLLoss": "losses",
    "Curvature": "losses",
    "CurvatureOutlierDetector": "outliers",
    "KernelCurvSSLLoss": "losses",
    "PretrainConfig": "config",
    "Run": "rundir",
    "UserError": "config",
    "VICRegLoss": "losses",
    "angular_defect": "geometry",
    "blend": "losses",
    "curvature": "geometry",
    "kernel_curvature": "geometry",
    "load_encoder": "rundir",
    "nearest_neighbors": "geometry",
    "polyhedron_curvature": "geometry",
    "pretrain": "train.loop",
}

__all__ = [
    "AugmentConfig",
    "BarlowTwinsLoss",
    "Chord",
    "CurvSSLLoss",
    "Curvature",
    "CurvatureOutlierDetector",
    "KernelCurvSSLLoss",
    "PretrainConfig",
    "Run",
    "UserError",
    "VICRegLoss",
    "angular_defect",
    "blend",
    "curvature",
    "kernel_curvature",
    "load_encoder",
    "nearest_neighbors",
    "polyhedron_curvature",
    "pretrain",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'curvssl' has no attribute {name!r}")
    return getattr(import_module(f"curvssl.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
