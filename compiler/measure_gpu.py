"""Measures what the cost model needs to know of a CUDA device, in CUDA graphs as compiled code.

Not what it waits for (`launch`, `step`, `library.step`): a kernel that is repeated has its code at
hand and its data in L2, and one that fills the device waits for memory. Measured like that on an
H200, these figures made decisions worse than the table's, which stem from the grid of `regret`.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_cascade.kernels.triton_call import KeyPart
from torch_cascade.kernels.triton_launch import attend_merge

_REPEAT = 9
_LARGE = 2**30
_SIZE = 8192

Step = tuple[str, Callable[[], dict[str, float]]]


def steps() -> list[Step]:
    """What is measured, in words, and how; each gives some figures."""
    return [
        ("memory", _memory),
        ("matrix products", _matmul),
        ("our attention", _attend),
        ("torch's attention", _library),
    ]


def seconds(call: Callable[[], object]) -> float:
    """Median seconds of a call, replayed as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(_REPEAT):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e-3 * begin.elapsed_time(end))
    return float(statistics.median(times))


def _memory() -> dict[str, float]:
    source = torch.ones(_LARGE // 4, device="cuda")
    target = torch.empty_like(source)
    return {
        "read": _LARGE / seconds(source.sum),
        "copy": 2 * _LARGE / seconds(lambda: target.copy_(source)),
    }


def _matmul() -> dict[str, float]:
    found = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        size = _SIZE if dtype != torch.float32 else _SIZE // 2
        left, right = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
        name = f"matmul.{str(dtype).removeprefix('torch.')}"
        found[name] = 2 * size**3 / seconds(functools.partial(torch.mm, left, right))
    return found


def _attend() -> dict[str, float]:
    """Many packed rows for the rate of operations, few for that of memory."""
    rate = _matmul_rate()
    q, k, v = _operands(rows=64, heads=32, kv_heads=8, queries=4, keys=8192, kv_rows=4)
    flops = 4 * q.shape[0] * 32 * 4 * 8192 * 128
    busy = seconds(lambda: attend_merge(q, [KeyPart(k, v, branches=16)]))
    alone, k_large, v_large = _operands(8, 32, 8, 1, keys=32768, kv_rows=8)
    reading = seconds(lambda: attend_merge(alone, [KeyPart(k_large, v_large)]))
    return {
        "attend": flops / busy / rate,
        "attend.read": 2 * k_large.nbytes / reading / _memory()["read"],
    }


def _library() -> dict[str, float]:
    q, k, v = _operands(rows=16, heads=32, kv_heads=32, queries=1024, keys=4096, kv_rows=16)
    flops = 4 * 16 * 32 * 1024 * 4096 * 128
    busy = seconds(lambda: F.scaled_dot_product_attention(q, k, v))
    return {"library": flops / busy / _matmul_rate()}


def _matmul_rate() -> float:
    left, right = (torch.randn(_SIZE, _SIZE, device="cuda").bfloat16() for _ in range(2))
    return 2 * _SIZE**3 / seconds(lambda: left @ right)


def _operands(
    rows: int, heads: int, kv_heads: int, queries: int, keys: int, kv_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """bfloat16 q [rows, heads, queries, 128], k and v [kv_rows, kv_heads, keys, 128]."""
    sizes = ((rows, heads, queries, 128), *[(kv_rows, kv_heads, keys, 128)] * 2)
    q, k, v = (torch.randn(size, device="cuda").bfloat16() for size in sizes)
    return q, k, v
