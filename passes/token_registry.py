"""The registry of token rules: how the rows of an op follow from the rows of its operands.

A rule answers one question about one op: **an axis of the output, where does it come from in each
operand?** It is asked for the token axis and for the batch axis alike, never guards and never
edits. Where the op mixes an axis (a sum over it, a slice of it), it declines.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx

from torch_cascade.compiler.graph import Size, Sizes, product, shape
from torch_cascade.compiler.report import Declined, Reason
from torch_cascade.passes.axes import ONE
from torch_cascade.passes.token_maker import Maker
from torch_cascade.passes.token_rows import Axis, Place, Places, Rows, Spread

Arguments: TypeAlias = Mapping[str, Any]
Rule: TypeAlias = Callable[[fx.Node, Axis, Sizes], "Places | Declined"]
Make: TypeAlias = Callable[[Maker, fx.Node, Rows, Arguments], fx.Node]


def same_call(maker: Maker, node: fx.Node, rows: Rows, given: Arguments) -> fx.Node:
    """The op as it was, on the rows of its operands."""
    return maker.again(node, given)


@dataclass(frozen=True)
class TokenRule:
    """One op.

    Attributes:
        places: the rule.
        make: writes the op for the rows of its operands.
        resizes: the op is told its output's size, so it needs no operand to have the tokens.
        counts: what it makes of a row depends on where the row stands.
    """

    places: Rule
    make: Make = field(default=same_call)
    resizes: bool = False
    counts: bool = False


RULES: dict[Any, TokenRule] = {}


def token_rule(
    *targets: Any, make: Make = same_call, resizes: bool = False, counts: bool = False
) -> Callable[[Rule], Rule]:
    """Register one rule for some op overloads."""

    def register(places: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, TokenRule(places, make, resizes, counts)))
        return places

    return register


def rule_of(target: Any) -> TokenRule | None:
    """The rule of an op: its own, or the one for all pointwise ops."""
    if target in RULES:
        return RULES[target]
    return _POINTWISE if is_pointwise(target) else None


def is_pointwise(target: Any) -> bool:
    """True iff torch says that each element depends on the operands' elements at its place only."""
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    tags = target.tags
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def bound(node: fx.Node) -> dict[str, Any]:
    """The arguments that a call gives, by the names of its op's schema."""
    if node.target is operator.getitem:
        return {"self": node.args[0]}
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def operands(node: fx.Node) -> Iterator[tuple[str, int | None, fx.Node]]:
    """(name, place in a list or None, node) of each argument that is a node."""
    for name, argument in bound(node).items():
        if isinstance(argument, fx.Node):
            yield name, None, argument
        elif isinstance(argument, (list, tuple)):
            nodes = ((i, a) for i, a in enumerate(argument) if isinstance(a, fx.Node))
            yield from ((name, i, a) for i, a in nodes)


def place_of(places: Places, name: str, index: int | None) -> Place:
    """What a rule said of one operand."""
    found = places.get(name)
    if isinstance(found, tuple):
        return found[index or 0]
    return found


def broadcast(rank: int, axis: Axis, operand: fx.Node) -> Place:
    """Where an operand that broadcasts to `rank` dims has an axis of the result."""
    own = axis.dim - (rank - len(shape(operand)))
    if own < 0 or (shape(operand)[own] == 1 and axis.size != 1):
        return Spread(rank - axis.dim)
    return axis.at(own)


def mixed(node: fx.Node, detail: str) -> Declined:
    """The decline of an op whose rows are no function of its operands' rows."""
    return Declined(Reason.TOKENS_MIXED, node.name, f"{node.target}: {detail}")


def rank_of(node: fx.Node) -> int:
    """How many dims a tensor node has."""
    return len(shape(node))


def _pointwise(node: fx.Node, axis: Axis, sizes: Sizes) -> Places:
    rank = rank_of(node)
    found: dict[str, Place] = {}
    for name, _, operand in operands(node):
        if isinstance(operand.meta["val"], torch.Tensor):
            found[name] = broadcast(rank, axis, operand)
    return found


_POINTWISE = TokenRule(_pointwise)


def around(sizes: tuple[Size, ...], axis: Axis) -> tuple[Size, Size]:
    """Products of all that stands before and after an axis in row-major order."""
    before, after = ONE * product(sizes[: axis.dim]), ONE * product(sizes[axis.dim + 1 :])
    return before * axis.outer, axis.inner * after


def has_size(node: fx.Node, axis: Axis, sizes: Sizes) -> bool:
    """True iff the axis provably fills its dim of a tensor node."""
    return axis.dim < rank_of(node) and sizes.equal(shape(node)[axis.dim], axis.size)
