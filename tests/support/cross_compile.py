"""Launches of the Triton kernels compiled for GPUs that are not there: what they would need.

A call on meta tensors runs the launch code and nothing else; its arguments become a signature as
Triton's launcher would make it, and Triton and its own `ptxas` compile that to a binary.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import pytest
import torch

from torch_cascade.kernels import launchable, triton_launch
from torch_cascade.kernels.launch_config import DeviceLimits
from torch_cascade.kernels.triton_call import KeyPart
from torch_cascade.kernels.triton_launch import attend_merge

triton = pytest.importorskip("triton")

POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.bool: "*i1",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Target:
    """A GPU: its compute capability times 10, and its limits."""

    name: str
    capability: int
    limits: DeviceLimits


# CUDA C++ Programming Guide, table of technical specifications: shared memory a block may have.
A100 = Target("sm_80", 80, DeviceLimits(108, 163 * 1024, generation=8))
H200 = Target("sm_90", 90, DeviceLimits(132, 227 * 1024, generation=9))
B200 = Target("sm_100", 100, DeviceLimits(148, 227 * 1024, generation=10))


@dataclass(frozen=True)
class Workload:
    """A call: requests, branches of each, prefix and suffix lengths, queries.

    Attributes:
        mask: "" or the dtype of a mask over both segments.
        lens: both segments have lengths.
        page: page size of both; 0 for none.
        segments: 1 (prefix), 2, or 3 (a system prompt of all requests before).
    """

    requests: int = 8
    branches: int = 4
    prefix: int = 4096
    suffix: int = 4
    queries: int = 1
    heads: int = 32
    kv_heads: int = 8
    dk: int = 128
    dv: int = 128
    dtype: torch.dtype = torch.bfloat16
    fp8: bool = False
    mask: torch.dtype | None = None
    positions: bool = True
    window: int | None = None
    lens: bool = False
    page: int = 0
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    segments: int = 2
    batch_invariant: bool = False

    def but(self, **changes: Any) -> Workload:
        """This with some attributes changed."""
        return replace(self, **changes)

    def __str__(self) -> str:
        changed = {k: v for k, v in vars(self).items() if v != getattr(Workload(), k)}
        return "-".join(f"{k}={v}".replace("torch.", "") for k, v in changed.items()) or "base"

    def call(self) -> None:
        """`attend_merge` on meta tensors."""
        n = self.requests * self.branches
        q = _meta(n, self.heads, self.queries, self.dk, dtype=self.dtype)
        parts = [self._part(1, n, 256)] if self.segments == 3 else []
        parts.append(self._part(self.requests, self.branches, self.prefix))
        if self.segments > 1:
            parts.append(self._part(n, 1, self.suffix))
        attend_merge(
            q,
            parts,
            _meta(self.heads, 1, dtype=torch.float32) if self.sinks else None,
            softcap=self.softcap,
            alibi_slopes=_meta(self.heads, dtype=torch.float32) if self.alibi else None,
            out_dtype=self.dtype,
            batch_invariant=self.batch_invariant,
        )

    def _part(self, rows: int, branches: int, keys: int) -> KeyPart:
        dtype = torch.float8_e4m3fn if self.fp8 else self.dtype
        pages = -(-keys // self.page) if self.page else 0
        shape = (rows * pages, self.kv_heads, self.page) if pages else (rows, self.kv_heads, keys)
        scale = _meta(self.kv_heads, dtype=torch.float32) if self.fp8 else None
        n, last = rows * branches, rows * branches == rows
        positions = (self.positions and last) or self.window is not None or self.alibi
        keys = pages * self.page if pages else keys
        return KeyPart(
            _meta(*shape, self.dk, dtype=dtype),
            _meta(*shape, self.dv, dtype=dtype),
            None if self.mask is None else _meta(n, 1, self.queries, keys, dtype=self.mask),
            branches=branches,
            q_positions=_meta(n, self.queries, dtype=torch.int64) if positions else None,
            window=self.window,
            kv_lens=_meta(rows, dtype=torch.int32) if self.lens else None,
            page_table=_meta(rows, pages, dtype=torch.int32) if pages else None,
            k_scale=scale,
            v_scale=scale,
        )


def _meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@dataclass(frozen=True)
class Launch:
    """A kernel and what it is compiled for; equal ones are the same binary."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[int, Any], ...]
    divisible: tuple[int, ...]
    options: tuple[tuple[str, int], ...]

    def constant(self, name: str) -> Any:
        """The value of a constexpr parameter."""
        return dict(self.constants)[self.kernel.arg_names.index(name)]

    def __str__(self) -> str:
        return f"{self.kernel.__name__}"


@dataclass(frozen=True)
class Binary:
    """What a compiled launch needs: registers a thread, bytes of stack and of shared memory."""

    registers: int
    stack: int
    shared: int
    ptx: str


class Called(Protocol):
    """A call on meta tensors."""

    def call(self) -> None:
        """Call it."""


def launches(workloads: Sequence[Called], target: Target) -> list[Launch]:
    """The different launches of some calls on a GPU."""
    found: dict[Launch, None] = {}

    class Recorder:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, _grid: Any) -> Any:
            def record(*args: Any, **kwargs: Any) -> None:
                named = dict(zip(self.kernel.arg_names, args, strict=False)) | kwargs
                found.setdefault(_launch(self.kernel, named))

            return record

    with (
        mock.patch.object(launchable, "called", Recorder),
        mock.patch.object(triton_launch, "device_limits", lambda _device: target.limits),
    ):
        for workload in workloads:
            workload.call()
    return list(found)


def _launch(kernel: Any, arguments: dict[str, Any]) -> Launch:
    """A launch with the specialisation of Triton's launcher: 1 is a constant, 16 divides."""
    signature, constants, divisible = [], [], []
    for index, parameter in enumerate(kernel.params):
        value = arguments.pop(parameter.name)
        given = value is not None and not (isinstance(value, int) and value == 1)
        if parameter.is_constexpr or not given:
            kind = "constexpr"
            constants.append((index, value))
        elif isinstance(value, torch.Tensor):
            kind = POINTERS[value.dtype]
            divisible.append(index)
        elif isinstance(value, float):
            kind = "fp32"
        else:
            kind = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0:
                divisible.append(index)
        signature.append((parameter.name, kind))
    options = tuple(sorted(arguments.items()))
    return Launch(kernel, tuple(signature), tuple(constants), tuple(divisible), options)


def compiled(launch: Launch, target: Target) -> Binary:
    """The launch compiled for a GPU.

    Raises:
        Exception: what Triton or ptxas raises where it cannot be.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(
        launch.kernel,
        dict(launch.signature),
        {(index,): value for index, value in launch.constants},
        {(index,): [["tt.divisibility", 16]] for index in launch.divisible},
    )
    gpu = GPUTarget("cuda", target.capability, 32)
    result = triton.compile(source, target=gpu, options=dict(launch.options))
    registers, stack = _resources(result.asm["cubin"])
    return Binary(registers, stack, result.metadata.shared, result.asm["ptx"])


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack a thread, by the tool that comes with Triton."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", shown)
    assert found, shown
    return int(found[1]), int(found[2])
