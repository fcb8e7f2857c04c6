"""Regions of a Dynamo graph in which an attention call means more than its arguments say.

Kernel flags: `torch.nn.attention.sdpa_kernel` and `torch.backends.cuda.enable_*_sdp` inside a
compiled function stay in the graph as calls that set process-wide flags. A `cascade::sdpa` is
lowered later, under the flags that hold around the compiled function. Forward-mode derivatives: a
dual number looks like a plain tensor, and `cascade::sdpa` has no derivative.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.backends import cuda
from torch.nn.attention import _sdpa_kernel

_BACKENDS = {
    "cudnn": "CUDNN_ATTENTION",
    "flash": "FLASH_ATTENTION",
    "mem_efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
    "overrideable": "OVERRIDEABLE",
}
_REDUCTION = "fp16_bf16_reduction"
# Calls that set one flag to their only argument.
_SWITCHES: dict[Any, str] = {
    **{getattr(torch._C, f"_set_sdp_use_{flag}"): flag for flag in _BACKENDS},
    cuda.enable_cudnn_sdp: "cudnn",
    cuda.enable_flash_sdp: "flash",
    cuda.enable_mem_efficient_sdp: "mem_efficient",
    cuda.enable_math_sdp: "math",
    cuda.allow_fp16_bf16_reduction_math_sdp: _REDUCTION,
}


def pinned_nodes(graph: fx.Graph) -> frozenset[fx.Node]:
    """Nodes that run under other kernel flags than those around the compiled function.

    All nodes, if the flags are still changed at the end of the graph: then that is what holds
    while it is lowered, and the flags at a call are lost.
    """
    if not any(_sets_flags(node) for node in graph.nodes):
        return frozenset()
    flags = _Flags()
    ambient = flags.state()
    pinned = []
    for node in graph.nodes:
        flags.apply(node)
        if flags.state() != ambient:
            pinned.append(node)
    return frozenset(pinned if flags.state() == ambient else graph.nodes)


def differentiates_forward(graph: fx.Graph) -> bool:
    """True if the graph itself computes with dual numbers (`torch.autograd.forward_ad`)."""
    calls = (node for node in graph.nodes if node.op == "call_function")
    return any(getattr(node.target, "__name__", "") == "_enter_dual_level" for node in calls)


def _sets_flags(node: fx.Node) -> bool:
    return node.op == "call_function" and (node.target is _sdpa_kernel or node.target in _SWITCHES)


class _Flags:
    """The kernel flags of the process, and what they become along a graph; sets nothing."""

    def __init__(self) -> None:
        self.flags: dict[str, bool] = {
            flag: getattr(torch._C, f"_get_{flag}_sdp_enabled")() for flag in _BACKENDS
        }
        self.flags[_REDUCTION] = torch._C._get_math_sdp_allow_fp16_bf16_reduction()
        names = {int(getattr(torch.nn.attention.SDPBackend, b)): f for f, b in _BACKENDS.items()}
        self.priority = [names[i] for i in torch._C._get_sdp_priority_order() if i in names]

    def state(self) -> tuple[list[str], bool]:
        """The kernels that may run, best first, and whether the reference reduces in half."""
        return [flag for flag in self.priority if self.flags[flag]], self.flags[_REDUCTION]

    def apply(self, node: fx.Node) -> None:
        """Follow a call that sets flags; others change nothing."""
        if not _sets_flags(node):
            return
        args: Any = node.args
        kwargs: Any = node.kwargs
        if node.target is _sdpa_kernel:
            self._select(*args, **kwargs)
        else:
            self._switch(_SWITCHES[node.target], *args, **kwargs)

    def _select(self, backends: Sequence[Any], set_priority: bool = False) -> None:
        chosen = [_flag(backend) for backend in backends]
        self.flags.update((flag, flag in chosen) for flag in _BACKENDS)
        if set_priority:
            self.priority = chosen + [flag for flag in self.priority if flag not in chosen]

    def _switch(self, flag: str, enabled: bool) -> None:
        self.flags[flag] = enabled


def _flag(backend: Any) -> str:
    """The flag of a backend; Dynamo writes one as a node, `_backend_from_string("MATH")`."""
    name = backend.args[0] if isinstance(backend, fx.Node) else backend.name
    return next(flag for flag, known in _BACKENDS.items() if known == name)
