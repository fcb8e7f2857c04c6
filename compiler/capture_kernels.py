"""Where a Dynamo graph itself chooses the kernels of its attention calls.

`torch.nn.attention.sdpa_kernel` and `torch.backends.cuda.enable_*_sdp` inside a compiled function
stay in the graph as calls that set process-wide flags. A `cascade::sdpa` is lowered later, under
the flags that hold around the compiled function, so calls under other flags must stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.backends import cuda
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, _sdpa_kernel

_SWITCHES: dict[Any, SDPBackend] = {
    cuda.enable_flash_sdp: SDPBackend.FLASH_ATTENTION,
    cuda.enable_mem_efficient_sdp: SDPBackend.EFFICIENT_ATTENTION,
    cuda.enable_math_sdp: SDPBackend.MATH,
    cuda.enable_cudnn_sdp: SDPBackend.CUDNN_ATTENTION,
}


def pinned_calls(graph: fx.Graph) -> frozenset[fx.Node]:
    """Nodes that run under other kernel flags than those around the compiled function.

    Every node, if the flags are still changed at the end of the graph: then they hold while
    it is lowered, and no longer say what held at a call.
    """
    targets = (_sdpa_kernel, *_SWITCHES)
    if not any(graph.find_nodes(op="call_function", target=t, sort=False) for t in targets):
        return frozenset()
    flags = _Flags()
    ambient = flags.choice()
    pinned = []
    for node in graph.nodes:
        flags.apply(node)
        if flags.choice() != ambient:
            pinned.append(node)
    return frozenset(pinned if flags.choice() == ambient else graph.nodes)


class _Flags:
    """The kernel flags of the process, and what they become along a graph; sets nothing."""

    def __init__(self) -> None:
        self.enabled = set(_cur_sdpa_kernel_backends())
        self.priority = [SDPBackend(i) for i in torch._C._get_sdp_priority_order()]

    def choice(self) -> list[SDPBackend]:
        """The kernels that may run, best first."""
        return [backend for backend in self.priority if backend in self.enabled]

    def apply(self, node: fx.Node) -> None:
        """Follow a call that sets flags; others change nothing."""
        if node.op != "call_function":
            return
        if node.target is _sdpa_kernel:
            self._select(*node.args, **node.kwargs)
        elif node.target in _SWITCHES:
            self._switch(_SWITCHES[node.target], *node.args, **node.kwargs)

    def _select(self, backends: Sequence[Any], set_priority: bool = False) -> None:
        named = [_backend(b) for b in backends]
        self.enabled = set(named)
        if set_priority:
            self.priority = named + [b for b in self.priority if b not in named]

    def _switch(self, backend: SDPBackend, enabled: bool) -> None:
        (self.enabled.add if enabled else self.enabled.discard)(backend)


def _backend(argument: Any) -> SDPBackend:
    """A backend, or the node by which Dynamo names one: `_backend_from_string('MATH')`."""
    return getattr(SDPBackend, argument.args[0]) if isinstance(argument, fx.Node) else argument
