"""Device code and its launch: knows buffers, strides and keys, not operands or frameworks."""

from pallas_kernels import _record, _window
from pallas_kernels._compat import unavailable

clamp_window = _window.clamp
pack_record = _record.pack

__all__ = ["clamp_window", "pack_record", "unavailable"]

if unavailable() is None:
    from pallas_kernels._select import SORT_LIMIT, SelectConfig, select_rows

    __all__ += ["SORT_LIMIT", "SelectConfig", "select_rows"]
