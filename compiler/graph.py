"""FX queries and edits that two passes or more use: values, sizes, emitting nodes, printing.

Sizes are sympy expressions throughout (a Python int becomes `sympy.Integer`), so one currency
serves static and symbolic shapes. Questions about them go through `Sizes.known`, which proves or
says no and never adds a guard; this package's deliberate guards are those of decisions
(`compiler/decide.py`, `compiler/decide_reuse.py`) and of `Sizes.agree`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeAlias, cast

import sympy
import torch
from torch import fx
from torch._guards import tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import (
    ShapeEnv,
    free_unbacked_symbols,
    statically_known_true,
)
from torch.utils._sympy.functions import FloorDiv, Max
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from torch_cascade.compiler.size_nodes import SizeNode

Size: TypeAlias = sympy.Expr
SizeLike: TypeAlias = "int | torch.SymInt | sympy.Expr"

aten = torch.ops.aten

# torch 2.11 has `size_hint`; 2.12 renamed it.
_HINTS = vars(symbolic_shapes)
_hint_of: Callable[[Any], int] = _HINTS.get("optimization_hint") or _HINTS["size_hint"]


def value(node: fx.Node) -> Any:
    """The fake value AOTAutograd recorded for a node (tensor, SymInt, tuple, ...)."""
    return node.meta["val"]


def tensor(node: fx.Node) -> torch.Tensor:
    """The fake tensor of a node that is known to hold one.

    Raises:
        TypeError: the node holds something else.
    """
    val = value(node)
    if not isinstance(val, torch.Tensor):
        raise TypeError(f"node {node.name}: expected a tensor value, got {type(val).__name__}")
    return val


def size_expr(size: SizeLike | fx.Node) -> Size:
    """A size as a sympy expression, from an int, a SymInt, a node holding one, or itself."""
    if isinstance(size, fx.Node):
        size = cast("int | torch.SymInt", value(size))
    if isinstance(size, torch.SymInt):
        return size.node.expr
    if type(size) is int:  # most sizes; sympify is several times slower
        return sympy.Integer(size)
    return sympy.sympify(size)


def shape(node: fx.Node) -> tuple[Size, ...]:
    """The sizes of a tensor node."""
    return tuple(size_expr(s) for s in tensor(node).shape)


def product(sizes: Iterable[Size]) -> Size:
    """Product of sizes; 1 for none."""
    return sympy.prod(list(sizes))


def fake_mode(graph: fx.Graph) -> FakeTensorMode:
    """The fake mode of a graph's own values (never ask the tracing context: it may be another).

    Raises:
        ValueError: no node carries a fake tensor.
    """
    for node in graph.nodes:
        val = node.meta.get("val")
        if isinstance(val, FakeTensor):
            return val.fake_mode
    raise ValueError("graph has no node with a fake tensor value")


class Sizes:
    """What is known about the symbolic sizes of one graph, asked without adding guards."""

    def __init__(self, shape_env: ShapeEnv | None, *, may_guard: bool = False) -> None:
        """Facts of `shape_env`; None for a graph whose sizes are all static."""
        self.shape_env = shape_env
        self.may_guard = may_guard

    @classmethod
    def of(cls, graph: fx.Graph, *, may_guard: bool = False) -> Sizes:
        """The facts that belong to a graph's fake values."""
        return cls(fake_mode(graph).shape_env, may_guard=may_guard)

    def known(self, condition: Any) -> bool:
        """True iff a sympy condition (or bool) holds for all admitted sizes; adds no guard."""
        if condition in (True, sympy.true):
            return True
        if condition in (False, sympy.false) or self.shape_env is None:
            return False
        return statically_known_true(self.shape_env.create_symboolnode(condition))

    def equal(self, a: SizeLike, b: SizeLike) -> bool:
        """True iff both sizes are provably the same."""
        a, b = size_expr(a), size_expr(b)
        if a == b or (a.is_number and b.is_number):
            return bool(a == b)
        if self.known(sympy.Eq(a, b)):
            return True
        return bool(sympy.expand(self.rewritten(a) - self.rewritten(b)) == 0)

    def agree(self, a: SizeLike, b: SizeLike) -> bool:
        """True iff both sizes are the same wherever the program is valid.

        For pairs that an attention itself needs to be equal, such as the lengths of K and V: Dynamo
        gives each its own symbol, and nothing in the graph compares them. Where the pair is not
        proved but equal now, the equality becomes a guard (if `may_guard`): it cannot fail in a
        valid program, so it costs no recompilation.
        """
        if self.equal(a, b):
            return True
        hint = self.hint(a)
        if not self.may_guard or hint is None or hint != self.hint(b):
            return False
        assert self.shape_env is not None  # static sizes are equal or not
        condition = sympy.Eq(size_expr(a), size_expr(b))
        return bool(self.shape_env.create_symboolnode(condition))

    def rewritten(self, expr: Size) -> Size:
        """An expression in terms of what guards already say a symbol equals.

        Torch looks a guard such as `Eq(s0, s1*(s0//s1))` up only as a whole; inside a product it
        has to be substituted.
        """
        if self.shape_env is None:
            return expr
        # A guard keeps the names of its time; a symbol may since have been replaced by another.
        expr = self.shape_env.replace(expr)
        equal = self._equalities()
        for _ in equal:
            changed = self.shape_env.replace(expr.xreplace(equal))
            if changed == expr:
                break
            expr = changed
        # Strides of fakes hold Max(1, size); a size that a guard keeps from 0 is the Max itself.
        at_least_one = {m: m.args[1] for m in expr.atoms(Max) if self._is_positive_size(m)}
        return expr.xreplace(at_least_one)

    def _equalities(self) -> dict[sympy.Basic, Size]:
        """What guards say a symbol or a quotient equals; the first guard about each counts."""
        assert self.shape_env is not None
        equal: dict[sympy.Basic, Size] = {}
        for fact, holds in self.shape_env.axioms.items():
            if not isinstance(fact, sympy.Eq) or holds != sympy.true:
                continue
            left, right = self.shape_env.replace(fact.lhs), self.shape_env.replace(fact.rhs)
            quotients = isinstance(left, FloorDiv) and isinstance(right, FloorDiv)
            if left.is_Symbol or (quotients and right not in equal):
                equal.setdefault(left, right)
        return equal

    def _is_positive_size(self, maximum: sympy.Basic) -> bool:
        floor, *rest = maximum.args
        if floor != 1 or len(rest) != 1:
            return False
        return all(self.known(sympy.Ne(factor, 0)) for factor in sympy.Mul.make_args(rest[0]))

    def at_least(self, a: SizeLike, b: SizeLike) -> bool:
        """True iff `a >= b` is provable."""
        return self.known(sympy.Ge(size_expr(a), size_expr(b)))

    def hint(self, size: SizeLike) -> int | None:
        """The size in the call being compiled, None where it has none (unbacked)."""
        expr = size_expr(size)
        if expr.is_number:
            return int(expr)
        if self.shape_env is None:
            return None
        if free_unbacked_symbols(expr):
            return None
        symint = self.shape_env.create_symintnode(expr, hint=None)
        return int(_hint_of(symint))


class Emitter:
    """Inserts call nodes before an anchor; each gets `meta["val"]` by running its op on fakes."""

    def __init__(self, anchor: fx.Node) -> None:
        """Nodes go right before `anchor` and carry its source location."""
        self.graph = anchor.graph
        self.anchor = anchor
        self.mode = fake_mode(anchor.graph)
        self.sizes = Sizes(self.mode.shape_env)
        keep = ("stack_trace", "nn_module_stack", "source_fn_stack")
        self._meta = {key: anchor.meta[key] for key in keep if key in anchor.meta}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert one call; arguments may be nodes, sizes as sympy expressions, or constants."""
        args, kwargs = self._sizes(args), self._sizes(kwargs)
        with self.graph.inserting_before(self.anchor):
            node = self.graph.call_function(target, args, kwargs)
        fake_args, fake_kwargs = fx.map_arg((node.args, node.kwargs), value)
        with tracing(None), self.mode:
            node.meta.update(self._meta, val=target(*fake_args, **fake_kwargs))
        return node

    def size(self, size: SizeLike) -> int | fx.Node:
        """A size as a graph argument: an int, or a node that computes the expression."""
        expr = size_expr(size)
        if self.mode.shape_env is not None:  # a symbol may since have been found to equal another
            expr = self.mode.shape_env.replace(expr)
        if expr.is_number:
            return int(expr)
        env = {symbol: SizeNode(self._symbol(symbol), self.call) for symbol in expr.free_symbols}
        result = sympy_interp(PythonReferenceAnalysis, cast("Any", env), expr)
        return cast("int | fx.Node", result.node if isinstance(result, SizeNode) else result)

    def _sizes(self, args: Any) -> Any:
        if isinstance(args, sympy.Expr):
            return self.size(args)
        if isinstance(args, (list, tuple)):
            return type(args)(self._sizes(a) for a in args)
        if isinstance(args, dict):
            return {key: self._sizes(a) for key, a in args.items()}
        return args

    def _symbol(self, symbol: sympy.Symbol) -> fx.Node:
        """A node that holds the value of a size symbol."""
        found = self._holder(symbol, self.graph.find_nodes(op="placeholder"))
        # What only data tells is no size of an input, but of what was computed from it.
        found = found or self._holder(symbol, self._nodes_before())
        if found is None:
            raise ValueError(f"nothing before {self.anchor.name} holds the size symbol {symbol}")
        return found

    def _holder(self, symbol: sympy.Symbol, nodes: Collection[fx.Node]) -> fx.Node | None:
        """One of the nodes that is the size, else that of a tensor among them."""
        for node in nodes:
            val = node.meta.get("val")
            if isinstance(val, torch.SymInt) and val.node.expr == symbol:
                return node
        for node in nodes:
            if not isinstance(node.meta.get("val"), torch.Tensor):
                continue
            if symbol in (sizes := shape(node)):
                return self.call(aten.sym_size.int, node, sizes.index(symbol))
        return None

    def _nodes_before(self) -> list[fx.Node]:
        return list(itertools.takewhile(lambda node: node is not self.anchor, self.graph.nodes))


def show(graph: fx.Graph, *, renamed: bool = True) -> str:
    """Text of a graph: `%cat: f32[8, 2, s0 + 5, 16] = cat([%view, %arg2], 2)` for a node.

    Args:
        graph: the graph.
        renamed: number nodes within their op's name and symbols in order of appearance, so that
            the text is the same for all versions of torch (tests). False keeps torch's own names,
            which its logs and guards use and which stay while a pass edits the graph (reports).
    """
    from torch_cascade.compiler.printing import Printer

    return Printer(graph, renamed=renamed).text()
