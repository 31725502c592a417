"""torch.topk.

from bridge.dropin.pytorch import topk
"""

from __future__ import annotations

import torch

from bridge._top_k import top_k
from jtopk import TopK


def topk(
    input: torch.Tensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> TopK:
    """torch.topk's answer, with what it leaves open fixed: equal values by ascending index.

    Returns and raises what `bridge.top_k` does; a 0-d tensor, which torch.topk takes, is refused.
    """
    return top_k(input, k, dim, largest, sorted, out=out)
