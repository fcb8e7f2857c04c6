"""Measures what the cost model needs to know of a CPU: seconds altogether, least of a few runs."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_cascade.kernels.merge import merge_torch

_REPEAT = 7
_LARGE = 256 * 2**20
_FLUSH = 64 * 2**20
_ROWS = (1, 64)  # query rows of a pair: keys are streamed, or arithmetic counts
_STAGES = (1, 5)

Step = tuple[str, Callable[[], dict[str, float]]]


def steps() -> list[Step]:
    """What is measured, in words, and how; each gives some figures."""
    return [
        ("memory", _memory),
        ("matrix product", _matmul),
        ("attention", _attention),
        ("merge of partial results (compiles a function)", _merge),
        ("one more op (compiles two functions)", _launch),
    ]


def least(call: Callable[[], object], flush: Tensor | None = None) -> float:
    """Seconds of the fastest of a few calls, after one that warms up."""
    call()
    times = []
    for _ in range(_REPEAT):
        if flush is not None:
            flush.sum()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


def _memory() -> dict[str, float]:
    source = torch.ones(_LARGE // 4)
    target = torch.ones(_LARGE // 4)
    return {
        "read": _LARGE / least(source.sum),
        "copy": 2 * _LARGE / least(lambda: target.copy_(source)),
        "fresh": _FLUSH / least(lambda: torch.empty(_FLUSH // 4).fill_(1.0)),
    }


def _matmul() -> dict[str, float]:
    size = 1024
    left, right = torch.randn(size, size), torch.randn(size, size)
    return {"matmul.float32": 2 * size**3 / least(lambda: left @ right)}


def _attention() -> dict[str, float]:
    """Two attentions, two unknowns: rows cost arithmetic, and each block of rows reads all keys."""
    pairs, keys, width = 4 * torch.get_num_threads(), 2048, 64
    streamed, flops, seconds = [], [], []
    for rows in _ROWS:
        q = torch.randn(pairs, 1, rows, width)
        k, v = (torch.randn(pairs, 1, keys, width) for _ in "kv")
        seconds.append(least(functools.partial(F.scaled_dot_product_attention, q, k, v)))
        blocks = -(-rows // 32)
        streamed.append(pairs * blocks * keys * 2 * width * 4)
        flops.append(4 * pairs * rows * keys * width)
    return solved(streamed, flops, seconds)


def solved(streamed: list[int], flops: list[int], seconds: list[float]) -> dict[str, float]:
    """`stream` and `attend` with seconds = streamed / stream + flops / attend, twice.

    Where one of them would not be positive (the measurement is too noisy), all of the time is
    given to the other one of its own attention.
    """
    determinant = streamed[0] * flops[1] - streamed[1] * flops[0]
    stream = (seconds[0] * flops[1] - seconds[1] * flops[0]) / determinant
    attend = (streamed[0] * seconds[1] - streamed[1] * seconds[0]) / determinant
    if stream <= 0:
        stream = seconds[0] / streamed[0]
    if attend <= 0:
        attend = seconds[1] / flops[1]
    return {"stream": 1 / stream, "attend": 1 / attend}


def _merge() -> dict[str, float]:
    """Two partial results of many rows into one, as compiled code does it."""
    rows, width = 64 * 1024, 64
    out = [torch.randn(rows, width) for _ in range(2)]
    lse = [torch.randn(rows) for _ in range(2)]
    compiled: Any = torch.compile(merge_torch, dynamic=False)
    moved = 3 * rows * (width + 1) * 4
    with torch.no_grad():
        return {"merge": moved / least(lambda: compiled(out, lse))}


def _launch() -> dict[str, float]:
    """What one stage more of an attention and a loop takes, after the caches were emptied."""
    flush = torch.ones(_FLUSH // 4)
    x = torch.randn(1, 2, 4, 16)
    times = []
    for count in _STAGES:
        compiled: Any = torch.compile(_chain(count), dynamic=False)
        with torch.no_grad():
            times.append(least(functools.partial(compiled, x), flush))
    more = (_STAGES[1] - _STAGES[0]) * 2  # an attention and a loop a stage
    return {"launch": max((times[1] - times[0]) / more, 1e-7)}


def _chain(count: int) -> Callable[[Tensor], Tensor]:
    def chain(x: Tensor) -> Tensor:
        for stage in range(count):
            x = F.scaled_dot_product_attention(x, x, x) * (stage + 2.0)
        return x

    return chain
