"""What the documents say runs: the Python in README and guide, the examples in docstrings, the names that the package exports."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import graven

ROOT = Path(__file__).parent.parent
BLOCKS = [
    pytest.param(block, id=f"{name}-{i}")
    for name in ("README.md", "docs/guide.md")
    for i, block in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), flags=re.DOTALL))
]
MODULES = sorted(module.name for module in pkgutil.walk_packages(graven.__path__, "graven.") if module.name != "graven.cli")


@pytest.mark.parametrize("block", BLOCKS)
def test_a_python_block_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "block", "exec"), {})


@pytest.mark.parametrize("module", ["graven", *MODULES])
def test_the_examples_of_a_docstring_print_what_they_say(module):
    assert doctest.testmod(importlib.import_module(module)).failed == 0


def test_public_names_are_sorted_and_documented():
    assert graven.__all__ == sorted(graven.__all__)
    for name in graven.__all__:
        assert getattr(graven, name).__doc__
        assert name in (ROOT / "docs" / "guide.md").read_text()


def test_every_local_link_leads_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_claims_name_verdicts_that_exist():
    rows = [line for line in (ROOT / "docs" / "claims.md").read_text().splitlines() if line.startswith("| ") and "---" not in line]
    verdicts = [re.split(r"(?<!\\)\|", line)[-2] for line in rows if not line.startswith("| claim")]
    assert verdicts
    assert all(re.match(r" \*\*(holds with a correction|holds|does not hold|open)\*\*", verdict) for verdict in verdicts)
