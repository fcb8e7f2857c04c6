"""The cost of one attention as formulas: named symbols with units, and a term a kernel.

A strategy is a list of kernels that run one after the other; its time is the sum of theirs. On a
GPU a kernel takes

    launch + max(bytes / read, operations / rate, longest chain of tiles)

as memory, arithmetic and latency overlap; on a CPU, where one thread does one after the other,

    launch + bytes / stream + operations / rate

with what is unevenly spread over the threads rounded up. The numbers put in are those of a
`cost.Work` and of a `device.Device`; `units.unit_of` checks every formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import sympy
from sympy import Max, ceiling

from torch_cascade.compiler.units import BYTE, BYTE_RATE, FLOP, FLOP_RATE, SECOND, symbol

# The attention: query rows, heads, query tokens, features, bytes an element.
N, HQ, HKV, M = (symbol(name) for name in ("N", "Hq", "Hkv", "M"))
DK, DV = symbol("Dk"), symbol("Dv")
Q_BYTES, KV_BYTES, ACC_BYTES = (symbol(name, BYTE) for name in ("e_q", "e_kv", "e_acc"))
COPIED = symbol("copied")  # parts of K and V that the naive graph writes: 1, or 0 for a view
NAIVE_HEADS = symbol("Hnaive")  # heads of K and V as the naive graph holds them
# The device.
READ, COPY = symbol("read", BYTE_RATE), symbol("copy", BYTE_RATE)
FRESH, STREAM = symbol("fresh", BYTE_RATE), symbol("stream", BYTE_RATE)
MERGE = symbol("merge", BYTE_RATE)
LAUNCH = symbol("launch", SECOND)
MATMUL, ATTEND = symbol("matmul", FLOP_RATE), symbol("attend")
LIBRARY = symbol("library")
CPU_ATTEND = symbol("attend_rate", FLOP_RATE)
STEP, LIBRARY_STEP = symbol("step", SECOND), symbol("library_step", SECOND)
P = symbol("P")
# How torch's own attention is launched.
LIBRARY_ROWS, LIBRARY_TILES = symbol("library_rows"), symbol("library_tiles")
LIBRARY_STEPS = symbol("library_steps")
# Bytes of the naive graph's copies that the system has to give, and that no cache holds.
FRESH_BYTES, SPILLED_BYTES = symbol("fresh_bytes", BYTE), symbol("spilled_bytes", BYTE)
ONE_FLOP = symbol("flop", FLOP)  # the unit itself: 1


class PartSymbols(NamedTuple):
    """Sizes of one segment of keys: KV rows, keys; tile, splits, and steps of a program."""

    rows: sympy.Symbol
    keys: sympy.Symbol
    block: sympy.Symbol
    splits: sympy.Symbol
    steps: sympy.Symbol

    @classmethod
    @cache
    def of(cls, index: int) -> PartSymbols:
        """Those of the part of that number."""
        return cls(*(symbol(f"{name}_{index}") for name in cls._fields))

    @property
    def packed(self) -> sympy.Expr:
        """Query rows that read one KV row and head."""
        return N * M * HQ / (self.rows * HKV)

    @property
    def tiles(self) -> sympy.Expr:
        """Tiles of query rows, over all KV rows and heads."""
        return self.rows * HKV * ceiling(self.packed / self.block)

    @property
    def kv_bytes(self) -> sympy.Expr:
        """Bytes of the keys and values, once."""
        return self.rows * HKV * self.keys * (DK + DV) * KV_BYTES


@dataclass(frozen=True)
class Kernel:
    """One kernel of a strategy: what it is, and its time."""

    name: str
    seconds: sympy.Expr


def total(kernels: Sequence[Kernel]) -> sympy.Expr:
    """The time of a strategy."""
    return sympy.Add(*(kernel.seconds for kernel in kernels))


def rows_bytes(width: sympy.Expr, element: sympy.Expr) -> sympy.Expr:
    """Bytes of one tensor with a vector of `width` for every query."""
    return N * HQ * M * width * element


def _flops(rows: sympy.Expr, keys: sympy.Expr) -> sympy.Expr:
    """Operations of both matrix products, `rows` of all heads together."""
    return 2 * rows * keys * (DK + DV) * ONE_FLOP


def expansion(parts: tuple[PartSymbols, ...]) -> tuple[sympy.Expr, sympy.Expr]:
    """Bytes that the naive graph reads and writes to give every branch a copy of its keys."""
    keys = sympy.Add(*(part.keys for part in parts))
    read = sympy.Add(*(part.kv_bytes for part in parts))
    return COPIED * read, COPIED * N * NAIVE_HEADS * keys * (DK + DV) * KV_BYTES


# --- GPU ------------------------------------------------------------------------------------------


@cache
def gpu_naive(parts: tuple[PartSymbols, ...]) -> tuple[Kernel, ...]:
    """Expanded copies of K and V, one kernel each, and torch's attention over them.

    A copy that L2 does not hold is read back from memory. Where nothing is copied, the branches
    read the same bytes one after the other, and L2 serves all but the first.
    """
    keys = sympy.Add(*(part.keys for part in parts))
    read, written = expansion(parts)
    once = sympy.Add(*(part.kv_bytes for part in parts))
    copy = COPIED * 2 * LAUNCH + (read + written) / COPY
    moved = SPILLED_BYTES + (1 - COPIED) * once + 2 * rows_bytes(DV, Q_BYTES)
    flops = _flops(LIBRARY_TILES * LIBRARY_ROWS, keys)
    chain = LIBRARY_STEP * LIBRARY_STEPS
    attend = LAUNCH + Max(moved / READ, flops / (LIBRARY * MATMUL), chain)
    return (Kernel("copy K and V for every branch", copy), Kernel("torch attention", attend))


@cache
def gpu_launch(parts: tuple[PartSymbols, ...], *, tail: bool, direct: bool) -> Kernel:
    """One launch of our attention over one or two segments of keys.

    Every program goes through its run of keys in steps of one tile; there are as many at once as
    multiprocessors. A tail is more steps of the first segment's last programs.
    """
    own = parts[:1] if tail else parts
    steps = [sympy.Add(*(part.steps for part in parts))] if tail else [p.steps for p in parts]
    partials = sympy.Add(*(part.splits for part in own)) * rows_bytes(DV + 1, ACC_BYTES)
    moved = sympy.Add(*(part.kv_bytes for part in parts)) + rows_bytes(DK, Q_BYTES)
    moved += rows_bytes(DV, Q_BYTES) if direct else partials
    flops = sympy.Add(*(_flops(part.tiles * part.block, part.keys) for part in own))
    work = sympy.Add(*(p.tiles * p.splits * count for p, count in zip(own, steps, strict=True)))
    chain = STEP * Max(*steps, work / P)
    seconds = LAUNCH + Max(moved / READ, flops / (ATTEND * MATMUL), chain)
    return Kernel("attention over " + " and ".join(part.keys.name for part in parts), seconds)


@cache
def gpu_merge(parts: tuple[PartSymbols, ...]) -> Kernel:
    """The merge of the partial results that those parts wrote."""
    splits = sympy.Add(*(part.splits for part in parts))
    moved = splits * rows_bytes(DV + 1, ACC_BYTES) + rows_bytes(DV, Q_BYTES)
    return Kernel("merge of partial results", LAUNCH + moved / READ)


# --- CPU ------------------------------------------------------------------------------------------


@cache
def cpu_naive(parts: tuple[PartSymbols, ...]) -> tuple[Kernel, ...]:
    """Expanded copies of K and V in one loop, and torch's attention, one query head at a time.

    The copies are written to memory that the system may have to give first.
    """
    keys = sympy.Add(*(part.keys for part in parts))
    read, written = expansion(parts)
    copy = LAUNCH + (read + written) / COPY + FRESH_BYTES / FRESH
    attend = _cpu_attention(N * HQ, M, keys, LIBRARY_ROWS, Q_BYTES) + SPILLED_BYTES / READ
    return (Kernel("copy K and V for every branch", copy), Kernel("torch attention", attend))


@cache
def cpu_part(part: PartSymbols, *, shared: bool, converted: bool) -> tuple[Kernel, ...]:
    """Attention over one segment: rows packed and unpacked where branches share it.

    Half-precision keys are first converted, as partial results must not be rounded.
    """
    seconds = _cpu_attention(part.rows * HKV, part.packed, part.keys, part.block, ACC_BYTES)
    kernels = [Kernel(f"attention over {part.keys.name}", seconds + part.kv_bytes / READ)]
    if shared:
        moved = 2 * rows_bytes(DK + DV + 1, ACC_BYTES)
        kernels.append(Kernel(f"rows packed for {part.keys.name}", LAUNCH + moved / MERGE))
    if converted:
        moved = part.kv_bytes * (1 + ACC_BYTES / KV_BYTES)
        kernels.append(Kernel(f"{part.keys.name} to float32", LAUNCH + moved / COPY))
    return tuple(kernels)


@cache
def cpu_merge(parts: int) -> Kernel:
    """The merge, fused with its neighbours."""
    moved = (parts + 1) * rows_bytes(DV + 1, ACC_BYTES)
    return Kernel("merge of partial results", LAUNCH + moved / MERGE)


def _cpu_attention(
    pairs: sympy.Expr,
    rows: sympy.Expr,
    keys: sympy.Expr,
    block: sympy.Expr,
    element: sympy.Expr,
) -> sympy.Expr:
    """The CPU's flash kernel: blocks of rows over the threads, each reads all keys of its pair."""
    items = pairs * ceiling(rows / block)
    uneven = ceiling(items / P) * P / items
    streamed = items * keys * (DK + DV) * element
    return LAUNCH + uneven * (streamed / STREAM + _flops(pairs * rows, keys) / CPU_ATTEND)
