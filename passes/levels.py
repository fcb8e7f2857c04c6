"""The option `levels`: how many kinds of sharing one attention may be split by.

A level is a way in which batch rows read KV rows: one row for all, one for each request, one for
each branch. The branches' own level is always there. Where a graph has more levels than asked for,
those that save the most reads stay; keys of the others are spread over all branches, as the user's
own graph does, and read with the branches' own. That is the same function, in fewer parts.
"""

from __future__ import annotations

from dataclasses import replace

from torch_cascade.compiler.graph import Size, Sizes
from torch_cascade.passes.axes import normalise, same_digits, whole
from torch_cascade.passes.prefix import Segment


def at_most(
    levels: int | None, found: tuple[Segment, ...], batch: Size, sizes: Sizes
) -> tuple[Segment, ...]:
    """The segments with at most so many levels; None: all that there are.

    Which levels stay is decided on the sizes of the call being compiled, without a guard.
    """
    shared = _by_level([s for s in found if s.branches != 1], sizes)
    if levels is None or len(shared) < levels:
        return found
    ranked = sorted(shared, key=lambda level: -_saved(level, batch, sizes))
    given_up = [segment for level in ranked[levels - 1 :] for segment in level]
    own = normalise(whole("n", batch).digits, sizes)
    return tuple(
        replace(s, kept=own, dropped=(), source=s) if any(s is g for g in given_up) else s
        for s in found
    )


def _by_level(shared: list[Segment], sizes: Sizes) -> list[list[Segment]]:
    levels: list[list[Segment]] = []
    for segment in shared:
        same = (at for at in levels if same_digits(at[0].kept, segment.kept, sizes.equal))
        level = next(same, None)
        if level is None:
            levels.append([segment])
        else:
            level.append(segment)
    return levels


def _saved(level: list[Segment], batch: Size, sizes: Sizes) -> int:
    """How many reads of a key the sharing of a level saves; unknown sizes count as none."""
    return sum(sizes.hint((batch - s.rows) * s.length) or 0 for s in level)
