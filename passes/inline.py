"""Inlines plain torch functions into a graph: traced once a signature, copied at every call.

A signature is the function and its arguments up to the names of size symbols: sizes, strides,
dtypes, what is known of the sizes, and their hints (launch configurations of kernels are chosen
from hints). All layers of a model usually share one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx
from torch._guards import tracing
from torch.utils._pytree import tree_flatten

from torch_cascade.compiler.graph import Size, Sizes, fake_mode, value
from torch_cascade.passes.inline_values import settle
from torch_cascade.passes.trace import Abstraction, Trace, trace


@dataclass(frozen=True)
class Call:
    """A function to inline, and its arguments.

    Attributes:
        function: plain torch code; equal functions on like arguments share a trace.
        args, kwargs: graph nodes and constants, in any nesting of lists, dicts and named tuples.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Inliner:
    """Inlines calls into one graph; keeps the traces and values it can use again.

    Attributes:
        graph: where to write.
        sizes: facts about its sizes.
        traces: by function, and what is known of the arguments.
        values: values of traced nodes in the sizes of the graph.
        assumed: traces whose assumptions were made to hold, with the sizes they hold for.
    """

    graph: fx.Graph
    sizes: Sizes
    traces: dict[Any, Trace] = field(default_factory=dict)
    values: dict[Any, Any] = field(default_factory=dict)
    assumed: set[Any] = field(default_factory=set)

    def inline(self, call: Call, anchor: fx.Node) -> list[Any]:
        """Write the trace of a call before `anchor`; returns the call's flat results.

        The results are nodes, or constants where the traced function returned one.
        """
        leaves, spec = tree_flatten((call.args, call.kwargs))
        abstraction = Abstraction(self.sizes)
        described = tuple(abstraction.describe(leaf) for leaf in leaves)
        key = (call.function, described, spec, abstraction.bounds(), abstraction.hints())
        if key not in self.traces:
            self.traces[key] = trace(call.function, leaves, spec, described, abstraction)
        traced = self.traces[key]
        renamed = dict(zip(traced.symbols, abstraction.atoms, strict=True))
        settled = (id(traced), tuple(renamed.values()))
        if settled not in self.assumed:
            self._assume(traced, renamed)
            self.assumed.add(settled)
        inputs = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
        return self._copied(traced, anchor, inputs, renamed)

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
                settle(copy)
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
        if isinstance(val, dict):  # a Triton kernel's tensors by the names of its arguments
            # The type stays: torch 2.11 compares it with that of the node's own arguments.
            return type(val)({name: self._rewritten(v, renamed) for name, v in val.items()})
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
    meta = {key: held for key, held in node.meta.items() if key != "tensor_meta"}
    return meta | place
