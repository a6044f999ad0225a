"""Records which objects a caller gave to `curvssl.pretrain`, as far as a run directory can hold them.

A run is resumed only with the objects it began with: the same class with the same code, settings and shapes. The
weights themselves come from the checkpoint.
"""

import hashlib
import inspect
from contextlib import suppress
from typing import Any

from torch import nn

from curvssl.config import UserError
from curvssl.rundir import Run

FILE = "own.json"


def described(module: nn.Module) -> dict[str, str]:
    """Class, code, settings and shapes of a module, as strings."""
    kind = type(module)
    words = {"class": f"{kind.__module__}.{kind.__qualname__}"}
    with suppress(OSError, TypeError):  # a class typed into a shell has no source file
        words["code"] = hashlib.sha256(inspect.getsource(kind).encode()).hexdigest()[:16]
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, bool | int | float | str | tuple) and not name.startswith("_") and name != "training":
                words[f"{path}.{name}".lstrip(".")] = repr(value)
    for name, value in module.state_dict().items():
        words[f"shape of {name}"] = f"{value.dtype} {tuple(value.shape)}"
    return words


def keep_own(run: Run, parts: dict[str, nn.Module | None], *, new: bool) -> None:
    """Record what was given, or refuse to resume with something else."""
    now = {name: described(part) for name, part in parts.items() if part is not None}
    if new:
        if now or FILE in run.manifest.entries():
            run.keep_json(FILE, now, of=(), by="")
        return
    known: dict[str, dict[str, Any]] = run.settled(FILE, now) if now else {}
    for name in now:
        then = known.get(name, {})
        changed = [key for key in (then | now[name]) if then.get(key) != now[name].get(key)]
        if changed:
            shown = "; ".join(f"{key} {then.get(key, 'none')} → {now[name].get(key, 'none')}" for key in changed[:3])
            raise UserError(f"{run.path} began with another {name} ({shown}): give it the same, or use another --out")
