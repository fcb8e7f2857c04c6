"""Offsets of groups: whether they are how many rows of each expert a sort put one after another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from torch_cascade.compiler.graph import Size, Sizes, shape, tensor
from torch_cascade.passes.token_frontier import is_result
from torch_cascade.passes.token_registry import bound, rank_of
from torch_cascade.passes.token_sorts import SORTS

aten = torch.ops.aten
prims = torch.ops.prims

_EXACT = (torch.int32, torch.int64, torch.float32, torch.float64)
"""Where numbers of experts, and of rows, are whole."""
_MOST = 1024
"""Experts up to which `histc` with bins from 0 to E - 1 is known to put each into its own."""
_SAME_NUMBERS = frozenset(
    {
        aten.alias.default,
        aten.clone.default,
        aten.permute.default,
        aten.reshape.default,
        aten.squeeze.dim,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.default,
        prims.convert_element_type.default,
    }
)
"""The same numbers in another order or form."""
_SOME_NUMBERS = _SAME_NUMBERS | {aten.slice.Tensor, aten.select.int, aten.expand.default}
"""Some of the same numbers."""

_PLACES = frozenset(
    {
        *SORTS,
        aten.max.dim,
        aten.min.dim,
        aten.topk.default,
    }
)
"""Ops whose second result is places along a dim."""


@dataclass(frozen=True)
class Counts:
    """Running totals of how often each number of 0 to E - 1 appears.

    Attributes:
        source: the numbers.
        steps: from the histogram to the totals, each an op of the one before.
    """

    source: fx.Node
    steps: tuple[fx.Node, ...]

    @property
    def dtype(self) -> torch.dtype:
        """In which the numbers are counted."""
        return tensor(self.source).dtype


def counts_of(offsets: fx.Node) -> Counts | None:
    """`cumsum(histc(numbers))`, with conversions between; None for anything else."""
    wanted = [aten.histc.default, aten.cumsum.default]
    steps: list[fx.Node] = []
    node = offsets
    while wanted:
        if tensor(node).dtype not in _EXACT or rank_of(node) != 1:
            return None
        if node.target is wanted[-1]:
            wanted.pop()
        elif node.target is not prims.convert_element_type.default:
            return None
        steps.insert(0, node)
        node = node.args[0]  # type: ignore[assignment]
    return Counts(node, tuple(steps))


def groups_of(offsets: fx.Node, sort: fx.Node, experts: Size, sizes: Sizes) -> str | None:
    """Why offsets are not provably the ends of the groups of a sort; None where they are.

    The rows of expert g are then `offsets[g - 1]` to `offsets[g]`, as the sort ascends, each number
    is a whole one of 0 to E - 1, and each is counted once.

    Args:
        offsets: int [E].
        sort: of one dim.
        experts: E, the number of groups.
        sizes: facts about the sizes.
    """
    given = bound(sort)
    counts = counts_of(offsets)
    if counts is None:
        return f"{offsets.name} is not the running total of a histogram of experts"
    if not _one_bin_each(counts.steps[0], experts):
        return f"{counts.steps[0].name} has not one bin for each of {experts} experts"
    if given.get("descending", False):
        return "experts are sorted in descending order, and counted in ascending order"
    counted = _numbers(counts.source)
    is_sorted = is_result(counted) and counted.args == (sort, 0)
    if not is_sorted and counted is not _numbers(given["self"]):
        return f"{offsets.name} does not count the experts that {sort.name} sorts"
    if not _less(given["self"], experts, sizes):
        return f"the experts that {sort.name} sorts may be others than 0 to {experts} - 1"
    return None


def _one_bin_each(histogram: fx.Node, experts: Size) -> bool:
    """Bins of 0 to E - 1, where number g falls into bin g; of 0 to E, rounding decides."""
    given = bound(histogram)
    if not experts.is_number or not 2 <= int(experts) <= _MOST:
        return False
    count = int(experts)
    bins, low, high = given.get("bins", 100), given.get("min", 0), given.get("max", 0)
    return (bins, low, high) == (count, 0, count - 1)


def _numbers(node: fx.Node) -> fx.Node:
    """What holds the same numbers."""
    while node.target in _SAME_NUMBERS and tensor(node).dtype in _EXACT:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _less(node: fx.Node, bound_by: Size, sizes: Sizes) -> bool:
    """Whether whole numbers are provably 0 to n - 1: places along a dim of at most n."""
    while node.target in _SOME_NUMBERS and tensor(node).dtype in _EXACT:
        node = node.args[0]  # type: ignore[assignment]
    if node.target is aten.cat.default:
        return all(_less(piece, bound_by, sizes) for piece in bound(node)["tensors"])
    if not is_result(node) or node.args[1] != 1:
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if source.target not in _PLACES:
        return False
    given = bound(source)
    return sizes.at_least(bound_by, shape(given["self"])[given.get("dim", -1)])
