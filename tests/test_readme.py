"""What the README shows runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

README = Path(__file__).parents[1] / "README.md"


def test_its_python_runs_from_top_to_bottom():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 3
    exec("\n".join(blocks), {})
