"""The package: light to import, every public name exists, and the file tree in CONTRIBUTING.md is complete."""

import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

import curvssl


def test_importing_the_package_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, curvssl; print(sorted({'torch', 'numpy', 'sklearn', 'torchvision'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize("name", curvssl.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(curvssl, name).__name__ == name
    assert name in dir(curvssl)


def test_unknown_name_is_an_attribute_error_and_types_are_declared() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Torsion'"):
        _ = curvssl.Torsion
    assert files("curvssl").joinpath("py.typed").is_file()


def test_the_file_tree_has_a_line_for_every_file_of_the_package() -> None:
    root = Path(__file__).parents[2]
    tree = (root / "CONTRIBUTING.md").read_text().split("```")[1]
    named, folder = set(), ""
    for line in tree.partition("curvssl/\n")[2].partition("tests/")[0].splitlines():
        name, _, purpose = line.strip().partition(" ")
        if name.endswith("/"):
            folder = name
        elif "." in name:
            named.add((folder if line.startswith("    ") else "") + name)
            assert purpose.strip(), f"{name} has no purpose"
    files = [file for suffix in ("py", "js", "html", "css") for file in (root / "curvssl").rglob(f"*.{suffix}")]
    there = {str(file.relative_to(root / "curvssl")) for file in files}
    assert {name for name in there if not name.endswith("/__init__.py")} <= named
