"""`cascade::linears` by torch's own products: what the op means, and what CPUs compute."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import linear


def linears_torch(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None = None
) -> tuple[Tensor, ...]:
    """`cascade::linears` [M, K] x [Ni, K] -> [M, Ni], one product after the other."""
    given = [None] * len(weights) if biases is None else biases
    return tuple(linear(x, weight, bias) for weight, bias in zip(weights, given, strict=True))
