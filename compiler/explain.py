"""`explain`: what the compiler would do with a call, without generating code; and `last_report`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from torch_cascade.compiler.backend import compile_graph, recent
from torch_cascade.compiler.journal import Journal
from torch_cascade.compiler.options import Options
from torch_cascade.compiler.summary import Report
from torch_cascade.compiler.target import Target


def explain(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Report:
    """Call a function or a module once, compiled by this backend without code generation.

    Every pass runs, caches are off, and the graphs are then interpreted: this takes an eager call
    and the time of tracing, a second or, for a large model, some. The call is a real one: what it
    writes (a KV cache that grows, say) is written. It neither counts in `counters["cascade"]` nor
    shows in `last_report`, and never raises for `strict`.

    Args:
        fn: what you would compile; or what `torch.compile` returned, then explained with the
            options and the `dynamic` it was given.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        Every attention with its source line, what was found, the decision and its numbers or the
        reason why not; the graphs before and after.

    Raises:
        TypeError: nothing that can be called.
        ValueError: an environment variable of this package that it does not take.

    Example:
        >>> import torch, torch_cascade
        >>> from torch.nn.functional import scaled_dot_product_attention
        >>> def attention(q, prefix, suffix):
        ...     kv = torch.cat([prefix.expand(8, -1, -1, -1), suffix], 2)
        ...     return scaled_dot_product_attention(q, kv, kv)
        >>> q, suffix = torch.randn(8, 4, 1, 16), torch.randn(8, 4, 3, 16)
        >>> report = torch_cascade.explain(attention, q, torch.randn(1, 4, 100, 16), suffix)
        >>> report.rewritten, len(report.sites)
        (1, 1)
        >>> report.sites[0].segments[0].rows, report.sites[0].segments[0].branches
        ('0', '8')
    """
    if not callable(fn):
        raise TypeError(f"fn must be a function or a module, got {type(fn).__name__}")
    target = Target.of(fn)
    options, patches = Options.resolve(target.options, target.mode)
    options = replace(options, strict=False)
    patches["force_disable_caches"] = True
    journal = Journal(draws=True)

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        stub = _interpreted
        return compile_graph(gm, inputs, options, patches, inner_compile=stub, journal=journal)

    target.call(backend, args, kwargs)
    return Report(journal.records)


def last_report() -> Report:
    """What `backend="cascade"` compiled in this process, without compiling anything.

    Returns:
        A report of the last graphs (64 at most), oldest first. Where the artefact came from
        Inductor's cache the passes did not run, and it says so; `explain` runs them.

    Example:
        >>> import torch_cascade
        >>> isinstance(torch_cascade.last_report().rewritten, int)
        True
    """
    return Report(tuple(recent()))


def _interpreted(gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """Stands in for Inductor's code generation: the graph as it is."""

    def run(args: list[Any]) -> Any:
        return gm(*args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
