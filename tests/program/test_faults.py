"""Some of the damage and of the kills that benchmarks/faults.py deals out in full: nothing is lost, nothing silent."""

import subprocess
import sys
from pathlib import Path

CAMPAIGN = Path(__file__).parents[2] / "benchmarks" / "faults.py"


def test_no_damage_is_silent_and_no_kill_costs_more_than_time():
    command = [sys.executable, str(CAMPAIGN), "--short", "--corruptions", "6", "--kills", "3"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 corruptions, 0 failed; " in done.stdout
