"""The structure of the package: it works without gpu/, and a new loss is one class and one line."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from pipeline import TINY, flags

from curvssl.cli import main

ROOT = Path(__file__).parents[2]


def python(*words: object, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    settings = os.environ | {"PYTHONPATH": f"{path}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *map(str, words)], env=settings, capture_output=True, text=True, cwd=path)


@pytest.fixture(scope="module")
def without_gpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project without gpu/."""
    root = tmp_path_factory.mktemp("house")
    shutil.copytree(ROOT / "curvssl", root / "curvssl", ignore=shutil.ignore_patterns("gpu", "__pycache__"))
    shutil.copytree(ROOT / "tests", root / "tests", ignore=shutil.ignore_patterns("gpu", "__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    # With an editable installation, Python would import the missing modules from the original folder.
    (root / "sitecustomize.py").write_text(
        "import sys\nsys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in getattr(f, '__module__', '')]\n"
    )
    return root


def test_without_gpu_tests_pass_and_a_step_for_speed_is_refused_in_one_line(without_gpu: Path, tmp_path: Path):
    """Some tests of losses, step and loop, to save time; the rule is that all tests outside tests/gpu pass."""
    script = textwrap.dedent("""
        import sys
        from importlib.util import find_spec
        import pytest
        from curvssl.cli import main

        tests, words = sys.argv[1:4], sys.argv[4:]
        assert find_spec("curvssl.gpu") is None
        chosen = "matches_the_loops or textbook or goes_down or first_step_of_adam"
        assert pytest.main(["-q", "-p", "no:cacheprovider", "-k", chosen, *tests]) == 0
        main(words)
    """)
    files = ("library/test_losses.py", "train/test_step.py", "train/test_loop.py")
    tests = [without_gpu / "tests" / file for file in files]
    words = ("pretrain", *flags(TINY), "--step", "compiled", "--out", tmp_path / "run")
    done = python("-c", script, *tests, *words, path=without_gpu)
    assert done.returncode == 2, done.stdout[-3000:] + done.stderr
    assert done.stderr.splitlines()[-1] == (
        "curvssl: step compiled needs the folder curvssl/gpu, which is missing here: use --step eager"
    )


def test_a_new_loss_is_one_class_and_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Written as CONTRIBUTING.md describes; the command line, the metrics, the table and the page know it at once."""
    script = textwrap.dedent("""
        import sys
        import torch
        from curvssl import losses, methods

        class AgreementLoss(losses.Loss):
            names = ("agreement",)

            def __init__(self, *, sharpness: float = 2.0) -> None:
                super().__init__()
                self.sharpness = sharpness

            def numbers(self, z):
                z0, z1 = losses.standardise(z, eps=1e-5)
                return (1 - (z0 * z1).mean()).pow(self.sharpness).view(1)

            def weights(self):
                return {"agreement": 1.0}

        losses.AgreementLoss = AgreementLoss
        methods.METHODS["agreement"] = methods.Method(
            "Agreement", "AgreementLoss", {"sharpness": methods.Setting(2.0, "exponent of what is missing to 1")}
        )
        methods.SETTINGS |= methods.METHODS["agreement"].settings

        from curvssl.cli import main
        config, run = sys.argv[1:-1], sys.argv[-1]
        main(["pretrain", *config, "--method", "agreement", "--sharpness", "3", "--out", run])
        main(["probe", run, "--no-floors", "--seeds", "1"])
        main(["pretrain", "--help"])
    """)
    file = tmp_path / "added.py"
    file.write_text(script)
    done = python(file, *flags(TINY), tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert '"agreement": ' in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert '"sharpness": 3.0' in (tmp_path / "run" / "config.json").read_text()
    assert re.search(r"^Agreement +\d\d", done.stdout, re.MULTILINE)
    assert "exponent of what is missing to 1" in done.stdout
    with pytest.raises(SystemExit) as end:  # the package of this process does not know the method
        main(["probe", str(tmp_path / "run")])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "unknown" in said
    assert said.count("\n") == 1
