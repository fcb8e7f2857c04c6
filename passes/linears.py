"""The linears pass: linear layers that read the same few rows become one launch."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from torch_cascade.compiler.graph import Emitter, tensor
from torch_cascade.compiler.pass_base import Pass, PassContext
from torch_cascade.compiler.record import LinearsRecord
from torch_cascade.kernels.launch_config import DeviceLimits
from torch_cascade.kernels.linears_config import GENERATION, MOST_WEIGHTS, takes
from torch_cascade.passes.linear_site import LinearSite, linear_of

# A product with fewer tiles of 64 columns than the device has multiprocessors is split over its
# features by cuBLAS, and the parts are summed by a launch of its own.
_SPLIT_COLUMNS = 64


@dataclass(frozen=True)
class LinearsPass(Pass):
    """Joins the linear layers of a decoding step that read the same rows.

    Once attention reads a shared prefix once, a decoding step of a few rows is the reading of the
    weights; a small weight (keys, values) fills no device by itself.

    Before:

        q = aten.mm(x, aten.t(w_q))
        k = aten.mm(x, aten.t(w_k))
        v = aten.mm(x, aten.t(w_v))

    After:

        q, k, v = cascade.linears(x, [w_q, w_k, w_v])

    Assumes bfloat16 or float16, sizes and strides that are numbers, weights that are inputs of the
    graph, and a GPU of the generation that the kernel was measured on. A single layer is taken
    where cuBLAS would compute it in two launches. Runs only where attention was rewritten: all
    other graphs stay as they are. Sums are in float32, as cuBLAS's; they differ in the order of the
    terms, which depends on the number of rows, so with `batch_invariant` nothing is joined.
    """

    name: ClassVar[str] = "linears"

    def apply(self, graph: fx.Graph, context: PassContext) -> None:
        """Find, group, then join."""
        if not context.record.rewritten or context.options.batch_invariant or _searches_itself():
            return
        found = [linear_of(node) for node in graph.nodes]
        sites = [site for site in found if isinstance(site, LinearSite)]
        taken = [site for site in sites if _is_measured(site)]
        groups = [group for group in _groups(taken) if _pays(group)]
        for group in groups:
            _join(group)
        if groups:
            joined = sum(len(group) for group in groups)
            context.record.linears = LinearsRecord(joined, len(groups), len(sites) - joined)


def _searches_itself() -> bool:
    """Whether Inductor is to search for the fastest product: what it finds is not replaced."""
    from torch._inductor import config

    return bool(config.max_autotune or config.max_autotune_gemm)


def _is_measured(site: LinearSite) -> bool:
    """Whether the kernel takes a product of these sizes, on this device."""
    x, biases = tensor(site.x), None if site.bias is None else [tensor(site.bias)]
    if x.device.type != "cuda" or not takes(x, [tensor(site.weight)], biases):
        return False
    return _limits(x.device).generation == GENERATION


def _limits(device: torch.device) -> DeviceLimits:
    # Imported here: CPUs need no Triton.
    from torch_cascade.kernels.triton_launch import device_limits

    return device_limits(device)


def _groups(sites: Sequence[LinearSite]) -> list[list[LinearSite]]:
    """Sites that read the same rows, in graph order, as many together as a launch takes."""
    alike: dict[object, list[LinearSite]] = {}
    for site in sites:
        alike.setdefault(site.key, []).append(site)
    return [
        group[start : start + MOST_WEIGHTS]
        for group in alike.values()
        for start in range(0, len(group), MOST_WEIGHTS)
    ]


def _pays(group: Sequence[LinearSite]) -> bool:
    """Whether one launch replaces several."""
    if len(group) > 1:
        return True
    weight = tensor(group[0].weight)
    return int(weight.size(0)) < _SPLIT_COLUMNS * _limits(weight.device).processors


def _join(group: Sequence[LinearSite]) -> None:
    """Compute all products where the first one stands."""
    first = group[0]
    emitter = Emitter(first.node)
    biases = [site.bias for site in group] if first.bias is not None else None
    weights = [site.weight for site in group]
    joined = emitter.call(torch.ops.cascade.linears.default, first.x, weights, biases)
    for index, site in enumerate(group):
        result = emitter.call(operator.getitem, joined, index)
        site.node.replace_all_uses_with(result)
    for site in group:
        site.node.graph.erase_node(site.node)
