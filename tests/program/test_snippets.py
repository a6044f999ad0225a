"""Every Python block in the README and the guides runs unchanged, in its own namespace."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def snippets() -> list[object]:
    found: list[object] = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text() if page.exists() else ""
        for block in BLOCK.finditer(text):
            line = text.count("\n", 0, block.start()) + 2
            found.append(pytest.param(page, line, block[1], id=f"{page.relative_to(ROOT)}:{line}"))
    return found


@pytest.mark.parametrize(("page", "line", "code"), snippets())
def test_snippet_runs(page: Path, line: int, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # for the files that a snippet writes
    # Blank lines in front, so that a traceback has the line number of the page.
    exec(compile("\n" * (line - 1) + code, str(page), "exec"), {"__name__": "__main__"})
