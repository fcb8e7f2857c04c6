"""Digits: where an index of an attention's operand comes from, seen from further up the graph.

An axis index such as the batch row `n` is written in a mixed radix: `n = n1 * T + n0` has the
digits `n1` (stride T) and `n0` (stride 1). Walking from an operand up through views, every dim of
every tensor on the way is indexed by some digits: reshape regroups or splits them, permute moves
them, and **expand drops one**: the tensor above does not depend on it. So a batch map is which
digits of `n` survive: `n1` alone is `n // T` (repeat_interleave), `n0` alone is `n % T` (repeat),
none is "one row for all". GQA's head expansion drops a digit of `h`, never of `n`, so the two
cannot be confused. Equal sizes by accident mean nothing: a digit is an axis and a stride.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import sympy
from torch.utils._sympy.functions import FloorDiv

from torch_cascade.compiler.graph import Size, Sizes, product
from torch_cascade.passes.site import AxisName

ZERO = sympy.Integer(0)
ONE = sympy.Integer(1)


@dataclass(frozen=True)
class Digit:
    """One digit of an axis index: `(index // stride) % size`."""

    axis: AxisName
    stride: Size
    size: Size


@dataclass(frozen=True)
class Dim:
    """How one dim of a tensor is indexed: `offset` + the number its digits spell, major first."""

    digits: tuple[Digit, ...] = ()
    offset: Size = ZERO

    @property
    def extent(self) -> Size:
        """How many indices of the dim are used."""
        return product(d.size for d in self.digits)

    def covers(self, size: Size, sizes: Sizes) -> bool:
        """True iff the digits provably run over a whole dim of `size`."""
        return self.offset == 0 and sizes.equal(self.extent, size)


Dims = tuple[Dim, ...]


def whole(axis: AxisName, size: Size, stride: Size = ONE) -> Dim:
    """A dim indexed by all of an axis."""
    return Dim(() if size == 1 else (Digit(axis, stride, size),))


def quotient(a: Size, b: Size, sizes: Sizes) -> Size | None:
    """`a / b` if `b` provably divides `a`, else None."""
    if sizes.equal(a, b):
        return ONE
    ratios = [sympy.cancel(x / y) for x, y in ((a, b), (sizes.rewritten(a), sizes.rewritten(b)))]
    exact = (r for r in (*ratios, FloorDiv(a, b)) if sympy.denom(r) == 1)
    return next((r for r in exact if sizes.equal(r * b, a)), None)


def split_digit(digit: Digit, parts: Sequence[Size]) -> tuple[Digit, ...]:
    """A digit cut into digits of the given sizes (major first); their product is its size."""
    digits: list[Digit] = []
    stride = digit.stride
    for size in reversed(parts):
        digits.append(Digit(digit.axis, stride, size))
        stride = stride * size
    return tuple(reversed(digits))


def cuts(a: Sequence[Size], b: Sequence[Size], sizes: Sizes) -> list[tuple[int, int]]:
    """Positions (i, j), from (0, 0), where `prod(a[:i])` provably equals `prod(b[:j])`.

    Each i and j appears once, so the runs between successive cuts are the smallest groups of dims
    that a reshape maps onto each other.
    """
    found = [(0, 0)]
    for i in range(1, len(a) + 1):
        for j in range(found[-1][1] + 1, len(b) + 1):
            left, right = product(a[:i]), product(b[:j])
            if sizes.hint(left) == sizes.hint(right) and sizes.equal(left, right):
                found.append((i, j))
                break
    return found


def regroup(dims: Dims, old: Sequence[Size], new: Sequence[Size], sizes: Sizes) -> Dims | None:
    """Dims of a tensor of sizes `new` that is viewed as `old`, itself indexed by `dims`.

    None where the digits do not line up provably. Size-1 dims carry no digits and fall out first.
    """
    if ZERO in (*old, *new):
        return None  # nothing is indexed: every product is 0 and the cuts would be arbitrary
    sources = [(d, s) for d, s in zip(dims, old, strict=True) if s != 1]
    targets = [s for s in new if s != 1]
    marks = cuts([s for _, s in sources], targets, sizes)
    if marks[-1] != (len(sources), len(targets)):
        return None
    result: list[Dim] = []
    for (i0, j0), (i1, j1) in pairwise(marks):
        group = _regroup_run(sources[i0:i1], targets[j0:j1], sizes)
        if group is None:
            return None
        result += group
    filled = iter(result)
    return tuple(Dim() if s == 1 else next(filled) for s in new)


def _regroup_run(
    sources: list[tuple[Dim, Size]], targets: list[Size], sizes: Sizes
) -> list[Dim] | None:
    if len(sources) == len(targets) == 1:
        return [sources[0][0]]
    if not all(dim.covers(size, sizes) for dim, size in sources):
        return None
    digits = [digit for dim, _ in sources for digit in dim.digits]
    return distribute(digits, targets, sizes)


def distribute(digits: Sequence[Digit], targets: Sequence[Size], sizes: Sizes) -> list[Dim] | None:
    """Digits laid out over dims of sizes `targets`; a digit is split where a dim ends in it."""
    marks = cuts([d.size for d in digits], targets, sizes)
    if marks[-1] != (len(digits), len(targets)):
        return None
    result: list[Dim] = []
    for (i0, j0), (i1, j1) in pairwise(marks):
        run, dims = tuple(digits[i0:i1]), targets[j0:j1]
        laid = _laid_out(run, dims, sizes)
        if laid is None:
            return None
        result += laid
    return result


def _laid_out(run: Sequence[Digit], targets: Sequence[Size], sizes: Sizes) -> list[Dim] | None:
    """One run of digits over dims with no cut between them: peeled off from the minor end.

    The last digit and the last dim always end together, so the smaller of the two divides the
    larger or they do not line up.
    """
    if len(targets) == 1:
        return [Dim(tuple(run))]
    left: list[Digit] = list(run)
    dims: list[Dim] = []
    for size in reversed(targets[1:]):
        own: list[Digit] = []
        while size != ONE:
            if not left:
                return None
            digit = left.pop()
            whole_digit, part = quotient(size, digit.size, sizes), None
            if whole_digit is None:
                part = quotient(digit.size, size, sizes)
                if part is None:
                    return None
                major, digit = split_digit(digit, (part, size))
                left.append(major)
            own.insert(0, digit)
            size = ONE if whole_digit is None else whole_digit
        dims.insert(0, Dim(tuple(own)))
    return [Dim(tuple(left)), *dims]


def complement(
    kept: Sequence[Digit], axis: AxisName, total: Size, sizes: Sizes
) -> tuple[Digit, ...] | None:
    """The digits of an axis of size `total` that are not among `kept`, major first.

    None where the kept digits do not provably tile the axis.
    """
    dropped: list[Digit] = []
    below = ONE
    for digit in sorted(kept, key=lambda d: sizes.hint(d.stride) or 0):
        gap = quotient(digit.stride, below, sizes)
        if gap is None:
            return None
        dropped += [Digit(axis, below, gap)] if gap != 1 else []
        below = digit.stride * digit.size
    rest = quotient(total, below, sizes)
    if rest is None:
        return None
    dropped += [Digit(axis, below, rest)] if rest != 1 else []
    return tuple(reversed(dropped))


def normalise(digits: Sequence[Digit], sizes: Sizes) -> tuple[Digit, ...]:
    """Digits in canonical form, major first: neighbours that continue one another are joined."""
    ordered = sorted(digits, key=lambda d: sizes.hint(d.stride) or 0, reverse=True)
    joined: list[Digit] = []
    for digit in ordered:
        if digit.size == 1:
            continue
        if joined and sizes.equal(joined[-1].stride, digit.stride * digit.size):
            digit = replace(digit, size=joined.pop().size * digit.size)
        joined.append(digit)
    return tuple(joined)


def same_digits(a: Sequence[Digit], b: Sequence[Digit], same: Callable[[Size, Size], bool]) -> bool:
    """True iff two canonical digit lists are the same, by `Sizes.equal` or `Sizes.agree`."""
    if len(a) != len(b):
        return False
    return all(
        x.axis == y.axis and same(x.stride, y.stride) and same(x.size, y.size)
        for x, y in zip(a, b, strict=True)
    )


def same_dim(a: Dim, b: Dim, sizes: Sizes) -> bool:
    """True iff two dims are indexed alike: the same offset, and the same digits when joined."""
    found, wanted = normalise(a.digits, sizes), normalise(b.digits, sizes)
    return sizes.equal(a.offset, b.offset) and same_digits(found, wanted, sizes.equal)
