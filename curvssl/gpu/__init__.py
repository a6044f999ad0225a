"""Everything that exists for speed alone. Without this folder the program computes the same, only slower.

`speed_up` is the door; curvssl.train enters by it.
"""

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from curvssl.train.step import Step


def speed_up(step: "Step", mode: str) -> None:
    """Let a plain step run compiled, or captured in a CUDA graph; what it computes is the same."""
    from curvssl.gpu.steps import FastStep

    FastStep(step, mode)


def compile_parts(*modules: nn.Module) -> None:
    """For several ranks, whose loss waits for the others in its middle: compile what lies before it."""
    from curvssl.gpu.steps import keep_compile_cache

    keep_compile_cache()
    for module in modules:
        module.compile(dynamic=False)
