"""Elements of graph tensors as decision trees: `at(node, index)` is the value at a symbolic index.

Read on demand and backwards: a view only moves the index, an `iota` answers with it, pointwise ops
combine the trees of their operands. What no rule covers is an unknown of that node at that index
(never an error, never a guess), so whatever a tree says is true of the tensor.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import sympy
import torch
from torch import fx
from torch._ops import OpOverload

from torch_cascade.compiler.graph import Size, Sizes, shape, size_expr, tensor, value
from torch_cascade.passes.mask_arithmetic import LEAF_RULES
from torch_cascade.passes.mask_leaves import (
    Unknown,
    cast,
    dtype_range,
    evaluated,
    is_constant,
    is_integer,
    magnitude,
)
from torch_cascade.passes.mask_rules import aligned
from torch_cascade.passes.mask_sources import RULES
from torch_cascade.passes.predicate import Atoms, Index, Tree, apply, size
from torch_cascade.passes.prover import Prover, Range

# Trees beyond this, or chains of ops deeper than that, are no mask that could be proved anyway.
_MOST_LEAVES = 128
_DEEPEST = 64


class Elements:
    """Reads elements of the tensors of one graph; remembers every one it has read.

    Attributes:
        prover: proofs about the sizes of the graph.
        atoms: the atoms of all trees.
        box: the range of every variable: indices of axes, and unknown integers.
        memo: what was read, innermost nodes first.
    """

    def __init__(self, sizes: Sizes) -> None:
        """Uses what is known of the sizes of the graph."""
        self.sizes = sizes
        self.prover = Prover(sizes)
        self.atoms = Atoms()
        self.box: dict[sympy.Symbol, Range] = {}
        self.memo: dict[tuple[fx.Node, Index], Tree] = {}
        self._unknowns: dict[tuple[fx.Node, Index], sympy.Symbol] = {}
        self._axes: dict[tuple[str, Size], sympy.Symbol] = {}
        self._depth = 0

    def axis(self, name: str, length: Size) -> Size:
        """The index variable of an axis, one for each name and length; 0 if the length is 1."""
        if length == 1:
            return sympy.Integer(0)
        if (name, length) not in self._axes:
            symbol = self._axes[name, length] = self._symbol(name)
            self.box[symbol] = Range(sympy.Integer(0), length - 1)
        return self._axes[name, length]

    def unknown(self, node: fx.Node, index: Index) -> Tree:
        """The element of a tensor whose values are not known."""
        dtype = tensor(node).dtype
        if dtype == torch.bool:
            return self.atoms.datum(node, index)
        if not is_integer(dtype):
            return Unknown.FLOAT
        if (node, index) not in self._unknowns:
            symbol = self._unknowns[node, index] = self._symbol(node.name)
            self.box[symbol] = dtype_range(dtype)
        found: Tree = self._unknowns[node, index]
        return found

    def is_data(self, expr: Size) -> bool:
        """True iff an integer expression depends on tensor data."""
        return not expr.free_symbols.isdisjoint(self._unknowns.values())

    def datum_of(self, symbol: Size) -> tuple[fx.Node, Index]:
        """The tensor and the index whose element an unknown integer is."""
        return next(place for place, known in self._unknowns.items() if known == symbol)

    def _symbol(self, name: str) -> sympy.Symbol:
        return sympy.Symbol(f"{name}#{len(self.box)}", integer=True)

    def at(self, node: fx.Node, index: Index) -> Tree:
        """The element of a tensor node at an index (one expression a dim, in range)."""
        key = (node, index)
        if key not in self.memo:
            self._depth += 1
            tree = self._read(node, index) if self._depth < _DEEPEST else None
            self._depth -= 1
            if tree is None or size(tree) > _MOST_LEAVES:
                tree = self.unknown(node, index)
            self.memo[key] = tree
        return self.memo[key]

    def _read(self, node: fx.Node, index: Index) -> Tree | None:
        target = node.target
        if node.op != "call_function":
            return None
        if target in RULES:
            return RULES[target](self, node, index)
        pointwise = isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags
        return self._pointwise(node, index) if pointwise else None

    def _pointwise(self, node: fx.Node, index: Index) -> Tree | None:
        operands = node.all_input_nodes
        trees = [self.operand(operand, index) for operand in operands]
        if math.prod(size(tree) for tree in trees) > _MOST_LEAVES:
            return None
        return apply(partial(self._leaf, node, index, operands), *trees)

    def operand(self, arg: fx.Node, index: Index) -> Tree:
        """The value of an argument that broadcasts to `index`: a tensor or a size."""
        val = value(arg)
        if isinstance(val, torch.Tensor):
            return self.at(arg, aligned(index, shape(arg)))
        return size_expr(val) if isinstance(val, (int, torch.SymInt)) else Unknown.FLOAT

    def _leaf(self, node: fx.Node, index: Index, operands: list[fx.Node], *leaves: Any) -> Tree:
        """One pointwise op on one leaf of each operand."""
        held = dict(zip(operands, leaves, strict=True))
        result: Tree | None = None
        if all(map(is_constant, leaves)):
            result = evaluated(node, held)
        elif node.target in LEAF_RULES:
            args, kwargs = fx.map_arg((node.args, node.kwargs), held.__getitem__)
            result = LEAF_RULES[node.target](self, node, index, *args, **kwargs)
        return self.unknown(node, index) if result is None else result

    def converted(self, leaf: Any, source: torch.dtype, target: torch.dtype) -> Tree | None:
        """A leaf in another dtype; None where it is not known then."""
        if source == target or (leaf is Unknown.FLOAT and target.is_floating_point):
            return leaf  # type: ignore[no-any-return]
        if is_constant(leaf):
            return cast(leaf, source, target)
        if leaf is Unknown.FLOAT or (self.is_data(leaf) and target == torch.bool):
            return None
        if target == torch.bool:
            negative, positive = map(self.atoms.at_least_zero, (-leaf - 1, leaf - 1))
            return apply(lambda a, b: a or b, negative, positive)
        return leaf if self.fits(leaf, target) else None

    def fits(self, expr: Size | int, dtype: torch.dtype) -> bool:
        """True iff an integer provably stays within a dtype, so that arithmetic is exact."""
        if not is_integer(dtype):
            return False
        info = torch.iinfo(dtype)
        if dtype == torch.int64:
            return magnitude(sympy.sympify(expr)) <= info.max
        low, high = self.prover.lowest(expr, self.box), self.prover.highest(expr, self.box)
        if low is None or high is None:
            return False
        return self.prover.known(low - info.min) and self.prover.known(info.max - high)
