"""Masks traced without compiling, and claims about them checked score by score.

A `Scene` is one `cascade::sdpa` whose keys are a prefix and a suffix and whose mask some function
builds. `check` compares what a `MaskReader` says of a key segment with what the mask tensor holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from torch_cascade.compiler.capture import capture
from torch_cascade.compiler.graph import Size, Sizes, fake_mode, shape, size_expr
from torch_cascade.kernels import ops  # noqa: F401  (defines torch.ops.cascade)
from torch_cascade.passes.attention import find_attention
from torch_cascade.passes.mask import MaskReader, SegmentMask
from torch_cascade.passes.site import AttentionSite, MaskTerm, Operand

from .capture import joint_graph

HUGE = -1e9
# A key to whose score no less than this is added is visible.
LEAST = -(2.0**16)


@dataclass(frozen=True)
class Dims:
    """Sizes of a scene: N rows, H heads, Q queries, P prefix keys, S suffix keys."""

    N: Any = 6
    H: Any = 4
    Q: Any = 3
    P: Any = 11
    S: Any = 5

    @property
    def K(self) -> Any:
        return self.P + self.S


Build = Callable[[Dims, Mapping[str, Tensor]], "Tensor | tuple[Tensor, ...]"]


@dataclass
class Scene:
    """A traced attention, and everything to ask and to check its masks.

    Attributes:
        build: makes the mask, or several that all apply, from sizes and data.
        dims: sizes at which it is traced.
        data: example tensors the mask depends on.
        kind: "keep", "drop" or "add".
        symbolic: trace with symbolic sizes.
    """

    build: Build
    dims: Dims = Dims()
    data: Mapping[str, Tensor] = field(default_factory=dict)
    kind: str = "keep"
    symbolic: bool = False
    is_causal: bool = False
    fill: float | None = None

    def __post_init__(self) -> None:
        names = list(self.data)

        def run(q: Tensor, kp: Tensor, ks: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
            dims = Dims(q.shape[0], q.shape[1], q.shape[2], kp.shape[2], ks.shape[2])
            masks = self.build(dims, dict(zip(names, given, strict=True)))
            masks = masks if isinstance(masks, tuple) else (masks,)
            k = torch.cat([kp, ks], 2)
            return *masks, torch.ops.cascade.sdpa(q, k, k, None, False, enable_gqa=True)

        mode = "symbolic" if self.symbolic else "fake"
        args = (*operands(self.dims), *self.data.values())
        table = select_decomp_table()
        self.graph_module = make_fx(run, decomposition_table=table, tracing_mode=mode)(*args)
        graph = self.graph_module.graph
        (*self.masks, attention), *_ = graph.output_node().args
        self.mask = self.masks[0]
        q, k, *_ = attention.args
        heads, keys = ("n", "h", "q", "d"), ("n", "h", "k", "d")
        self.site = AttentionSite(
            node=attention,
            q=Operand(q, heads),
            k=Operand(k, keys),
            v=Operand(k, keys),
            masks=tuple(MaskTerm(mask, self.kind, self.fill) for mask in self.masks),
            is_causal=self.is_causal,
            fully_masked="zero" if self.fill is None else "uniform",
        )
        self.sizes = Sizes(fake_mode(graph).shape_env)
        self.guards = self._guards()
        self.reader = MaskReader(self.sizes)
        self.prefix, self.suffix = (shape(p)[2] for p in k.args[0])

    def claim(self, start: Size | int, length: Size | int) -> SegmentMask:
        """What the reader says of a segment."""
        claim = self.reader.segment(self.site, sympy.sympify(start), sympy.sympify(length))
        assert self._guards() == self.guards, "reading a mask added a guard"
        return claim

    @property
    def on_prefix(self) -> SegmentMask:
        return self.claim(0, self.prefix)

    @property
    def on_suffix(self) -> SegmentMask:
        return self.claim(self.prefix, self.suffix)

    def _guards(self) -> list[str]:
        env = self.sizes.shape_env
        return [] if env is None else [str(guard.expr) for guard in env.guards]

    def values(self, dims: Dims, data: Mapping[str, Tensor]) -> Values:
        """All values of the graph at some sizes and data."""
        inputs = (*operands(dims), *data.values())
        symbols = symbol_values(self.graph_module.graph, inputs)
        env = Recorded(self.graph_module).values(*inputs)
        return Values(self.reader, self.site, env, symbols)

    def admits(self, dims: Dims, data: Mapping[str, Tensor]) -> bool:
        """True iff the guards of the trace hold at some sizes."""
        env = self.sizes.shape_env
        if env is None:
            return dims == self.dims
        symbols = symbol_values(self.graph_module.graph, (*operands(dims), *data.values()))
        return all(guard.expr.xreplace(symbols) != sympy.false for guard in env.guards)


@dataclass(frozen=True)
class Values:
    """One attention, a reader of its masks, and the value of every node in one run.

    Attributes:
        reader: what is tested.
        site: the attention.
        env: values of the nodes of its graph.
        symbols: values of the size symbols in that run.
    """

    reader: MaskReader
    site: AttentionSite
    env: Mapping[fx.Node, Any]
    symbols: Mapping[sympy.Symbol, int]

    @property
    def scores(self) -> tuple[int, ...]:
        """N, H, Q, K."""
        keys = self.env[self.site.k.node].shape[self.site.k.axes.index("k")]
        return (*self.env[self.site.node].shape[:-1], keys)

    def number(self, size: Size | int) -> int:
        return int(sympy.sympify(size).xreplace(self.symbols))

    def added(self, term: MaskTerm) -> Tensor:
        """What a mask adds to the scores [N, H, Q, K]."""
        held = self.env[term.node]
        if term.kind == "add":
            return held.double().expand(self.scores)
        hidden = torch.tensor(-math.inf if term.fill is None else term.fill).double()
        added = torch.where(held ^ (term.kind == "drop"), torch.zeros(()).double(), hidden)
        return added.expand(self.scores)

    def truth(self) -> Tensor:
        """What all masks of the site add to the scores."""
        total = torch.zeros(self.scores).double()
        for term in self.site.masks:
            total = total + self.added(term)
        if self.site.is_causal:
            *_, queries, keys = self.scores
            late = torch.arange(keys)[None] > torch.arange(queries)[:, None]
            total = total.masked_fill(late, -math.inf)
        return total

    def check(self, start: Size | int, length: Size | int) -> SegmentMask:
        """Compare the claim about a segment with the masks; the claim is returned."""
        claim = self.reader.segment(self.site, sympy.sympify(start), sympy.sympify(length))
        first, count = self.number(start), self.number(length)
        keys = slice(first, first + count)
        truth = self.truth()
        every_row_sees = bool((truth >= LEAST).any(-1).all())
        assert every_row_sees or not self.reader.sees_a_key(self.site)
        claimed, actual = self._claimed(claim, keys), truth[..., keys]
        if claim.rows_see_a_key:
            assert (actual >= LEAST).any(-1).all(), f"a row sees no key: {claim}"
        if every_row_sees:  # then a huge finite value hides as -inf does
            claimed, actual = (t.masked_fill(t <= HUGE, -math.inf) for t in (claimed, actual))
        same = (claimed == actual) | (claimed.isnan() & actual.isnan())
        wrong = (~same).nonzero()
        assert not len(wrong), f"{claim} is wrong at {wrong[0].tolist()} of {self.scores}"
        return claim

    def _claimed(self, claim: SegmentMask, keys: slice) -> Tensor:
        *outer, _ = self.scores
        total = torch.zeros(*outer, keys.stop - keys.start).double()
        if claim.hidden:
            return total - math.inf
        for term in claim.terms:
            total = total + self.added(term)[..., keys]
        if claim.q_offset is None:
            assert claim.window is None
            return total
        j, last = torch.arange(total.shape[-1])[None], torch.arange(outer[-1])[:, None]
        last = last + self.number(claim.q_offset)
        visible = j <= last
        if claim.window is not None:
            visible = visible & (j > last - self.number(claim.window))
        return total.masked_fill(~visible, -math.inf)


def symbol_values(graph: fx.Graph, inputs: Sequence[Any]) -> dict[sympy.Symbol, int]:
    """The value of each size symbol that the inputs of a graph hold."""
    symbols: dict[sympy.Symbol, int] = {}
    for node, given in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        if isinstance(given, Tensor):
            pairs = zip(shape(node), given.shape, strict=True)
        else:
            pairs = [(size_expr(node), given)] if isinstance(given, int) else []
        symbols.update({expr: size for expr, size in pairs if expr.is_Symbol})
    return symbols


class Recorded(fx.Interpreter):
    """Runs a graph and keeps the value of every node."""

    def values(self, *args: Any) -> dict[fx.Node, Any]:
        self.held: dict[fx.Node, Any] = {}
        self.run(*args)
        return self.held

    def run_node(self, n: fx.Node) -> Any:
        self.held[n] = super().run_node(n)
        return self.held[n]


def operands(dims: Dims) -> tuple[Tensor, Tensor, Tensor]:
    """q, prefix and suffix keys."""
    return (
        torch.zeros(dims.N, dims.H, dims.Q, 16),
        torch.zeros(dims.N, 2, dims.P, 16),
        torch.zeros(dims.N, 2, dims.S, 16),
    )


def attentions(fn: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> list[Values]:
    """Every attention of a compiled function, with all values of one call.

    Attention calls are captured and hand-written attention is matched as in the real pipeline.
    """
    inputs: list[Any] = []

    def keep(gm: fx.GraphModule, example: Sequence[Any], **options: Any) -> Callable[..., Any]:
        def call(given: list[Any]) -> Any:
            inputs[:] = given
            return gm(*given)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    gm = joint_graph(fn, *args, dynamic=dynamic, prepare=capture, inner_compile=keep)
    sizes = Sizes.of(gm.graph)
    found = find_attention(gm.graph, sizes)
    assert found and all(isinstance(site, AttentionSite) for site in found), found
    env = Recorded(gm).values(*inputs)
    symbols = symbol_values(gm.graph, inputs)
    reader = MaskReader(sizes)
    return [Values(reader, site, env, symbols) for site in found]
