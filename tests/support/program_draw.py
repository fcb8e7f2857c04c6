"""Drawing programs: one generator for hypothesis (tests) and for plain random (mass runs)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from hypothesis import strategies as st

from . import program_spec as spec
from .program_rules import _SPELLINGS, NEEDS_LITERAL, valid
from .program_spec import Mask, Program, Segment, Sizes

T = TypeVar("T")

# Symbolic sizes everywhere take ten times as long to compile.
DYNAMIC: tuple[bool | None, ...] = (None, False, None, False, None, False, True)


class Pick(Protocol):
    """A source of choices. The first option is the simplest: hypothesis shrinks towards it."""

    def choice(self, options: Sequence[T]) -> T: ...

    def chance(self, percent: int) -> bool: ...


class RandomPick:
    """Choices of a seeded generator."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def choice(self, options: Sequence[T]) -> T:
        return self.random.choice(options)

    def chance(self, percent: int) -> bool:
        return self.random.randrange(100) < percent


class HypothesisPick:
    """Choices of a hypothesis strategy's `draw`."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self.draw = draw

    def choice(self, options: Sequence[T]) -> T:
        result: T = self.draw(st.sampled_from(options))
        return result

    def chance(self, percent: int) -> bool:
        return bool(self.draw(st.integers(0, 99)) >= 100 - percent)


@st.composite
def programs(
    draw: Callable[[st.SearchStrategy[Any]], Any], dynamic: tuple[bool | None, ...] = DYNAMIC
) -> Program:
    """A hypothesis strategy of valid programs; `dynamic` as `torch.compile` takes it."""
    return draw_program(HypothesisPick(draw), dynamic)


def random_program(seed: int) -> Program:
    """The program of a seed."""
    return draw_program(RandomPick(seed))


def draw_program(pick: Pick, dynamic: tuple[bool | None, ...] = DYNAMIC) -> Program:
    """One valid program: every part is drawn, then kept only where it goes with the rest."""
    program = replace(_base(pick), dynamic=pick.choice(dynamic))
    for change in (_form, _heads, _mask, _layout, _ends):
        program = change(pick, program)
    assert valid(program), program
    return program


def _offer(program: Program, pick: Pick, percent: int = 100, **options: Sequence[Any]) -> Program:
    """Change fields one after another, each only if the program stays valid."""
    for name, values in options.items():
        if percent < 100 and not pick.chance(percent):
            continue
        changed = replace(program, **{name: pick.choice(values)})
        program = changed if valid(changed) else program
    return program


def _base(pick: Pick) -> Program:
    """Sizes, dtype and segments."""
    dims = pick.choice(("shape", "shape", "literal", "argument"))
    dtype = pick.choice(("float32", "float32", "bfloat16", "bfloat16", "float16", "float64"))
    d = pick.choice((8, 16, 4, 12, 20))
    sizes = Sizes(
        requests=pick.choice((2, 1, 3)),
        mid=pick.choice((1, 1, 1, 2, 3)),
        branches=pick.choice((3, 2, 4, 5, 1)),
        kv_heads=pick.choice((2, 1, 3)),
        group=pick.choice((1, 2, 3, 7)),
        queries=pick.choice((1, 2, 3, 5, 1, 7, 20)),
        features=d,
        value_features=d if pick.chance(75) else pick.choice((8, 6, 24)),
        keys=(),
    )
    count = pick.choice((2, 2, 2, 3, 3, 4, 1))
    segments = tuple(_segment(pick, dims, dtype, sizes, i, count) for i in range(count))
    keys = tuple(_length(pick, segment) for segment in segments)
    keys = keys if sum(keys) else (*keys[:-1], 3)
    sizes = replace(sizes, keys=keys)
    calls = (sizes,) if dims == "literal" else _calls(pick, sizes)
    return Program(
        calls=calls,
        segments=segments,
        dims=dims,
        dtype=dtype,
        heads="same" if sizes.group == 1 else "repeat_kv",
        seed=pick.choice(range(10_000)),
    )


def _length(pick: Pick, segment: Segment) -> int:
    """About as many keys everywhere: a long prefix would hide faults in the suffix."""
    low = 1 if segment.write != "none" else 0
    kind = pick.choice(("some", "some", "some", "some", "few", "many"))
    if kind == "few":
        return pick.choice((1, low))
    return pick.choice(range(2, 12)) if kind == "some" else pick.choice(range(12, 41))


def _calls(pick: Pick, sizes: Sizes) -> tuple[Sizes, ...]:
    """Up to three calls on one compiled function: what grows is what grows in serving."""
    calls = [sizes]
    for _ in range(pick.choice((0, 0, 0, 1, 2))):
        last = calls[-1]
        keys = last.keys
        calls.append(
            pick.choice(
                (
                    replace(last, keys=(*keys[:-1], keys[-1] + 1)),
                    replace(last, keys=(*keys[:-1], keys[-1] + 2)),
                    replace(last, branches=pick.choice((2, 3, 4, 1))),
                    replace(last, requests=pick.choice((1, 2, 3))),
                    replace(last, keys=(keys[0] + 3, *keys[1:])),
                    replace(last, queries=pick.choice((1, 2, 4))),
                )
            )
        )
    return tuple(calls)


def _segment(pick: Pick, dims: str, dtype: str, sizes: Sizes, index: int, count: int) -> Segment:
    shared: tuple[spec.Rows, ...] = ("request", "all", "request", "all", "mid", "modulo", "own")
    last: tuple[spec.Rows, ...] = ("own", "own", "own", "own", "own", "mid", "request", "all")
    rows = pick.choice(last if index == count - 1 and count > 1 else shared)
    banned = () if dims == "literal" else NEEDS_LITERAL
    banned = (*banned, "two_steps") if dims == "shape" else banned
    spellings = [s for s in spec.MAPS[rows] if s not in banned]
    spelling = pick.choice(spellings)
    square = sizes.features == sizes.value_features
    storages = [s for s in spec.STORAGES if square or s not in ("stacked", "unbind")]
    if spelling == "outside":
        storages = ["bhld", "blhd", "permute", "bhdl"]
    segment = Segment(
        rows=rows,
        spelling=spelling,
        storage=pick.choice(storages) if pick.chance(60) else "bhld",
        copy=pick.choice(("clone", "contiguous")) if pick.chance(20) else "none",
        strides="sliced" if pick.chance(20) else "dense",
    )
    if pick.chance(15):
        others = [t for t in ("float32", "bfloat16", "float16", "float64") if t != dtype]
        segment = replace(segment, stored=pick.choice(others))
    if rows != "own" and spelling != "outside" and pick.chance(15):
        v_spelling = pick.choice([s for s in spellings if s != "outside"])
        segment = replace(segment, v_spelling=v_spelling)
    if rows == "own" and segment.storage == "bhld" and pick.chance(35):
        segment = replace(segment, write=pick.choice(spec.WRITES))
    return segment


def _form(pick: Pick, program: Program) -> Program:
    program = _offer(program, pick, scale=(None, None, 0.25, 1.0))
    if pick.chance(50):
        return _offer(program, pick, call=spec.CALLS)
    program = replace(program, form="eager")
    return _offer(
        program,
        pick,
        scores=spec.SCORES,
        scaling=spec.SCALES,
        softmax=spec.SOFTMAXES,
        masking=("fill", "where"),
        dropout=(False, False, True),
    )


def _heads(pick: Pick, program: Program) -> Program:
    return _offer(program, pick, heads=spec.HEADS[1:]) if program.heads != "same" else program


def _mask(pick: Pick, program: Program) -> Program:
    """A mask that goes with the program, or none after a few tries."""
    additive = program.scores == "baddbmm" or None
    for _ in range(6):
        changed = replace(program, mask=_draw_mask(pick, additive))
        if valid(changed):
            return changed
    return program


def _draw_mask(pick: Pick, additive: bool | None) -> Mask:
    kind = pick.choice(spec.MASKS)
    fill = pick.choice(("inf", "inf", "finite"))
    if kind == "none":
        return Mask()
    ways = (None, None, *spec.ADDITIVES) if not additive else spec.ADDITIVES
    if kind == "input":
        ways = (*ways, "given", "given", "bias")
    mask = Mask(kind, fill=fill)
    if kind not in ("alibi", "is_causal"):
        mask = replace(mask, additive=pick.choice(ways), wide=pick.chance(15))
    if kind in _SPELLINGS:
        mask = replace(mask, spelling=pick.choice(_SPELLINGS[kind]))
    if kind == "tree":
        mask = replace(mask, shape=pick.choice(("mk", "11mk", "n1mk", "nhmk")))
    if kind == "input":
        hidden = pick.choice(("some", "rows", "none"))
        mask = replace(mask, shape=pick.choice(spec.MASK_SHAPES), hidden=hidden)
    if kind in ("causal", "window", "tree"):
        mask = replace(mask, padding=pick.chance(20))
    if kind == "window":
        mask = replace(mask, window=pick.choice((4, 1, 9)))
    return replace(mask, expanded=pick.chance(20))


def _layout(pick: Pick, program: Program) -> Program:
    program = _offer(program, pick, q_layout=spec.Q_LAYOUTS)
    program = _offer(program, pick, 30, cat=spec.CATS[1:], cat_layout=spec.CAT_LAYOUTS)
    if pick.chance(15) and len(program.segments) > 1:
        program = _mapped_after(program)
    program = _offer(program, pick, 8, crop=(1, 2))
    return _offer(
        program, pick, 30, cat_name=("cat", "concat", "concatenate"), cat_negative=(False, True)
    )


def _mapped_after(program: Program) -> Program:
    """The first two segments joined before their common row map is applied."""
    first, second, *rest = program.segments
    second = replace(
        second,
        rows=first.rows,
        spelling=first.spelling,
        v_spelling=first.v_spelling,
        write="none",
        storage="bhld",
    )
    changed = replace(program, segments=(first, second, *rest), cat="mapped_after")
    return changed if valid(changed) else program


def _ends(pick: Pick, program: Program) -> Program:
    program = _offer(program, pick, 40, follow=spec.FOLLOWS)
    program = _offer(program, pick, 25, outputs=spec.OUTPUTS)
    program = _offer(program, pick, 10, layers=(2,))
    return _offer(program, pick, 8, autocast=(True,))
