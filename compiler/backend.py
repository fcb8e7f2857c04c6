"""The backend: `torch.compile(model, backend="cascade")`.

Looking the backend up must stay cheap, so Inductor and the passes are imported on first use.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx

from torch_cascade.compiler.options import Options

logger = logging.getLogger(__name__)

Compiled = Callable[..., Any]

_RECENT: deque[Any] = deque(maxlen=64)


class CascadeError(RuntimeError):
    """With `strict=1`: a graph in which nothing was rewritten, or a pass that failed."""


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
        CascadeError: with `strict=1`, nothing was rewritten.
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
) -> Compiled:
    """`cascade_backend` after its options were read.

    Args:
        gm: the Dynamo graph; edited in place.
        example_inputs: its inputs.
        options: this package's options.
        patches: Inductor configuration to compile under.
        inner_compile: stands in for Inductor's code generation (tests, explain).
    """
    from torch._inductor.compile_fx import compile_fx

    keywords: dict[str, Any] = {} if inner_compile is None else {"inner_compile": inner_compile}
    if options.disable:
        return cast(
            "Compiled", compile_fx(gm, example_inputs, config_patches=dict(patches), **keywords)
        )
    from torch_cascade.compiler.capture_rules import builds_training_graph
    from torch_cascade.compiler.pipeline import Pipeline
    from torch_cascade.compiler.record import Compilation

    begin = time.perf_counter()
    record = Compilation(sites=_capture(gm, example_inputs))
    record.seconds["capture"] = time.perf_counter() - begin
    if builds_training_graph(gm, example_inputs):
        compiled = compile_fx(gm, example_inputs, config_patches=dict(patches), **keywords)
    else:
        pipeline = Pipeline(options, record, _user_passes(patches))
        config = {**patches, "joint_custom_pre_pass": pipeline}
        if options.strict:  # a cached artefact would not say what was rewritten
            config["force_disable_caches"] = True
        compiled = compile_fx(gm, example_inputs, config_patches=config, **keywords)
        record.cached = not pipeline.ran
    record.total_seconds = time.perf_counter() - begin
    _publish(record, options)
    return cast("Compiled", compiled)


def _capture(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    """Raise the attention calls; the records of those that were not."""
    from torch_cascade.compiler.capture import capture
    from torch_cascade.compiler.record import SiteRecord
    from torch_cascade.compiler.report import Declined

    found = capture(gm, example_inputs)
    return [SiteRecord(d.node, d.where, declined=d) for d in found if isinstance(d, Declined)]


def _user_passes(patches: Mapping[str, Any]) -> tuple[Any, ...]:
    """The `joint_custom_pre_pass` the user set, by option or in Inductor's configuration."""
    from torch._inductor import config

    given = patches.get("joint_custom_pre_pass", config.joint_custom_pre_pass)
    if given is None:
        return ()
    return tuple(given) if isinstance(given, (list, tuple)) else (given,)


def _publish(record: Any, options: Options) -> None:
    """Count, keep and log what one compilation did; with `strict`, insist that it did."""
    from torch._dynamo.utils import counters

    tally: Counter[str] = counters["cascade"]
    for site in record.sites:
        tally["sites"] += 1
        declined = site.declined
        tally["rewritten" if declined is None else f"declined.{declined.reason.value}"] += 1
    _RECENT.append(record)
    rewritten = sum(site.rewritten for site in record.sites)
    logger.info("%d of %d attention sites rewritten", rewritten, len(record.sites))
    for site in record.sites:
        if site.declined is not None:
            logger.info("%s: %s", site.where or site.node, site.declined)
    if options.strict and record.sites and not rewritten:
        reasons = "; ".join(str(site.declined) for site in record.sites)
        raise CascadeError(f"strict: none of {len(record.sites)} sites was rewritten: {reasons}")


def recent() -> list[Any]:
    """The records (`compiler.record.Compilation`) of the last compilations, oldest first."""
    return list(_RECENT)
