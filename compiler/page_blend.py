"""Cached keys and values of one graph, as a part of `report.html`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any
from xml.sax.saxutils import quoteattr

from torch_cascade.compiler.blend_text import ahead, runs
from torch_cascade.compiler.markup import Markup, joined, scrolling, table, tag
from torch_cascade.compiler.page_sites import decision_parts, what_to_do

Content = dict[str, Any]

_WIDE, _HIGH = 18.0, 80.0
# Of a bar from below: what is computed, and what is reused.
_LEGEND = {
    "product": "computed for all tokens",
    "choice": "tokens are chosen by their keys and values, all else is computed for them only",
    "rows": "computed for the chosen tokens only",
    "cached": "reused as cached",
}


def blend_section(blend: Content, maps: Sequence[Content] = ()) -> Markup:
    """Which layers reuse cached keys and values, where tokens are chosen, or why none is."""
    layers, count = blend["layers"], blend["reused"]
    parts = [
        tag("h3", "Cached keys and values"),
        tag("p", tag("code", blend["where"] or f"node {blend['node']}")),
        tag("p", f"{count} of {len(layers)} layers reuse them{_tokens(blend)}"),
    ]
    parts.append(tag("p", "; ".join(runs(tuple(layers)))))
    if blend["declined"] is None:
        parts += [tag("p", line) for line in ahead(blend["ahead"])]
        parts += _bars(blend)
    if blend["stages"]:
        parts.append(table(["from layer", "share recomputed", "tokens", "now"], _stages(blend)))
    if blend["decision"] is not None:
        parts += decision_parts(blend["decision"], maps)
    if blend["declined"] is not None:
        declined = blend["declined"]
        parts.append(tag("p", tag("b", "Not reused: "), tag("code", declined["reason"])))
        parts += [*what_to_do(declined["meaning"], declined["hint"])]
        parts.append(tag("p", declined["detail"]))
    return joined(*parts)


def _tokens(blend: Content) -> str:
    if not blend["tokens"]:
        return ""
    return f"; {blend['tokens']} tokens, {blend['fresh']} of them without a cached copy"


def _stages(blend: Content) -> list[list[str]]:
    chosen = f", chosen by {blend['selector']}"
    return [
        [
            "before all" if stage["layer"] < 0 else str(stage["layer"]),
            stage["ratio"] + ("" if stage["layer"] < 0 else chosen),
            stage["rows"],
            "" if stage["now"] is None else str(stage["now"]),
        ]
        for stage in blend["stages"]
    ]


def _bars(blend: Content) -> Iterator[Markup]:
    """A bar for each layer: how much of the prompt is computed there."""
    uses = {"computed": "product", "checked": "choice", "reused": "rows"}
    found = [(uses[use], _share(blend, n)) for n, use in enumerate(blend["layers"])]
    width, height = _WIDE * len(found) + 40, _HIGH + 40
    said = (
        f"Share of the prompt that each layer computes: {'; '.join(runs(tuple(blend['layers'])))}"
    )
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    lines = [f'<svg class="graph bars" role="img" {size} aria-label={quoteattr(said)}>']
    for n, (part, share) in enumerate(found):
        lines += _bar(n, part, share)
    lines.append(f'<text x="20" y="{_HIGH + 36:.0f}">layer</text></svg>')
    yield scrolling(Markup("".join(lines)), "share of the prompt that each layer computes")
    shown = {part for part, _ in found} | ({"cached"} if any(s < 1 for _, s in found) else set())
    yield tag(
        "ul",
        *(
            tag("li", tag("span", "", class_=f"swatch s-{part}"), said)
            for part, said in _LEGEND.items()
            if part in shown
        ),
        class_="legend",
    )


def _bar(n: int, part: str, share: float) -> Iterator[str]:
    x, high = 20 + _WIDE * n, _HIGH * share
    if share < 1:
        yield f'<rect class="k-cached" x="{x:.0f}" y="4" width="14" height="{_HIGH - high:.1f}"/>'
    yield f'<rect class="k-{part}" x="{x:.0f}" y="{4 + _HIGH - high:.1f}" width="14" '
    yield f'height="{high:.1f}"/>'
    if n % 5 == 0:
        yield f'<text x="{x:.0f}" y="{_HIGH + 20:.0f}">{n}</text>'


def _share(blend: Content, layer: int) -> float:
    """Of the tokens of the call, or of the cached ones where sizes are symbolic."""
    stages = [stage for stage in blend["stages"] if stage["layer"] < layer]
    if not stages:
        return 1.0
    now, tokens = stages[-1]["now"], str(blend["tokens"])
    if now is not None and tokens.isdecimal():
        return float(now / int(tokens))
    return float(Fraction(stages[-1]["ratio"]))
