"""How a program builds its mask: an input, or arithmetic on positions in the graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .program_attention import fill_text

if TYPE_CHECKING:
    from .program_source import Source


def mask_lines(source: Source) -> None:
    """Emit `mask`: bool (True = visible) or floating, added to the scores. Nothing for none."""
    mask = source.program.mask
    if mask.kind == "none" or (mask.kind == "is_causal" and source.program.form == "sdpa"):
        return
    if mask.kind == "input" and mask.additive in ("given", "bias"):
        source.take("mask", "additive_mask")
        return
    if mask.kind == "alibi":
        source.add(*_alibi(source))
        return
    build = {
        "is_causal": _top_left,
        "input": _given,
        "causal": _causal,
        "window": _window,
        "tree": _tree,
        "padding": lambda s: _padding(s, "mask"),
        "isolate": _isolate,
    }[mask.kind]
    source.add(*build(source))
    if mask.padding:
        source.add(*_padding(source, "seen"), "mask = mask & seen")
    if mask.expanded:
        source.add(f"mask = mask.expand({source.n}, 1, {source.m}, {source.keys()})")
    if mask.additive is not None:
        source.add(f"mask = {_additive(source)}")


def _additive(source: Source) -> str:
    dtype = "torch.float32" if source.program.mask.wide else "q.dtype"
    fill = fill_text(source)
    return {
        "where": f"torch.where(mask, torch.zeros((), dtype={dtype}), {fill})",
        "masked_fill": f"torch.zeros(mask.shape, dtype={dtype}).masked_fill(~mask, {fill})",
        "times": f"(~mask).to({dtype}) * {fill}",
    }[source.program.mask.additive or ""]


def _given(source: Source) -> list[str]:
    source.take("mask", "bool_mask")
    return []


def _top_left(source: Source) -> list[str]:
    return [f"mask = torch.ones({source.m}, {source.keys()}, dtype=torch.bool).tril()"]


def _causal(source: Source) -> list[str]:
    m, keys = source.m, source.keys()
    spelling = source.program.mask.spelling
    if spelling == "tril":
        return [f"mask = torch.ones({m}, {keys}, dtype=torch.bool).tril({keys} - {m})"]
    if spelling == "triu":
        return [f"mask = ~torch.ones({m}, {keys}, dtype=torch.bool).triu({keys} - {m} + 1)"]
    query, key = _positions(source)
    return [f"mask = {key} <= {query}"]


def _positions(source: Source) -> tuple[str, str]:
    """Query and key positions that broadcast to the mask."""
    m, keys = source.m, source.keys()
    spelling = source.program.mask.spelling
    if spelling == "positions":
        source.take("positions", "positions")
        return "positions[None, None, :, None]", f"torch.arange({keys})[None, None, None, :]"
    if spelling == "row_positions":
        source.take("positions", "row_positions")
        return "positions[:, None, :, None]", f"torch.arange({keys})[None, None, None, :]"
    return f"torch.arange({m})[:, None] + ({keys} - {m})", f"torch.arange({keys})[None, :]"


def _window(source: Source) -> list[str]:
    query, key = _positions(source)
    width = source.program.mask.window
    return [
        f"query, key = {query}, {key}",
        f"mask = (key <= query) & (key > query - {width})",
    ]


def _tree(source: Source) -> list[str]:
    last = len(source.program.segments) - 1
    before = source.number(f"{source.keys()} - {source.length(last)}", 0)
    if source.program.dims == "literal":
        before = str(source.sizes.total - source.sizes.keys[last])
    source.take("tree", "tree")
    if source.program.mask.spelling == "pad":
        return [f"mask = F.pad(tree, ({before}, 0), value=True)"]
    ones = f"tree.new_ones(*tree.shape[:-1], {before})"
    return [f"mask = torch.cat([{ones}, tree], -1)"]


def _padding(source: Source, name: str) -> list[str]:
    """Each request hides a part of the first segment: by length, from the left, or a 2-D mask."""
    spelling = source.program.mask.spelling
    n, keys, first = source.n, source.keys(), source.length(0)
    if spelling == "mask2d":
        source.take("attention_mask", "attention_mask")
        return [f"{name} = attention_mask.bool()[:, None, None, :]"]
    source.take("lengths", "lengths")
    rows = f"{n} // lengths.shape[0]"
    spread = f"lengths = lengths.repeat_interleave({rows})[:, None]"
    key = f"torch.arange({keys})[None, :]"
    visible = f"({key} < lengths) | ({key} >= {first})"
    if spelling == "left":
        visible = f"{key} >= lengths"
    return [spread, f"{name} = ({visible})[:, None, None, :]"]


def _isolate(source: Source) -> list[str]:
    """Some rows do not see some segments at all."""
    source.take("sees", "sees")
    count = len(source.program.segments)
    parts = [f"sees[:, {i}, None].expand(-1, {source.length(i)})" for i in range(count)]
    return [f"mask = torch.cat([{', '.join(parts)}], 1)[:, None, None, :]"]


def _alibi(source: Source) -> list[str]:
    m, keys = source.m, source.keys()
    source.take("slopes", "slopes")
    fill = fill_text(source)
    return [
        f"distance = torch.arange({keys})[None, :] - torch.arange({m})[:, None] - ({keys} - {m})",
        "mask = (slopes[:, None, None] * distance).to(q.dtype)[None]",
        f"mask = mask.masked_fill(distance > 0, {fill})",
    ]
