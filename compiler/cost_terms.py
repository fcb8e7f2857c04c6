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

from torch_cascade.compiler.units import (
    BYTE,
    BYTE_RATE,
    FLOP,
    FLOP_RATE,
    SECOND,
    symbol,
    unit_of,
)

# The attention: query rows, heads, query tokens, features, bytes an element.
N, HQ, HKV, M = (symbol(name) for name in ("N", "Hq", "Hkv", "M"))
DK, DV = symbol("Dk"), symbol("Dv")
Q_BYTES, KV_BYTES, ACC_BYTES = (symbol(name, BYTE) for name in ("e_q", "e_kv", "e_acc"))
COPIED = symbol("copied")  # parts of K and V that the naive graph writes: 1, or 0 for a view
KEYS, ONCE = symbol("keys"), symbol("once", BYTE)  # of all segments: keys, and bytes of K and V
NAIVE_HEADS = symbol("Hnaive")  # heads of K and V as the naive graph holds them
# The device.
READ, COPY = symbol("read", BYTE_RATE), symbol("copy", BYTE_RATE)
FRESH, STREAM = symbol("fresh", BYTE_RATE), symbol("stream", BYTE_RATE)
MERGE = symbol("merge", BYTE_RATE)
LAUNCH = symbol("launch", SECOND)
MATMUL, ATTEND = symbol("matmul", FLOP_RATE), symbol("attend")
ATTEND_READ = symbol("attend_read")
LIBRARY = symbol("library")
CPU_ATTEND = symbol("attend_rate", FLOP_RATE)
STEP, LIBRARY_STEP = symbol("step", SECOND), symbol("library_step", SECOND)
P = symbol("P")
# How torch's own attention is launched.
LIBRARY_ROWS, LIBRARY_TILES = symbol("library_rows"), symbol("library_tiles")
LIBRARY_STEPS, LIBRARY_SPLITS = symbol("library_steps"), symbol("library_splits")
# Bytes of the naive graph's copies that the system has to give, and that no cache holds.
FRESH_BYTES, SPILLED_BYTES = symbol("fresh_bytes", BYTE), symbol("spilled_bytes", BYTE)
ONE_FLOP = symbol("flop", FLOP)  # the unit itself: 1


# So many steps' time passes before the first programs of ours begin with theirs (one H200).
_FIRST = 3

_DEFINITIONS: dict[sympy.Symbol, sympy.Expr] = {}


def named(name: str, expr: sympy.Expr) -> sympy.Symbol:
    """A symbol that stands for an expression in formulas, with its unit."""
    made = symbol(name, unit_of(expr))
    _DEFINITIONS[made] = expr
    return made


def definitions(expr: sympy.Expr) -> dict[sympy.Symbol, sympy.Expr]:
    """What the named symbols in an expression stand for, and those within them."""
    found: dict[sympy.Symbol, sympy.Expr] = {}
    for used in sorted(expr.free_symbols, key=str):
        if used in _DEFINITIONS:
            found |= {used: _DEFINITIONS[used]} | definitions(_DEFINITIONS[used])
    return found


def expanded(expr: sympy.Expr) -> sympy.Expr:
    """An expression of sizes and figures only."""
    while inner := definitions(expr):
        expr = expr.xreplace(inner)
    return expr


ROWS = named("rows", N * HQ * M)  # vectors of queries, and of outputs
EXPANDED = named("expanded", COPIED * N * NAIVE_HEADS * KEYS * (DK + DV) * KV_BYTES)
PARTIAL = named("partial", ROWS * (DV + 1) * ACC_BYTES)  # one partial result of every query
OUTPUT = named("output", ROWS * DV * Q_BYTES)


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

    def _named(self, name: str, expr: sympy.Expr) -> sympy.Symbol:
        return named(f"{name}_{str(self.keys).rpartition('_')[2]}", expr)

    @property
    def packed(self) -> sympy.Expr:
        """Query rows that read one KV row and head."""
        return self._named("packed", ROWS / (self.rows * HKV))

    @property
    def tiles(self) -> sympy.Expr:
        """Tiles of query rows, over all KV rows and heads."""
        return self._named("tiles", self.rows * HKV * ceiling(self.packed / self.block))

    @property
    def bytes(self) -> sympy.Expr:
        """Bytes of the keys and values, once."""
        return self._named("bytes", self.rows * HKV * self.keys * (DK + DV) * KV_BYTES)

    @property
    def tile_flops(self) -> sympy.Expr:
        """Operations on whole tiles, as a GPU does them."""
        return self._named("flops", _flops(self.tiles * self.block, self.keys))

    @property
    def row_flops(self) -> sympy.Expr:
        """Operations on the rows there are, as a CPU does them."""
        return self._named("flops_of_rows", _flops(ROWS, self.keys))

    @property
    def crowding(self) -> sympy.Expr:
        """How much longer a step takes where tiles are too large for two on a multiprocessor."""
        return self._named("crowding", Max(1, self.block * (DK + DV) / (64 * 256)))

    @property
    def uneven(self) -> sympy.Expr:
        """How much longer the tiles take as they do not divide among the threads."""
        return self._named("uneven", ceiling(self.tiles / P) * P / self.tiles)


@dataclass(frozen=True)
class Kernel:
    """One kernel of a strategy.

    Attributes:
        name: what it does.
        formula: its time, in named symbols.
        seconds: its time in sizes and figures only.
    """

    name: str
    formula: sympy.Expr
    seconds: sympy.Expr

    @classmethod
    def of(cls, name: str, formula: sympy.Expr) -> Kernel:
        """A kernel from its formula."""
        return cls(name, formula, expanded(formula))


def total(kernels: Sequence[Kernel]) -> sympy.Expr:
    """The time of a strategy."""
    return sympy.Add(*(kernel.seconds for kernel in kernels))


def _flops(rows: sympy.Expr, keys: sympy.Expr) -> sympy.Expr:
    """Operations of both matrix products, `rows` of all heads together."""
    return 2 * rows * keys * (DK + DV) * ONE_FLOP


# --- GPU ------------------------------------------------------------------------------------------


@cache
def gpu_naive(*, split: bool) -> tuple[Kernel, ...]:
    """Expanded copies of K and V, one kernel each, and torch's attention over them.

    A copy that L2 does not hold is read back from memory. Where nothing is copied, the branches
    read the same bytes one after the other, and L2 serves all but the first. Where keys are split,
    a second kernel combines the partial results.
    """
    copy = COPIED * (2 * LAUNCH + ONCE / COPY) + EXPANDED / COPY
    moved = SPILLED_BYTES + (1 - COPIED) * ONCE + 2 * OUTPUT
    flops = named("flops", _flops(LIBRARY_TILES * LIBRARY_ROWS, KEYS))
    chain = LIBRARY_STEP * LIBRARY_STEPS
    attend = LAUNCH + Max(moved / READ, flops / (LIBRARY * MATMUL), chain)
    kernels = (
        Kernel.of("copy K and V for every branch", copy),
        Kernel.of("torch's attention", attend),
    )
    if not split:
        return kernels
    combined = LAUNCH + LIBRARY_STEP + (2 * LIBRARY_SPLITS * PARTIAL + OUTPUT) / READ
    return (*kernels, Kernel.of("combine its splits", combined))


@cache
def gpu_launch(parts: tuple[PartSymbols, ...], *, tail: bool, direct: bool) -> Kernel:
    """One launch of our attention over one or two segments of keys.

    Every program goes through its run of keys in steps of one tile, after some steps' time in which
    nothing is there yet; there are as many at once as multiprocessors. A tail is more steps of the
    first segment's last programs, twice as long, as they wait for each load. What is written is
    slower than what is read.
    """
    own = parts[:1] if tail else parts
    steps = [parts[0].steps + 2 * parts[1].steps] if tail else [p.steps for p in parts]
    moved = sympy.Add(*(part.bytes for part in parts)) + ROWS * DK * Q_BYTES
    written = OUTPUT if direct else sympy.Add(*(part.splits for part in own)) * PARTIAL
    flops = sympy.Add(*(part.tile_flops for part in own))
    run = [p.crowding * (1 + count) for p, count in zip(own, steps, strict=True)]
    work = sympy.Add(*(p.tiles * p.splits * count for p, count in zip(own, run, strict=True)))
    features = (DK + DV) / 256  # a step is that of a tile of 128 features
    chain = features * STEP * (_FIRST + Max(*run, work / P))
    seconds = LAUNCH + Max(
        moved / (ATTEND_READ * READ) + written / COPY, flops / (ATTEND * MATMUL), chain
    )
    return Kernel.of("attention over " + " and ".join(str(p.keys) for p in parts), seconds)


@cache
def join(part: PartSymbols) -> Kernel:
    """K and V of a segment copied into one tensor each, what is coarser once for each row."""
    return Kernel.of(f"join {part.keys}", 2 * LAUNCH + 2 * part.bytes / COPY)


@cache
def gpu_merge(parts: tuple[PartSymbols, ...]) -> Kernel:
    """The merge of the partial results that those parts wrote."""
    moved = sympy.Add(*(part.splits for part in parts)) * PARTIAL + OUTPUT
    return Kernel.of("merge of partial results", LAUNCH + 2 * STEP + moved / READ)


# --- CPU ------------------------------------------------------------------------------------------


@cache
def cpu_naive() -> tuple[Kernel, ...]:
    """Expanded copies of K and V in one loop, and torch's attention, one query head at a time.

    The copies are written to memory that the system may have to give first.
    """
    copy = LAUNCH + (ONCE + EXPANDED) / COPY + FRESH_BYTES / FRESH
    items = named("items", N * HQ * ceiling(M / LIBRARY_ROWS))
    uneven = named("uneven", ceiling(items / P) * P / items)
    streamed = named("streamed", items * KEYS * (DK + DV) * Q_BYTES)
    flops = named("flops_of_rows", _flops(ROWS, KEYS))
    attend = LAUNCH + SPILLED_BYTES / READ + uneven * (streamed / STREAM + flops / CPU_ATTEND)
    return Kernel.of("copy K and V for every branch", copy), Kernel.of("torch's attention", attend)


@cache
def cpu_part(part: PartSymbols, *, shared: bool, converted: bool) -> tuple[Kernel, ...]:
    """Attention over one segment: rows packed and unpacked where branches share it.

    The CPU's flash kernel spreads tiles of rows over the threads; each reads all keys of its KV
    row. Half-precision keys are first converted, as partial results must not be rounded.
    """
    streamed = part.tiles * part.keys * (DK + DV) * ACC_BYTES
    work = part.uneven * (streamed / STREAM + part.row_flops / CPU_ATTEND)
    seconds = LAUNCH + part.bytes / READ + work
    kernels = [Kernel.of(f"attention over {part.keys}", seconds)]
    if shared:
        moved = 2 * ROWS * (DK + DV + 1) * ACC_BYTES
        kernels.append(Kernel.of(f"rows packed for {part.keys}", LAUNCH + moved / MERGE))
    if converted:
        moved = part.bytes * (1 + ACC_BYTES / KV_BYTES)
        kernels.append(Kernel.of(f"{part.keys} to float32", LAUNCH + moved / COPY))
    return tuple(kernels)


@cache
def cpu_merge(parts: int) -> Kernel:
    """The merge, fused with its neighbours."""
    return Kernel.of("merge of partial results", LAUNCH + (parts + 1) * PARTIAL / MERGE)
