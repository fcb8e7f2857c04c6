"""Sites, decisions and declines of one graph, as parts of `report.html`.

All of it is made from the JSON of a report (`compiler.summary`), so that a graph another process
wrote is shown like one of this.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from torch_cascade.compiler.lines import binary
from torch_cascade.compiler.markup import Markup, folded, joined, table, tag
from torch_cascade.compiler.page_map import map_section
from torch_cascade.compiler.price import time_text
from torch_cascade.compiler.record import NumericRecord
from torch_cascade.compiler.report import EXPLANATIONS, Reason
from torch_cascade.compiler.text import alike

Content = dict[str, Any]


def sites_section(sites: Sequence[Content], maps: Sequence[Content] = ()) -> Markup:
    """What was rewritten, then what was not, by reason."""
    done = [site for site in sites if site["rewritten"]]
    left = sorted((site for site in sites if not site["rewritten"]), key=order_of_reasons)
    parts = [tag("h3", f"Rewritten ({len(done)})"), _blocks(done, maps)] if done else []
    for _, group in groupby(left, key=order_of_reasons):
        parts.append(_declined(list(group), maps))
    return joined(*parts)


def order_of_reasons(site: Content) -> int:
    """Where a site that was not rewritten stands: reasons have the order of their table."""
    return list(EXPLANATIONS).index(Reason(site["declined"]["reason"]))


def _declined(sites: Sequence[Content], maps: Sequence[Content]) -> Markup:
    reason = Reason(sites[0]["declined"]["reason"])
    explanation = EXPLANATIONS[reason]
    head = tag("h3", "Not rewritten: ", tag("code", reason.value), f" ({len(sites)})", class_="bad")
    return joined(head, *what_to_do(explanation.meaning, explanation.remedy), _blocks(sites, maps))


def what_to_do(meaning: str, remedy: str) -> Iterator[Markup]:
    """What a reason means, and what the user can do about it."""
    yield tag("p", meaning)
    if remedy:
        yield tag("p", tag("b", "What you can do: "), remedy)


def _blocks(sites: Sequence[Content], maps: Sequence[Content]) -> Markup:
    return joined(*(_block(site, count, maps) for site, count in alike_sites(sites)))


def alike_sites(sites: Sequence[Content]) -> list[tuple[Content, int]]:
    """Each kind of site once, with the number of its likes: a model's layers are one block.

    It is the first, or where results were compared the one that is most wrong.
    """
    kinds = [alike(json.dumps(site | {"node": "", "numeric": None})) for site in sites]
    kept: dict[str, Content] = {}
    for kind, site in zip(kinds, sites, strict=True):
        shown = kept.setdefault(kind, site)
        if _wrongness(site) > _wrongness(shown):
            kept[kind] = site
    return [(kept[kind], count) for kind, count in Counter(kinds).items()]


def _wrongness(site: Content) -> float:
    numeric = _numeric(site)
    return 0.0 if numeric is None else numeric.error / (numeric.bound or 1.0)


def _numeric(site: Content) -> NumericRecord | None:
    """What the check found of a site; an error that is not finite is null in JSON."""
    found = site.get("numeric")
    if found is None:
        return None
    error = math.inf if found["error"] is None else found["error"]
    return NumericRecord(error, found["eager_error"], found["bound"], found["unchecked"])


def numeric_text(site: Content) -> str:
    """How right a rewritten site is, by `verify=numeric`; "" without it."""
    numeric = _numeric(site)
    return "" if numeric is None else f"numeric: {numeric}"


def _block(site: Content, count: int, maps: Sequence[Content]) -> Markup:
    mark, times = "+" if site["rewritten"] else "-", f"{count} x " if count > 1 else ""
    return folded(f"{mark} {times}{site['where'] or 'node ' + site['node']}", _inside(site, maps))


def _inside(site: Content, maps: Sequence[Content]) -> Markup:
    parts = []
    if site["shapes"]:
        parts.append(tag("p", f"{site['form']}: {site['shapes']}", class_="code"))
    if site["scores"]:
        parts.append(tag("p", f"scores: {site['scores']}"))
    if site["segments"]:
        names = ["keys", "base", "rows", "branches", "mask"]
        parts.append(table(names, [[s[name] for name in names] for s in site["segments"]]))
    if site["decision"] is not None:
        parts += decision_parts(site["decision"], maps)
    if numeric_text(site):
        parts.append(tag("p", numeric_text(site)))
    if site["decision"] is None and site["declined"] is not None:
        parts += _refusal(site["declined"])
    return joined(*parts)


def _refusal(declined: Content) -> Iterator[Markup]:
    """What was found; a hint only where it says more than the reason does."""
    if declined["detail"]:
        yield tag("p", declined["detail"])
    if declined["hint"] and declined["hint"] != EXPLANATIONS[Reason(declined["reason"])].remedy:
        yield tag("p", tag("b", "Hint: "), declined["hint"])


def decision_parts(decision: Content, maps: Sequence[Content]) -> Iterator[Markup]:
    """What was decided, on what grounds, with the formulas and the numbers put in."""
    verb = "applied" if decision["apply"] else "not applied"
    yield tag("p", tag("b", verb), f": {decision['why']}{_bytes(decision)}")
    if decision["guard"]:
        yield tag("p", "guard: ", tag("code", decision["guard"]))
    costs = decision["costs"]
    if costs is None:
        return
    rows = [
        [name, time_text(seconds), joined(*(tag("div", f) for f in costs["formulas"][name]))]
        for name, seconds in costs["seconds"].items()
    ]
    yield tag("p", f"on {costs['device']}; {_turning(costs['break_even'])}")
    if costs.get("map") is not None:
        yield map_section(maps[costs["map"]])
    yield table(["way", "time", "as the sum of its kernels"], rows)
    numbers = [[symbol, number] for symbol, number in costs["numbers"].items()]
    yield folded("numbers put in", table(["symbol", "value"], numbers))


def _bytes(decision: Content) -> str:
    plain, cascade = decision["naive_bytes"], decision["cascade_bytes"]
    if plain is None or cascade is None:
        return ""
    return f" (naive {binary(plain)}, cascade {binary(cascade)})"


def _turning(break_even: Content) -> str:
    prefix, branches = break_even.get("prefix"), break_even.get("branches")
    turns = [f"a prefix of {prefix} keys"] if prefix is not None else []
    turns += [f"{branches} branches"] if branches is not None else []
    return f"breaks even at {' or '.join(turns)}" if turns else "never breaks even"
