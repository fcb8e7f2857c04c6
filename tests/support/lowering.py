"""The passes on a captured graph, one by one, and the GPU's lowering on a machine without a GPU."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from support.capture import joint_graph
from support.fake_cuda import moved_to_cuda, triton_for_a_gpu
from torch import Tensor, fx
from torch._guards import tracing

from torch_cascade.compiler.capture import capture
from torch_cascade.compiler.graph import Sizes, fake_mode, value
from torch_cascade.compiler.options import Options
from torch_cascade.compiler.pass_base import PassContext
from torch_cascade.compiler.pipeline import passes_of
from torch_cascade.compiler.record import Compilation
from torch_cascade.kernels.cpu_attend import attend_cpu
from torch_cascade.kernels.merge import merge_torch
from torch_cascade.passes import lower
from torch_cascade.passes.cascade import CascadePass
from torch_cascade.passes.cleanup import CleanupPass
from torch_cascade.passes.inline import Call, Inliner
from torch_cascade.passes.verify import check_graph

USERS = "users_nodes"
"""In a graph module's `meta`: the nodes that stood there before the first pass."""


def rewritten(fn: Callable[..., Any], *args: Any, dynamic: bool = False, **kwargs: Any) -> Any:
    """(graph module, context) of a function after the cascade pass, nothing lowered yet."""
    gm = joint_graph(fn, *args, prepare=capture, dynamic=dynamic, **kwargs)
    gm.meta[USERS] = frozenset(gm.graph.nodes)
    sizes = Sizes.of(gm.graph, may_guard=True)
    context = PassContext(sizes, Options(decide="always", strict=True), Compilation())
    CascadePass().apply(gm.graph, context)
    return gm, context


def lowered_for_cuda(gm: fx.GraphModule, context: PassContext) -> fx.Graph:
    """The graph as Inductor gets it on a GPU, checked node by node; edited in place."""
    triton = pytest.importorskip("triton")
    from torch_cascade.kernels.triton_attend import attend_parts

    if not isinstance(attend_parts, triton.JITFunction):
        pytest.skip("the kernels are interpreted in this process, and cannot be traced")
    graph = moved_to_cuda(gm).graph
    *others, cleanup = passes_of(replace(context.options, passes=()), graph)
    users = gm.meta.get(USERS, cleanup.since)
    with triton_for_a_gpu():
        for each in (*others, CleanupPass(since=users)):
            each.apply(graph, context)
            check_graph(graph, after=each.name)
    return graph


class FakePart(NamedTuple):
    """Stands for `kernels.triton_call.KeyPart`."""

    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    branches: Any = 1
    q_positions: Tensor | None = None
    kv_start: Any = 0
    window: Any = None
    kv_lens: Tensor | None = None
    page_table: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


class StandIn:
    """Computes what `attend_merge` does with the CPU's functions; keeps how it was called."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self,
        q: Tensor,
        parts: Sequence[FakePart],
        sinks: Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
        out_order: Sequence[int] = (0, 1, 2, 3),
        **shared: Any,
    ) -> tuple[Tensor, Tensor]:
        order = tuple(out_order)
        self.calls.append({"parts": len(parts), "dtype": out_dtype, "order": order} | shared)
        partials = [attend_cpu(q, **part._asdict(), **shared) for part in parts]
        outs, lses = (list(each) for each in zip(*partials, strict=True))
        o, lse = partials[0]
        if len(parts) > 1 or sinks is not None:
            o, lse = merge_torch(outs, lses, sinks=sinks)
        if out_dtype not in (None, torch.float32):
            o = o.to(out_dtype)
        memory = o.permute(order).clone(memory_format=torch.contiguous_format)
        return memory.permute([order.index(d) for d in range(4)]), lse


@contextmanager
def fused_on_the_cpu() -> Iterator[StandIn]:
    """The lowering treats the CPU as it treats a GPU, with the stand-in for the kernel."""
    stand_in, real = StandIn(), lower.target_of

    def target_of(device_type: str, **options: Any) -> lower.Target:
        return lower.Target(real(device_type).functions, stand_in, FakePart)

    with mock.patch.object(lower, "target_of", target_of):
        yield stand_in


@contextmanager
def fused_in_the_interpreter() -> Iterator[list[int]]:
    """As `fused_on_the_cpu`, with the real kernels interpreted: one number of parts a call made.

    Interpreted kernels cannot be traced, so each call stands in the graph as it is.
    """
    from support.interpreter import interpreted

    from torch_cascade.kernels.triton_call import KeyPart
    from torch_cascade.kernels.triton_launch import attend_merge

    real, inline, made = lower.target_of, Inliner.inline, []

    def kernel(q: Tensor, parts: Sequence[KeyPart], *args: Any, **kwargs: Any) -> Any:
        made.append(len(parts))
        return attend_merge(q, parts, *args, **kwargs)

    def target_of(device_type: str, **options: Any) -> lower.Target:
        return lower.Target(real(device_type).functions, kernel, KeyPart)

    def inserted(self: Inliner, call: Call, anchor: fx.Node) -> list[Any]:
        if call.function is not kernel:
            return inline(self, call, anchor)
        with self.graph.inserting_before(anchor):
            node = self.graph.call_function(kernel, call.args, dict(call.kwargs))
            results = [self.graph.call_function(operator.getitem, (node, i)) for i in range(2)]
        node.meta["val"] = _fake_result(call)
        for result, held in zip(results, node.meta["val"], strict=True):
            result.meta["val"] = held
        return results

    with (
        interpreted(),
        mock.patch.object(lower, "target_of", target_of),
        mock.patch.object(Inliner, "inline", inserted),
    ):
        yield made


def _fake_result(call: Call) -> tuple[Tensor, Tensor]:
    q, v = value(call.args[0]), value(call.args[1][0].v)
    order = call.kwargs.get("out_order", (0, 1, 2, 3))
    sizes = (*q.shape[:3], v.shape[3])
    with tracing(None), fake_mode(call.args[0].graph):
        dtype = call.kwargs.get("out_dtype", torch.float32)
        o = q.new_empty([sizes[d] for d in order], dtype=dtype)
        lse = q.new_empty(sizes[:3], dtype=torch.float32)
        return o.permute([order.index(d) for d in range(4)]), lse
