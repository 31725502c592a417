"""The examples run, and check themselves as they do."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


def test_there_are_some():
    assert len(EXAMPLES) == 4


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path, capsys):
    assert len(path.read_text().splitlines()) < 100
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out
