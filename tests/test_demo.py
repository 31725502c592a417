"""The command line and its demonstration."""

from __future__ import annotations

import json

import pytest

from jtopk import _cli


def test_a_command_that_cannot_be_loaded_says_what_it_needs(monkeypatch, capsys):
    class Broken:
        name = "demo"

        def load(self):
            raise ImportError("No module named 'torch'")

    monkeypatch.setattr(_cli.metadata, "entry_points", lambda group: [Broken()])
    assert _cli.main(["demo", "--rows", "3"]) == 1
    assert "No module named 'torch'. It needs PyTorch: pip install" in capsys.readouterr().err


def test_bad_arguments_and_version(capsys):
    with pytest.raises(SystemExit, match="2"):
        _cli.main([])
    with pytest.raises(SystemExit, match="0"):
        _cli.main(["--version"])
    assert "jtopk 0." in capsys.readouterr().out


ARGUMENTS = ["demo", "--rows", "4", "--columns", "1000", "-k", "64"]


def test_demo_json(capsys):
    pytest.importorskip("torch")
    assert _cli.main([*ARGUMENTS, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["right"] and report["bytes_copied"] == 0 and report["row_stride"] == 1024
    assert report["wrong"]["bridge.top_k"] == report["wrong"]["bridge.jit"] == [0] * 4
    # A kernel that takes size(1) for the stride gets the first row right, and no other.
    naive = report["wrong"]["size(1) for the stride"]
    assert naive[0] == 0 and all(n > 0 for n in naive[1:])


@pytest.mark.parametrize("sizes", [["--rows", "0"], ["--k", "1001"], ["--k", "0"]])
def test_demo_refuses_sizes_it_cannot_take(sizes, capsys):
    pytest.importorskip("torch")
    assert _cli.main([*ARGUMENTS, *sizes]) == 2
    assert "expected at least one row and 1 <= k <= columns" in capsys.readouterr().err


def test_demo_holds_columns_to_the_lowest_of_a_tie():
    torch = pytest.importorskip("torch")
    from bridge import _demo

    row = torch.tensor([1.0, 5.0, 2.0, 5.0, 5.0])
    expected = _demo._expected(row, 3)
    assert expected[1].tolist() == [1, 3, 4]
    values = torch.tensor([5.0, 5.0, 5.0])
    assert _demo._count_wrong((values, torch.tensor([1, 3, 4])), expected) == 0
    assert _demo._count_wrong((values, torch.tensor([3, 1, 4])), expected) == 2
    assert _demo._count_wrong((values, torch.tensor([1, 3, 3])), expected) == 1
    assert _demo._count_wrong((-values, torch.tensor([1, 3, 4])), expected) == 3


def test_demo_table(capsys):
    pytest.importorskip("torch")
    assert _cli.main(ARGUMENTS) == 0
    shown = capsys.readouterr().out
    assert "every row is right" in shown and "copied   0 bytes" in shown


def test_demo_notices_a_wrong_answer(monkeypatch, capsys):
    """If the row stride were lost anywhere on the way, the demonstration would fail."""
    pytest.importorskip("torch")
    from bridge import _dlpack

    original = _dlpack._torch_memory

    def forgetful(tensor):
        return original(tensor.as_strided(tensor.shape, (tensor.shape[1], 1)))

    monkeypatch.setattr(_dlpack, "_torch_memory", forgetful)
    assert _cli.main(ARGUMENTS) == 1
    assert "WRONG" in capsys.readouterr().out
