"""Argument checks for both faces, so that both say the same words.

They take plain values (shapes, dtype names), never arrays. `ValueError` and `TypeError` are
the caller's mistakes.
"""

from __future__ import annotations

import operator
from typing import Any

from jtopk._order import DTYPES

INT32_MAX = 2**31 - 1


def dtype(name: str, *, argument: str, x64: bool) -> None:
    """Raises unless values of this type have an order jtopk supports."""
    if name not in DTYPES:
        raise TypeError(f"{argument} has dtype {name}; expected one of {', '.join(DTYPES)}")
    width(name, argument=argument, x64=x64)


def width(name: str, *, argument: str, x64: bool) -> None:
    """Raises where JAX would narrow values of this type without a word."""
    if name in ("float64", "int64", "uint64", "complex128") and not x64:
        raise TypeError(
            f"{argument} has dtype {name}, which JAX would narrow to half the bits; enable it with "
            "jax.config.update('jax_enable_x64', True), or convert the values yourself"
        )


def axis(value: Any, shape: tuple[int, ...], *, argument: str, of: str) -> int:
    """The axis as a number from 0; raises for a 0-d operand or an axis it does not have."""
    ndim = len(shape)
    if ndim == 0:
        raise TypeError(f"{of} has shape (); expected at least one dimension")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{argument} must be an integer, got {value!r} of type {type(value).__name__}"
        ) from None
    if not -ndim <= number < ndim:
        raise ValueError(
            f"{argument}={number} is out of range for shape {shape}; expected -{ndim} to {ndim - 1}"
        )
    return number % ndim


def k(value: Any, columns: int, *, has_lengths: bool) -> int:
    """k as an int; with lengths it may exceed the row, whose tail is then filled."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"k must be a static integer, got {value!r} of type {type(value).__name__}"
        ) from None
    if number < 0:
        raise ValueError(f"k must not be negative, got {number}")
    if number > columns and not has_lengths:
        raise ValueError(
            f"k={number} is larger than the row, which has {columns} columns; "
            "only with lengths may k exceed the row"
        )
    return number


def columns(count: int, *, of: str) -> None:
    """Raises where int32 indices cannot name every column."""
    if count > INT32_MAX:
        raise ValueError(
            f"{of} has rows of {count} columns; int32 indices reach {INT32_MAX} at most"
        )


def row_numbers(
    argument: str,
    shape: tuple[int, ...],
    dtype_name: str,
    expected: tuple[int, ...],
    *,
    each: str = "row",
) -> None:
    """Raises unless `lengths` or its like has one int32 or int64 for each row."""
    if dtype_name not in ("int32", "int64"):
        raise ValueError(f"{argument} has dtype {dtype_name}; expected int32 or int64")
    if shape != expected:
        raise ValueError(
            f"{argument} has shape {shape}; expected one number for each {each}, shape {expected}"
        )
