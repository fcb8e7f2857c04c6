"""The map of a decision as SVG of a page: colours, numbers, the break-even line, the call."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any
from xml.sax.saxutils import quoteattr

from torch_cascade.compiler.markup import Markup, joined, scrolling, tag

# The time of the plain graph over that of the cascade, and the fills from there on.
_LIMITS = (0.5, 0.8, 1.0, 1.25, 2.0, 4.0)
_LIGHT = ("#e8a06a", "#f3c59f", "#fbe6d3", "#dceaf7", "#b3d1ee", "#86b4e2", "#5f9ad6")
_DARK = ("#8a4513", "#6b3a18", "#45301f", "#1f3347", "#204a72", "#1f5c94", "#1a6cb3")
_WIDE, _HIGH, _LEFT, _TOP = 46.0, 24.0, 74.0, 8.0


def map_style() -> str:
    """CSS of the maps, for light and dark."""
    light = "".join(f".m-{n}{{fill:{c};background:{c}}}" for n, c in enumerate(_LIGHT))
    dark = "".join(f".m-{n}{{fill:{c};background:{c}}}" for n, c in enumerate(_DARK))
    return (
        ".map text{font:11px ui-monospace,monospace;fill:#000}.map .out{fill:var(--text)}"
        ".map .turn{fill:none;stroke:#000;stroke-width:2.5}.map .dot{stroke:none;fill:#000}"
        f".map .now{{fill:none;stroke:#a80000;stroke-width:3}}{light}"
        "@media (prefers-color-scheme:dark){.map text{fill:#fff}.map .turn{stroke:#fff}"
        f".map .dot{{fill:#fff}}.map .now{{stroke:#ffb3a8}}{dark}}}"
    )


def map_section(drawn: dict[str, Any]) -> Markup:
    """One map with its legend.

    Args:
        drawn: `compiler.cost_map.CostMap` as JSON has it.
    """
    about = (
        "Time of the plain graph over that of the cascade, by the cost model, with all other "
        "sizes as they are. The line is where the decision turns, the ring is this call."
    )
    return joined(
        tag("p", about, class_="soft"),
        scrolling(Markup(_svg(drawn)), "map of the decision"),
        tag("ul", *_legend(), class_="legend"),
    )


def _legend() -> Iterator[Markup]:
    ends = [f"below {_LIMITS[0]:g}"]
    ends += [f"{low:g} to {high:g}" for low, high in pairwise(_LIMITS)]
    ends.append(f"{_LIMITS[-1]:g} and more")
    for n, said in enumerate(ends):
        pays = ", cascade pays" if n == _LIMITS.index(1.0) + 1 else ""
        plain = ", it does not" if n == _LIMITS.index(1.0) else ""
        yield tag("li", tag("span", "", class_=f"swatch m-{n}"), f"{said} x{pays}{plain}")


def _svg(drawn: dict[str, Any]) -> str:
    lengths, branches = drawn["prefix"], drawn["branches"]
    width = _LEFT + _WIDE * len(lengths) + 12
    height = _TOP + _HIGH * len(branches) + 40
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    lines = [f'<svg class="map" role="img" {size} aria-label={quoteattr(_spoken(drawn))}>']
    for row, gains in enumerate(drawn["gain"]):
        lines += _row(row, gains, branches)
    lines += _axes(lengths, branches)
    lines += _line(drawn)
    x, y = _place(drawn, *drawn["now"])
    lines.append(f'<circle class="now" cx="{x:.0f}" cy="{y:.0f}" r="11"/></svg>')
    return "".join(lines)


def _row(row: int, gains: Sequence[float], branches: Sequence[int]) -> Iterator[str]:
    y = _TOP + _HIGH * (len(branches) - 1 - row)
    for column, gain in enumerate(gains):
        x = _LEFT + _WIDE * column
        fill = bisect_right(_LIMITS, gain)
        yield f'<rect class="m-{fill}" x="{x:.0f}" y="{y:.0f}" width="{_WIDE}" height="{_HIGH}"/>'
        yield _text(x + _WIDE / 2, y + 16, f"{gain:.2g}")


def _axes(lengths: Sequence[int], branches: Sequence[int]) -> Iterator[str]:
    for row, count in enumerate(branches):
        y = _TOP + _HIGH * (len(branches) - 1 - row) + 16
        yield _text(_LEFT - 22, y, str(count), "out")
    below = _TOP + _HIGH * len(branches)
    for column, keys in enumerate(lengths):
        x = _LEFT + _WIDE * (column + 0.5)
        said = f"{keys // 1024}k" if keys >= 1024 else str(keys)
        yield _text(x, below + 14, said, "out")
    yield _text(_LEFT + _WIDE * len(lengths) / 2, below + 32, "keys of the prefix", "out")
    yield f'<text class="out" transform="translate(14 {_TOP + _HIGH * len(branches) / 2:.0f}) '
    yield 'rotate(-90)" text-anchor="middle">branches</text>'


def _text(x: float, y: float, said: str, kind: str = "in") -> str:
    return f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}" text-anchor="middle">{said}</text>'


def _line(drawn: dict[str, Any]) -> Iterator[str]:
    """The first turn of each number of branches, joined; later turns as dots."""
    firsts: dict[int, int] = {}
    for branches, keys in drawn["break_even"]:
        if firsts.setdefault(branches, keys) != keys:
            x, y = _place(drawn, keys, branches)
            yield f'<circle class="dot" cx="{x:.0f}" cy="{y:.0f}" r="4"/>'
    points = [_place(drawn, keys, branches) for branches, keys in firsts.items()]
    if points:
        path = " ".join(f"{x:.0f},{y:.0f}" for x, y in points)
        yield f'<polyline class="turn" points="{path}"/>'
        yield from (f'<circle class="dot" cx="{x:.0f}" cy="{y:.0f}" r="3"/>' for x, y in points)


def _place(drawn: dict[str, Any], keys: int, branches: int) -> tuple[float, float]:
    """Where a point stands: both axes are logarithmic."""
    column = math.log2(max(keys, 1) / drawn["prefix"][0])
    row = math.log2(branches / drawn["branches"][0])
    return (
        _LEFT + _WIDE * (column + 0.5),
        _TOP + _HIGH * (len(drawn["branches"]) - row - 0.5),
    )


def _spoken(drawn: dict[str, Any]) -> str:
    """The map for those who do not see it."""
    lengths, branches, now = drawn["prefix"], drawn["branches"], drawn["now"]
    turns = [f"at {keys} keys with {count} branches" for count, keys in drawn["break_even"]]
    best = max(max(row) for row in drawn["gain"])
    return (
        f"Map of the decision: prefixes of {lengths[0]} to {lengths[-1]} keys across, "
        f"{branches[0]} to {branches[-1]} branches up. This call has {now[0]} keys and {now[1]} "
        f"branches. The cascade is at best {best:g} times as fast. The decision turns "
        f"{'; '.join(turns) or 'nowhere in the map'}."
    )
