"""`verify=numeric`: every rewritten attention against the original, on the first real inputs.

Two graphs are kept beside the one that Inductor compiles, and given to nobody else: the functional
graph before the cascade pass, and the one after all passes, from which code is generated. In the
first call of the compiled artefact, before it runs, both are run op by op in eager mode on the same
inputs (`compiler.numeric_run`). What Inductor makes of the second graph is not looked at here.

With `err(x) = max |x - reference|`, the reference being the original attention in float64 on the
very q, k, v and mask that it got, a rewritten attention must keep

    err(rewritten) <= 2 * err(original) + (4 * eps + reach * eps32) * max |reference|

The two sum the same terms in another order, so twice what the original gets wrong, and 4 roundings
of the merge. A log-sum-exp is stored in float32 (float64 for float64): a rounding of it, relative
to its size, is one of the output; `reach = max |q| * max |k| * scale` is not below any score.

A graph that holds cached keys and values (`cascade::reuse_kv`) is not checked: a blend of them is
an approximation by design, and some can be taken only once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from torch_cascade.compiler.backend import CascadeError
from torch_cascade.compiler.numeric_run import Original, Rewritten
from torch_cascade.compiler.record import Compilation, NumericRecord, SiteRecord
from torch_cascade.passes.site import tags_of

logger = logging.getLogger(__name__)

_REUSES = "the graph holds cached keys and values; a blend of them is an approximation by design"
_UNTRACED = "no node of the lowered graph holds its result alone"


class NumericCheck:
    """The check of one compilation; `see` is told of its graphs, `around` wraps code generation."""

    def __init__(self, record: Compilation, strict: bool) -> None:
        """Results go into the sites of `record`; with `strict` a wrong one is an error."""
        self.record = record
        self.strict = strict
        self.done: Callable[[], None] = lambda: None
        self._before: fx.GraphModule | None = None
        self._after: fx.GraphModule | None = None
        self._cascaded = False

    def see(self, stage: str, graph: fx.Graph) -> None:
        """Keep the last graph before the cascade pass, and the one after all passes."""
        if stage == "before":
            self._cascaded, self._after = False, None
        self._cascaded |= stage == "cascade"
        if not self._cascaded:
            self._before = _copied(graph)
        if stage == "cleanup":
            self._after = _copied(graph)

    def around(self, inner_compile: Callable[..., Any]) -> Callable[..., Any]:
        """An `inner_compile` of which the artefact makes the check in its first call."""

        def compiled(gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
            artefact = inner_compile(gm, inputs, **options)
            if not any(site.rewritten for site in self.record.sites):
                return artefact

            def run(args: list[Any]) -> Any:
                self._check_once(list(args))
                return artefact(args)

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        return compiled

    def _check_once(self, args: list[Any]) -> None:
        before, after = self._before, self._after
        self._before = self._after = None
        if before is None or after is None:
            return
        try:
            found = self._found(before, after, args)
        except Exception as error:
            if self.strict:
                raise CascadeError(f"strict: the numeric check failed: {error}") from error
            logger.warning("the numeric check failed; nothing was compared", exc_info=error)
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
            found = dict.fromkeys(self._rewritten(), NumericRecord(unchecked=why))
        sites = self.record.sites
        sites[:] = [replace(s, numeric=found.get(s.node) if s.rewritten else None) for s in sites]
        self.done()
        wrong = [site for site in sites if site.numeric is not None and site.numeric.wrong]
        if wrong and self.strict:
            raise CascadeError("strict: " + "; ".join(map(_said, wrong)))
        for site in wrong:
            logger.warning("%s", _said(site))

    def _rewritten(self) -> list[str]:
        return [site.node for site in self.record.sites if site.rewritten]

    def _found(
        self, before: fx.GraphModule, after: fx.GraphModule, args: list[Any]
    ) -> dict[str, NumericRecord]:
        found = dict.fromkeys(self._rewritten(), NumericRecord(unchecked=_UNTRACED))
        if self.record.blend is not None:
            return dict.fromkeys(found, NumericRecord(unchecked=_REUSES))
        tags = [tag for node in after.graph.nodes for tag in tags_of(node)]
        devices = {a.device for a in args if isinstance(a, torch.Tensor) and a.is_cuda}
        with torch.no_grad(), torch.random.fork_rng(devices):
            original = Original(before, tags)
            original.run(*args)
        with torch.no_grad(), torch.random.fork_rng(devices):
            rewritten = Rewritten(after, original.results)
            rewritten.run(*args)
        return found | rewritten.found


def _copied(graph: fx.Graph) -> fx.GraphModule:
    """A copy under the same names: the graph itself is edited further."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    assert graph.owning_module is not None
    return fx.GraphModule(graph.owning_module, copy)


def _said(site: SiteRecord) -> str:
    assert site.numeric is not None
    return f"wrong result of the attention {site.node} at {site.where or '?'}: {site.numeric}"
