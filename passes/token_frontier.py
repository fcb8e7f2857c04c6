"""What of a graph is computed for all tokens, and what exists for the chosen rows only."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

import torch_cascade.kernels.ops  # noqa: F401  (defines the ops of the namespace cascade)

aten = torch.ops.aten
reuse_kv = torch.ops.cascade.reuse_kv.default

CONTRACTIONS = frozenset(
    {
        torch.ops.cascade.sdpa.default,
        torch.ops.cascade.attend.default,
        aten.mm.default,
        aten.bmm.default,
        aten.addmm.default,
        aten.baddbmm.default,
        aten.linear.default,
    }
)
"""Where keys and values meet queries, or weights: the work that rows save."""
_GROUPED = ("aten::_grouped_mm", "transformers::grouped_mm_fallback")  # by name: it may not exist


def is_grouped(target: Any) -> bool:
    """True iff an op multiplies groups of rows, each by the weights of its expert."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.name in _GROUPED


def contracts(target: Any) -> bool:
    """True iff an op is work that rows save."""
    return target in CONTRACTIONS or is_grouped(target)


@dataclass(frozen=True)
class Frontier:
    """What of a graph is computed in full.

    Nodes that are neither full nor below are made again if they have a rule, else gathered.

    Attributes:
        full: nodes that are computed for all tokens anyway: their rows are gathered.
        below: nodes whose full value will not exist: later markers, the attention over the check
            layer's keys, and what depends on them.
    """

    full: frozenset[fx.Node]
    below: frozenset[fx.Node]

    @classmethod
    def of(cls, graph: fx.Graph, check: fx.Node | None) -> Frontier:
        """The frontier below a check layer.

        Args:
            graph: functional ATen.
            check: the `reuse_kv` of the last layer whose k and v are computed for all tokens, with
                all that it takes; None for no such layer (then every marker is a barrier).
        """
        full = {node for node in graph.nodes if node.op in ("placeholder", "get_attr")}
        results: set[fx.Node] = set()
        if check is not None:
            results = {check, *check.users}
            full |= results | ancestors([check])
        below: set[fx.Node] = set()
        fresh = set(results)  # the check layer's keys and values on their way to the attention
        for node in graph.nodes:
            takes = node.all_input_nodes
            if any(n in below for n in takes) or (node.target is reuse_kv and node not in full):
                below.add(node)
            elif any(n in fresh for n in takes):
                (below if contracts(node.target) else fresh).add(node)
        return cls(frozenset(full), frozenset(below))


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """All that some nodes are computed from, without themselves."""
    seen: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        new = [n for n in waiting.pop().all_input_nodes if n not in seen]
        seen.update(new)
        waiting += new
    return seen


def is_result(node: fx.Node) -> bool:
    """True iff a node picks one of the results of an op."""
    return node.op == "call_function" and node.target is operator.getitem


def seen_through(node: fx.Node) -> fx.Node:
    """Rows of a marker's result are rows of its fresh k or v."""
    while is_result(node):
        marker, index = node.args
        assert isinstance(marker, fx.Node) and isinstance(index, int)
        if marker.target is not reuse_kv:
            break
        fresh = marker.args[index]
        assert isinstance(fresh, fx.Node)
        node = fresh
    return node
