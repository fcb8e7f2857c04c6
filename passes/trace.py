"""Traces an implementation in a world of its own: few simple size symbols, no guard left behind.

Tracing `attend` on a model's own sizes proves facts about products such as `s79*(s48//s79)` again
and again, which takes seconds. Here every factor of every size becomes one fresh symbol (an
*atom*) with the bounds that are known of it; the implementation is traced on those in a shape
environment of its own, and the result is written back in the model's sizes. What the trace had to
assume comes back as conditions on the atoms, for the caller to prove or to guard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import sympy
import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._guards import tracing
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, free_unbacked_symbols
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten
from torch.utils._sympy.numbers import int_oo

from torch_cascade.compiler.graph import Size, Sizes, size_expr, value


class TraceError(RuntimeError):
    """What was traced cannot be inlined."""


@dataclass(frozen=True)
class Trace:
    """A traced implementation.

    Attributes:
        graph: functional ATen; its values are written in `symbols`.
        symbols: one for each atom, in the order of `Abstraction.atoms`.
        conditions: what the trace assumed of them.
    """

    graph: fx.Graph
    symbols: tuple[sympy.Symbol, ...]
    conditions: tuple[sympy.Basic, ...]


@dataclass
class Abstraction:
    """The arguments of one call with every factor of their sizes named by a number.

    Attributes:
        sizes: facts about the real sizes.
        atoms: the factors, in order of appearance.
    """

    sizes: Sizes
    atoms: list[Size] = field(default_factory=list)
    _named: dict[Size, Size] = field(default_factory=dict)

    def describe(self, arg: Any) -> Any:
        """An argument as a hashable value in which only atoms stand for sizes."""
        val = value(arg) if isinstance(arg, fx.Node) else arg
        if isinstance(val, torch.Tensor):
            shape = tuple(self.named(s) for s in val.shape)
            strides = tuple(self.named(s) for s in val.stride())
            return "tensor", shape, strides, val.dtype, val.device
        if isinstance(val, torch.SymInt):
            return "size", self.named(val)
        if isinstance(val, torch.SymFloat):
            return "float", self._atom(val.node.expr)
        return "constant", type(val), repr(val)

    def named(self, size: Any) -> Size:
        """A size as a product of atoms and numbers."""
        expr = size_expr(size)
        if expr not in self._named:
            factored = sympy.factor_terms(self.sizes.rewritten(expr))
            factors = sympy.Mul.make_args(factored)
            self._named[expr] = sympy.prod([self._factor(f) for f in factors])
        return self._named[expr]

    def bounds(self) -> tuple[int | None, ...]:
        """For each atom the lower bound that is known of it: 2, 1, 0, or None."""
        return tuple(self._bound(atom) for atom in self.atoms)

    def hints(self) -> tuple[int | None, ...]:
        """For each atom its value in the call being compiled, or None."""
        return tuple(self.sizes.hint(atom) for atom in self.atoms)

    def _bound(self, atom: Size) -> int | None:
        if not self.sizes.at_least(atom, 0):
            return None
        # A guard may exclude 0 and 1 one by one, which no range remembers.
        low = 0
        while low < 2 and (
            self.sizes.at_least(atom, low + 1) or self.sizes.known(sympy.Ne(atom, low))
        ):
            low += 1
        return low

    def _factor(self, factor: Size) -> Size:
        if factor.is_number:
            return factor
        base, exponent = factor.as_base_exp()
        return self._atom(base) ** exponent

    def _atom(self, expr: Size) -> sympy.Symbol:
        if expr not in self.atoms:
            self.atoms.append(expr)
        return sympy.Symbol(f"atom{self.atoms.index(expr)}", integer=True)


def trace(
    function: Callable[..., Any],
    leaves: Sequence[Any],
    spec: TreeSpec,
    described: Sequence[Any],
    abstraction: Abstraction,
) -> Trace:
    """The functional ATen graph of `function`, called with `leaves` arranged as `spec` says.

    Args:
        function: plain torch code; returns a tensor or a tuple of tensors.
        leaves: the flat arguments; those that are graph nodes become inputs of the trace.
        spec: how the leaves form (args, kwargs).
        described: `abstraction.describe` of each leaf.
        abstraction: the atoms.

    Raises:
        TraceError: the function reads values of tensors, or tensors that it was not given.
    """
    world = _World(abstraction)
    pairs = zip(leaves, described, strict=True)
    inputs = tuple(world.input(d) for leaf, d in pairs if isinstance(leaf, fx.Node))

    def flat(*values: Any) -> tuple[Any, ...]:
        given = iter(values)
        filled = [next(given) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(filled, spec)
        result = function(*args, **kwargs)
        return result if isinstance(result, tuple) else (result,)

    table = select_decomp_table()
    with tracing(None), unset_fake_temporarily():  # Inductor's own mode is active around passes
        module = aot_export_joint_simple(flat, inputs, trace_joint=False, decompositions=table)
    conditions = tuple(guard.expr for guard in world.shape_env.guards)
    graph = cast("fx.GraphModule", module).graph
    _drop_assertions(graph)
    _write_out_constants(graph)
    _check(graph, world.symbols)
    return Trace(graph, world.symbols, conditions)


def _drop_assertions(graph: fx.Graph) -> None:
    """A cast leaves a check that its input has the dtype it was traced with: it has."""
    for node in graph.find_nodes(
        op="call_function", target=torch.ops.aten._assert_tensor_metadata.default
    ):
        graph.erase_node(node)


def _write_out_constants(graph: fx.Graph) -> None:
    """A number that was made a tensor, as in `x[mask] = 0`, is held by the module of the trace."""
    for node in graph.find_nodes(op="get_attr"):
        held = getattr(graph.owning_module, str(node.target))
        if not isinstance(held, torch.Tensor) or held.dim() != 0:
            continue
        with _disable_current_modes():
            number = held.item()
        with graph.inserting_before(node):
            written = graph.call_function(
                torch.ops.aten.full.default,
                ([], number),
                {"dtype": held.dtype, "device": held.device},
            )
        written.meta.update(node.meta)
        node.replace_all_uses_with(written)
        graph.erase_node(node)


def _check(graph: fx.Graph, sizes: Sequence[sympy.Symbol]) -> None:
    """Nothing may depend on the data but elements of tensors, and sizes that did so before."""
    for node in graph.nodes:
        if node.op == "get_attr":
            raise TraceError("it holds a tensor or a function of its own")
        # A kernel's results are a dict, in which torch looks for no symbols.
        found = map(free_unbacked_symbols, tree_leaves(node.meta.get("val")))
        if any(symbols - set(sizes) for symbols in found):
            raise TraceError(f"{node.target} makes a number or a size of the values of a tensor")


class _World:
    """A shape environment in which each atom is one symbol."""

    def __init__(self, abstraction: Abstraction) -> None:
        self.shape_env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.shape_env)
        bounded = zip(abstraction.hints(), abstraction.bounds(), strict=True)
        self.symbols = tuple(self._symbol(i, h, low) for i, (h, low) in enumerate(bounded))
        self.names = {f"atom{i}": symbol for i, symbol in enumerate(self.symbols)}

    def _symbol(self, index: int, hint: int | None, low: int | None) -> sympy.Symbol:
        symbol = self._unbacked() if hint is None else self._backed(index, hint, low)
        if low is not None:
            self.shape_env.constrain_symbol_range(symbol, low, int_oo)
        return symbol

    def _unbacked(self) -> sympy.Symbol:
        """A size that only data tells: a guard on it could not be kept, so there is no value."""
        with self.shape_env.ignore_fresh_unbacked_symbols():
            made = self.shape_env.create_unbacked_symint()
        return cast("sympy.Symbol", made.node.expr)

    def _backed(self, index: int, hint: int, low: int | None) -> sympy.Symbol:
        return self.shape_env.create_symbol(
            hint,
            source=ConstantSource(f"atom{index}"),
            dynamic_dim=DimDynamic.DYNAMIC,
            positive=True if low else None,
            do_not_specialize_zero_one=True,
        )

    def input(self, described: Any) -> Any:
        """The fake value of one described argument."""
        kind, *rest = described
        if kind == "size":
            return self._size(rest[0])
        if kind == "float":
            symbol = self.names[rest[0].name]
            return self.shape_env.create_symfloatnode(symbol, hint=None)
        shape, strides, dtype, device = rest
        with unset_fake_temporarily(), self.mode:
            return torch.empty_strided(
                [self._size(s) for s in shape],
                [self._size(s) for s in strides],
                dtype=dtype,
                device=device,
            )

    def _size(self, expr: Size) -> int | torch.SymInt:
        if expr.is_number:
            return int(expr)
        real = expr.xreplace({s: self.names[s.name] for s in expr.free_symbols})
        return self.shape_env.create_symintnode(real, hint=None)
