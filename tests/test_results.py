"""Every table in README and docs is what results/ says, and every result says where it comes from."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = sorted((ROOT / "results").rglob("*.json"))


def test_the_documents_are_up_to_date_with_the_results():
    done = subprocess.run([sys.executable, ROOT / "results/tables.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.name)
def test_a_result_carries_its_provenance(file: Path):
    made = json.loads(file.read_text())["provenance"]
    assert {"command", "commit", "versions", "device", "created"} <= set(made)
    assert made["commit"]
