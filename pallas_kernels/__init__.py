"""Device code and its launch: knows buffers, strides and keys, not operands or frameworks."""

from pallas_kernels import _record, _window
from pallas_kernels._compat import launch_unavailable, unavailable
from pallas_kernels._record import ADDRESS_ALIGNMENT, PARAMETER_SHIFT

clamp_window = _window.clamp
move_numbers = _record.move
pack_numbers = _record.pack
row_numbers = _record.numbers
span_of_numbers = _record.span

__all__ = [
    "ADDRESS_ALIGNMENT",
    "PARAMETER_SHIFT",
    "clamp_window",
    "launch_unavailable",
    "move_numbers",
    "pack_numbers",
    "row_numbers",
    "span_of_numbers",
    "unavailable",
]

if unavailable() is None:
    from pallas_kernels._config import SORT_LIMIT, Keys, SelectConfig
    from pallas_kernels._index import OPERANDS, Index
    from pallas_kernels._kernel import select_rows
    from pallas_kernels._native import Kernel, lower

    __all__ += [
        "OPERANDS",
        "SORT_LIMIT",
        "Index",
        "Kernel",
        "Keys",
        "SelectConfig",
        "lower",
        "select_rows",
    ]
