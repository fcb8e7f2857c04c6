"""`cascade::merge` in plain functional torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def merge_torch(
    o: Sequence[Tensor], lse: Sequence[Tensor], *, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Partial attentions over disjoint key sets -> the attention over their union.

    The contract is that of `torch_cascade.kernels.ops.merge`. Pointwise ops only, and no stacked
    copy of the parts, so a compiler can fuse everything into one kernel over the output.

    Args:
        o: partial outputs, each [..., D].
        lse: their log-sum-exps, each [...].
        sinks: scores of one more key a row, of value zero; broadcastable to [...].

    Returns:
        o [..., D] and lse [...], contiguous, aliasing no part.
    """
    top = lse[0]
    for part in lse[1:]:
        top = torch.maximum(top, part)
    if sinks is not None:  # a part whose output is zero: it takes its share of the weights only
        sinks = sinks if sinks.dtype == top.dtype else sinks.to(top.dtype)
        top = torch.maximum(top, sinks)
    weights = [_weight(part, top) for part in lse]
    total = weights[0]
    for weight in weights[1:]:
        total = total + weight
    if sinks is not None:
        total = total + _weight(sinks, top)
    merged = _weighted(o[0], weights[0], total)
    for part, weight in zip(o[1:], weights[1:], strict=True):
        merged = merged + _weighted(part, weight, total)
    return _contiguous(merged), _contiguous(top + torch.log(total.clamp(min=1.0)))


def _weight(lse: Tensor, top: Tensor) -> Tensor:
    """e^(lse - top). Where both are the same infinity, 0 (no keys) or 1 (overflow), not NaN."""
    weight = torch.where(lse == top, 1.0, torch.exp(lse - top))
    return weight.masked_fill(lse == -math.inf, 0.0)


def _weighted(o: Tensor, weight: Tensor, total: Tensor) -> Tensor:
    """A part's share of the output; 0 for a part that saw no key, whatever its `o` holds."""
    share = (weight / total.clamp(min=1.0)).unsqueeze(-1)
    return torch.where(share == 0, 0.0, o * share)


def _contiguous(x: Tensor) -> Tensor:
    """A contiguous copy: never an alias, even of a single part."""
    return x.clone(memory_format=torch.contiguous_format)
