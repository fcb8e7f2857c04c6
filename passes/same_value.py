"""Nodes that compute the same from the same: what each layer of a model writes anew."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def same_value(a: object, b: object) -> bool:
    """True only if two arguments of calls have equal values for all inputs.

    Assumes a functional graph. Calls are compared by op and arguments, those of any depth; an op
    that draws random numbers is like itself alone.
    """
    stack: list[tuple[Any, Any]] = [(a, b)]
    seen: set[tuple[fx.Node, fx.Node]] = set()
    while stack:
        one, other = stack.pop()
        if one is other or (one, other) in seen:
            continue
        if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
            if type(one) is not type(other) or not _same_plain(one, other, stack):
                return False
            continue
        if one.target != other.target or not (_repeatable(one) and _repeatable(other)):
            return False
        seen.add((one, other))
        stack += [(one.args, other.args), (one.kwargs, other.kwargs)]
    return True


def _same_plain(one: Any, other: Any, stack: list[tuple[Any, Any]]) -> bool:
    """Compares what is no node; the parts of a container are left to `stack`."""
    if isinstance(one, (list, tuple)):
        stack += zip(one, other, strict=False)
        return len(one) == len(other)
    if isinstance(one, dict):
        stack += [(one[key], other.get(key)) for key in one]
        return bool(one.keys() == other.keys())
    return bool(one == other)


def _repeatable(node: fx.Node) -> bool:
    """Whether a second call gives the same: no input (it is like itself alone), nothing random."""
    if node.op != "call_function":
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return True  # an item of a result, or arithmetic of sizes
    return torch.Tag.nondeterministic_seeded not in node.target.tags
