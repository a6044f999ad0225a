"""Everything that exists only for speed. Without this folder the program computes the same, only slower.

curvssl.train calls `speed_up`, or `compile_parts` for several ranks.
"""

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from curvssl.train.step import Step


def speed_up(step: "Step", mode: str) -> None:
    """Make a plain step run compiled, or captured in a CUDA graph. It computes the same."""
    from curvssl.gpu.steps import FastStep

    FastStep(step, mode)


def compile_parts(*modules: nn.Module) -> None:
    """For several ranks: compile these modules but not the loss, which waits for the other ranks in its middle."""
    from curvssl.gpu.steps import keep_compile_cache

    keep_compile_cache()
    for module in modules:
        module.compile(dynamic=False)
