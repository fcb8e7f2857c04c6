"""Row numbers computed in the graph: which row of one tensor a row of another is.

A view would have to prove that the digits tile the axis, again at each op; with symbolic sizes
every reshape nests the quotients of the one before, until proofs take minutes. A lookup needs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from torch_cascade.compiler.graph import Emitter, Size
from torch_cascade.passes.axes import ONE, Digit

aten = torch.ops.aten
prims = torch.ops.prims


def row_numbers(emit: Emitter, rows: Size, device: torch.device) -> fx.Node:
    """Int64 [rows]: 0, 1, 2, ..."""
    return emit.call(
        prims.iota.default,
        rows,
        start=0,
        step=1,
        dtype=torch.int64,
        device=device,
        requires_grad=False,
    )


def as_indexed(kept: Sequence[Digit]) -> list[Digit]:
    """The digits of a KV row's own index: the same ones without the gaps, major first."""
    found: list[Digit] = []
    below: Size = ONE
    for digit in reversed(kept):
        found.insert(0, replace(digit, stride=below))
        below = below * digit.size
    return found


def spelled(
    emit: Emitter, index: fx.Node, digits: Sequence[Digit], strides: Sequence[Size]
) -> fx.Node:
    """The number that digits of an index spell with other strides."""
    number = emit.call(aten.mul.Tensor, index, 0)
    for digit, stride in zip(digits, strides, strict=True):
        place = emit.call(aten.div.Tensor_mode, index, digit.stride, rounding_mode="floor")
        place = emit.call(aten.remainder.Scalar, place, digit.size)
        number = emit.call(aten.add.Tensor, number, emit.call(aten.mul.Tensor, place, stride))
    return number
