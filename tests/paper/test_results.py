"""Every table in README and docs agrees with results/, and every result has its provenance."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from generators.base import device_minutes

from curvssl.config import PretrainConfig
from curvssl.paper.studies import STUDIES, study_of

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "results").rglob("*.json"))


def test_the_documents_are_up_to_date_with_the_results():
    done = subprocess.run([sys.executable, ROOT / "results/tables.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_cells_that_share_the_device_count_once():
    def cell(ends: str, minutes: float) -> dict[str, object]:
        return {"provenance": {"created": f"2026-01-01T00:{ends}:00Z"}, "seconds_with_probes": 60 * minutes}

    assert device_minutes([cell("10", 4), cell("30", 1), cell("08", 4), cell("09", 1)]) == pytest.approx(6 + 1)


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.name)
def test_a_result_carries_its_provenance(file: Path):
    made = json.loads(file.read_text())["provenance"]
    assert {"command", "commit", "versions", "device", "created"} <= set(made)
    assert made["commit"]


@pytest.mark.parametrize("study", STUDIES)
def test_every_cell_was_run_with_the_settings_that_its_study_gives_it(study: str):
    asked = study_of(study)
    for file in (ROOT / "results" / study).glob("*.json"):
        assert PretrainConfig.from_dict(json.loads(file.read_text())["config"]) == asked[file.stem].config
