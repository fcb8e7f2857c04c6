"""Fewer levels than a graph has: neighbouring parts read as one attention, where that is cheaper.

    attend(root, branches=B*T), attend(prefix, branches=T), attend(suffix)     as the graph has it
    attend(cat(root of each request, prefix), branches=T), attend(suffix)      with the root joined

Each `attend` costs a launch and a partial result of every query; a join costs a copy of its keys,
and reads of what is now there more than once. Which is less is for the cost model to say
(`compiler.decide.cheapest`); both compute the same function.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

from torch_cascade.compiler.graph import Sizes
from torch_cascade.passes.axes import complement, normalise, same_digits
from torch_cascade.passes.mask import MaskReader
from torch_cascade.passes.plan import CascadePlan, Part, limit_rows, work_of
from torch_cascade.passes.prefix import Segment, batch_size

# Three levels are the most that is met in practice; four have seven ways to be joined.
_MOST_PARTS = 4


def alternatives(plan: CascadePlan, reader: MaskReader, sizes: Sizes) -> Iterator[CascadePlan]:
    """Every legal way to join neighbouring parts in which something is still shared."""
    count = len(plan.parts)
    if not 2 < count <= _MOST_PARTS:
        return
    boundaries = range(1, count)
    for kept in range(1, count - 1):
        for chosen in combinations(boundaries, kept):
            marks = (0, *chosen, count)
            runs = [plan.parts[a:b] for a, b in pairwise(marks)]
            joined = [_joined(plan, run, reader, sizes) for run in runs]
            parts = tuple(part for part in joined if part is not None)
            if len(parts) == len(runs) and any(p.segments[0].branches != 1 for p in parts):
                work = replace(work_of(plan.site, parts), own=plan.work.own_tokens)
                yield replace(plan, parts=parts, work=work)


def _joined(
    plan: CascadePlan, parts: Sequence[Part], reader: MaskReader, sizes: Sizes
) -> Part | None:
    """The parts as one, at the rows of the finest; None where they cannot be read as one."""
    if len(parts) == 1:
        return parts[0]
    segments = [segment for part in parts for segment in part.segments]
    if any(s.is_stored or s.source is not None for s in segments):
        return None
    if not all(sizes.equal(a.start + a.length, b.start) for a, b in pairwise(segments)):
        return None
    finest = max(segments, key=lambda s: sizes.hint(s.rows) or 0)
    spread = [_spread(segment, finest, plan, sizes) for segment in segments]
    found = [segment for segment in spread if segment is not None]
    if len(found) < len(segments):
        return None
    length = sum((s.length for s in found[1:]), found[0].length)
    rows = limit_rows(plan.site, found[0])
    mask = reader.segment(plan.site, found[0].start, length, rows)
    # A mask that is read as a tensor only for the join would cost more than the join saves.
    if len(mask.terms) > max(len(part.mask.terms) for part in parts):
        return None
    return Part(tuple(found), mask)


def _spread(segment: Segment, finest: Segment, plan: CascadePlan, sizes: Sizes) -> Segment | None:
    """The segment at the rows of the finest one, which must tell apart what it tells apart."""
    if same_digits(segment.kept, finest.kept, sizes.equal):
        return segment
    batch = batch_size(plan.site)
    extra = complement((*segment.kept, *finest.dropped), "n", batch, sizes)
    if extra is None:
        return None
    kept = normalise((*segment.kept, *extra), sizes)
    if not same_digits(kept, finest.kept, sizes.equal):
        return None
    return replace(segment, kept=finest.kept, dropped=finest.dropped, source=segment)
