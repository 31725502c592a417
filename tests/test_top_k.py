"""Every case of the table through every face: equal columns and value bits, no tolerance.

The padding holds what would win if it were read, so a leak is a wrong answer; each face checks
that the operand's storage is unchanged.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtopk
import oracle
from cases import CASES, GROUPS, Case, next_multiple
from faces import FACES, Answer, Face

faces = pytest.mark.parametrize(
    "face", [pytest.param(face, id=face.name, marks=face.marks) for face in FACES]
)


def run(face: Face, case: Case) -> Answer:
    if reason := face.problem():
        pytest.skip(reason)
    return face.run(case)


@pytest.mark.parametrize(
    ("face", "case"),
    [
        pytest.param(face, case, id=f"{case.name}-{face.name}", marks=face.marks)
        for case in CASES
        for face in FACES
        if face.takes(case)
    ],
)
def test_like_the_oracle(face: Face, case: Case) -> None:
    got, expected = run(face, case), case.expected(face.order)
    if not case.sorted:
        got, expected = (oracle.by_column(*a, axis=case.axis) for a in (got, expected))
    oracle.assert_same(got, expected)


@faces
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in GROUPS["unsorted"]])
def test_unsorted_is_the_same_in_every_run(face: Face, case: Case) -> None:
    oracle.assert_same(run(face, case), run(face, case))


@faces
def test_a_row_does_not_depend_on_the_others(face: Face) -> None:
    together = Case("alone", "float32", (12, 257), 9, strides=(512, 1))
    alone = dataclasses.replace(together, shape=(1, 257))
    values, indices = run(face, together)
    oracle.assert_same(run(face, alone), (values[:1], indices[:1]))


@pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])
def test_under_jit(strided: bool) -> None:
    lengths = np.array([-1, 0, 8, 9, 10, 256, 257, 258, 2**31 - 1, 1, 2, 100], np.int32)
    starts = np.array([0, 1, 250, 3, -9, 0, 0, 5, 100, 257, 256, 9], np.int32)
    case = Case("jit", "float32", (12, 257), 9, strides=(512, 1), offset=3)
    case = dataclasses.replace(case, lengths=lengths, starts=starts)
    flat = case.storage()

    @jax.jit
    def pipeline(operand, lengths, starts):
        values, indices = jtopk.top_k(operand, case.k, lengths=lengths, starts=starts)
        return values, indices + 1

    operand = jnp.asarray(case.view(flat).copy())
    if strided:
        operand = jtopk.StridedRows(jnp.asarray(flat), case.shape, case.step, case.offset)
    values, indices = pipeline(operand, lengths, starts)
    oracle.assert_same((values, np.asarray(indices) - 1), case.expected("total"))


@pytest.mark.parametrize("x64", [True, False], ids=["x64", "x64-until-the-call"])
def test_int64_row_numbers_on_the_device(x64: bool) -> None:
    case = Case(
        "x64", "float32", (12, 129), 7, strides=(256, 1),
        lengths=np.array([2**33, -(2**33), 2**32 + 3, 7, 6, 8, 0, -1, 129, 130, 5, 2**63 - 1]),
        starts=np.array([2**33, -(2**33), 2**32 + 3, 0, 127, 1, 31, 129, -1, 33, 100, 2]),
    )  # fmt: skip
    operand = jnp.asarray(case.view(case.storage()).copy())
    with jax.enable_x64(True):
        lengths, starts = jnp.asarray(case.lengths), jnp.asarray(case.starts)
    assert lengths.dtype == starts.dtype == np.int64
    with jax.enable_x64(x64):
        got = jtopk.top_k(operand, case.k, lengths=lengths, starts=starts)
    assert got.indices.dtype == np.int32
    oracle.assert_same(got, case.expected("total"))


def test_torch_tensor_that_requires_grad() -> None:
    torch = pytest.importorskip("torch")
    import bridge

    x = torch.tensor([[1.0, 3.0, 2.0], [4.0, 4.0, 5.0]], requires_grad=True)
    values, indices = bridge.top_k(x, 2)
    assert indices.tolist() == [[1, 2], [2, 0]]
    (values * torch.tensor([10.0, 20.0])).sum().backward()
    assert x.grad.tolist() == [[0.0, 10.0, 20.0], [20.0, 0.0, 10.0]]


def test_takes_what_asarray_takes() -> None:
    got = jtopk.top_k([[1.0, 3.0, 2.0]], 2)
    assert got.values.tolist() == [[3.0, 2.0]]
    assert got.indices.tolist() == [[1, 2]]
    assert jtopk.top_k(np.arange(5, dtype=np.int8), np.int64(1)).indices.tolist() == [4]


def test_a_padded_batch_of_logits() -> None:
    """The mistake the package exists for: rows of 900 in steps of 1024, read as steps of 900."""
    columns = 900
    case = Case("logits", "float32", (4, columns), 8, strides=(next_multiple(columns, 256), 1))
    flat = case.storage()
    right = case.expected("total")[1]
    wrong = oracle.top_k(flat[: 4 * columns].reshape(4, columns), 8)[1]
    got = jtopk.top_k(jtopk.StridedRows(jnp.asarray(flat), case.shape, case.step), 8).indices
    np.testing.assert_array_equal(got, right)
    assert not any(np.array_equal(a, b) for a, b in zip(wrong[1:], right[1:], strict=True))
