"""Which attends and merges of a graph one GPU kernel computes together.

The readable form stays in the graph until it is lowered: `attend`, `attend`, `merge`, and after
them the conversion and the layout of the output. Where nothing else reads what stands in between,
all of it is one call of `attend_merge`. Nothing is edited here.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_cascade.compiler.graph import tensor

aten = torch.ops.aten
prims = torch.ops.prims
ops = torch.ops.cascade

Order = tuple[int, ...]

NATURAL: Order = (0, 1, 2, 3)
# What all parts of one call have in common; the other options of `attend` are each part's own.
SHARED = ("scale", "softcap", "alibi_slopes")
_OUT_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_DENSE_FORMATS = (None, torch.preserve_format)


@dataclass(frozen=True)
class Epilogue:
    """What is done to the output right after: at most one conversion, and moves of memory.

    Attributes:
        nodes: from the output itself to the last node taken in; each reads the one before.
        dtype: of the last node.
        dims: for each dim of the last node the dim of the output [N, Hq, M, Dv] it is.
        order: dims of the output from the largest stride to the smallest.
    """

    nodes: tuple[fx.Node, ...]
    dtype: torch.dtype = torch.float32
    dims: Order = NATURAL
    order: Order = NATURAL


@dataclass(frozen=True)
class Fusion:
    """Nodes that one call of `attend_merge` replaces. Arguments are read from them when it is made.

    Attributes:
        root: the merge, or an attend that stands alone; whatever the call reads stands above it.
        attends: the parts, in order.
        epilogue: None where the output has several readers, or none.
    """

    root: fx.Node
    attends: tuple[fx.Node, ...]
    epilogue: Epilogue | None

    @property
    def sinks(self) -> fx.Node | None:
        """The merge's sinks."""
        return self.root.kwargs.get("sinks")  # type: ignore[return-value]


@dataclass(frozen=True)
class Separate:
    """A merge or attend that is lowered by itself, and why."""

    root: fx.Node
    why: str


def fusions(graph: fx.Graph, device_type: str) -> tuple[list[Fusion], list[Separate]]:
    """What is computed in one call, and which merges on that device are not.

    An attend that stands alone is a fusion of one part, if only for its epilogue.
    """
    fused: list[Fusion] = []
    separate: list[Separate] = []
    for node in graph.find_nodes(op="call_function", target=ops.merge.default):
        if tensor(node.args[0][0]).device.type != device_type:
            continue
        found = _merge(node)
        (fused if isinstance(found, Fusion) else separate).append(found)  # type: ignore[arg-type]
    taken = {attend for fusion in fused for attend in fusion.attends}
    for node in graph.find_nodes(op="call_function", target=ops.attend.default):
        on_device = tensor(node.args[0]).device.type == device_type
        if on_device and node not in taken and _computed(node):
            fused.append(Fusion(node, (node,), _epilogue(node)))
    return fused, separate


def part_arguments(attend: fx.Node) -> dict[str, Any]:
    """The arguments of an attend that belong to its part (a `KeyPart`), by name."""
    names = ("k", "v", "mask")
    given = dict(zip(names, attend.args[1:], strict=False)) | attend.kwargs
    return {name: arg for name, arg in given.items() if name not in SHARED}


def shared_arguments(attend: fx.Node) -> dict[str, Any]:
    """The arguments of an attend that all parts of a call share, by name."""
    return {name: attend.kwargs.get(name) for name in SHARED}


def _computed(attend: fx.Node) -> bool:
    """Whether the kernel takes these operands at all."""
    return tensor(attend.args[0]).dtype != torch.float64  # type: ignore[arg-type]


def _merge(merge: fx.Node) -> Fusion | Separate:
    outs, lses = merge.args[0], merge.args[1]
    assert isinstance(outs, (list, tuple))
    assert isinstance(lses, (list, tuple))
    attends = [_attend_of(out, lse) for out, lse in zip(outs, lses, strict=True)]
    for attend, out in zip(attends, outs, strict=True):
        if attend is None:
            return Separate(merge, f"{out} and its log-sum-exp are not the results of one attend")
    parts = [attend for attend in attends if attend is not None]
    why = _unlike(parts) or _shared_results(merge, parts)
    if why:
        return Separate(merge, why)
    return Fusion(merge, tuple(parts), _epilogue(merge))


def _attend_of(out: Any, lse: Any) -> fx.Node | None:
    """The attend whose two results these are."""
    if not all(isinstance(n, fx.Node) and n.target is operator.getitem for n in (out, lse)):
        return None
    attend = out.args[0]
    same = lse.args[0] is attend and (out.args[1], lse.args[1]) == (0, 1)
    return attend if same and attend.target is ops.attend.default else None


def _unlike(attends: Sequence[fx.Node]) -> str:
    """How the attends differ in what they must share; "" if they do not."""
    first = attends[0]
    if len(set(attends)) < len(attends):
        return "an attend is merged twice"
    if not _computed(first):
        return "float64"
    for other in attends[1:]:
        if other.args[0] is not first.args[0]:
            return f"{first.name} and {other.name} have queries of their own"
        if shared_arguments(other) != shared_arguments(first):
            return f"{first.name} and {other.name} differ in {' or '.join(SHARED)}"
        k, other_k = tensor(first.args[1]), tensor(other.args[1])  # type: ignore[arg-type]
        if k.dtype != other_k.dtype:
            return f"{first.name} and {other.name} have keys of {k.dtype} and {other_k.dtype}"
    return ""


def _shared_results(merge: fx.Node, attends: Sequence[fx.Node]) -> str:
    """Who else reads what the attends compute; "" for nobody."""
    for attend in attends:
        for result in attend.users:
            others = [user for user in result.users if user is not merge]
            if others:
                return f"{others[0].name} reads {result.name} too"
    return ""


def _epilogue(root: fx.Node) -> Epilogue | None:
    outs = [user for user in root.users if user.args[1] == 0]
    if len(outs) != 1:
        return None
    kept = state = Epilogue((outs[0],))
    while len(state.nodes[-1].users) == 1:
        following = _followed(state, next(iter(state.nodes[-1].users)))
        if following is None:
            break
        state = following
        if state.nodes[-1].target is not aten.permute.default:  # a view is not worth taking in
            kept = state
    return kept


def _followed(state: Epilogue, user: fx.Node) -> Epilogue | None:
    """An epilogue with one more node; None if that cannot be taken in."""
    nodes = (*state.nodes, user)
    if user.target is aten.permute.default:
        moved = [state.dims[d] for d in user.args[1]]  # type: ignore[index, union-attr]
        return Epilogue(nodes, state.dtype, tuple(moved), state.order)
    if user.target is aten.clone.default:
        return _cloned(state, nodes)
    if user.target is prims.convert_element_type.default:
        # A second conversion would round the result of the first.
        dtype = user.args[1]
        if state.dtype != torch.float32 or dtype not in _OUT_DTYPES:
            return None
        return Epilogue(nodes, dtype, state.dims, state.order)  # type: ignore[arg-type]
    return None


def _cloned(state: Epilogue, nodes: tuple[fx.Node, ...]) -> Epilogue | None:
    layout = nodes[-1].kwargs.get("memory_format")
    if layout in _DENSE_FORMATS:
        return Epilogue(nodes, state.dtype, state.dims, state.order)
    if layout is not torch.contiguous_format or state.dims[-1] != NATURAL[-1]:
        return None
    return Epilogue(nodes, state.dtype, state.dims, state.dims)
