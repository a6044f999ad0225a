"""A short run of benchmarks/fuzz.py: random inputs against the equations in extended precision."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from fuzz import CHECKS, run


@pytest.mark.filterwarnings("ignore::UserWarning")  # of the detector, that it has fewer points than neighbours
def test_every_result_is_right_or_a_value_error() -> None:
    counts, faults = run(range(500), seed=1)
    assert faults == []
    assert sum(found["right"] for found in counts.values()) > 300
    assert all(counts[name]["right"] for name in CHECKS)
