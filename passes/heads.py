"""Which heads attention reads: behind keys and values that are repeated for groups of queries."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from torch_cascade.compiler.graph import Sizes, shape, tensor
from torch_cascade.passes.axes import ONE, same_dim, whole
from torch_cascade.passes.site import AxisName
from torch_cascade.passes.views import Source, source_of

_AXES: tuple[AxisName, ...] = ("n", "h", "k", "d")


def sources(node: fx.Node, sizes: Sizes) -> Iterator[Source]:
    """A 4-D value and what it is a view or copy of, each with how the value indexes its dims."""
    dims = tuple(whole(*of) for of in zip(_AXES, shape(node), strict=True))
    source: Source | None = (node, dims)
    while source is not None:
        yield source
        source = source_of(*source, sizes)


def repeats(node: fx.Node, source: Source, sizes: Sizes) -> bool:
    """Whether head h of a value is head h // times of one of its sources; nothing else is moved."""
    read, kept = shape(node), shape(source[0])
    if len(kept) != len(_AXES) or read[1] % kept[1] != 0:
        return False
    if not all(sizes.equal(read[dim], kept[dim]) for dim in (0, 2, 3)):
        return False
    strides = (ONE, read[1] / kept[1], ONE, ONE)
    wanted = (whole(*of) for of in zip(_AXES, kept, strides, strict=True))
    return all(same_dim(a, b, sizes) for a, b in zip(source[1], wanted, strict=True))


def fewest_heads(node: fx.Node, sizes: Sizes) -> fx.Node:
    """The value [N, Hkv, L, D] whose heads a value [N, Hq, L, D] repeats; itself if it does not.

    `cascade::attend` needs no copies: it reads a head once for all queries of its group. What is
    converted on the way is another value, even if it is converted back: it may have been rounded.
    """
    found = node
    for source in sources(node, sizes):
        if not _stored_alike(source[0], node):
            break
        if repeats(node, source, sizes):
            found = source[0]
    return found


def _stored_alike(one: fx.Node, other: fx.Node) -> bool:
    a, b = tensor(one), tensor(other)
    return (a.dtype, a.device) == (b.dtype, b.device)
