"""Runs the graphs of `compiler.numeric` op by op: the original with a float64 twin of each site."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

from torch_cascade.compiler.record import NumericRecord
from torch_cascade.passes.site import SiteTag, tags_of

_FACTOR = 2.0
_ROUNDINGS = 4.0


@dataclass
class _Twin:
    """One site in float64, computed along with the original.

    Attributes:
        tag: the site.
        nodes: what is computed between q, k, v and the result.
        doubles: values in float64, of q, k, v and those nodes.
        reach: a bound of the scores.
    """

    tag: SiteTag
    nodes: frozenset[fx.Node]
    doubles: dict[str, torch.Tensor] = field(default_factory=dict)
    reach: float = 0.0


@dataclass(frozen=True)
class Result:
    """What a site yields in the original graph, in its own dtype and in float64."""

    eager: torch.Tensor
    reference: torch.Tensor
    reach: float


class _Functional(fx.Interpreter):
    """Runs a graph without writing to its inputs: what an op would write is a copy."""

    def run_node(self, n: fx.Node) -> Any:
        """The value of a node."""
        schema = getattr(n.target, "_schema", None)
        if n.op != "call_function" or schema is None or not schema.is_mutable:
            return super().run_node(n)
        args, kwargs = tree_map(_cloned, self.fetch_args_kwargs_from_env(n))
        return n.target(*args, **kwargs)  # type: ignore[operator]


class Original(_Functional):
    """The graph before the rewrite; after `run`, `results` has what its sites yield, by place."""

    def __init__(self, gm: fx.GraphModule, tags: Sequence[SiteTag]) -> None:
        """Sites by their tags; a tag that names no node of this graph has no result."""
        super().__init__(gm)
        nodes = {node.name: node for node in self.module.graph.nodes}  # type: ignore[union-attr]
        self.results: dict[str, Result] = {}
        self._twins = [_Twin(tag, _between(tag, nodes)) for tag in tags if tag.place in nodes]

    def run_node(self, n: fx.Node) -> Any:
        """The value of a node; beside it, its twins."""
        found = super().run_node(n)
        for twin in self._twins:
            if n.name in (twin.tag.q, twin.tag.k, twin.tag.v):
                twin.doubles[n.name] = _double(found)
            if n in twin.nodes:
                twin.doubles[n.name] = self._in_double(n, twin)
            if n.name == twin.tag.place and n in twin.nodes:
                self._finish(twin, found)
        return found

    def _in_double(self, n: fx.Node, twin: _Twin) -> Any:
        def argument(node: fx.Node) -> Any:
            return twin.doubles[node.name] if node.name in twin.doubles else self.env[node]

        args, kwargs = fx.map_arg((n.args, n.kwargs), argument)
        args, kwargs = tree_map(_double, (args, kwargs))
        return n.target(*args, **kwargs)  # type: ignore[operator]

    def _finish(self, twin: _Twin, eager: torch.Tensor) -> None:
        tag, doubles = twin.tag, twin.doubles
        q, k = doubles[tag.q], doubles[tag.k]
        scale = q.shape[tag.q_features] ** -0.5 if tag.scale is None else abs(tag.scale)
        norms = [_largest(x.norm(dim=d)) for x, d in ((q, tag.q_features), (k, tag.k_features))]
        self.results[tag.place] = Result(eager, doubles[tag.place], math.prod(norms) * scale)
        doubles.clear()
        self._twins.remove(twin)


class Rewritten(_Functional):
    """The graph after all passes; after `run`, `found` says of each site how wrong it is.

    Each site is given what it got in the original graph: what it yields is compared and then
    replaced by what the original yielded, so that errors do not add up.
    """

    def __init__(self, gm: fx.GraphModule, results: dict[str, Result]) -> None:
        """`results` of the original graph."""
        super().__init__(gm)
        self.found: dict[str, NumericRecord] = {}
        self._results = results

    def run_node(self, n: fx.Node) -> Any:
        """The value of a node, of a site that of the original."""
        found = super().run_node(n)
        for tag in tags_of(n):
            result = self._results.get(tag.place)
            if result is not None:
                self.found[tag.site] = _compared(found, result)
                replacement = result.eager
        return replacement if any(t.place in self._results for t in tags_of(n)) else found


def _between(tag: SiteTag, nodes: dict[str, fx.Node]) -> frozenset[fx.Node]:
    """The nodes that depend on q, k or v and that the result depends on, the result included."""
    leaves = {nodes[name] for name in (tag.q, tag.k, tag.v) if name in nodes}
    above: set[fx.Node] = set()
    left = [nodes[tag.place]]
    while left:
        node = left.pop()
        if node not in above and node not in leaves:
            above.add(node)
            left += node.all_input_nodes
    found: set[fx.Node] = set()
    for node in nodes.values():  # in the order of the graph
        if node in above and any(n in found or n in leaves for n in node.all_input_nodes):
            found.add(node)
    return frozenset(found)


def _compared(actual: torch.Tensor, result: Result) -> NumericRecord:
    """How wrong a result is, and how wrong it may be; infinite where it is not even finite."""
    reference, dtype = result.reference, actual.dtype
    finite = torch.isfinite(reference)
    largest = _largest(reference)
    own = torch.finfo(dtype).eps * largest
    stored = torch.finfo(torch.promote_types(dtype, torch.float32)).eps * largest
    eager_error = _error(result.eager, reference, finite, strict=False)
    bound = _FACTOR * eager_error + _ROUNDINGS * own + result.reach * stored
    return NumericRecord(_error(actual, reference, finite, strict=True), eager_error, bound)


def _error(x: torch.Tensor, reference: torch.Tensor, finite: torch.Tensor, strict: bool) -> float:
    """The largest difference; infinite where x has other infinities or NaNs, if `strict`."""
    x = x.double()
    if x.shape != reference.shape:
        return math.inf
    same = finite | (x == reference) | (x.isnan() & reference.isnan())
    if strict and not bool((same & (torch.isfinite(x) == finite)).all()):
        return math.inf
    return _largest((x - reference)[finite])


def _largest(x: torch.Tensor) -> float:
    found = x[torch.isfinite(x)].abs()
    return found.max().item() if found.numel() else 0.0


def _double(x: Any) -> Any:
    """Floating tensors and dtypes as float64; anything else as it is."""
    if isinstance(x, torch.Tensor) and x.is_floating_point():
        return x.double()
    return torch.float64 if isinstance(x, torch.dtype) and x.is_floating_point else x


def _cloned(x: Any) -> Any:
    return x.clone() if isinstance(x, torch.Tensor) else x
