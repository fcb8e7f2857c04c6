"""The page of `ChosenTokens.html`: a prompt's text with what a blend computes again marked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from torch_cascade.compiler.markup import Markup, joined, table, tag
from torch_cascade.compiler.page_style import document

if TYPE_CHECKING:
    from torch_cascade.compiler.chosen import ChosenTokens, Part

_STYLE = """
.text{white-space:pre-wrap;overflow-wrap:anywhere;padding:.5rem .7rem;background:var(--box);
border-left:4px solid var(--line);line-height:1.8;margin:.3rem 0 1rem}
.again,.fresh,.dropped{padding:.1rem 0;color:inherit}
.again{background:#ffd98a;text-decoration:underline 2px solid #7a3d00}
.fresh{background:#d6e6fb;text-decoration:underline 2px dotted #0b57d0}
.dropped{background:none;text-decoration:underline 2px dashed #6a6f79}
@media (prefers-color-scheme:dark){.again{background:#6b4300;text-decoration-color:#ffc766}
.fresh{background:#1b3a66;text-decoration-color:#8ab4ff}.dropped{text-decoration-color:#a3a8b3}}
"""

_KINDS = {
    "again": "has a cached copy and is computed again",
    "fresh": "has no cached copy: always computed",
    "dropped": "was computed up to this layer, and is not any more",
    "reused": "is reused as it was cached",
}


def tokens_page(chosen: ChosenTokens, tokenizer: Any = None) -> str:
    """The whole file.

    Args:
        chosen: what was chosen.
        tokenizer: of transformers; without one token ids are shown.
    """
    rows, length = chosen.ids.shape
    last = chosen.stages[-1].rows.shape[1]
    title = f"{last} of {length} tokens are computed to the last layer"
    links = (
        tag("li", tag("a", _where(stage.layer), href=f"#stage-{n}"))
        for n, stage in enumerate(chosen.stages)
    )
    sections = (
        _section(chosen, n, row, tokenizer)
        for n in range(len(chosen.stages))
        for row in range(rows)
    )
    legend = (
        tag("li", tag("span", "text", class_=kind), f" {said}")
        for kind, said in _KINDS.items()
        if kind != "dropped" or len(chosen.stages) > 1
    )
    body = (
        tag("h1", title),
        tag("ul", *legend, class_="legend"),
        tag("nav", tag("ul", *links), aria_label="check layers"),
        *sections,
    )
    return document(f"torch_cascade: {title}", tag("main", *body), _STYLE)


def _where(layer: int) -> str:
    return "before all layers" if layer < 0 else f"from layer {layer} on"


def _section(chosen: ChosenTokens, stage: int, row: int, tokenizer: Any) -> Markup:
    """One batch row at one check layer."""
    now = chosen.stages[stage]
    counts = chosen.counts()[stage][row]
    which = f", prompt {row}" if len(chosen.ids) > 1 else ""
    head = f"{_where(now.layer).capitalize()}{which}: {sum(counts)} tokens are computed"
    kinds = _kinds(chosen, stage, row)
    parts = chosen.parts[row]
    rows = [
        [str(n), str(part.end - part.start), str(part.reused), str(count), _share(part, count)]
        for n, (part, count) in enumerate(zip(parts, counts, strict=True))
    ]
    texts = (
        _text(
            chosen,
            row,
            part,
            kinds[part.start : part.end],
            f"Part {n}: {_about(part, count)}",
            tokenizer,
        )
        for n, (part, count) in enumerate(zip(parts, counts, strict=True))
    )
    columns = ["part", "tokens", "cached", "computed", "share of the cached"]
    attributes = {"id": f"stage-{stage}"} if row == 0 else {}
    return joined(tag("section", tag("h2", head), table(columns, rows), *texts, **attributes))


def _share(part: Part, count: int) -> str:
    again = count - (part.end - part.start - part.reused)
    return f"{100 * again / part.reused:.0f} %" if part.reused else ""


def _about(part: Part, count: int) -> str:
    size = part.end - part.start
    if not part.reused:
        return f"{size} tokens without a cached copy"
    return f"{size} tokens, {count} of them computed"


def _kinds(chosen: ChosenTokens, stage: int, row: int) -> list[str]:
    """One of `_KINDS` for each token."""
    kinds = ["fresh"] * chosen.ids.shape[1]
    for part in chosen.parts[row]:
        kinds[part.start : part.start + part.reused] = ["reused"] * part.reused
    cached = [kind == "reused" for kind in kinds]
    for earlier in chosen.stages[:stage]:
        for token in earlier.rows[row].tolist():
            kinds[token] = "dropped" if cached[token] else "fresh"
    for token in chosen.stages[stage].rows[row].tolist():
        kinds[token] = "again" if cached[token] else "fresh"
    return kinds


def _text(
    chosen: ChosenTokens, row: int, part: Part, kinds: Sequence[str], head: str, tokenizer: Any
) -> Markup:
    """A part's text; tokens of one kind that stand together are one mark."""
    ids = chosen.ids[row, part.start : part.end].tolist()
    marks = []
    pieces = _pieces(ids, kinds, tokenizer)
    for kind, run in groupby(pieces, key=lambda piece: piece[1]):
        said = "".join(text for text, _ in run)
        name = "mark" if kind in ("again", "fresh") else "span"
        marks.append(tag(name, said, class_=kind))
    return joined(tag("h3", head), tag("div", *marks, class_="text"))


def _pieces(ids: Sequence[int], kinds: Sequence[str], tokenizer: Any) -> Iterator[tuple[str, str]]:
    """Text and kind of each token; tokens that are one character only together are one piece."""
    if tokenizer is None:
        yield from ((f"{token} ", kind) for token, kind in zip(ids, kinds, strict=True))
        return
    begin = 0
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[begin:end], clean_up_tokenization_spaces=False)
        whole = not text.endswith("\ufffd") or end - begin >= 4 or end == len(ids)
        if whole:
            yield text, "again" if "again" in kinds[begin:end] else kinds[begin]
            begin = end
