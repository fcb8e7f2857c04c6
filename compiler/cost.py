"""What each way to compute one attention takes: the numbers of a call put into the formulas.

A way is "plain" (the graph as it is), or a cascade of levels: one `attend` a segment of keys, and a
merge. `price` prices both for numbers; symbolic sizes are a matter of `compiler/decide.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import sympy

from torch_cascade.compiler import cost_terms as terms
from torch_cascade.compiler.cost_terms import Kernel, PartSymbols
from torch_cascade.compiler.device import Device
from torch_cascade.compiler.price import Price
from torch_cascade.compiler.work import KeyRun, Work
from torch_cascade.kernels.launch_config import (
    DeviceLimits,
    LaunchConfig,
    SlotShape,
    Widths,
    attend_config,
)

# torch/aten/native/cpu/FlashAttentionKernel.cpp: query rows of a block, by number of rows.
_CPU_BLOCKS = ((768, 256), (192, 64), (0, 32))
# glibc gives anything larger back to the system when it is freed (M_MMAP_THRESHOLD_MAX).
_KEPT_BYTES = 32 * 2**20
# Tiles of FlashAttention 2 (flash_fwd_launch_template.h): features at most, rows, keys.
_SPLIT_TILES = ((64, 64, 256), (128, 64, 128), (256, 64, 64))
_WHOLE_TILES = ((64, 128, 128), (192, 128, 64), (256, 64, 64))
# So many tiles' time passes before its first blocks begin with theirs, for one query token (or
# splits) and for more: measured on one H200.
_FIRST_OF_ONE, _FIRST_OF_MANY = 2, 5
# Where there are fewer blocks than this share of two a multiprocessor, keys are split.
_FULL = 0.8


def plain(work: Work, device: Device) -> Price:
    """The graph as it is. Sizes of `work` are numbers."""
    used = [run for run in work.runs if run.length > 0]
    parts = tuple(PartSymbols.of(i) for i in range(len(used)))
    values = _values(work, device) | _run_values(parts, used)
    if device.kind == "cpu":
        return Price.of(terms.cpu_naive(), values | _cpu_library(work, device))
    values |= _gpu_library(work, device)
    return Price.of(terms.gpu_naive(split=values[terms.LIBRARY_SPLITS] > 1), values)


def cascade(work: Work, device: Device) -> Price:
    """One level a segment. Sizes of `work` are numbers."""
    used = [run for run in work.runs if run.length > 0]
    parts = tuple(PartSymbols.of(i) for i in range(len(used)))
    values = _values(work, device) | _run_values(parts, used)
    make = _cpu_cascade if device.kind == "cpu" else _gpu_cascade
    return make(work, used, parts, values, device)


def _values(work: Work, device: Device) -> dict[sympy.Symbol, float]:
    """What does not depend on the segments."""
    values: dict[sympy.Symbol, float] = {
        terms.N: work.batch,
        terms.HQ: work.heads,
        terms.HKV: work.kv_heads,
        terms.M: work.q_len,
        terms.DK: work.d_k,
        terms.DV: work.d_v,
        terms.Q_BYTES: work.q_bytes,
        terms.KV_BYTES: work.kv_bytes,
        terms.ACC_BYTES: work.acc_bytes,
        terms.NAIVE_HEADS: work.naive_heads,
        terms.KEYS: sum(run.length for run in work.runs),
        terms.ONCE: work.kv_heads * work.token_bytes * int(work.own_tokens),
        terms.COPIED: float(_is_copied(work, device)),
        terms.ONE_FLOP: 1,
        terms.READ: device["read"],
        terms.COPY: device["copy"],
        terms.LAUNCH: device["launch"],
        terms.P: device["processors"],
        terms.MATMUL: device.matmul(work.dtype),
    }
    return values


def _is_copied(work: Work, device: Device) -> bool:
    """Inductor hands a GPU's attention expanded views as they are, and copies them for a CPU's."""
    return work.copied or device.kind == "cpu"


def _spilled_bytes(work: Work, device: Device) -> int:
    """Bytes of the expanded K and V that attention reads from memory: none if a cache holds them.

    Half of the cache: the other half holds what they were copied from, and what else there is.
    """
    if not _is_copied(work, device):
        return 0
    keys = sum(run.length for run in work.runs)
    written = work.batch * work.naive_heads * keys * work.token_bytes
    return int(written) if written > device["cache"] / 2 else 0


def _run_values(parts: tuple[PartSymbols, ...], used: list[KeyRun]) -> dict[sympy.Symbol, float]:
    values: dict[sympy.Symbol, float] = {}
    for part, run in zip(parts, used, strict=True):
        values |= {part.rows: run.rows, part.keys: run.length}
    return values


# --- CPU ------------------------------------------------------------------------------------------


def _cpu_library(work: Work, device: Device) -> dict[sympy.Symbol, float]:
    keys = sum(run.length for run in work.runs)
    tensor = work.batch * work.naive_heads * keys * work.d_k * work.kv_bytes
    return {
        terms.SPILLED_BYTES: _spilled_bytes(work, device),
        terms.LIBRARY_ROWS: _cpu_block(work.q_len),
        terms.FRESH_BYTES: 2 * tensor if tensor > _KEPT_BYTES else 0,
        terms.FRESH: device["fresh"],
        terms.STREAM: device["stream"],
        terms.CPU_ATTEND: device["attend"],
    }


def _cpu_block(rows: int) -> int:
    return next(block for least, block in _CPU_BLOCKS if rows >= least)


def _cpu_cascade(
    work: Work,
    used: list[KeyRun],
    parts: tuple[PartSymbols, ...],
    values: dict[sympy.Symbol, float],
    device: Device,
) -> Price:
    values |= {terms.STREAM: device["stream"], terms.CPU_ATTEND: device["attend"]}
    values |= {terms.MERGE: device["merge"]}
    kernels: list[Kernel] = []
    for part, run in zip(parts, used, strict=True):
        packed = work.batch * work.q_len * work.heads // (run.rows * work.kv_heads)
        values[part.block] = _cpu_block(packed)
        if run.joined:
            kernels.append(terms.join(part))
        converted = work.kv_bytes < work.acc_bytes
        kernels += terms.cpu_part(part, shared=run.rows < work.batch, converted=converted)
    if len(parts) > 1:
        kernels.append(terms.cpu_merge(len(parts)))
    return Price.of(kernels, values)


# --- GPU ------------------------------------------------------------------------------------------


def _gpu_library(work: Work, device: Device) -> dict[sympy.Symbol, float]:
    """How FlashAttention 2 covers the queries: a block a tile of rows and query head.

    With one query token it swaps group and query axis, so that a block reads a KV head once. The
    keys are split where blocks do not fill the device (`num_splits_heuristic`).
    """
    swapped = work.q_len == 1 and work.heads > work.kv_heads
    heads, tokens = (
        (work.kv_heads, work.heads // work.kv_heads) if swapped else (work.heads, work.q_len)
    )
    length = sum(run.length for run in work.runs)
    rows, keys = _tile(_SPLIT_TILES, work)
    tiles = work.batch * heads * -(-tokens // rows)
    places = 2 * device["processors"]
    splits = 1
    if tiles < _FULL * places:
        splits = max(1, min(-(-length // keys), int(places / tiles)))
    if splits == 1:
        rows, keys = _tile(_WHOLE_TILES, work)
        tiles = work.batch * heads * -(-tokens // rows)
    blocks = max(1.0, tiles * splits / device["processors"])
    first = _FIRST_OF_ONE if work.q_len == 1 or splits > 1 else _FIRST_OF_MANY
    features = max(work.d_k, work.d_v) / 128  # up to 128, tiles have more keys instead
    steps = (1 + -(-length // (keys * splits))) * blocks
    chain = first * features + steps * max(1.0, features)
    return {
        terms.SPILLED_BYTES: _spilled_bytes(work, device),
        terms.LIBRARY_ROWS: rows,
        terms.LIBRARY_TILES: tiles,
        terms.LIBRARY_SPLITS: splits,
        terms.LIBRARY_STEPS: chain,
        terms.LIBRARY: device["library"],
        terms.LIBRARY_STEP: device["library.step"],
    }


def _tile(table: Sequence[tuple[int, int, int]], work: Work) -> tuple[int, int]:
    """Rows and keys of a tile; FlashAttention has none for more features."""
    features = max(work.d_k, work.d_v)
    return next((row[1:] for row in table if features <= row[0]), table[-1][1:])


def launches(work: Work, device: Device) -> list[tuple[list[int], LaunchConfig]]:
    """Which segments each launch of `attend_merge` computes, and how; sizes are numbers.

    By two, from the last on; the one that more rows share comes first in a pair.
    """
    count = len(work.runs)
    odd = count % 2
    pairs = [[0]] if odd else []
    pairs += [[i, i + 1] for i in range(odd, count, 2)]
    made = []
    for pair in pairs:
        ordered = sorted(pair, key=lambda i: work.runs[i].rows)
        runs = [work.runs[i] for i in ordered]
        nested = len(runs) == 2 and runs[1].rows % runs[0].rows == 0
        shapes = [
            SlotShape(
                run.rows * work.kv_heads,
                work.batch * work.q_len * work.heads // (run.rows * work.kv_heads),
                run.length,
            )
            for run in runs
        ]
        widths = Widths(work.d_k, work.d_v, work.q_bytes, work.kv_bytes)
        limits = DeviceLimits(int(device["processors"]), int(device["shared"]))
        config = attend_config(shapes, widths, limits, alone=len(pairs) == 1, nested=nested)
        made.append((ordered, config))
    return made


def _gpu_cascade(
    work: Work,
    used: list[KeyRun],
    parts: tuple[PartSymbols, ...],
    values: dict[sympy.Symbol, float],
    device: Device,
) -> Price:
    values |= {terms.ATTEND: device["attend"], terms.STEP: device["step"]}
    values |= {terms.ATTEND_READ: device["attend.read"]}
    kernels = [terms.join(p) for p, run in zip(parts, used, strict=True) if run.joined]
    written: list[PartSymbols] = []
    made = launches(replace(work, runs=tuple(used)), device)
    for order, config in made:
        ours = tuple(parts[i] for i in order)
        for part, run, slot in zip(ours, (used[i] for i in order), config.slots, strict=True):
            keys = -(-run.length // slot.splits)
            values |= {part.block: slot.block_m, part.splits: slot.splits}
            values[part.steps] = -(-keys // slot.block_n)
        if config.tail:  # of the suffixes of all branches that a tile has rows of
            branches = used[order[1]].rows // used[order[0]].rows
            keys = branches * used[order[1]].length
            values[ours[1].steps] = -(-keys // config.slots[1].block_n)
        kernels.append(terms.gpu_launch(ours, tail=config.tail, direct=config.direct))
        written += ours[:1] if config.tail else ours
    if not made[0][1].direct:
        kernels.append(terms.gpu_merge(tuple(written)))
    return Price.of(kernels, values)
