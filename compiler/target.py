"""What a user gave `torch.compile`, to be compiled once more and called once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import nn

from torch_cascade.compiler.backend import cascade_backend

# A call may be repeated any number of times: this is no loop of recompilations.
_NO_LIMIT = 2**30


@dataclass(frozen=True)
class Target:
    """What to compile, and what the user has already said about how."""

    fn: Callable[..., Any]
    options: dict[str, object] | None = None
    mode: str | None = None
    dynamic: bool | None = None

    @classmethod
    def of(cls, fn: Callable[..., Any]) -> Target:
        """A function or a module, with the options of the `torch.compile` around it."""
        from torch._dynamo.eval_frame import OptimizedModule, innermost_backend, innermost_fn

        inner: Callable[..., Any] = fn  # torch.compile unwraps functions
        outer: Any = fn
        if isinstance(fn, OptimizedModule):
            inner = fn._orig_mod
        elif isinstance(fn, nn.Module) and getattr(fn, "_compiled_call_impl", None) is not None:
            inner, outer = fn._call_impl, fn._compiled_call_impl  # after `module.compile()`
        elif isinstance(fn, nn.Module) and _context(fn.forward) is not None:
            inner = outer = fn.forward  # after `module.forward = torch.compile(module.forward)`
        if inspect.ismethod(inner):  # a decorated one: unwrapping it by torch would lose `self`
            inner = MethodType(innermost_fn(inner.__func__), inner.__self__)
        callback: Any = getattr(_context(outer), "callback", None)
        backend = innermost_backend(callback) if callable(callback) else None
        target = cls(inner, dynamic=getattr(backend, "dynamic", None))
        if getattr(backend, "compiler_fn", None) is not cascade_backend:
            return target
        given = getattr(backend, "kwargs", {})
        return replace(target, options=given.get("options"), mode=given.get("mode"))

    def call(
        self, backend: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Compile it with another backend and call it, without effect on the user's own limits."""
        keywords: dict[str, Any] = {"backend": backend, "dynamic": self.dynamic}
        if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
            keywords["isolate_recompiles"] = True  # from torch 2.13
        limits = {"recompile_limit": _NO_LIMIT, "accumulated_recompile_limit": _NO_LIMIT}
        with torch._dynamo.config.patch(limits):
            return torch.compile(self.fn, **keywords)(*args, **kwargs)


def _context(compiled: Any) -> Any:
    """Where Dynamo keeps what `torch.compile` was given; None for what it did not return."""
    if isinstance(compiled, nn.Module):
        return getattr(compiled, "dynamo_ctx", None)
    # A compiled function has no attribute for it: only this method of it knows its context.
    method = getattr(compiled, "get_compiler_config", None)
    if not inspect.isfunction(method):
        return None
    return inspect.getclosurevars(method).nonlocals.get("self")
