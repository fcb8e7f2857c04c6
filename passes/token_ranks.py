"""Token rules of collectives: sums over ranks that compute the same rows."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import fx
from torch.distributed import is_available

from torch_cascade.compiler.graph import Sizes
from torch_cascade.compiler.report import Declined
from torch_cascade.passes.token_axis import RowPlan
from torch_cascade.passes.token_registry import bound, mixed, token_rule
from torch_cascade.passes.token_rows import Axis, Places
from torch_cascade.runtime.ranks import Ranks, size_of

_REDUCED: tuple[Any, ...] = ()
if is_available():
    _REDUCED = (torch.ops._c10d_functional.all_reduce.default,)
    _WAITED = torch.ops._c10d_functional.wait_tensor.default

    @token_rule(*_REDUCED, _WAITED)
    def _over_ranks(node: fx.Node, axis: Axis, sizes: Sizes) -> Places:
        """Each element is reduced with those at its place, if all ranks have the same rows."""
        return {"input": axis, "tensor": axis}


def is_collective(node: fx.Node) -> bool:
    """True iff ranks exchange something there, or wait for it."""
    return getattr(node.target, "namespace", "") == "_c10d_functional"


def has_effect(node: fx.Node, unread: Collection[fx.Node]) -> bool:
    """Whether a node has to run even if nobody reads it.

    Args:
        node: any.
        unread: where a collective is none: all ranks drop it together.
    """
    return bool(node.is_impure()) and not (is_collective(node) and node in unread)


def ranks_of(plans: Iterable[RowPlan]) -> Ranks | Declined | None:
    """The ranks that have to choose the same rows: those over which rows are reduced.

    Returns:
        None where no rows are reduced over ranks.
    """
    found: dict[str, fx.Node] = {}
    for plan in plans:
        nodes = (step.demand[0] for step in plan.steps)
        found |= {bound(n)["group_name"]: n for n in nodes if n.target in _REDUCED}
    if not found:
        return None
    if len(found) > 1:
        node = list(found.values())[-1]
        return mixed(node, "rows are reduced over different groups of ranks")
    (group,) = found
    return Ranks(group, size_of(group))
