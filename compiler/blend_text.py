"""The section of a report about cached keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from torch_cascade.compiler.lines import decision_lines, refusal_lines, wrapped
from torch_cascade.compiler.record import BlendRecord, StageRecord
from torch_cascade.compiler.report import EXPLANATIONS


def blend_block(blend: BlendRecord) -> str:
    """What became of them, or why nothing did."""
    mark = "+" if blend.declined is None else "-"
    head = wrapped(blend.where or f"node {blend.node}", f"{mark} ")
    return "\n".join([head, *(wrapped(line, "    ") for line in _details(blend))])


def _details(blend: BlendRecord) -> Iterator[str]:
    yield f"cached keys and values: {blend.reused} of {len(blend.layers)} layers reuse them"
    if blend.tokens:
        yield f"{blend.tokens} tokens, {blend.fresh} of them without a cached copy"
    if blend.declined is None:
        yield "; ".join(runs(blend.layers))
        yield from ahead(blend.ahead)
        yield from (_stage(stage, blend.selector) for stage in blend.stages)
    decided = blend.decision is not None and blend.decision.apply == (blend.declined is None)
    if blend.decision is not None and decided:
        yield from decision_lines(blend.decision)
    if blend.declined is None:
        return
    explanation = EXPLANATIONS[blend.declined.reason]
    yield f"not reused: {blend.declined.reason.value}. {explanation.meaning}"
    if not decided:
        yield from refusal_lines(blend.declined)
    if explanation.remedy:
        yield f"What you can do: {explanation.remedy}"


def ahead(layers: int) -> Iterator[str]:
    """What runs before the choice, if anything does."""
    if layers:
        of = f"{layers} later layer{'s' if layers > 1 else ''}"
        yield f"before the choice, tokens without a cached copy run through {of} over the copies"


def runs(layers: tuple[str, ...]) -> Iterator[str]:
    """Layers of the same use that stand together: "layers 2 to 29 reused"."""
    for use, group in groupby(enumerate(layers), key=lambda pair: pair[1]):
        numbers = [number for number, _ in group]
        first, last = numbers[0], numbers[-1]
        yield f"layer {first} {use}" if first == last else f"layers {first} to {last} {use}"


def _stage(stage: StageRecord, selector: str) -> str:
    now = "" if stage.now is None or stage.rows == str(stage.now) else f" (now {stage.now})"
    if stage.layer < 0:
        return f"full reuse: {stage.rows} tokens{now} computed, those without a cached copy"
    which = f"recompute {stage.ratio} of the cached tokens, chosen by {selector}"
    return f"from layer {stage.layer} on {stage.rows} tokens{now}: {which}"
