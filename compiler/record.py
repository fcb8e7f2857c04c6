"""What one compilation found and did, as data: filled by the passes, read by reports."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import fx

from torch_cascade.compiler.decide import Decision
from torch_cascade.compiler.options import Options
from torch_cascade.compiler.report import Declined, Reason

_OP_CALLS = str(Path(__file__).parents[1] / "kernels")  # thin functions that call the ops


@dataclass(frozen=True)
class SegmentRecord:
    """One segment of a site, for people.

    Attributes:
        keys: the run on the key axis, e.g. "[0, s0)".
        base: the node that holds K, with its shape.
        rows: which KV row a batch row reads, e.g. "n // 8".
        branches: how many batch rows share one KV row.
        mask: what was proved about it, e.g. "all visible".
    """

    keys: str
    base: str
    rows: str
    branches: str
    mask: str


@dataclass(frozen=True)
class NumericRecord:
    """What `verify=numeric` found of a rewritten site.

    Attributes:
        error: largest difference to the original attention in float64; infinite where one is not
            finite and the other is.
        eager_error: that of the original attention itself.
        bound: the error it may have (`compiler.numeric` has the formula).
        unchecked: why there are no numbers ("" where there are).
    """

    error: float = 0.0
    eager_error: float = 0.0
    bound: float = 0.0
    unchecked: str = ""

    @property
    def wrong(self) -> bool:
        """True iff the error is above the bound, or no number."""
        return not self.unchecked and not self.error <= self.bound

    def __str__(self) -> str:
        if self.unchecked:
            return f"not compared with the original: {self.unchecked}"
        verdict = "WRONG, error" if self.wrong else "right, error"
        return (
            f"{verdict} {self.error:.2g} against float64, may be {self.bound:.2g}; the original's "
            f"own error {self.eager_error:.2g}"
        )


@dataclass(frozen=True)
class SiteRecord:
    """One attention: where it stands, what was found, what was decided.

    Attributes:
        node: its node in the functional graph.
        where: the user's source line, "file:line: code" ("" if unknown).
        form: "sdpa" or "eager".
        shapes: q, k and v.
        scores: what else is done to the scores: a soft-cap, sinks ("" if nothing).
        segments: in key order (empty if the analysis did not get there).
        decision: the cost model's answer (None if a decline came first).
        declined: why it was not rewritten; None if it was.
        numeric: how right it is; None without `verify=numeric`, and before the first call.
    """

    node: str
    where: str
    form: str = ""
    shapes: str = ""
    scores: str = ""
    segments: tuple[SegmentRecord, ...] = ()
    decision: Decision | None = None
    declined: Declined | None = None
    numeric: NumericRecord | None = None

    @property
    def refused_at_capture(self) -> bool:
        """True for a call of this graph itself that was not raised; AOTAutograd takes it apart."""
        body = Reason.HIGHER_ORDER_BODY
        return self.declined is not None and not self.form and self.declined.reason is not body

    @property
    def rewritten(self) -> bool:
        """True iff the site was rewritten."""
        return self.declined is None


@dataclass(frozen=True)
class StageRecord:
    """Where tokens were chosen, for people.

    Attributes:
        layer: the check layer; -1 before all.
        ratio: share of the cached tokens that is recomputed from there on, such as "0.15".
        rows: how many tokens that are, fresh ones included, as an expression of the sizes.
        now: the number in the call being compiled (None where it has none).
    """

    layer: int
    ratio: str
    rows: str
    now: int | None = None


@dataclass(frozen=True)
class BlendRecord:
    """The marked layers of a prefill: which reuse cached keys and values, or why none does.

    Attributes:
        where: the user's source line of the first marker ("" if unknown).
        node: the first marker, or the node a decline is about.
        layers: for each marked layer "computed" (all tokens), "checked" (all keys and values, of
            which the rows are chosen) or "reused"; all are "computed" if it was declined.
        tokens, fresh: sizes of the prompt and of its part without a cached copy.
        selector: how rows are chosen.
        stages: where.
        ahead: through how many layers the fresh tokens run before that, over cached copies.
        decision: whether it pays (None if a decline came first).
        declined: why nothing is reused; None if it is.
    """

    where: str
    node: str
    layers: tuple[str, ...] = ()
    tokens: str = ""
    fresh: str = ""
    selector: str = ""
    stages: tuple[StageRecord, ...] = ()
    ahead: int = 0
    decision: Decision | None = None
    declined: Declined | None = None

    @property
    def reused(self) -> int:
        """Number of layers that are not computed for all tokens."""
        return sum(layer != "computed" for layer in self.layers)


@dataclass(frozen=True)
class LinearsRecord:
    """What became of the linear layers of a decoding step.

    Attributes:
        joined: layers that the kernel computes.
        launches: in so many launches.
        kept: others, whose weights are inputs of the graph, too: Inductor computes them as ever.
    """

    joined: int
    launches: int
    kept: int


@dataclass
class Compilation:
    """The record of one compiled graph.

    Attributes:
        sites: every attention seen, in graph order; those declined at capture first.
        blend: what became of cached keys and values; None for a graph without `reuse_kv`.
        linears: layers that were joined; None where none was.
        before, after: the functional graph around our rewrites, as `compiler.graph.show` prints
            it, with the names torch's own logs have ("" if the passes did not run).
        pictures: of the graph before and after, `compiler.picture.Pictures` (None if none were
            asked for, or there is no attention).
        seconds: time of each pass.
        total_seconds: time of the whole compilation, passes included (0 until it ended).
        cached: the passes did not run: Inductor found the whole artefact in its cache. What they
            found is then that of the cold compilation, if its record was kept.
        origin: of a cached one where that record is from, or why there is none; else "".
        training: the graph is compiled for training, so the passes did not run.
        options: what was asked for, variables included.
        compile_id: Dynamo's name of the compilation, "0/0" ("" outside of Dynamo).
    """

    sites: list[SiteRecord] = field(default_factory=list)
    blend: BlendRecord | None = None
    linears: LinearsRecord | None = None
    before: str = ""
    after: str = ""
    pictures: Any = None
    seconds: dict[str, float] = field(default_factory=dict)
    total_seconds: float = 0.0
    cached: bool = False
    origin: str = ""
    training: bool = False
    options: Options = field(default_factory=Options)
    compile_id: str = ""

    @property
    def rewritten(self) -> int:
        """Number of sites that were rewritten."""
        return sum(site.rewritten for site in self.sites)

    @property
    def unknown(self) -> bool:
        """True iff the artefact came from a cache, and no record of its cold compilation."""
        return self.cached and not self.before

    @property
    def idle(self) -> bool:
        """True iff nothing was rewritten, or a reuse that was asked for was declined."""
        if self.blend is not None:
            return self.blend.declined is not None
        return not self.rewritten

    def add(self, found: Sequence[SiteRecord]) -> None:
        """Append what a pass found, each attention once.

        An attention call that was refused at capture is taken apart by AOTAutograd, so a pass may
        find it again, hand-written in the same line of the user. Its rewrite is then the truth;
        its second refusal is dropped.
        """
        refused = [site for site in self.sites if site.refused_at_capture]
        for site in found:
            twin = next(
                (r for r in refused if site.form == "eager" and r.where == site.where), None
            )
            if twin is not None:
                refused.remove(twin)
            if twin is None or site.rewritten:
                self.sites.append(site)
            if twin is not None and site.rewritten:
                self.sites.remove(twin)

    def restart(self) -> None:
        """Forget what the passes said: Dynamo may run a backend's compile twice for one graph."""
        self.sites = [s for s in self.sites if not s.form]
        self.blend = self.linears = None
        self.before = self.after = ""
        self.seconds = {k: s for k, s in self.seconds.items() if k == "capture"}


def source_line(node: fx.Node) -> str:
    """The user's line a node comes from: "file:line: code", "" where no trace was kept."""
    trace: Any = node.meta.get("stack_trace")
    if not isinstance(trace, str):
        return ""
    frames = re.findall(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)', trace)
    if not frames:
        return ""
    users = [frame for frame in frames if not frame[0].startswith(_OP_CALLS)]
    file, line, code = (users or frames)[-1]
    return f"{file}:{line}: {code.strip()}"
