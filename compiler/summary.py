"""`Report`: what was compiled, for people (`str`) and for tools (`to_json`).

The JSON of a report, version 1; "?" marks what may be null:

    version          1
    torch            version of torch
    torch_cascade    version of this package
    sites            number of attention sites
    rewritten        how many of them were rewritten
    graphs           list, in the order of compilation:
        id           Dynamo's compile id, "0/0"
        cached       true: the artefact came from Inductor's cache; the passes did not run, and
                     sites, blend, before and after are those of the cold compile
        origin       "from the cold compile of DATE", or why that is not known; "" if not cached
        training     true: compiled for training; the passes did not run
        options      every option by name, as a user would write it
        seconds      of each pass by name, and "total" of the whole compilation
        sites        list, in graph order:
            node       name in the graph text before
            where      "file:line: code" of the user, "" if unknown
            form       "sdpa" or "eager" (hand-written); "" if it was refused at capture
            shapes     of q, k and v
            scores     what else is done to the scores: a soft-cap, sinks; "" if nothing
            segments   list: keys, base, rows, branches, mask (see `compiler.record.SegmentRecord`)
            decision?  apply, why, naive_bytes?, cascade_bytes?, guard ("" for none), and costs?:
                       device, seconds, formulas (by plain and cascade), numbers, break_even,
                       map? (number of its map)
            rewritten  true or false
            declined?  reason (stable identifier), meaning, detail, hint; null if rewritten
            numeric?   of verify=numeric: error?, eager_error, bound, wrong, unchecked ("" where
                       compared); an error that is not finite is null
        maps         where cascades pay, once for sites alike (see `compiler.cost_map.CostMap`):
                     prefix, branches, gain, break_even, now
        blend?       cached keys and values; null for a graph without `reuse_kv`:
            node, where, tokens, fresh, selector   as in `compiler.record.BlendRecord`
            layers     list: "computed", "checked" or "reused" for each marked layer
            reused     how many of them are not computed for all tokens
            ahead      number of layers that tokens without a copy run through before the choice
            stages     list: layer, ratio, rows, now? (see `compiler.record.StageRecord`)
            decision?, declined?   as of a site
        linears?     joined, launches, kept (see `compiler.record.LinearsRecord`); null: none joined
        before       graph text before the passes ("" if the passes did not run)
        after        graph text after it

In the `report.json` of a dump, graphs have no before and after, which are files, but

        folder       name of the folder of their files
        notes        list: what could not be written, and why

Later versions may add keys; a change of those above raises the version.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from typing import Any

import torch

from torch_cascade.compiler.cost_map import CostMap, cost_map
from torch_cascade.compiler.decide import Decision, Facts, priced
from torch_cascade.compiler.device import Device
from torch_cascade.compiler.options import written
from torch_cascade.compiler.record import BlendRecord, Compilation, NumericRecord, SiteRecord
from torch_cascade.compiler.report import EXPLANATIONS, Declined
from torch_cascade.compiler.work import Work

JSON_VERSION = 1


@dataclass(frozen=True)
class Report:
    """What the passes found and did, in one compilation or in several.

    `str(report)` and `report.html()` are for people, `report.to_json()` for tools.

    Attributes:
        compilations: one record a compiled graph (`torch_cascade.compiler.record.Compilation`).
    """

    compilations: tuple[Compilation, ...] = ()

    @property
    def sites(self) -> tuple[SiteRecord, ...]:
        """Every attention of every graph, in order."""
        return tuple(site for record in self.compilations for site in record.sites)

    @property
    def rewritten(self) -> int:
        """Number of sites that were rewritten."""
        return sum(record.rewritten for record in self.compilations)

    @property
    def before(self) -> str:
        """Text of the graphs before the passes, with a heading each where there are several.

        A line a node; names and symbols are those of torch's own logs and guards.
        """
        return _joined([(r.compile_id, r.before) for r in self.compilations if r.before])

    @property
    def after(self) -> str:
        """Text of the graphs after the passes, as `before`."""
        return _joined([(r.compile_id, r.after) for r in self.compilations if r.before])

    def diff(self, context: int = 2) -> str:
        """What the passes changed, as a unified diff.

        Args:
            context: unchanged lines to show around each change.

        Returns:
            "" if nothing changed.
        """
        before, after = self.before.splitlines(), self.after.splitlines()
        lines = difflib.unified_diff(before, after, "before", "after", lineterm="", n=context)
        return "\n".join(lines)

    def to_json(self, indent: int | None = 1) -> str:
        """Everything in the report, and the graphs, as JSON.

        Returns:
            An object as described in `torch_cascade.compiler.summary`.
        """
        return json.dumps(
            report_object([graph_object(r) for r in self.compilations]), indent=indent
        )

    def html(self) -> str:
        """The report as one HTML file that loads nothing: write it and open it.

        It has what `str(report)` has, maps of the decisions, the graphs before and after side by
        side, and their pictures (`last_report` has none: drawing is for who asks).
        """
        from torch_cascade.compiler.page import page, section

        graphs = [graph_object(record) for record in self.compilations]
        parts = [
            (str(n), section(graph, str(n), record.pictures))
            for n, (graph, record) in enumerate(zip(graphs, self.compilations, strict=True))
        ]
        return page(report_object(graphs), parts)

    def show(self, *, diff: bool = False) -> None:
        """Print the report, in colours where `rich` is installed and the output is a terminal.

        Args:
            diff: also what the passes changed in the graphs.
        """
        from torch_cascade.compiler.terminal import show

        show(self, diff=diff)

    def __str__(self) -> str:
        from torch_cascade.compiler.text import render

        return render(self)


def _joined(graphs: list[tuple[str, str]]) -> str:
    if len(graphs) == 1:
        return graphs[0][1]
    return "\n\n".join(f"# graph {name}\n{text}" for name, text in graphs)


def report_object(graphs: list[dict[str, Any]]) -> dict[str, Any]:
    """The JSON object of a report, from those of its graphs."""
    sites = [site for graph in graphs for site in graph["sites"]]
    return {
        "version": JSON_VERSION,
        "torch": torch.__version__,
        "torch_cascade": metadata.version("torch-cascade"),
        "sites": len(sites),
        "rewritten": sum(site["rewritten"] for site in sites),
        "graphs": graphs,
    }


def graph_object(record: Compilation, *, with_text: bool = True) -> dict[str, Any]:
    """The JSON object of one compiled graph."""
    texts = {"before": record.before, "after": record.after} if with_text else {}
    facts = [site.decision.facts for site in record.sites if site.decision is not None]
    maps = list(dict.fromkeys(filter(None, (cost_map(f) for f in facts if f is not None))))
    return {
        "id": record.compile_id,
        "cached": record.cached,
        "origin": record.origin,
        "training": record.training,
        "options": written(record.options),
        "seconds": {**record.seconds, "total": record.total_seconds},
        "sites": [_site(site, maps) for site in record.sites],
        "maps": [dataclasses.asdict(each) for each in maps],
        "blend": None if record.blend is None else _blend(record.blend, maps),
        "linears": None if record.linears is None else dataclasses.asdict(record.linears),
        **texts,
    }


def _site(site: SiteRecord, maps: list[CostMap]) -> dict[str, Any]:
    return {
        "node": site.node,
        "where": site.where,
        "form": site.form,
        "shapes": site.shapes,
        "scores": site.scores,
        "segments": [dataclasses.asdict(segment) for segment in site.segments],
        "decision": None if site.decision is None else _decision(site.decision, maps),
        "rewritten": site.rewritten,
        "declined": None if site.declined is None else _declined(site.declined),
        "numeric": None if site.numeric is None else _numeric(site.numeric),
    }


def _numeric(numeric: NumericRecord) -> dict[str, Any]:
    error = numeric.error if math.isfinite(numeric.error) else None
    return dataclasses.asdict(numeric) | {"error": error, "wrong": numeric.wrong}


def _blend(blend: BlendRecord, maps: list[CostMap]) -> dict[str, Any]:
    return {
        "node": blend.node,
        "where": blend.where,
        "layers": list(blend.layers),
        "reused": blend.reused,
        "tokens": blend.tokens,
        "fresh": blend.fresh,
        "selector": blend.selector,
        "ahead": blend.ahead,
        "stages": [dataclasses.asdict(stage) for stage in blend.stages],
        "decision": None if blend.decision is None else _decision(blend.decision, maps),
        "declined": None if blend.declined is None else _declined(blend.declined),
    }


def _decision(decision: Decision, maps: list[CostMap]) -> dict[str, Any]:
    facts = decision.facts
    return {
        "apply": decision.apply,
        "why": decision.why,
        "naive_bytes": decision.naive,
        "cascade_bytes": decision.cascade,
        "guard": decision.guard,
        "costs": None if facts is None else _costs(facts, decision.break_even, maps),
    }


def _costs(
    facts: Facts, break_even: Mapping[str, int | None] | None, maps: list[CostMap]
) -> dict[str, Any]:
    drawn = cost_map(facts)
    return {
        "device": str(facts.device),
        **_prices(facts.work, facts.device),
        "break_even": dict(break_even or {}),
        "map": None if drawn is None else maps.index(drawn),
    }


@lru_cache(maxsize=256)
def _prices(work: Work, device: Device) -> dict[str, Any]:
    """Both ways in words, once for sites that are alike: sympy takes its time to print."""
    ways = priced(work, device).ways()
    return {
        "seconds": {name: way.seconds for name, way in ways.items()},
        "formulas": {name: way.lines() for name, way in ways.items()},
        "numbers": {s: number for way in ways.values() for s, number in way.numbers().items()},
    }


def _declined(declined: Declined) -> dict[str, Any]:
    explanation = EXPLANATIONS[declined.reason]
    return {
        "reason": declined.reason.value,
        "meaning": explanation.meaning,
        "detail": declined.detail,
        "hint": declined.hint or explanation.remedy,
    }
