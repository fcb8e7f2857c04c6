"""Making a failing program small: change one part at a time, keep what fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from .program_rules import valid
from .program_spec import MAPS, Mask, Program, Segment, Sizes


def shrink(program: Program, fails: Callable[[Program], bool], budget: int = 80) -> Program:
    """The smallest program found that still fails, after at most `budget` runs of `fails`."""
    tried = {program}
    progress = True
    while progress and budget > 0:
        progress = False
        for candidate in simpler(program):
            if candidate in tried or not valid(candidate) or budget <= 0:
                continue
            tried.add(candidate)
            budget -= 1
            if fails(candidate):
                program, progress = candidate, True
                break
    return program


def simpler(program: Program) -> Iterator[Program]:
    """Programs with one part made simpler, the largest steps first."""
    for call in program.calls if len(program.calls) > 1 else ():
        yield replace(program, calls=(call,))
    yield from _fewer_segments(program)
    if program.mask != Mask():
        yield replace(program, mask=Mask())
    yield from _plain(program)
    for index, segment in enumerate(program.segments):
        for plain in _plain_segments(segment):
            segments = list(program.segments)
            segments[index] = plain
            yield replace(program, segments=tuple(segments))
    for field in fields(Mask):
        plain_mask = replace(program.mask, **{field.name: getattr(Mask(), field.name)})
        yield replace(program, mask=plain_mask)
    yield from _smaller(program)


def _fewer_segments(program: Program) -> Iterator[Program]:
    for drop in range(len(program.segments) if len(program.segments) > 1 else 0):
        calls = tuple(
            replace(c, keys=tuple(k for i, k in enumerate(c.keys) if i != drop))
            for c in program.calls
        )
        segments = tuple(s for i, s in enumerate(program.segments) if i != drop)
        yield replace(program, calls=calls, segments=segments, cat="flat")


def _plain(program: Program) -> Iterator[Program]:
    default = Program()
    by_hand = ("scores", "scaling", "softmax", "masking", "dropout")
    plain = {name: getattr(default, name) for name in by_hand}
    yield replace(program, form="sdpa", **plain)
    yield replace(program, dims="literal")
    yield replace(program, dynamic=False)
    for field in fields(Program):
        if field.name not in ("calls", "segments", "mask", "dims", "dynamic", "form", "seed"):
            yield replace(program, **{field.name: getattr(default, field.name)})
    calls = tuple(replace(c, group=1) for c in program.calls)
    yield replace(program, heads="same", calls=calls)


def _plain_segments(segment: Segment) -> Iterator[Segment]:
    for field in fields(Segment):
        if field.name in ("rows", "spelling"):
            continue
        yield replace(segment, **{field.name: getattr(Segment(), field.name)})
    if segment.rows != "own":
        yield replace(segment, spelling=MAPS[segment.rows][0])
        yield Segment("all", "expand")
    yield Segment()


def _smaller(program: Program) -> Iterator[Program]:
    small = {
        "requests": 1,
        "mid": 1,
        "branches": 2,
        "kv_heads": 1,
        "queries": 1,
        "features": 8,
        "value_features": 8,
    }
    for name, size in small.items():
        yield _everywhere(program, **{name: size})
    yield _everywhere(program, features=8, value_features=8)
    for index, length in enumerate(program.calls[0].keys):
        if length > 3:
            calls = tuple(
                replace(c, keys=tuple(3 if i == index else k for i, k in enumerate(c.keys)))
                for c in program.calls
            )
            yield replace(program, calls=calls)


def _everywhere(program: Program, **sizes: int) -> Program:
    calls: tuple[Sizes, ...] = tuple(replace(c, **sizes) for c in program.calls)
    return replace(program, calls=calls)
