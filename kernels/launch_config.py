"""Launch configurations of the Triton kernels: pure functions of shapes and device, no autotuning.

Sizes here are numbers: exact where the graph's are, otherwise the hints of symbolic ones. A
configuration never changes what is computed beyond rounding, so a hint that later sizes leave
behind costs time and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


class DeviceLimits(NamedTuple):
    """What a launch depends on.

    Attributes:
        processors: multiprocessors.
        shared_memory: bytes of it that a program may have.
        generation: major number of the compute capability; what was measured here is 9.
    """

    processors: int
    shared_memory: int
    generation: int = 9


class SlotShape(NamedTuple):
    """One key segment as a launch sees it.

    Attributes:
        tiles_of: KV rows times KV heads; each has `rows` packed query rows.
        rows: T * M * G.
        kv_len: keys.
    """

    tiles_of: int
    rows: int
    kv_len: int


class Widths(NamedTuple):
    """Head sizes, and bytes of an element of q and of K/V."""

    d_k: int
    d_v: int
    q_bytes: int
    kv_bytes: int


@dataclass(frozen=True)
class SlotConfig:
    """Tile, pipeline depth and number of splits of one slot."""

    block_m: int
    block_n: int
    stages: int
    splits: int


def padded(size: int, least: int = 16) -> int:
    """The smallest power of two that holds `size`."""
    return max(least, 1 << max(size - 1, 0).bit_length())


@dataclass(frozen=True)
class LaunchConfig:
    """One launch of `attend_parts`.

    Attributes:
        slots: one or two.
        warps: warps of a program.
        direct: there is one partial result a row, which is the result.
        tail: the second slot is read by the last split of the first.
        quick: the first slot is read with one reference score as far as nothing hides its keys.
    """

    slots: tuple[SlotConfig, ...]
    warps: int = 4
    direct: bool = False
    tail: bool = False
    quick: bool = False

    @property
    def splits(self) -> int:
        """Partial results of a row that the launch writes."""
        if self.tail:
            return self.slots[0].splits
        return sum(slot.splits for slot in self.slots)


@dataclass(frozen=True)
class MergeConfig:
    """One launch of `merge_parts`: rows of a program, partials in flight, warps."""

    rows: int
    unroll: int
    warps: int


# No more partial results a row than this: beyond it merging costs more than the splits gain.
_MOST_SPLITS = 64
# Programs that one multiprocessor holds at a time: their shared memory is what limits them.
_RESIDENT = 2
# Tiles of keys that a program could have read before its first one is there.
_START = 3
# Generations whose matrix instructions take 64 rows, and slower ones less.
_TALL_PRODUCTS = (9, 10)
# The generation that `quick` is for. With the instructions of 8, which 9 has for less than 64 rows,
# it was slower; for 10 Triton 3.6 fails to compile it.
QUICK_GENERATION = 9
# A suffix of up to this many keys, over all branches of a tile, is read as a tail of the prefix.
_MOST_TAIL = 128


def attend_config(
    shapes: Sequence[SlotShape],
    widths: Widths,
    limits: DeviceLimits,
    *,
    alone: bool,
    nested: bool,
) -> LaunchConfig:
    """The configuration of one launch of `attend_parts`.

    Args:
        shapes: its one or two slots.
        widths: of the heads.
        limits: of the device.
        alone: no other launch adds partial results.
        nested: the KV rows of the second slot divide evenly among those of the first.
    """
    first = _slot(shapes[0], widths, limits)
    # It saves instructions, which count where several tiles of rows read the same keys.
    many = shapes[0].rows > first.block_m
    quick = limits.generation == QUICK_GENERATION and widths.q_bytes == 2 and many
    if len(shapes) == 1:
        return LaunchConfig((first,), direct=alone and first.splits == 1, quick=quick)
    tail = nested and shapes[0].rows * shapes[1].kv_len <= _MOST_TAIL * shapes[1].rows
    if tail:
        keys = shapes[1].kv_len * shapes[0].rows // max(shapes[1].rows, 1)
        block_n = min(first.block_n, padded(keys, least=32))
        second = SlotConfig(first.block_m, block_n, first.stages, splits=1)
        direct = alone and first.splits == 1
        return LaunchConfig((first, second), direct=direct, tail=True, quick=quick)
    second = _slot(shapes[1], widths, limits)
    return LaunchConfig(_in_one_wave((first, second), shapes, limits), quick=quick)


def _tiles(shape: SlotShape, slot: SlotConfig) -> int:
    """Tiles of rows of a slot; each is read by as many programs as there are splits."""
    return max(shape.tiles_of * -(-shape.rows // slot.block_m), 1)


def _run(shape: SlotShape, slot: SlotConfig) -> int:
    """Tiles of keys that a program of a slot goes through."""
    return -(-shape.kv_len // (slot.block_n * slot.splits))


def _in_one_wave(
    slots: tuple[SlotConfig, SlotConfig], shapes: Sequence[SlotShape], limits: DeviceLimits
) -> tuple[SlotConfig, SlotConfig]:
    """Fewer splits where the programs of both slots would not all be resident at once.

    No suffix is split into runs shorter than those of the prefix, which everybody waits for; and
    the prefix leaves room for the suffixes where its longer runs cost less than a second wave.
    """
    first, second = slots
    runs = -(-shapes[1].kv_len // (second.block_n * max(_run(shapes[0], first), 1)))
    second = replace(second, splits=max(1, min(second.splits, runs)))
    room = _RESIDENT * limits.processors - _tiles(shapes[1], second) * second.splits
    fewer = replace(first, splits=min(first.splits, room // _tiles(shapes[0], first)))
    if fewer.splits < 1:
        return first, second
    longer = _run(shapes[0], fewer) - _run(shapes[0], first)
    wave = _run(shapes[1], second) + _START
    return (fewer if longer < wave else first), second


def _tallest(widths: Widths) -> int:
    """Rows of the tallest tile. float32 products use no tensor cores, and registers instead."""
    return 64 if widths.q_bytes <= 2 else 32


def _height(rows: int, widths: Widths, limits: DeviceLimits) -> int:
    """Rows of a tile: as few as hold them, but half-empty ones for instructions of 64 rows."""
    if limits.generation in _TALL_PRODUCTS and widths.q_bytes <= 2 and rows > 16:
        return _tallest(widths)
    return min(_tallest(widths), padded(rows))


def _slot(shape: SlotShape, widths: Widths, limits: DeviceLimits) -> SlotConfig:
    block_m = _height(shape.rows, widths, limits)
    block_n = 64 if max(padded(widths.d_k), padded(widths.d_v)) * widths.kv_bytes <= 256 else 32
    slot = SlotConfig(block_m, block_n, 3, 1)
    # One program a multiprocessor keeps its memory busy; tall tiles need two to overlap arithmetic.
    resident = 1 if shape.rows <= block_m else _RESIDENT
    wanted = max(1, resident * limits.processors // _tiles(shape, slot))
    splits = max(1, min(wanted, _MOST_SPLITS, -(-shape.kv_len // block_n)))
    return _fitted(replace(slot, splits=splits), widths, limits)


def shared_bytes(slot: SlotConfig, widths: Widths) -> int:
    """Shared memory of a program, estimated from above: tiles of Q, K, V and weights.

    Tests compare it with what compiled kernels take.
    """
    d_k, d_v = padded(widths.d_k), padded(widths.d_v)
    queries = slot.block_m * (d_k + slot.block_n) * widths.q_bytes
    return queries + slot.stages * slot.block_n * (d_k + d_v) * widths.q_bytes


def _fitted(slot: SlotConfig, widths: Widths, limits: DeviceLimits) -> SlotConfig:
    """The slot, with a shorter pipeline and then smaller tiles where it would not fit."""
    if shared_bytes(slot, widths) <= limits.shared_memory:
        return slot
    if slot.stages > 1:
        return _fitted(replace(slot, stages=slot.stages - 1), widths, limits)
    if slot.block_m > 16:
        return _fitted(replace(slot, block_m=slot.block_m // 2), widths, limits)
    if slot.block_n > 16:
        return _fitted(replace(slot, block_n=slot.block_n // 2), widths, limits)
    return slot


def invariant_config(
    shapes: Sequence[SlotShape], widths: Widths, limits: DeviceLimits
) -> LaunchConfig:
    """A configuration that depends on nothing but the lengths of the segments.

    Never `quick`: a row would depend on whether the scores of the other rows of its tile grow.
    """
    slots = tuple(_slot(SlotShape(1, 1, s.kv_len), widths, limits) for s in shapes)
    tall = (replace(slot, block_m=_tallest(widths)) for slot in slots)
    return LaunchConfig(tuple(_fitted(slot, widths, limits) for slot in tall))


def merge_config(parts: int, rows: int) -> MergeConfig:
    """One row a program, and more only where the programs would not all be resident."""
    return MergeConfig(rows=min(8, padded(rows // 4096, least=1)), unroll=min(8, parts), warps=1)
