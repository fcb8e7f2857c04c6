"""Numbers of visible keys that are data: `arange(L) < lens[:, None]` read as one number a KV row.

A padded prefix, or the unused end of a page table or of a cache that is written in place, is hidden
by such a mask. Read as a limit, the keys behind it are not only hidden but never read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import FloorDiv, Mod

from torch_cascade.compiler.graph import Emitter, Size, Sizes, product, shape, tensor
from torch_cascade.passes.arrange import arranged
from torch_cascade.passes.axes import ONE, Digit, Dim, Dims, normalise, quotient, whole
from torch_cascade.passes.mask_elements import Elements
from torch_cascade.passes.mask_sight import Scores, Sight, conjunction
from torch_cascade.passes.predicate import Branch, Datum, Tree, apply, both, given

aten = torch.ops.aten
prims = torch.ops.prims

# What a condition says of a key, alone (a bool) or as a whole mask.
_VISIBLE: dict[Tree, bool] = {True: True, False: False, Sight.VISIBLE: True, Sight.HIDDEN: False}

# No key stands so far from another, and no sum of two such numbers overflows.
_FAR = 2**62 - 1


@dataclass(frozen=True)
class Rows:
    """Which KV rows a segment has: the digits of the batch row that choose one, major first."""

    kept: tuple[Digit, ...]
    batch: Size


@dataclass(frozen=True)
class KeyLimit:
    """Key j of a segment (0-based) is visible only if j < max(number, least) + shift.

    Attributes:
        node: an integer tensor that holds the numbers.
        dims: how each of its dims is indexed by digits of n.
        shift: a size.
        least: a size; None where the number counts whatever it is.
        major, minor: KV row (a * numbers + b) * minor + c reads number b, a < major, c < minor.
    """

    node: fx.Node
    dims: Dims
    shift: Size
    major: Size = ONE
    minor: Size = ONE
    least: Size | None = None

    def __str__(self) -> str:
        number = self.node.name if self.least is None else f"max({self.node.name}, {self.least})"
        return f"key < {number}" + ("" if self.shift == 0 else f" + {self.shift}")


def limits(
    read: Elements, scores: Scores, tree: Tree, start: Size, rows: Rows
) -> Iterator[tuple[KeyLimit, Tree]]:
    """Every limit that a mask implies on the keys from `start` on, and what else it says.

    Those that say it all come first. The others are of the last query, which sees most keys: the
    mask is still to be read then.
    """
    conditions, rest = conjunction(tree)
    parts = (*conditions, rest)
    others = [given(tree, each.atom, each.then is True) for each in conditions]
    for part, left in zip(parts, (*others, _where_all(conditions)), strict=True):
        limit = _limit_of(read, scores, part, start, rows, of_last_query=False)
        if limit is not None:
            yield limit, left
    for part in parts:
        limit = _limit_of(read, scores, part, start, rows, of_last_query=True)
        if limit is not None:
            yield limit, tree


def _where_all(conditions: Sequence[Branch]) -> Tree:
    """`VISIBLE` where all conditions hold, else `HIDDEN`."""
    shown: Tree = True
    for condition in conditions:
        shown = both(shown, condition)
    return apply(lambda seen: Sight.VISIBLE if seen else Sight.HIDDEN, shown)


def _limit_of(
    read: Elements,
    scores: Scores,
    tree: Tree,
    start: Size,
    rows: Rows,
    of_last_query: bool,
) -> KeyLimit | None:
    """A tree on keys from `start` on as a limit for each KV row, None if it is none.

    It is "key <= a", or "key <= a if a >= b, else key <= b", where b is a size: so reads a number
    of tokens that was clamped from below, as `SharedPrefixCache` gives it.
    """
    last = _last(read, scores, tree, of_last_query)
    if last is not None:
        return _limit(read, scores, last, start, rows)
    if not isinstance(tree, Branch) or isinstance(tree.atom, Datum):
        return None
    # A side that hides all keys would have made the atom a condition, and `conjunction` took it.
    then, other = (_last(read, scores, side, of_last_query) for side in (tree.then, tree.other))
    if then is None or other is None:
        return None
    for larger, smaller, holds in (
        (then, other, tree.atom.expr),
        (other, then, -tree.atom.expr - 1),
    ):
        # Where both are equal it does not matter which one is taken.
        ahead = sympy.expand(holds - (larger - smaller))
        limit = _limit(read, scores, larger, start, rows) if ahead in (0, -1) else None
        if limit is not None and not smaller.free_symbols & read.box.keys():
            return replace(limit, least=sympy.expand(smaller + 1 - start - limit.shift))
    return None


def _last(read: Elements, scores: Scores, tree: Tree, of_last_query: bool) -> Size | None:
    """The expression that a visible key does not exceed, where nothing else decides; else None.

    Of the last query, where later queries see no fewer keys.
    """
    key, query = scores.key, scores.query
    if not isinstance(tree, Branch) or isinstance(tree.atom, Datum):
        return None
    if not isinstance(key, sympy.Symbol):
        return None
    sides = [_VISIBLE.get(side) for side in (tree.then, tree.other)]
    if sides not in ([True, False], [False, True]):
        return None
    expr = tree.atom.expr if sides[0] else -tree.atom.expr - 1
    last = sympy.expand(expr + key)
    if of_last_query and _grows(last, query):
        last = sympy.expand(last.subs(query, read.box[query].high))
    return None if key in last.free_symbols else last


def _grows(last: Size, query: Size) -> bool:
    """True if an expression is a multiple of the query, and what does not depend on it."""
    times = last.coeff(query)
    # Not so: i - 3 * (i // 3), which is largest in the middle.
    linear = not query.free_symbols & sympy.expand(last - times * query).free_symbols
    return linear and bool(times.is_positive)


def _limit(read: Elements, scores: Scores, last: Size, start: Size, rows: Rows) -> KeyLimit | None:
    """`key <= last` as a limit for each KV row, None if it is none."""
    data = [symbol for symbol in last.free_symbols if read.is_data(symbol)]
    if len(data) != 1:
        return None
    more = sympy.expand(last - data[0])
    if more.free_symbols & read.box.keys():
        return None  # it depends on key, query or head, or not on the number as it is
    node, index = read.datum_of(data[0])
    dims = _digits(index, scores.index[0], rows.batch, read.sizes)
    spread = None if dims is None else _spread(dims, rows, read.sizes)
    if dims is None or spread is None:
        return None
    return KeyLimit(node, dims, more + 1 - start, *spread)


def _digits(index: tuple[Size, ...], row: Size, batch: Size, sizes: Sizes) -> Dims | None:
    """Index expressions as digits of the batch row."""
    found: list[Dim] = []
    for expr in index:
        if expr.is_number:
            found.append(Dim((), expr))
            continue
        digit = _digit(expr, row, batch, sizes)
        if digit is None:
            return None
        found.append(digit)
    return tuple(found)


def _digit(expr: Size, row: Size, batch: Size, sizes: Sizes) -> Dim | None:
    """`row`, `row // c`, `row % c` or `row // c % d` as one digit."""
    size: Size | None = None
    stride: Size = ONE
    if isinstance(expr, Mod):
        expr, size = expr.args
    if isinstance(expr, FloorDiv):
        expr, stride = expr.args
    if expr != row or row in stride.free_symbols or (size is not None and row in size.free_symbols):
        return None
    above = quotient(batch, stride, sizes)
    if above is None or (size is not None and quotient(above, size, sizes) is None):
        return None
    return whole("n", above if size is None else size, stride)


def _spread(dims: Dims, rows: Rows, sizes: Sizes) -> tuple[Size, Size] | None:
    """(major, minor) of a limit of these dims; None where the rows are no finer than it."""
    own = normalise([digit for dim in dims for digit in dim.digits], sizes)
    total = product(digit.size for digit in rows.kept)
    if not own:
        return total, ONE
    if len(own) != 1 or len(rows.kept) != 1:
        return None
    kept = rows.kept[0]
    minor = quotient(own[0].stride, kept.stride, sizes)
    major = None if minor is None else quotient(kept.size, minor * own[0].size, sizes)
    return None if minor is None or major is None else (major, minor)


def emit_limit(emit: Emitter, limit: KeyLimit) -> fx.Node:
    """The limits as int32 or int64 [rows]."""
    node = arranged(emit, limit.node, limit.dims, "n")
    is_number = limit.shift == 0 and limit.least is None
    if tensor(node).dtype not in (torch.int32, torch.int64) or not is_number:
        if tensor(node).dtype != torch.int64:
            node = emit.call(prims.convert_element_type.default, node, torch.int64)
        node = _shifted(emit, node, limit)
    if limit.major == 1 and limit.minor == 1:
        return node
    (numbers,) = shape(node)
    node = emit.call(aten.reshape.default, node, [1, numbers, 1])
    spread = emit.call(aten.expand.default, node, [limit.major, numbers, limit.minor])
    return emit.call(aten.reshape.default, spread, [limit.major * numbers * limit.minor])


def _shifted(emit: Emitter, node: fx.Node, limit: KeyLimit) -> fx.Node:
    """max(number, least) + shift, in int64."""
    if limit.shift == 0:
        return node if limit.least is None else emit.call(aten.clamp_min.default, node, limit.least)
    # The largest int64 may stand for "all": added to, it would become the smallest one.
    least = -_FAR if limit.least is None else limit.least
    bounded = emit.call(aten.clamp_min.default, node, least)
    # Not `clamp`: Inductor has taken it apart before the passes run, and lowers no other.
    bounded = emit.call(aten.clamp_max.default, bounded, _FAR)
    return emit.call(aten.add.Tensor, bounded, limit.shift)
