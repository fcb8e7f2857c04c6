"""Replaces every cascade op that is left by the torch code that computes it on the target.

An implementation is a plain torch function. It is traced once a signature (op, sizes, strides and
dtypes up to the names of size symbols), and the trace is inlined at every site that has the
signature; a model of thirty layers traces once. A `cascade::sdpa` that nobody rewrote becomes the
SDPA it was, traced under the same rules as Inductor's own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import sympy
import torch
from torch import fx
from torch._guards import tracing
from torch.utils._pytree import tree_flatten

from torch_cascade.compiler.graph import Size, Sizes, fake_mode, value
from torch_cascade.compiler.pass_base import Pass, PassContext
from torch_cascade.kernels.cpu_attend import attend_cpu
from torch_cascade.kernels.merge import merge_torch
from torch_cascade.kernels.sdpa import sdpa_torch
from torch_cascade.passes.trace import Abstraction, Trace, trace

ops = torch.ops.cascade


def _fresh(
    k: torch.Tensor, v: torch.Tensor, *cached: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reuse_kv` that no pass used: the fresh K and V."""
    return k, v


def implementations() -> dict[Any, Callable[..., Any]]:
    """The torch function that computes each op."""
    return {
        ops.sdpa.default: sdpa_torch,
        ops.attend.default: attend_cpu,
        ops.merge.default: merge_torch,
        ops.reuse_kv.default: _fresh,
    }


@dataclass(frozen=True)
class LowerPass(Pass):
    """Inlines the implementation of every cascade op.

    Before:

        o, lse = cascade.merge([o0, o1], [lse0, lse1])

    After (shortened): `maximum`, `sub`, `exp`, `mul`, `add`, `log`, which Inductor fuses.
    """

    name: ClassVar[str] = "lower"

    def apply(self, graph: fx.Graph, context: PassContext) -> None:
        """Replace each cascade op, in graph order."""
        table = implementations()
        inliner = _Inliner(graph, context.sizes)
        for node in list(graph.nodes):
            if node.target in table:
                inliner.inline(node, table[node.target])


@dataclass
class _Inliner:
    """Inlines implementations into one graph; keeps the traces and values it can use again."""

    graph: fx.Graph
    sizes: Sizes
    traces: dict[Any, Trace] = field(default_factory=dict)
    values: dict[Any, Any] = field(default_factory=dict)
    assumed: set[Any] = field(default_factory=set)

    def inline(self, node: fx.Node, function: Callable[..., Any]) -> None:
        """Replace a call by the trace of `function` on its arguments."""
        leaves, spec = tree_flatten((node.args, node.kwargs))
        abstraction = Abstraction(self.sizes)
        described = tuple(abstraction.describe(leaf) for leaf in leaves)
        key = (node.target, described, spec, abstraction.bounds())
        if key not in self.traces:
            self.traces[key] = trace(function, leaves, spec, described, abstraction)
        traced = self.traces[key]
        renamed = dict(zip(traced.symbols, abstraction.atoms, strict=True))
        settled = (id(traced), tuple(renamed.values()))
        if settled not in self.assumed:
            self._assume(traced, renamed)
            self.assumed.add(settled)
        inputs = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
        _replace(node, self._copied(traced, node, inputs, renamed))

    def _assume(self, traced: Trace, renamed: dict[sympy.Symbol, Size]) -> None:
        """Make what the trace assumed hold for the real sizes: proved, else guarded."""
        shape_env = self.sizes.shape_env
        for condition in traced.conditions:
            real = condition.xreplace(renamed)
            if self.sizes.known(real):
                continue
            assert shape_env is not None
            if not bool(shape_env.create_symboolnode(real)):
                raise AssertionError(f"traced under {condition}, which is {real} here: false")

    def _copied(
        self,
        traced: Trace,
        anchor: fx.Node,
        inputs: Sequence[fx.Node],
        renamed: dict[sympy.Symbol, Size],
    ) -> list[Any]:
        """Copy a traced graph before `anchor`; returns its outputs as arguments."""
        placeholders = iter(inputs)
        env: dict[fx.Node, fx.Node] = {}
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(placeholders)
            elif node.op == "output":
                return [env[a] if isinstance(a, fx.Node) else a for a in node.args[0]]
            else:
                assert node.op == "call_function", f"{node.format_node()} in a trace"
                with self.graph.inserting_before(anchor):
                    env[node] = copy = self.graph.node_copy(node, env.__getitem__)
                copy.meta = _meta(node, anchor)
                copy.meta["val"] = self._value(node, renamed)
        raise AssertionError("a traced graph ends with its output")

    def _value(self, node: fx.Node, renamed: dict[sympy.Symbol, Size]) -> Any:
        """The value of a traced node in the real sizes; layers of the same sizes share it."""
        key = (node, tuple(renamed.values()))
        if key not in self.values:
            self.values[key] = self._rewritten(value(node), renamed)
        return self.values[key]

    def _rewritten(self, val: Any, renamed: dict[sympy.Symbol, Size]) -> Any:
        if isinstance(val, (tuple, list)):
            return type(val)(self._rewritten(v, renamed) for v in val)
        if isinstance(val, (torch.SymInt, torch.SymFloat)):
            return self._size(val, renamed)
        if not isinstance(val, torch.Tensor):
            return val
        shape = [self._size(s, renamed) for s in val.shape]
        strides = [self._size(s, renamed) for s in val.stride()]
        with tracing(None), fake_mode(self.graph):
            return torch.empty_strided(shape, strides, dtype=val.dtype, device=val.device)

    def _size(self, size: Any, renamed: dict[sympy.Symbol, Size]) -> Any:
        if not isinstance(size, (torch.SymInt, torch.SymFloat)):
            return size
        real = size.node.expr.xreplace(renamed)
        if real.is_number:
            return int(real)
        assert self.sizes.shape_env is not None
        if isinstance(size, torch.SymFloat):
            return self.sizes.shape_env.create_symfloatnode(real, hint=None)
        return self.sizes.shape_env.create_symintnode(real, hint=None)


def _meta(node: fx.Node, anchor: fx.Node) -> dict[str, Any]:
    """A copied node's metadata: what it is, at the anchor's place in the user's code."""
    keep = ("stack_trace", "nn_module_stack", "source_fn_stack", "seq_nr")
    place = {key: anchor.meta[key] for key in keep if key in anchor.meta}
    return {**node.meta, **place}


def _replace(node: fx.Node, outputs: Sequence[Any]) -> None:
    """Redirect the users of an op to the inlined outputs, and erase it."""
    if isinstance(value(node), torch.Tensor):
        node.replace_all_uses_with(outputs[0])
    for user in list(node.users):
        assert user.target is operator.getitem, f"{user.format_node()} uses several outputs"
        user.replace_all_uses_with(outputs[user.args[1]])  # type: ignore[index]
        node.graph.erase_node(user)
    node.graph.erase_node(node)
