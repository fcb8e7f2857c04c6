"""A script: what Inductor makes of the Triton kernels, compiled for a GPU that need not be there.

`python inductor_kernels.py` compiles attention with `backend="cascade"` on CPU tensors, lowered as
for a GPU, up to the launch: Inductor's analysis of what the kernels write, its scheduling, its copy
of their source, and that source compiled for sm_90. Prints `scene: kernel, kernel` for each scene,
and for one the masks that the generated code writes.
A process of its own, because Triton's driver and Inductor's compile workers are replaced.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import triton
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.graph import GraphLowering
from triton.backends.compiler import GPUTarget

import torch_cascade.kernels.ops  # noqa: F401  (defines the ops that lower names)
from torch_cascade.kernels.launch_config import DeviceLimits
from torch_cascade.passes import linears, lower

TARGET = GPUTarget("cuda", 90, 32)
OPTIONS = {"strict": True, "decide": "always"}
HEADS, GROUP, PREFIX, SUFFIX, WIDTH = 5, 2, 71, 67, 64


class Reached(Exception):
    """The compiled code is there and would be launched now."""


class NoDevice:
    """Stands for Triton's driver of a GPU of compute capability 9.0."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind


@contextmanager
def as_on_a_gpu(compiled: list[str]) -> Iterator[None]:
    """Inside, graphs on CPU tensors are lowered to the kernels; compiled ones are noted by name."""
    target_of, fusions, compile_triton = lower.target_of, lower.fusions, triton.compile

    def compile_for_target(source: Any, target: Any = None, options: Any = None) -> Any:
        given = {k: v for k, v in options.items() if k in ("num_warps", "num_stages")}
        return compile_triton(source, target=TARGET, options=given)

    def define(_self: AsyncCompile, name: str, source: str, *_: Any, **__: Any) -> Any:
        kernel = getattr(PyCodeCache.load(source), name)
        (config,) = kernel.configs
        with mock.patch.object(triton, "compile", compile_for_target):
            kernel._precompile_config(config)
        compiled.append(name)
        return mock.Mock(run=mock.Mock(side_effect=Reached))

    with ExitStack() as patches:
        for owner, name, value in (
            (lower, "target_of", lambda _kind, **options: target_of("cuda", **options)),
            (lower, "fusions", lambda graph, _kind: fusions(graph, "cpu")),
            (linears, "_is_measured", lambda _site: True),
            (linears, "_limits", lambda _device: DeviceLimits(132, 232448)),
            (AsyncCompile, "triton", define),
        ):
            patches.enter_context(mock.patch.object(owner, name, value))
        yield


def inputs(branches: int, queries: int) -> list[torch.Tensor]:
    rows = 2 * branches
    q = torch.randn(rows, queries, HEADS * GROUP, WIDTH).transpose(1, 2)
    prefix = [torch.randn(2, HEADS, PREFIX, WIDTH) for _ in "kv"]
    suffix = [torch.randn(rows, HEADS, SUFFIX, WIDTH) for _ in "kv"]
    return [x.bfloat16() for x in (q, *prefix, *suffix)]


def attention(
    q: torch.Tensor,
    prefix_k: torch.Tensor,
    prefix_v: torch.Tensor,
    suffix_k: torch.Tensor,
    suffix_v: torch.Tensor,
) -> torch.Tensor:
    times = q.shape[0] // prefix_k.shape[0]
    k = torch.cat([prefix_k.repeat_interleave(times, 0), suffix_k], 2)
    v = torch.cat([prefix_v.repeat_interleave(times, 0), suffix_v], 2)
    keys = torch.arange(k.shape[2])
    queries = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    return F.scaled_dot_product_attention(q, k, v, keys <= queries, enable_gqa=True)


def two_layers(q: torch.Tensor, *kv: torch.Tensor) -> torch.Tensor:
    return attention(attention(q.sin(), *kv), *kv)


def told_by_data(q: torch.Tensor, *kv: torch.Tensor) -> torch.Tensor:
    """How long the suffix is, only data tells."""
    length = (q[0, 0, 0] != 0).sum().item()
    torch._check(length >= 1)
    torch._check(length <= SUFFIX)
    return attention(q, *kv[:2], *(suffix[:, :, :length] for suffix in kv[2:]))


WEIGHTS = [torch.randn(n, HEADS * GROUP * WIDTH).bfloat16() for n in (96, 32)]


def linear_layers(q: torch.Tensor, *kv: torch.Tensor) -> list[torch.Tensor]:
    """Two linear layers that read what attention gives."""
    x = attention(q, *kv).transpose(1, 2).flatten(2)
    return [F.linear(x, weight) for weight in WEIGHTS]


def masked_layers(q: torch.Tensor, *kv: torch.Tensor) -> torch.Tensor:
    """Three layers read a mask that the graph computes; it is no condition on positions alone."""
    keys, queries = torch.arange(PREFIX + SUFFIX), torch.arange(q.shape[2])[:, None]
    visible = (keys * 3 + queries) % 5 > 0
    k, v = (torch.cat([kv[i].repeat_interleave(3, 0), kv[i + 2]], 2) for i in (0, 1))
    for _ in range(3):
        q = F.scaled_dot_product_attention(q.sin(), k, v, visible, enable_gqa=True)
    return q


def masks_written(branches: int, queries: int) -> list[str]:
    """The shapes of boolean buffers in the code that Inductor generates for `masked_layers`."""
    code: list[str] = []
    keep = mock.patch.object(GraphLowering, "save_output_code", staticmethod(code.append))
    run = torch.compile(masked_layers, backend="cascade", dynamic=False, options=OPTIONS)
    with as_on_a_gpu([]), keep, torch.no_grad(), suppress(Reached):
        run(*inputs(branches, queries))
    torch._dynamo.reset()
    return re.findall(r"empty_strided_cpu\(\((.*?)\), \(.*?\), torch\.bool\)", code[-1])


def scene(name: str, fn: Callable[..., Any], dynamic: bool, *calls: tuple[int, int]) -> None:
    """Compile a function for the sizes of each call in turn, and print the kernels."""
    run = torch.compile(fn, backend="cascade", dynamic=dynamic, options=OPTIONS)
    for branches, queries in calls:
        compiled: list[str] = []
        with as_on_a_gpu(compiled), torch.no_grad():
            try:
                run(*inputs(branches, queries))
            except Reached:
                print(f"{name}: {', '.join(compiled)}", flush=True)
    torch._dynamo.reset()


def main() -> None:
    triton.runtime.driver.set_active(NoDevice())
    # Inductor resets the active driver around its work for the CPU.
    importlib.import_module("triton.runtime.driver")._create_driver = NoDevice
    scene("static", attention, False, (3, 3))
    # The second call finds symbols tied by guards of the first; the third needs nothing new.
    scene("symbolic", attention, True, (3, 3), (5, 1), (2, 130))
    scene("layers", two_layers, True, (3, 3))
    scene("linears", linear_layers, False, (3, 3))
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        scene("told by data", told_by_data, False, (3, 3))
    print(f"masks of three layers: {'; '.join(sorted(masks_written(3, 4)))}")


if __name__ == "__main__":
    main()
