"""`cascade::linears` on a GPU: arguments and grid of the kernel."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torch_cascade.kernels import launchable
from torch_cascade.kernels.linears import linears_torch
from torch_cascade.kernels.linears_config import (
    MOST_WEIGHTS,
    LinearsConfig,
    linears_config,
    takes,
)
from torch_cascade.kernels.triton_launch import device_limits
from torch_cascade.kernels.triton_linears import linears_tile


def linears_gpu(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None = None
) -> tuple[Tensor, ...]:
    """`cascade::linears` by the kernel, or by torch's own products what the kernel does not take.

    The pass `linears` writes nothing of that kind; a program that calls the op may.
    """
    compute = linears_triton if takes(x, weights, biases) else linears_torch
    return compute(x, weights, biases)


def linears_triton(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] | None = None,
    *,
    config: LinearsConfig | None = None,
) -> tuple[Tensor, ...]:
    """`cascade::linears` in one launch.

    Args:
        x: [M, K], bfloat16 or float16, features dense; M and K are numbers.
        weights: up to `MOST_WEIGHTS` of [Ni, K], of the same dtype, features dense.
        biases: [Ni] each, dense; None for none.
        config: instead of the chosen one (for tuning).

    Returns:
        [M, Ni] each, contiguous, of the dtype of x.

    What it takes, `linears_config.takes` says.
    """
    rows, features = x.shape
    columns = [weight.shape[0] for weight in weights]
    processors = device_limits(x.device).processors
    chosen = config or linears_config(rows, features, columns, processors)
    outs = tuple(x.new_empty(rows, n) for n in columns)
    missing = MOST_WEIGHTS - len(weights)
    given = [None] * len(weights) if biases is None else biases
    grid = (sum(columns) // chosen.block_n,)
    launchable.called(linears_tile)[grid](
        x,
        *weights,
        *[None] * missing,
        *given,
        *[None] * missing,
        *outs,
        *[None] * missing,
        rows,
        x.stride(0),
        *(weight.stride(0) for weight in weights),
        *[0] * missing,
        *columns,
        *[0] * missing,
        K=features,
        WEIGHTS=len(weights),
        BIAS=biases is not None,
        BLOCK_M=chosen.block_m,
        BLOCK_N=chosen.block_n,
        BLOCK_K=chosen.block_k,
        STAGES=chosen.stages,
        num_warps=chosen.warps,
    )
    return outs
