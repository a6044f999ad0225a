"""Random inputs to the library: is every result right, or the error a ValueError?

    python benchmarks/fuzz.py [--cases 100000] [--seed 0] [--out results/fuzz.json]

A case is a function and an input. Inputs have 0 to 40 rows; scales from 1e-30 to 1e30 (float64: 1e±150), for the whole,
by row or by column; twins, constant columns, common offsets, subnormal numbers; every dtype and memory layout; wrong
types, NaN and infinity. Results and gradients are compared with the equations in extended precision (numpy's
longdouble, to 1e4932) or, for losses, with plain float64. Outcomes:

right      finite, and the equation's to rounding
refused    a ValueError that says what came and what was needed, where the input deserves it
shown      NaN or infinity in, and the result shows it, as documented for losses and measures; or a kernel's value does
           not fit into its type, and is infinite
finite     finite, but the rounding of the input decides the result, so there is nothing to compare with
FAULT      anything else
"""

import argparse
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fuzzing import losses, points
from fuzzing.inputs import Draw

from curvssl.files import write_json
from curvssl.rundir import provenance

CHECKS: dict[str, tuple[Callable[[Draw], str], int]] = {  # and their shares of the cases
    "nearest_neighbors": (points.check_neighbors, 15),
    "curvature": (points.check_curvature, 15),
    "kernel_curvature": (points.check_kernel_curvature, 12),
    "polyhedron_curvature": (points.check_polyhedron, 6),
    "angular_defect": (points.check_defect, 5),
    "kernels": (points.check_kernels, 8),
    "BarlowTwinsLoss": (losses.check_barlow, 8),
    "Curvature": (losses.check_curvature_loss, 8),
    "CurvSSLLoss and KernelCurvSSLLoss": (losses.check_whole_losses, 4),
    "VICRegLoss": (losses.check_vicreg, 5),
    "Chord": (losses.check_chord, 4),
    "blend": (losses.check_blend, 2),
    "measures without labels": (losses.check_measures, 5),
    "CurvatureOutlierDetector": (points.check_detector, 3),
}


NAMES = [name for name, (_, share) in CHECKS.items() for _ in range(share)]


def case(i: int, *, seed: int) -> tuple[str, Callable[[], str]]:
    """The function of case i, and its check. It does not depend on the number of cases."""
    draw = np.random.default_rng((seed, i))
    name = NAMES[draw.integers(len(NAMES))]
    return name, lambda: CHECKS[name][0](draw)


def run(cases: range, *, seed: int) -> tuple[dict[str, Counter[str]], list[dict[str, Any]]]:
    """Outcomes by function, and what went wrong."""
    torch.set_num_threads(1)
    counts: dict[str, Counter[str]] = {name: Counter() for name in CHECKS}
    faults = []
    for i in cases:
        name, check = case(i, seed=seed)
        try:
            with np.errstate(all="ignore"):
                counts[name][check()] += 1
        except Exception as error:
            counts[name]["FAULT"] += 1
            where = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__}: {(str(error) or ' ').splitlines()[0]}"
            faults.append({"case": i, "function": name, "what": f"{what} ({Path(where.filename).name}:{where.lineno})"})
    return counts, faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="one case, with its traceback")
    parser.add_argument("--out", type=Path, default=Path("results/fuzz.json"))
    arguments = parser.parse_args()
    if arguments.only is not None:
        print(case(arguments.only, seed=arguments.seed)[1]())
        return
    started = time.monotonic()
    counts: dict[str, Counter[str]] = {name: Counter() for name in CHECKS}
    faults: list[dict[str, Any]] = []
    parts = [range(start, min(start + 500, arguments.cases)) for start in range(0, arguments.cases, 500)]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for found, wrong in pool.map(partial(run, seed=arguments.seed), parts):
            faults += wrong
            for name in CHECKS:
                counts[name] += found[name]
    outcomes = ("right", "refused", "shown", "finite", "FAULT")
    print(f"{'':36}" + "".join(f"{outcome:>9}" for outcome in outcomes))
    for name, outcome_of in counts.items():
        print(f"{name:36}" + "".join(f"{outcome_of[outcome]:9}" for outcome in outcomes))
    for fault in faults[:50]:
        print(fault)
    result = {"counts": {name: {o: of[o] for o in outcomes} for name, of in counts.items()}, "faults": faults}
    facts = {"cases": arguments.cases, "seed": arguments.seed, "seconds": round(time.monotonic() - started)}
    write_json(arguments.out, facts | result | {"provenance": provenance(device="CPU")})
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    main()
