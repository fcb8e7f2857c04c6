"""What the passes changed in a graph's text, side by side: only that, with some context."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TypeAlias

from torch_cascade.compiler.markup import Markup, folded, tag
from torch_cascade.compiler.text import alike

Row: TypeAlias = tuple[bool, str, str]
"""Whether a line is changed, the line before ("" for none), and after."""

_CONTEXT = 3


def hunks(before: str, after: str) -> list[list[Row]]:
    r"""Changed lines with those around them, in order.

    Example:
        >>> hunks("a\nb", "a\nc\nd")
        [[(False, 'a', 'a'), (True, 'b', 'c'), (True, '', 'd')]]
    """
    old, new = before.splitlines(), after.splitlines()
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    groups = matcher.get_grouped_opcodes(_CONTEXT)
    return [[row for code in group for row in _rows(code, old, new)] for group in groups]


def _rows(
    code: tuple[str, int, int, int, int], old: Sequence[str], new: Sequence[str]
) -> Iterator[Row]:
    kind, first, last, begin, end = code
    for left, right in zip_longest(old[first:last], new[begin:end], fillvalue=""):
        yield kind != "equal", left, right


def changes(before: str, after: str) -> list[tuple[list[Row], int]]:
    """Every kind of change once, with the number of places: a model's layers are changed alike."""
    found = hunks(before, after)
    kinds = [_kind(rows) for rows in found]
    counts = Counter(kinds)
    return [(found[kinds.index(kind)], count) for kind, count in counts.items()]


def diff_section(before: str, after: str) -> Markup:
    """Every kind of change in two columns, one below the other where the window is narrow."""
    shown = changes(before, after)
    if not shown:
        return tag("p", "The passes changed nothing in this graph.")
    return Markup("".join(_block(rows, count) for rows, count in shown))


def _kind(rows: Sequence[Row]) -> str:
    return alike("\n".join(f"{changed}\t{left}\t{right}" for changed, left, right in rows))


def _block(rows: Sequence[Row], count: int) -> Markup:
    removed = sum(changed and bool(left) for changed, left, _ in rows)
    added = sum(changed and bool(right) for changed, _, right in rows)
    what = f"before {_lines(removed)}, after {_lines(added)}"
    if count > 1:
        what += f"; alike in {count} places"
    head = tag("thead", tag("tr", *(tag("th", name, scope="col") for name in ("before", "after"))))
    lines = (
        tag(
            "tr",
            tag("td", left, class_="old"),
            tag("td", right, class_="new"),
            class_="changed" if changed else "same",
        )
        for changed, left, right in rows
    )
    return folded(what, tag("table", head, tag("tbody", *lines), class_="diff"), is_open=True)


def _lines(count: int) -> str:
    return f"{count} line{'' if count == 1 else 's'}"
