"""Graphs for a GPU on a machine without one: nothing runs, everything is traced.

A graph captured on the CPU is moved: its fake values and its `device` arguments become those of a
GPU. (Torch built without CUDA cannot even choose a kernel for SDPA on a fake CUDA tensor.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._guards import tracing
from torch.utils._pytree import tree_map_only

from torch_cascade.compiler.graph import fake_mode

CUDA = torch.device("cuda", 0)


def moved_to_cuda(gm: fx.GraphModule) -> fx.GraphModule:
    """The same graph module, edited in place: every tensor is now on the first GPU."""
    mode = fake_mode(gm.graph)

    def fake(value: torch.Tensor) -> torch.Tensor:
        with tracing(None), mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CUDA)

    for node in gm.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = tree_map_only(torch.Tensor, fake, node.meta["val"])
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": CUDA}
    return gm


class _Driver:
    """What tracing a Triton kernel asks of a driver."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@contextmanager
def triton_for_a_gpu() -> Iterator[None]:
    """Triton kernels can be traced (never run): the target is a GPU that is not there."""
    from triton.runtime import driver

    if torch.cuda.is_available():
        yield
        return
    with mock.patch.object(driver, "_active", _Driver()):
        yield
