"""Replaces every cascade op that is left by the torch code that computes it on the target.

An implementation is a plain torch function. It is traced once a signature (`passes/inline.py`), and
the trace is inlined at every site that has the signature; a model of thirty layers traces once. On
a GPU an attention's attends, its merge and the layout of its output are one such function
(`passes/fuse.py` says where). A `cascade::sdpa` that nobody rewrote becomes the SDPA it was, traced
under the same rules as Inductor's own.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from torch_cascade.compiler.graph import Emitter, Sizes, size_expr, tensor, value
from torch_cascade.compiler.pass_base import Pass, PassContext
from torch_cascade.compiler.record import source_line
from torch_cascade.kernels.cpu_attend import attend_cpu, attend_math
from torch_cascade.kernels.linears import linears_torch
from torch_cascade.kernels.merge import merge_torch
from torch_cascade.kernels.ops import SCHEMAS
from torch_cascade.kernels.sdpa import sdpa_torch
from torch_cascade.passes.fuse import (
    NATURAL,
    Fusion,
    Separate,
    fusions,
    part_arguments,
    shared_arguments,
)
from torch_cascade.passes.inline import Call, Inliner
from torch_cascade.passes.site import move_tags
from torch_cascade.passes.written_once import is_part_of_computed, packed, viewed

logger = logging.getLogger(__name__)

aten = torch.ops.aten
ops = torch.ops.cascade


@dataclass(frozen=True)
class Target:
    """What computes the ops on one kind of device.

    Attributes:
        functions: the torch function of each op.
        fused: `kernels.triton_launch.attend_merge`; None where the ops are computed one by one.
        part: makes one of its key parts.
    """

    functions: Mapping[Any, Callable[..., Any]]
    fused: Callable[..., Any] | None = None
    part: Callable[..., Any] = field(default=dict)


def target_of(device_type: str, *, batch_invariant: bool = False) -> Target:
    """The functions for a device type; devices without kernels get the formulas."""
    attend = attend_cpu if device_type == "cpu" else attend_math
    functions: dict[Any, Callable[..., Any]] = {
        ops.sdpa.default: sdpa_torch,
        ops.attend.default: attend,
        ops.merge.default: merge_torch,
        ops.linears.default: linears_torch,
    }
    if device_type != "cuda":
        return Target(functions)
    # Imported here: CPUs need no Triton.
    from torch_cascade.kernels.linears_launch import linears_gpu
    from torch_cascade.kernels.triton_call import KeyPart
    from torch_cascade.kernels.triton_launch import attend_merge

    functions[ops.linears.default] = linears_gpu
    fused = functools.partial(attend_merge, batch_invariant=batch_invariant)
    return Target(functions, fused, KeyPart)


@dataclass(frozen=True)
class LowerPass(Pass):
    """Inlines the implementation of every cascade op.

    Before:

        o, lse = cascade.merge([o0, o1], [lse0, lse1])

    After (shortened): `maximum`, `sub`, `exp`, `mul`, `add`, `log`, which Inductor fuses. On a GPU
    the ops that computed o0 and o1 are gone with it, and Triton kernels stand there.
    """

    name: ClassVar[str] = "lower"

    def apply(self, graph: fx.Graph, context: PassContext) -> None:
        """Replace each cascade op, in graph order."""
        inliner = Inliner(graph, context.sizes)
        found = [node for node in graph.nodes if node.target in _OPS]
        kinds = {device_type(node) for node in found}
        invariant = context.options.batch_invariant
        targets = {kind: target_of(kind, batch_invariant=invariant) for kind in sorted(kinds)}
        _warn_of_variance(targets, invariant)
        fused = {f.root: f for kind, target in targets.items() for f in _fused(graph, kind, target)}
        inside = {attend for fusion in fused.values() for attend in fusion.attends}
        for node in found:
            target = targets[device_type(node)]
            if node.target is ops.reuse_kv.default:
                _replace(node, [_dense(node, n, context.sizes) for n in (0, 1)])
                graph.erase_node(node)
            elif node in fused:
                _inline_fused(inliner, fused[node], target)
            elif node not in inside:
                call = Call(target.functions[node.target], node.args, node.kwargs)
                _replace(node, inliner.inline(call, node))
                graph.erase_node(node)


_OPS = tuple(getattr(ops, name).default for name in SCHEMAS)


def device_type(node: fx.Node) -> str:
    """The kind of device a cascade op computes on."""
    first = node.args[0]
    return tensor(first if isinstance(first, fx.Node) else first[0]).device.type  # type: ignore


def _dense(marker: fx.Node, which: int, sizes: Sizes) -> fx.Node:
    """The fresh k or v of a `reuse_kv`: copied if it lies otherwise, or is a graph input's memory.

    What the op yields may be a result of the graph, and results are not to be inputs.
    """
    fresh, result = marker.args[which], value(marker)[which]
    assert isinstance(fresh, fx.Node)
    pairs = zip(tensor(fresh).stride(), result.stride(), strict=True)
    lies_so = all(sizes.equal(size_expr(have), size_expr(want)) for have, want in pairs)
    if lies_so and not _is_input(fresh):
        return fresh
    layout = torch.contiguous_format
    return Emitter(marker).call(aten.clone.default, fresh, memory_format=layout)


def _is_input(node: fx.Node) -> bool:
    """True for a graph input, and for a view of one."""
    while (source := viewed(node)) is not None:
        node = source
    return node.op == "placeholder"


def _warn_of_variance(targets: Mapping[str, Target], asked: bool) -> None:
    """A promise that cannot be kept is not silently dropped."""
    others = [kind for kind, target in targets.items() if target.fused is None]
    if asked and others:
        logger.warning(
            "batch_invariant=1 is kept by attention on a GPU only: on %s it changes nothing",
            " and ".join(others),
        )


def _fused(graph: fx.Graph, kind: str, target: Target) -> list[Fusion]:
    """The fusions on one kind of device; a merge that is none is logged with the reason."""
    if target.fused is None:
        return []
    found, separate = fusions(graph, kind)
    for each in separate:
        logger.info("%s", _said(each))
    return found


def _said(separate: Separate) -> str:
    place = source_line(separate.root) or separate.root.name
    return f"{place}: attends and merge are computed one by one: {separate.why}"


def _inline_fused(inliner: Inliner, fusion: Fusion, target: Target) -> None:
    """Replace attends, merge and what follows by one call."""
    root, first, epilogue = fusion.root, fusion.attends[0], fusion.epilogue
    emit = Emitter(root)
    parts = [target.part(**_compact(emit, part_arguments(attend))) for attend in fusion.attends]
    options = shared_arguments(first)
    if epilogue is not None:
        options |= {"out_dtype": epilogue.dtype, "out_order": epilogue.order}
    assert target.fused is not None
    call = Call(target.fused, (first.args[0], parts, fusion.sinks), options)
    out, lse = inliner.inline(call, root)
    if epilogue is not None:
        _take_over(epilogue.nodes, out, epilogue.dims)
    _replace(root, [out, lse])
    for node in {root: None} | dict.fromkeys(fusion.attends):
        for result in list(node.users):
            node.graph.erase_node(result)
        node.graph.erase_node(node)


def _compact(emit: Emitter, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a part; a mask that is cut out of a computed one is a copy, for all layers.

    Only its elements are then written, and not those of the other parts.
    """
    mask = arguments.get("mask")
    if mask is None or not is_part_of_computed(mask):
        return dict(arguments)
    return {**arguments, "mask": packed(emit, mask)}


def _take_over(nodes: Sequence[fx.Node], out: fx.Node, dims: tuple[int, ...]) -> None:
    """Let `out` stand for the last node of an epilogue, and erase all but the first."""
    *between, last = nodes
    if not between:
        return
    if dims != NATURAL:
        out = Emitter(nodes[0]).call(aten.permute.default, out, list(dims))
    # Sizes of 1 may have any stride: what follows was traced with those of the old node.
    out.meta["val"] = value(last)
    for node in nodes:  # `out` holds what `last` did, whatever a site's own result was
        move_tags(node, out, None if node is last else last.name)
    last.replace_all_uses_with(out)
    for node in reversed(nodes[1:]):
        node.graph.erase_node(node)


def _replace(node: fx.Node, outputs: Sequence[Any]) -> None:
    """Redirect the users of an op to the inlined outputs."""
    if isinstance(value(node), torch.Tensor):
        move_tags(node, outputs[0])
        node.replace_all_uses_with(outputs[0])
    for user in list(node.users):
        assert user.target is operator.getitem, f"{user.format_node()} uses several outputs"
        move_tags(user, outputs[user.args[1]])  # type: ignore[index]
        user.replace_all_uses_with(outputs[user.args[1]])  # type: ignore[index]
        node.graph.erase_node(user)
