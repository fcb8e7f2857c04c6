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
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._guards import tracing
from torch._inductor.decomposition import select_decomp_table
from torch.utils._pytree import tree_flatten, tree_unflatten

from torch_cascade.compiler.graph import fake_mode, size_expr, value
from torch_cascade.compiler.pass_base import Pass, PassContext
from torch_cascade.kernels.cpu_attend import attend_cpu
from torch_cascade.kernels.merge import merge_torch
from torch_cascade.kernels.sdpa import sdpa_torch

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
        traces: dict[Any, Trace] = {}
        for node in list(graph.nodes):
            if node.target in table:
                _inline(node, table[node.target], traces)


@dataclass(frozen=True)
class Trace:
    """A traced implementation: its graph, and the size symbols its values are written in."""

    graph: fx.Graph
    symbols: tuple[sympy.Symbol, ...]


@dataclass
class _Signature:
    """What a trace depends on, with size symbols named by order of appearance."""

    symbols: dict[sympy.Symbol, sympy.Symbol] = field(default_factory=dict)

    def of(self, arg: Any) -> Any:
        """A hashable description of one argument."""
        val = value(arg) if isinstance(arg, fx.Node) else arg
        if isinstance(val, torch.Tensor):
            sizes = [self._named(s) for s in (*val.shape, *val.stride(), val.storage_offset())]
            return (*sizes, val.dtype, val.device, val.ndim)
        if isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return type(val).__name__, self._named(val)
        return repr(val)

    def _named(self, size: Any) -> sympy.Basic:
        expr = size.node.expr if isinstance(size, torch.SymFloat) else size_expr(size)
        for symbol in sorted(expr.free_symbols, key=str):
            name = f"size{len(self.symbols)}"
            assumptions = {"integer": symbol.is_integer, "positive": symbol.is_positive}
            self.symbols.setdefault(symbol, sympy.Symbol(name, **assumptions))
        return expr.xreplace(self.symbols)


def _inline(node: fx.Node, function: Callable[..., Any], traces: dict[Any, Trace]) -> None:
    leaves, spec = tree_flatten((node.args, node.kwargs))
    inputs = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
    signature = _Signature()
    key = (node.target, tuple(signature.of(leaf) for leaf in leaves))
    symbols = tuple(signature.symbols)
    if key not in traces:
        traces[key] = Trace(_trace(function, leaves, spec, inputs), symbols)
    trace = traces[key]
    renamed = dict(zip(trace.symbols, symbols, strict=True))
    outputs = _copied(trace.graph, node, inputs, renamed)
    _replace(node, outputs)


def _trace(
    function: Callable[..., Any], leaves: Sequence[Any], spec: Any, inputs: Sequence[fx.Node]
) -> fx.Graph:
    """The functional ATen graph of an implementation, on the fake values of its arguments."""

    def flat(*values: Any) -> tuple[Any, ...]:
        given = iter(values)
        filled = [next(given) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(filled, spec)
        result = function(*args, **kwargs)
        return result if isinstance(result, tuple) else (result,)

    with tracing(None):
        module = aot_export_joint_simple(
            flat,
            tuple(value(node) for node in inputs),
            trace_joint=False,
            decompositions=select_decomp_table(),
        )
    return module.graph


def _copied(
    traced: fx.Graph,
    anchor: fx.Node,
    inputs: Sequence[fx.Node],
    renamed: dict[sympy.Symbol, sympy.Symbol],
) -> list[Any]:
    """Copy a traced graph before `anchor`; returns its outputs as arguments."""
    placeholders = iter(inputs)
    env: dict[fx.Node, fx.Node] = {}
    same = all(a == b for a, b in renamed.items())
    graph = anchor.graph
    for node in traced.nodes:
        if node.op == "placeholder":
            env[node] = next(placeholders)
        elif node.op == "output":
            return [env[a] if isinstance(a, fx.Node) else a for a in node.args[0]]
        else:
            assert node.op == "call_function", f"{node.format_node()} in a traced implementation"
            with graph.inserting_before(anchor):
                env[node] = copy = graph.node_copy(node, env.__getitem__)
            copy.meta = _meta(node, anchor)
            if not same:
                copy.meta["val"] = _renamed_value(value(node), renamed, graph)
    raise AssertionError("a traced graph ends with its output")


def _meta(node: fx.Node, anchor: fx.Node) -> dict[str, Any]:
    """A copied node's metadata: its own value, the anchor's place in the user's code."""
    keep = ("stack_trace", "nn_module_stack", "source_fn_stack", "seq_nr")
    place = {key: anchor.meta[key] for key in keep if key in anchor.meta}
    return {**node.meta, **place}


def _renamed_value(val: Any, renamed: dict[sympy.Symbol, sympy.Symbol], graph: fx.Graph) -> Any:
    """A fake value rewritten in the symbols of another site."""
    mode = fake_mode(graph)
    assert mode.shape_env is not None
    shape_env = mode.shape_env

    def size(s: Any) -> Any:
        if not isinstance(s, torch.SymInt):
            return s
        return shape_env.create_symintnode(s.node.expr.xreplace(renamed), hint=None)

    if isinstance(val, (tuple, list)):
        return type(val)(_renamed_value(v, renamed, graph) for v in val)
    if not isinstance(val, torch.Tensor):
        return size(val)
    sizes, strides = [size(s) for s in val.shape], [size(s) for s in val.stride()]
    with tracing(None), mode:
        return torch.empty_strided(sizes, strides, dtype=val.dtype, device=val.device)


def _replace(node: fx.Node, outputs: Sequence[Any]) -> None:
    """Redirect the users of an op to the inlined outputs, and erase it."""
    if isinstance(value(node), torch.Tensor):
        node.replace_all_uses_with(outputs[0])
    for user in list(node.users):
        assert user.target is operator.getitem, f"{user.format_node()} uses several outputs"
        user.replace_all_uses_with(outputs[user.args[1]])  # type: ignore[index,arg-type]
        node.graph.erase_node(user)
    node.graph.erase_node(node)
