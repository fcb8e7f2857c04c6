"""Where a cascade pays, over the length of the prefix and the number of branches.

The cost model's own prices at a grid of sizes, all others as they are in a call: 0.2 ms a point, so
a map is made when a report is asked for, never while compiling, and once for sites that are alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from torch_cascade.compiler.break_even import bisected
from torch_cascade.compiler.decide import Facts, priced
from torch_cascade.compiler.device import Device
from torch_cascade.compiler.work import Work

_KEYS, _BRANCHES = (4, 17), (1, 7)  # powers of two


@dataclass(frozen=True)
class CostMap:
    """Prices around one call.

    Attributes:
        prefix: lengths of the segment that most rows share, ascending.
        branches: numbers of branches, ascending.
        gain: for each number of branches, and each length, the time of the plain graph over that
            of the cascade.
        break_even: [branches, prefix] at which the cascade begins, or ceases, to pay.
        now: [prefix, branches] of the call.
    """

    prefix: tuple[int, ...]
    branches: tuple[int, ...]
    gain: tuple[tuple[float, ...], ...]
    break_even: tuple[tuple[int, int], ...]
    now: tuple[int, int]


def cost_map(facts: Facts) -> CostMap | None:
    """The map of one decision; None where nothing is shared."""
    return _made(facts.work, facts.device)


@lru_cache(maxsize=256)
def _made(work: Work, device: Device) -> CostMap | None:
    facts = priced(work, device)
    shared = [run.rows for run in work.runs if run.rows < work.batch and run.length > 0]
    if not shared:
        return None
    now = int(work.runs[facts.level].length), int(work.batch // max(shared))
    lengths, branches = _powers(_KEYS, now[0]), _powers(_BRANCHES, now[1])
    rows = [[_at(facts, keys, count) for keys in lengths] for count in branches]
    turns = [
        (count, keys)
        for count, row in zip(branches, rows, strict=True)
        for keys in _turns(facts, count, lengths, [point.pays for point in row])
    ]
    gain = tuple(tuple(_gain(point) for point in row) for row in rows)
    return CostMap(tuple(lengths), tuple(branches), gain, tuple(turns), now)


def _powers(ends: tuple[int, int], now: int) -> list[int]:
    """Powers of two, with one at least on either side of the size at hand."""
    first = min(ends[0], max(0, now.bit_length() - 2))
    return [2**n for n in range(first, max(ends[1], now.bit_length()) + 1)]


def _at(facts: Facts, prefix: int, branches: int) -> Facts:
    return facts.with_branches(branches).with_prefix(prefix)


def _gain(point: Facts) -> float:
    return float(f"{point.plain.seconds / point.cascade.seconds:.3g}")


def _turns(facts: Facts, branches: int, lengths: list[int], pays: list[bool]) -> list[int]:
    """The lengths at which the decision turns, to the key."""
    return [
        bisected(lambda keys: _at(facts, keys, branches).pays, low, high)
        for (low, was), (high, now) in pairwise(zip(lengths, pays, strict=True))
        if was != now
    ]
