"""The backend: `torch.compile(model, backend="cascade")`.

Looking the backend up must stay cheap, so Inductor and the passes are imported on first use.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, cast

import torch
from torch import fx

from torch_cascade.compiler.options import Options

logger = logging.getLogger(__name__)

Compiled = Callable[..., Any]

_KEPT = 64  # compilations of which the record is kept


_TO_COMPUTE_ALL = (
    "To compute all tokens and reuse none, leave the pass `blend` out: passes=cascade."
)


class CascadeError(RuntimeError):
    """A graph that asks a blend for tokens it does not compute.

    With `strict=1` also: a graph in which nothing was rewritten, a pass that failed, or a result
    that `verify=numeric` found wrong, or could not check.
    """


def cascade_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
    **unknown: Any,
) -> Compiled:
    """Compile a Dynamo graph with the cascade passes and Inductor.

    This is the entry point `cascade` of the group `torch_dynamo_backends`; call it through
    `torch.compile(fn, backend="cascade", mode=..., options={...})`.

    Args:
        gm: the graph; edited in place.
        example_inputs: its inputs, as Dynamo passes them.
        mode: as for Inductor ("default", "reduce-overhead", "max-autotune", ...).
        options: names of this package (`torch_cascade.compiler.options.settings`) or of Inductor's
            configuration.
        unknown: keywords that later versions of torch may pass ("name"); ignored.

    Returns:
        The compiled function.

    Raises:
        ValueError: an unknown option, or a value it does not take.
        CascadeError: results of tokens that a blend does not compute; with `strict=1`, nothing was
            rewritten.
    """
    resolved, patches = Options.resolve(options, mode)
    return compile_graph(gm, example_inputs, resolved, patches)


def _reset() -> None:
    """Forward `torch._dynamo.reset()` as Inductor's own backend does."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        reset_cudagraph_trees()


cascade_backend.reset = _reset  # type: ignore[attr-defined]


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    patches: Mapping[str, Any],
    *,
    inner_compile: Callable[..., Any] | None = None,
    journal: Any = None,
) -> Compiled:
    """`cascade_backend` after its options were read.

    Args:
        gm: the Dynamo graph; edited in place.
        example_inputs: its inputs.
        options: this package's options.
        patches: Inductor configuration to compile under.
        inner_compile: stands in for Inductor's code generation (tests, explain).
        journal: the `compiler.journal.Journal` that keeps the record; None for this process's.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    from torch_cascade.compiler.capture_rules import builds_training_graph
    from torch_cascade.compiler.cold_record import keep_or_recall
    from torch_cascade.compiler.generated_code import capturing
    from torch_cascade.compiler.observers import Observers
    from torch_cascade.compiler.pipeline import Pipeline
    from torch_cascade.compiler.record import Compilation

    config: dict[str, Any] = dict(patches)
    begin = time.perf_counter()
    record, pipeline = Compilation(options=options), None
    record.training = not options.disable and builds_training_graph(gm, example_inputs)
    observers = Observers.of(record, example_inputs, draws=(journal or _journal()).draws)
    if not options.disable:
        record.sites = _capture(gm, example_inputs, options)
        record.seconds["capture"] = time.perf_counter() - begin
    if not (options.disable or record.training):
        pipeline = Pipeline(options, record, _user_passes(patches), observers.see)
        config["joint_custom_pre_pass"] = pipeline
        if options.strict or observers.need_passes:
            config["force_disable_caches"] = True  # a cached artefact would have nothing to say
    inner_compile = observers.around(inner_compile or compile_fx_inner)
    with capturing() as codes:
        compiled = compile_fx(
            gm, example_inputs, config_patches=config, inner_compile=inner_compile
        )
    observers.draw()
    if pipeline is not None:
        record.cached = not pipeline.ran
        if not config.get("force_disable_caches"):
            keep_or_recall(record, codes, pipeline.uuid())
    record.total_seconds = time.perf_counter() - begin
    (journal or _journal()).add(record)
    observers.finish(codes)
    _log(record)
    error = _asked_in_vain(record, journal is None)
    if error:
        raise CascadeError(error)
    return cast("Compiled", compiled)


def _capture(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> list[Any]:
    """Raise the attention calls; the records of those that were not."""
    from torch._dynamo.utils import dynamo_timed

    from torch_cascade.compiler.capture import capture
    from torch_cascade.compiler.record import SiteRecord
    from torch_cascade.compiler.report import Declined
    from torch_cascade.passes.failures import Failures

    failures = Failures(options.strict)
    with dynamo_timed("cascade.capture"):
        found = failures.guarded(None, capture, gm, example_inputs)
    failures.warn("capture")
    declined = [d for d in (found if isinstance(found, list) else [found]) if not d]
    return [SiteRecord(d.node, d.where, declined=d) for d in declined if isinstance(d, Declined)]


def _user_passes(patches: Mapping[str, Any]) -> tuple[Any, ...]:
    """The `joint_custom_pre_pass` the user set, by option or in Inductor's configuration."""
    from torch._inductor import config

    given = patches.get("joint_custom_pre_pass", config.joint_custom_pre_pass)
    if given is None:
        return ()
    return tuple(given) if isinstance(given, (list, tuple)) else (given,)


def _log(record: Any) -> None:
    if record.cached:
        said = "graph %s came from Inductor's cache: the passes did not run; %s"
        logger.info(said, record.compile_id, record.origin)
    found, name = len(record.sites), record.compile_id
    logger.info("graph %s: %d of %d attention sites rewritten", name, record.rewritten, found)
    blend = record.blend
    if blend is not None:
        layers, reason = len(blend.layers), blend.declined or "blended"
        logger.info("graph %s: %d of %d layers reuse: %s", name, blend.reused, layers, reason)
    for site in record.sites:
        if site.declined is not None:
            logger.info("%s: %s", site.where or site.node, site.declined)


def _asked_in_vain(record: Any, for_use: bool) -> str:
    """The error of a compilation that has ended; "" for none.

    Args:
        record: the compilation.
        for_use: False where only a report is wanted, which says that results are asked in vain.
    """
    options = record.options
    if options.strict and not options.disable and record.idle:
        return f"strict: {_why_nothing(record)}"
    return _asks_too_much(record) if for_use else ""


def _asks_too_much(record: Any) -> str:
    """The error for results of tokens that a blend does not compute; "" for none."""
    from torch_cascade.compiler.report import EXPLANATIONS, Reason

    declined = None if record.blend is None else record.blend.declined
    if declined is None or declined.reason is not Reason.ALL_TOKENS:
        return ""
    if record.options.of_pass("blend").decide == "never":
        return ""
    said = EXPLANATIONS[Reason.ALL_TOKENS]
    return f"{said.meaning} At {declined.node}: {declined.detail}. {said.remedy} {_TO_COMPUTE_ALL}"


def _why_nothing(record: Any) -> str:
    """Why a compilation rewrote no site, for the error that `strict` asked for."""
    if record.blend is not None:
        return f"no cached keys and values were reused: {record.blend.declined}"
    if record.sites:
        reasons = "; ".join(str(site.declined) for site in record.sites)
        return f"none of {len(record.sites)} attention sites was rewritten: {reasons}"
    if record.training:
        return "the graph is compiled for training, as an input requires a gradient"
    if not record.options.passes:
        return "no pass was to run (passes=none)"
    return "no attention was found in the graph"


@cache
def _journal() -> Any:
    from torch_cascade.compiler.journal import Journal

    return Journal(_KEPT, counted=True)


def recent() -> list[Any]:
    """The records (`compiler.record.Compilation`) of the last compilations, oldest first."""
    return list(_journal().records)


def keeping_all() -> AbstractContextManager[None]:
    """A context in which `recent` has all of its compilations, and no other."""
    context: AbstractContextManager[None] = _journal().growing()
    return context
