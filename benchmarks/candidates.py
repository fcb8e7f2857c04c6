"""Launch configurations worth measuring for a row of sizes, and the one that is chosen for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from torch_cascade.benchmarks.rows import Heads, Row
from torch_cascade.kernels.launch_config import (
    QUICK_GENERATION,
    DeviceLimits,
    LaunchConfig,
    SlotConfig,
    SlotShape,
    Widths,
    attend_config,
    padded,
    shared_bytes,
)

# Query rows, keys; tiles of 16 rows are for at most so many, and the only ones for them.
SMALL_TILES = ((16, 64), (16, 32))
TILES = ((64, 64), (64, 32), (128, 64))
STAGES = (2, 3)
RESIDENT = (1, 2, 3)  # prefix programs a multiprocessor
TAIL_KEYS = (16, 32, 64)
SUFFIX_TILES = ((64, 3), (64, 2), (128, 2))  # keys, stages
# A tail costs every tile all suffix keys of its request's branches: beyond this it cannot win.
MOST_TAIL = 512


def shapes(row: Row, heads: Heads) -> tuple[SlotShape, SlotShape]:
    """Prefix and suffix as a launch sees them."""
    rows = row.queries * heads.query // heads.kv
    prefix = SlotShape(row.requests * heads.kv, row.branches * rows, row.prefix)
    return prefix, SlotShape(row.batch * heads.kv, rows, row.suffix)


def widths(heads: Heads) -> Widths:
    """Queries, keys and values have the same features and dtype."""
    return Widths(heads.dim, heads.dim, heads.element, heads.element)


def chosen(row: Row, heads: Heads, limits: DeviceLimits) -> LaunchConfig:
    """What `attend_merge` takes for a row if nobody says otherwise."""
    return attend_config(shapes(row, heads), widths(heads), limits, alone=True, nested=True)


def enumerate_all(row: Row, heads: Heads, limits: DeviceLimits) -> list[LaunchConfig]:
    """Every candidate once, whether it fits the device or not."""
    prefix, suffix = shapes(row, heads)
    firsts = [*dict.fromkeys(_firsts(prefix, limits))]
    tails = TAIL_KEYS if row.branches * row.suffix <= MOST_TAIL else ()
    made = [_with_tail(first, keys) for first, keys in product(firsts, tails)]
    seconds = [_suffix(suffix, keys, stages) for keys, stages in SUFFIX_TILES]
    made += [LaunchConfig((first, s), _warps(first)) for first, s in product(firsts, seconds)]
    if limits.generation == QUICK_GENERATION:  # for others it does not compile, or was slower
        made += [replace(config, quick=True) for config in made]
    return [*dict.fromkeys(made)]


def _firsts(prefix: SlotShape, limits: DeviceLimits) -> Iterator[SlotConfig]:
    tall = max(64, padded(prefix.rows))
    sizes = SMALL_TILES if prefix.rows <= 16 else [tile for tile in TILES if tile[0] <= tall]
    for (block_m, block_n), stages, resident in product(sizes, STAGES, RESIDENT):
        tiles = prefix.tiles_of * -(-prefix.rows // block_m)
        wanted = max(1, resident * limits.processors // tiles)
        splits = min(wanted, -(-prefix.kv_len // block_n))  # none without keys
        yield SlotConfig(block_m, block_n, stages, splits)


def _with_tail(first: SlotConfig, keys: int) -> LaunchConfig:
    second = SlotConfig(first.block_m, keys, first.stages, splits=1)
    return LaunchConfig((first, second), _warps(first), direct=first.splits == 1, tail=True)


def _suffix(suffix: SlotShape, keys: int, stages: int) -> SlotConfig:
    block_m = min(64, padded(suffix.rows))
    all_keys = padded(suffix.kv_len)
    if all_keys <= keys:  # one tile: there is no pipeline
        return SlotConfig(block_m, all_keys, min(STAGES), splits=1)
    return SlotConfig(block_m, keys, stages, splits=1)


def _warps(first: SlotConfig) -> int:
    return 8 if first.block_m > 64 else 4


def fits(config: LaunchConfig, heads: Heads, limits: DeviceLimits) -> bool:
    """Have its tiles room in shared memory? The slots of a launch are not at work together."""
    needed = max(shared_bytes(slot, widths(heads)) for slot in config.slots)
    return needed <= limits.shared_memory


def name(config: LaunchConfig) -> str:
    """In words: tile (rows x keys x stages), warps, splits, and how the suffix is read.

    `64x64x3, 4 warps, splits 8, tail 32x3` (keys x stages), or `..., suffix 16x64x2, splits 1`
    where the suffix has programs of its own; with `quick` after the warps where that is set.
    """
    first, second = config.slots
    quick = ", quick" if config.quick else ""
    said = f"{_tile(first)}, {config.warps} warps{quick}, splits {first.splits}"
    if config.tail:
        return f"{said}, tail {second.block_n}x{second.stages}"
    return f"{said}, suffix {_tile(second)}, splits {second.splits}"


def _tile(slot: SlotConfig) -> str:
    return f"{slot.block_m}x{slot.block_n}x{slot.stages}"
