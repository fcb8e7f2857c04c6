"""Raise: swap the attention calls of a Dynamo graph for `cascade::sdpa`, in place.

AOTAutograd splits `scaled_dot_product_attention` into backend-specific ops; `cascade::sdpa` (same
meaning) goes through it whole, so that the passes find one node for one attention in the functional
graph. The graph handed over by Dynamo is edited, never copied or rebuilt: AOTAutograd reads facts
from its module and its placeholders (which inputs are parameters) that a copy would lose.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

import torch_cascade.kernels.ops  # noqa: F401  (defines the ops of the namespace cascade)
from torch_cascade.compiler import capture_rules as rules
from torch_cascade.compiler.record import source_line
from torch_cascade.compiler.report import Declined, Reason

# Devices on which every cascade op has a lowering.
LOWERED_DEVICES = frozenset({"cpu", "cuda"})


@dataclass(frozen=True)
class Captured:
    """One attention call that became `cascade::sdpa`.

    Attributes:
        node: name of the graph node, the same before and after.
        where: the user's source line, "file:line: code" ("" if unknown).
        query, key, value: dtype and shape of the operands, e.g. `f32[2, 8, s0, 64]`.
    """

    node: str
    where: str
    query: str
    key: str
    value: str


def capture(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    devices: Collection[str] = LOWERED_DEVICES,
) -> list[Captured | Declined]:
    """Swap every attention call that may be rewritten for `cascade::sdpa`; report the others.

    Only the swapped nodes change, and of them only target and arguments: the name, the metadata
    (`example_value`: the strides and the dtype of the real call) and all other nodes stay.

    Args:
        gm: the graph Dynamo handed to the backend; edited in place.
        example_inputs: its inputs, as Dynamo passes them.
        devices: device types that have a lowering.

    Returns:
        One record an attention, in graph order; the bodies of higher-order ops are searched too.
    """
    found: list[Captured | Declined] = []
    swaps: list[rules.Call] = []
    scope = rules.Scope.of(gm, example_inputs, devices)
    bodies: set[fx.GraphModule] = set()
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            found += _in_bodies(gm, node, bodies)
        if not rules.is_attention(node):
            continue
        call = rules.legal_call(node, scope)
        if isinstance(call, Declined):
            found.append(call)
            continue
        found.append(_record(call))
        swaps.append(call)
    for call in swaps:
        _swap(call)
    if swaps:
        gm.recompile()
    return found


def _record(call: rules.Call) -> Captured:
    operands = (rules.describe(n) for n in (call.query, call.key, call.value))
    return Captured(call.node.name, source_line(call.node), *operands)


def _swap(call: rules.Call) -> None:
    node = call.node
    node.target = torch.ops.cascade.sdpa.default
    node.args = (call.query, call.key, call.value, call.attn_mask, call.is_causal)
    node.kwargs = {"scale": call.scale, "enable_gqa": call.enable_gqa}


def _in_bodies(gm: fx.GraphModule, node: fx.Node, seen: set[fx.GraphModule]) -> Iterator[Declined]:
    """Declines for the attention inside the body a `get_attr` node refers to, each body once."""
    body = operator.attrgetter(str(node.target))(gm)
    if not isinstance(body, fx.GraphModule) or body in seen:
        return
    seen.add(body)
    for inner in body.graph.nodes:
        if inner.op == "get_attr":
            yield from _in_bodies(body, inner, seen)
        if not rules.is_attention(inner):
            continue
        detail = f"{rules.target_name(inner)} in {node.target}"
        yield rules.refuse(Reason.HIGHER_ORDER_BODY, inner, detail)
