"""`explain`: what the compiler would do with a call, without generating code; and `last_report`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from torch_cascade.compiler.backend import cascade_backend, compile_graph, recent
from torch_cascade.compiler.journal import Journal
from torch_cascade.compiler.options import Options
from torch_cascade.compiler.summary import Report

# A call may be explained any number of times: this is no loop of recompilations.
_NO_LIMIT = 2**30


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
    target = _unwrapped(fn)
    options, patches = Options.resolve(target.options, target.mode)
    options = replace(options, strict=False)
    patches["force_disable_caches"] = True
    journal = Journal(draws=True)

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        stub = _interpreted
        return compile_graph(gm, inputs, options, patches, inner_compile=stub, journal=journal)

    keywords: dict[str, Any] = {"backend": backend, "dynamic": target.dynamic}
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        keywords["isolate_recompiles"] = True  # from torch 2.13: no effect on the user's own limit
    limits = {"recompile_limit": _NO_LIMIT, "accumulated_recompile_limit": _NO_LIMIT}
    with torch._dynamo.config.patch(limits):
        torch.compile(target.fn, **keywords)(*args, **kwargs)
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


@dataclass(frozen=True)
class _Target:
    """What to compile, and what the user has already said about how."""

    fn: Callable[..., Any]
    options: dict[str, object] | None = None
    mode: str | None = None
    dynamic: bool | None = None


def _unwrapped(fn: Callable[..., Any]) -> _Target:
    """What to compile, with the options of the `torch.compile` around it."""
    from torch._dynamo.eval_frame import OptimizedModule, innermost_backend

    inner: Callable[..., Any] = fn  # torch.compile unwraps functions
    outer: Any = fn
    if isinstance(fn, OptimizedModule):
        inner = fn._orig_mod
    elif isinstance(fn, nn.Module) and getattr(fn, "_compiled_call_impl", None) is not None:
        inner, outer = fn._call_impl, fn._compiled_call_impl  # after `module.compile()`
    callback: Any = getattr(_context(outer), "callback", None)
    backend = innermost_backend(callback) if callable(callback) else None
    target = _Target(inner, dynamic=getattr(backend, "dynamic", None))
    if getattr(backend, "compiler_fn", None) is not cascade_backend:
        return target
    given = getattr(backend, "kwargs", {})
    return replace(target, options=given.get("options"), mode=given.get("mode"))


def _context(compiled: Any) -> Any:
    """Where Dynamo keeps what `torch.compile` was given; None for what it did not return."""
    if isinstance(compiled, nn.Module):
        return getattr(compiled, "dynamo_ctx", None)
    # A compiled function has no attribute for it: only this method of it knows its context.
    method = getattr(compiled, "get_compiler_config", None)
    if not inspect.isfunction(method):
        return None
    return inspect.getclosurevars(method).nonlocals.get("self")


def _interpreted(gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """Stands in for Inductor's code generation: the graph as it is."""

    def run(args: list[Any]) -> Any:
        return gm(*args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
