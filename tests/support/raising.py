"""`capture` at work inside `torch.compile`, with `cascade::sdpa` run as it is.

Inductor's decompositions and AOTAutograd are the real ones; code generation is a stub that
interprets the functional graph, so that what is compared is the swapped call and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from support.capture import boxed
from torch import fx
from torch._inductor.compile_fx import compile_fx

from torch_cascade.compiler.capture import Captured, capture
from torch_cascade.compiler.report import Declined, Reason


def node_text(node: fx.Node) -> str:
    """One node with everything a swap could change."""
    return f"{node.op} {node.name} {node.target} {node.args} {node.kwargs}"


def meta_text(node: fx.Node) -> str:
    """Every metadata entry by the identity of its value."""
    return str(sorted((key, id(value)) for key, value in node.meta.items()))


@dataclass
class Raised:
    """A backend that captures, and what it saw.

    Attributes:
        on: False leaves every call as it is (what Inductor would see without this package).
        found: what `capture` returned, over all graphs.
        before, after: the text of the nodes of the last graph, around `capture`.
        meta_before, meta_after: their metadata.
        gm: the last graph.
        inputs: its example inputs.
        functional: the last functional graph.
        static_inputs: the inputs AOTAutograd takes for parameters and buffers.
        graphs: number of graphs compiled.
    """

    on: bool = True
    found: list[Captured | Declined] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    meta_before: list[str] = field(default_factory=list)
    meta_after: list[str] = field(default_factory=list)
    gm: fx.GraphModule | None = None
    inputs: Sequence[Any] = ()
    functional: fx.GraphModule | None = None
    static_inputs: Sequence[int] = ()
    graphs: int = 0

    def __call__(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.gm, self.inputs = gm, inputs
        self.graphs += 1
        self.before = [node_text(n) for n in gm.graph.nodes]
        self.meta_before = [meta_text(n) for n in gm.graph.nodes]
        if self.on:
            self.found += capture(gm, inputs)
        self.after = [node_text(n) for n in gm.graph.nodes]
        self.meta_after = [meta_text(n) for n in gm.graph.nodes]
        return compile_fx(gm, inputs, inner_compile=self._interpret)

    def _interpret(self, gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        self.functional = gm
        self.static_inputs = options.get("static_input_idxs", ())
        return boxed(gm, inputs)

    def compile(self, fn: Callable[..., Any], dynamic: bool | None = None) -> Callable[..., Any]:
        """`fn` compiled by this backend, from a clean state."""
        torch._dynamo.reset()
        return torch.compile(fn, backend=self, dynamic=dynamic)

    @property
    def reasons(self) -> list[Reason | None]:
        """One entry for each attention: why it was declined, None if it was captured."""
        return [d.reason if isinstance(d, Declined) else None for d in self.found]


def identical(actual: Any, expected: Any) -> None:
    """Fails unless two results agree bit for bit, in dtype and in strides."""
    if isinstance(expected, (tuple, list)):
        assert len(actual) == len(expected)
        for a, e in zip(actual, expected, strict=True):
            identical(a, e)
        return
    assert (actual.dtype, actual.shape, actual.stride()) == (
        expected.dtype,
        expected.shape,
        expected.stride(),
    )
    assert torch.equal(actual.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
    assert torch.equal(actual.isnan(), expected.isnan())


def check_raised(
    fn: Callable[..., Any], *args: Any, dynamic: bool | None = None, graphs: int = 1
) -> Raised:
    """Run `fn` with its calls captured, without gradients, and judge the result.

    If every call was captured, the result must be identical to eager mode's. A call that was not
    is compiled by Inductor, which may round differently from eager mode: then the result must be
    identical to the one without any capture.
    """
    raised = Raised()
    with torch.no_grad():
        got = raised.compile(fn, dynamic)(*_fresh(args))
        if set(raised.reasons) != {None}:
            fn = Raised(on=False).compile(fn, dynamic)
        identical(got, fn(*_fresh(args)))
    assert raised.graphs == graphs
    return raised


def _fresh(args: Sequence[Any]) -> list[Any]:
    """Arguments a function may write to: copies with the same strides."""
    return [_copy(a) if isinstance(a, torch.Tensor) else a for a in args]


def _copy(x: torch.Tensor) -> torch.Tensor:
    storage = x.untyped_storage().clone()
    return x.new_empty(0).set_(storage, x.storage_offset(), x.shape, x.stride())
