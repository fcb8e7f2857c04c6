"""The product's backend without code generation: the whole pipeline, then the graph interpreted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.capture import boxed
from torch import fx

from torch_cascade.compiler.backend import compile_graph, recent
from torch_cascade.compiler.options import Options
from torch_cascade.compiler.record import Compilation


def eager_cascade(**options: Any) -> Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]:
    """A backend for `torch.compile`: milliseconds to a second instead of Inductor's minutes.

    Args:
        options: as in `torch.compile(..., options={...})`.
    """
    resolved, patches = Options.resolve(options)

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return compile_graph(gm, inputs, resolved, patches, inner_compile=boxed)

    return backend


def last_compilation() -> Compilation:
    """The record of the last graph the backend compiled."""
    return recent()[-1]
