"""The two ceilings of the machine: a streaming read, and a matrix product."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_cascade.benchmarks import timing
from torch_cascade.benchmarks.rows import Ceilings
from torch_cascade.benchmarks.spread import Spread

READ_BYTES = 4 * 2**30
MATMUL_SIZE = 8192
REPEAT = 11
_BLOCK = 8192


def measure(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure both on this CUDA device, on random data: zeros compute faster.

    The read is the better of torch's own sum and a kernel that only reads.
    """
    found = Ceilings(_read_rate(device), _matmul_rate(device, dtype), _empty_us(device))
    torch.cuda.empty_cache()
    return found


def _read_rate(device: torch.device) -> float:
    buffer = torch.randn(READ_BYTES // 4, device=device)
    partial = torch.empty(buffer.numel() // _BLOCK, device=device)
    readers: list[Callable[[], object]] = [buffer.sum, lambda: _read_sum(buffer, partial)]
    return READ_BYTES / min(_once(reader, device) for reader in readers)


def _matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    size = (MATMUL_SIZE, MATMUL_SIZE)
    left, right = (torch.randn(size, device=device).to(dtype) for _ in range(2))
    product = torch.empty(size, device=device, dtype=dtype)
    return 2 * MATMUL_SIZE**3 / _once(lambda: torch.mm(left, right, out=product), device)


def _once(run: Callable[[], object], device: torch.device) -> float:
    """Median seconds of one call, between events: calls here last a millisecond."""
    for _ in range(3):
        run()
    pairs = [timing.between_events(run) for _ in range(REPEAT)]
    torch.cuda.synchronize(device)
    return Spread.of([begin.elapsed_time(end) * 1e-3 for begin, end in pairs]).median


def _empty_us(device: torch.device) -> float:
    tiny = torch.zeros(1, device=device)
    flush = timing.Flush("read", device)
    graph = timing.prepare(lambda: tiny.add_(1.0))
    return Spread.of(timing.interleaved({"empty": graph}, flush, REPEAT)["empty"]).median


def _read_sum(buffer: Tensor, partial: Tensor) -> None:
    _kernel()[(partial.numel(),)](buffer, partial, BLOCK=_BLOCK, num_warps=8)


@functools.cache
def _kernel() -> Any:
    """A kernel that reads a block and keeps only its sum; Triton is imported only here."""
    from torch_cascade.benchmarks.read_kernel import read_block

    return read_block
