"""Random inputs of the library, and what the checks share."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

Draw = np.random.Generator
Array = Any  # of np.longdouble
TYPES = {torch.float32: 5, torch.float64: 2, torch.float16: 1, torch.bfloat16: 1}
WRONG: tuple[Any, ...] = (None, "points", [["a", "b"]], {}, 3.5, [[1, 2], [3]], object())


class Fault(AssertionError):
    """What the function did is neither right nor documented."""


def need(condition: Any, what: str) -> None:
    if not condition:
        raise Fault(what)


# ---- inputs ----


def numbers(draw: Draw, n: int, d: int, *, most: float) -> np.ndarray:
    """Float64 (n, d), of magnitudes up to 10^most."""
    x = draw.normal(size=(n, d))
    if draw.random() < 0.15:
        x = draw.integers(-2, 3, (n, d)).astype(float)  # many ties and twins
    if n and draw.random() < 0.2:
        x[draw.integers(n, size=n // 2)] = x[draw.integers(n)]
    if d and draw.random() < 0.15:
        x[:, draw.integers(d)] = draw.normal()
    kind = draw.choice(
        ["plain", "whole", "rows", "columns", "outlier", "offset", "subnormal"], p=[0.2, 0.3, *[0.1] * 5]
    )
    if kind == "whole":
        x *= 10 ** draw.uniform(-most, most)
    if kind == "rows":
        x *= 10 ** draw.uniform(-most, most, (n, 1))
    if kind == "columns":
        x *= 10 ** draw.uniform(-most, most, (1, d))
    if kind == "outlier" and n:
        x[draw.integers(n)] *= 10 ** draw.uniform(0, most)
    if kind == "offset":
        x += 10 ** draw.uniform(-2, 6)
    if kind == "subnormal":
        x *= 10 ** draw.uniform(-45, -36)
    return x


def a_type(draw: Draw) -> torch.dtype:
    weights = np.array([*TYPES.values()]) / sum(TYPES.values())
    return [*TYPES][draw.choice(len(TYPES), p=weights)]


def values(draw: Draw, n: int, d: int) -> Tensor:
    """A tensor of any dtype, with scales that it holds."""
    dtype = a_type(draw)
    most = {torch.float16: 3.0, torch.float64: 150.0}.get(dtype, 30.0)
    x = torch.tensor(numbers(draw, n, d, most=most)).reshape(n, d)
    return x.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)


def laid_out(draw: Draw, x: Tensor) -> Any:
    """The same numbers as another kind of tensor or array."""
    kind = draw.integers(8)
    if kind == 0 and x.numel():
        return x.t().contiguous().t()
    if kind == 1:
        return torch.stack((x, x), 1)[:, 1]  # not contiguous
    if kind == 2 and x.dtype != torch.bfloat16:
        return np.ascontiguousarray(x.numpy()[::-1])[::-1]  # negative strides
    if kind == 3 and x.dtype == torch.float64:
        return x.numpy().astype(">f8")
    if kind == 4 and x.dtype == torch.float64 and len(x):
        return x.tolist()
    if kind == 5 and x.dtype != torch.bfloat16:
        array = x.numpy().copy()
        array.flags.writeable = False
        return array
    return x


def spoilt(draw: Draw, x: Tensor) -> Tensor:
    """One entry that is no finite number."""
    x = x.clone()
    x[draw.integers(len(x)), draw.integers(x.shape[1])] = draw.choice([math.nan, math.inf, -math.inf])
    return x


def long(x: Tensor) -> Array:
    """Exact."""
    return x.detach().double().numpy().astype(np.longdouble)


def eps_of(x: Tensor) -> float:
    """The rounding error of what is computed with x."""
    return torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps


def floor_of(x: Tensor) -> float:
    """Edges below this count as zero (kernels.directions)."""
    return torch.finfo(torch.promote_types(x.dtype, torch.float32)).tiny * 2**14


def refused(call: Callable[[], Any]) -> str:
    """The call has to raise a ValueError with a sentence."""
    try:
        call()
    except ValueError as error:
        need(len(str(error)) > 20, f"ValueError says only {error}")
        return "refused"
    raise Fault("accepted")


def near(ours: Any, expected: Array, allowed: Any, what: str = "value") -> None:
    ours = np.asarray(ours, dtype=np.longdouble)
    need(np.isfinite(ours).all(), f"{what} is not finite")
    off = np.abs(ours - expected) - allowed
    need(
        not off.size or (off <= 0).all(),
        f"{what} is off by {np.max(off + allowed, initial=0):.3g}, allowed {np.max(allowed, initial=0):.3g}",
    )
