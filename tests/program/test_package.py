"""The package: light to import, and every public name where it is said to be."""

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


def test_readme_names_every_file_of_the_package():
    root = Path(__file__).parents[2]
    table = (root / "README.md").read_text().split("## The files")[1]
    for file in (root / "curvssl").glob("*.py"):
        assert f"`{file.name}`" in table or file.stem.startswith("__"), file.name
