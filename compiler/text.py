"""A report as plain text: one block a distinct attention, declines under their reason."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import groupby

from torch_cascade.compiler.blend_text import blend_block
from torch_cascade.compiler.lines import decision_lines, linears_line, refusal_lines, wrapped
from torch_cascade.compiler.options import PREFIX, written
from torch_cascade.compiler.record import BlendRecord, Compilation, SegmentRecord, SiteRecord
from torch_cascade.compiler.report import EXPLANATIONS
from torch_cascade.compiler.summary import Report

_GRAD = "run it under torch.no_grad() or torch.inference_mode()"


def render(report: Report) -> str:
    """The whole report; lines have at most 100 columns, unless a path or a name is longer."""
    parts = [_headline(report)]
    parts += [_graph(r, alone=len(report.compilations) == 1) for r in _eventful(report)]
    quiet = [record.compile_id for record in report.compilations if _is_quiet(record)]
    if quiet and report.sites:
        parts.append(wrapped(f"Without attention: graph {', '.join(quiet)}"))
    parts += _options(report)
    return "\n\n".join(part for part in parts if part)


def _headline(report: Report) -> str:
    graphs = len(report.compilations)
    if not graphs:
        return "torch_cascade: no graph was compiled (nothing to compile, or compiling is off)"
    if not report.sites:
        told = {_verdict(record) for record in report.compilations}
        what = told.pop() if len(told) == 1 else "no attention was analysed"
    else:
        what = f"{report.rewritten} of {len(report.sites)} attention sites rewritten"
        what += _reuse([record.blend for record in report.compilations])
    passes = sum(sum(record.seconds.values()) for record in report.compilations)
    total = sum(record.total_seconds for record in report.compilations)
    where = "1 graph" if graphs == 1 else f"{graphs} graphs"
    time = f"the passes took {passes:.2f} s of {total:.2f} s"
    return wrapped(f"torch_cascade: {what} ({where}; {time})")


def _reuse(blends: Sequence[BlendRecord | None]) -> str:
    """What there is to say of cached keys and values; "" for nothing."""
    found = [blend for blend in blends if blend is not None]
    layers = sum(len(blend.layers) for blend in found)
    reused = sum(blend.reused for blend in found)
    return f", {reused} of {layers} layers reuse cached keys and values" if found else ""


def _verdict(record: Compilation) -> str:
    """What there is to say of a graph as a whole."""
    if record.options.disable:
        return f"plain Inductor, as disable is set ({PREFIX}DISABLE)"
    if record.training:
        return f"compiled for training, as an input requires a gradient: {_GRAD}"
    if record.unknown:
        return f"the artefact came from Inductor's cache; the passes did not run; {record.origin}"
    if not record.options.passes:
        return f"no pass was to run (passes=none, {PREFIX}PASSES)"
    found = f"{record.rewritten} of {len(record.sites)} attention sites rewritten"
    found = found if record.sites else "no attention was found"
    origin = f"; {record.origin}, its artefact came from Inductor's cache" if record.cached else ""
    return found + _reuse([record.blend]) + origin


def _is_quiet(record: Compilation) -> bool:
    eventful = record.sites or record.blend is not None or record.unknown or record.training
    return not eventful


def _eventful(report: Report) -> list[Compilation]:
    """The graphs that get a section: all but those of which the headline has said everything."""
    told = {_verdict(record) for record in report.compilations}
    if not report.sites and len(told) == 1 and not any(r.blend for r in report.compilations):
        return []
    return [r for r in report.compilations if not (report.sites and _is_quiet(r))]


def _graph(record: Compilation, *, alone: bool) -> str:
    """The section of one graph: what was rewritten, then what was not, by reason."""
    head = (
        []
        if alone and not record.cached
        else [wrapped(f"Graph {record.compile_id}: {_verdict(record)}")]
    )
    done = [site for site in record.sites if site.rewritten]
    blocks = [_block(site, count) for site, count in _folded(done)]
    left = sorted((site for site in record.sites if not site.rewritten), key=_reason_order)
    for _, group in groupby(left, key=_reason_order):
        blocks += _declined(list(group))
    if record.blend is not None:
        blocks.insert(0, blend_block(record.blend))
    if record.linears is not None:
        blocks.append(wrapped(linears_line(asdict(record.linears)), "+ "))
    return "\n\n".join([*head, *blocks])


def _reason_order(site: SiteRecord) -> int:
    assert site.declined is not None
    return list(EXPLANATIONS).index(site.declined.reason)


def _declined(sites: Sequence[SiteRecord]) -> list[str]:
    """The sites of one reason: what it means, once, and each distinct site."""
    assert sites[0].declined is not None
    reason = sites[0].declined.reason
    explanation = EXPLANATIONS[reason]
    said = [wrapped(f"Not rewritten: {reason.value} ({len(sites)}). {explanation.meaning}")]
    if explanation.remedy:
        said.append(wrapped(f"What you can do: {explanation.remedy}"))
    return ["\n".join(said), *(_block(site, count) for site, count in _folded(sites))]


def _block(site: SiteRecord, count: int) -> str:
    times = f"{count} x " if count > 1 else ""
    lines = [f"{times}{site.where or f'node {site.node}'}"]
    details = [f"{site.form}: {site.shapes}"] if site.shapes else []
    details += [f"scores: {site.scores}"] if site.scores else []
    details += [_segment(segment) for segment in site.segments]
    if site.decision is not None:
        details += decision_lines(site.decision)
    if site.numeric is not None:
        details.append(f"numeric: {site.numeric}")
    if site.declined is not None and site.decision is None:
        details += refusal_lines(site.declined)
    mark = "+" if site.rewritten else "-"
    return "\n".join([wrapped(lines[0], f"{mark} "), *(wrapped(d, "    ") for d in details)])


def _segment(segment: SegmentRecord) -> str:
    shared = f", shared by {segment.branches} branches" if segment.branches != "1" else ""
    return f"keys {segment.keys}: row {segment.rows} of {segment.base}{shared}; {segment.mask}"


def _folded(sites: Sequence[SiteRecord]) -> list[tuple[SiteRecord, int]]:
    """One of each kind of site, with their number: identical layers are one block.

    It is the first, or where results were compared the one that is most wrong.
    """
    counts = Counter(_kind(site) for site in sites)
    shown = {_kind(site): site for site in reversed(sorted(sites, key=_wrongness, reverse=True))}
    return [(shown[kind], count) for kind, count in counts.items()]


def _wrongness(site: SiteRecord) -> float:
    numeric = site.numeric
    return 0.0 if numeric is None else numeric.error / (numeric.bound or 1.0)


def _kind(site: SiteRecord) -> str:
    """What a block says, but for the numbers in the names of nodes and symbols."""
    return alike(_block(replace(site, numeric=None), 1))


def alike(text: str) -> str:
    """Text in which nodes are called by their op only, and symbols in order of appearance.

    Example:
        >>> alike("keys [0, s27) are in arg3_1 [2, s27, s9]; keep le_12")
        'keys [0, s#0) are in arg# [2, s#0, s#1]; keep le'
    """
    symbols: dict[str, str] = {}
    text = re.sub(
        r"\b([suz]+f?)\d+\b", lambda m: symbols.setdefault(m[0], f"{m[1]}#{len(symbols)}"), text
    )
    return re.sub(r"\b([a-z][a-z_]*?)(\d+)?(_\d+)+\b", lambda m: m[1] + "#" * bool(m[2]), text)


def _options(report: Report) -> Iterator[str]:
    """The options in effect; graphs compiled under other options are named."""
    groups: dict[str, list[str]] = {}
    for record in report.compilations:
        listed = "  ".join(f"{k}={v or 'unset'}" for k, v in written(record.options).items())
        groups.setdefault(listed, []).append(record.compile_id)
    for listed, names in groups.items():
        which = f" for graph {', '.join(names)}" if len(groups) > 1 else ""
        head = f"Options{which} (or variables {PREFIX}..., read whenever a graph is compiled):"
        yield f"{wrapped(head)}\n{wrapped(listed, '  ')}"
