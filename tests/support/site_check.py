"""Is a site what the matcher says? Computed from its operands, and compared with the graph's value.

The captured graph is run by an interpreter that keeps every node's value. `softmax(cap(q k^T *
scale) + masks) v` of the values of the site's operands, in float64, must then be the value of the
site's own node: a wrong operand, axis, scale, soft-cap, mask or sink cannot hide.

How far apart they may be follows from rounding, no tolerance is picked. Eager code rounds each
score to a dtype of precision eps: an absolute error of `eps * s`, s the largest score; the same
again for the bias and scale, and once for the dot product. A score's error is a relative error of
its weight, and each of the few roundings of weights and output adds eps. Weights sum to one, so the
output is off by at most `eps * (4 s + 8) * max |v|`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.compile_fx import compile_fx

from torch_cascade.compiler.graph import Sizes, fake_mode
from torch_cascade.compiler.report import Declined
from torch_cascade.passes.attention import find_attention
from torch_cascade.passes.site import AttentionSite, Operand

from .capture import _Recorder


@dataclass(frozen=True)
class Run:
    """A captured graph and the value each of its nodes had in one call."""

    module: fx.GraphModule
    values: dict[fx.Node, Any]

    def find(self) -> list[AttentionSite | Declined]:
        """What `find_attention` says, in a fake mode as in the pipeline; it must add no guard."""
        sizes = Sizes.of(self.module.graph)
        before = _guards(sizes)
        with fake_mode(self.module.graph):
            found = find_attention(self.module.graph, sizes)
        assert _guards(sizes) == before, "the analysis added guards"
        return found


def _guards(sizes: Sizes) -> list[str]:
    return [] if sizes.shape_env is None else [str(g.expr) for g in sizes.shape_env.guards]


def run(fn: Callable[..., Any], *args: Any, dynamic: bool | None = None, **kwargs: Any) -> Run:
    """Compile `fn` up to the functional graph, call it once and keep every value."""
    recorder, inputs = _Recorder(), []

    def stub(gm: fx.GraphModule, example: Any, **options: Any) -> Callable[[list[Any]], Any]:
        def call(given: list[Any]) -> Any:
            inputs[:] = given
            return gm(*given)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def backend(gm: fx.GraphModule, example: list[Any]) -> Any:
        patches = {"joint_custom_pre_pass": recorder}
        return compile_fx(gm, example, inner_compile=stub, config_patches=patches)

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(fn, backend=backend, dynamic=dynamic)(*args, **kwargs)
        module = recorder.graphs[-1]
        interpreter = fx.Interpreter(module, garbage_collect_values=False)
        interpreter.run(*inputs, enable_io_processing=False)
    return Run(module, interpreter.env)


def check_sites(
    fn: Callable[..., Any], *args: Any, dynamic: bool | None = None, **kwargs: Any
) -> list[AttentionSite | Declined]:
    """Everything `find_attention` finds in `fn`, each site proved by its values."""
    called = run(fn, *args, dynamic=dynamic, **kwargs)
    found = called.find()
    for site in found:
        if isinstance(site, AttentionSite):
            assert_site_computes(called, site)
    return found


def assert_site_computes(called: Run, site: AttentionSite) -> None:
    """Assert that a site's operands give the value of its node, within eager's own rounding."""
    q, k, v = (
        _operand(called, o, axis) for o, axis in ((site.q, "q"), (site.k, "k"), (site.v, "k"))
    )
    scores, visible = _scores(called, site, q, _heads(k, q))
    sinks = _sinks(called, site, scores)
    weights = torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]
    expected = weights @ _heads(v, q)
    blind = ~visible.any(-1, keepdim=True) & (sinks == -math.inf)
    blind = blind.expand_as(expected)
    expected = torch.where(blind, _blind(site, _heads(v, q)), expected)
    node = called.values[site.node]
    axes = site.axes or ("n", "h", "q", "d")[-4:] if "h" in site.q.axes else site.axes
    actual = _arranged(node, axes or ("n", "q", "d"), "q").double()
    finite = scores[torch.isfinite(scores) & visible]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    eps = max(torch.finfo(dtype).eps for dtype in _dtypes_between(called, site.q.node, site.node))
    bound = eps * (4 * largest + 8) * max(v.abs().max().item(), 1e-300)
    torch.testing.assert_close(actual, expected, rtol=0, atol=bound, equal_nan=True)


def _dtypes_between(called: Run, first: fx.Node, last: fx.Node) -> set[torch.dtype]:
    """Floating dtypes of what is computed from the query to the output."""
    nodes = list(called.module.graph.nodes)
    values = [called.values[n] for n in nodes[nodes.index(first) : nodes.index(last) + 1]]
    return {x.dtype for x in values if isinstance(x, Tensor) and x.is_floating_point()}


def _arranged(value: Tensor, axes: tuple[str, ...], row: str) -> Tensor:
    """A value as [n, h, q or k, d]; one head where there are none."""
    wanted = [axis for axis in ("n", "h", row, "d") if axis in axes]
    value = value.permute([axes.index(axis) for axis in wanted])
    return value if "h" in axes else value.unsqueeze(1)


def _operand(called: Run, operand: Operand, row: str) -> Tensor:
    return _arranged(called.values[operand.node], operand.axes, row).double()


def _heads(x: Tensor, q: Tensor) -> Tensor:
    """K or V with the rows and heads of q: one row broadcasts, query head h reads h // group."""
    x = x.repeat_interleave(q.shape[1] // x.shape[1], 1)
    return x.expand(q.shape[0], -1, -1, -1)


def _scores(called: Run, site: AttentionSite, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Scores in float64 under all masks, and which of them are visible."""
    scale = site.scale
    if isinstance(scale, fx.Node):
        scale = float(called.values[scale])
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if site.softcap is not None:
        scores = site.softcap * torch.tanh(scores / site.softcap)
    visible = torch.ones_like(scores, dtype=torch.bool)
    fill = -math.inf
    for term in site.masks:
        mask = called.values[term.node]
        if "h" not in site.q.axes and mask.ndim == 3:
            mask = mask.unsqueeze(1)
        if term.kind == "add":
            scores = scores + mask
            visible = visible & (mask != -math.inf)
        else:
            visible = visible & (mask if term.kind == "keep" else ~mask)
            fill = max(fill, -math.inf if term.fill is None else term.fill)
    if site.is_causal:
        visible = visible & torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return torch.where(visible, scores, fill), visible


def _sinks(called: Run, site: AttentionSite, scores: Tensor) -> Tensor:
    """The column of the sinks in float64, [n, h, q, 1]; -inf where the site has none."""
    if site.sinks is None:
        return torch.full_like(scores[..., :1], -math.inf)
    sinks = called.values[site.sinks].double()
    if "h" not in site.q.axes and sinks.ndim == 3:
        sinks = sinks.unsqueeze(1)
    return sinks.expand_as(scores[..., :1])


def _blind(site: AttentionSite, v: Tensor) -> Tensor:
    """What a row that sees no key yields, [n, h, 1, d]."""
    if site.fully_masked == "uniform":
        return v.mean(-2, keepdim=True)
    return torch.full_like(v[:, :, :1], 0.0 if site.fully_masked == "zero" else math.nan)
