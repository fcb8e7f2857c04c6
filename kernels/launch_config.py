"""Launch configurations of the Triton kernels: pure functions of shapes and device, no autotuning.

Sizes here are numbers: exact where the graph's are, otherwise the hints of symbolic ones. A
configuration never changes what is computed beyond rounding, so a hint that later sizes leave
behind costs time and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class DeviceLimits(NamedTuple):
    """What a launch depends on: multiprocessors, and bytes of shared memory one of them has."""

    processors: int
    shared_memory: int


class SlotShape(NamedTuple):
    """One key segment as a launch sees it.

    Attributes:
        tiles_of: KV rows times KV heads; each has `rows` packed query rows.
        rows: T * M * G.
        kv_len: keys.
        paged: keys are read through a page table.
    """

    tiles_of: int
    rows: int
    kv_len: int
    paged: bool = False


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


@dataclass(frozen=True)
class LaunchConfig:
    """One launch of `attend_parts`."""

    slots: tuple[SlotConfig, ...]
    warps: int


def padded(size: int, least: int = 16) -> int:
    """The smallest power of two that holds `size`."""
    return max(least, 1 << max(size - 1, 0).bit_length())


@dataclass(frozen=True)
class MergeConfig:
    """One launch of `merge_parts`."""

    block_r: int
    chunk: int
    warps: int


# No more partial results a row than this: beyond it merging costs more than the splits gain.
_MOST_SPLITS = 64


def attend_config(
    slots: list[SlotShape],
    widths: Widths,
    limits: DeviceLimits,
    parts: int,
    batch_invariant: bool,
) -> LaunchConfig:
    """The configuration of one launch of `attend_parts` for one or two slots."""
    warps = 4
    chosen = []
    for slot in slots:
        block_m = min(64, padded(slot.rows))
        tiles = slot.tiles_of * -(-slot.rows // block_m)
        block_n = 64 if widths.d_k <= 128 else 32
        splits = max(
            1, min(_MOST_SPLITS, 2 * limits.processors // max(tiles, 1), -(-slot.kv_len // block_n))
        )
        chosen.append(SlotConfig(block_m, block_n, 3, splits))
    return LaunchConfig(tuple(chosen), warps)


def merge_config(parts: int, d_v: int) -> MergeConfig:
    """Rows of a program so that its partial results fit its registers."""
    chunk = min(64, padded(parts, least=1))
    block_r = max(1, min(16, 8192 // (chunk * padded(d_v))))
    return MergeConfig(block_r, chunk, 4)
