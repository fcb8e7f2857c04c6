"""A layer of routed experts, spelled as a gather of weights and by sorting rows by expert."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers.integrations.moe  # noqa: F401  (defines the op: torch's own is bfloat16)
from support.blend_plain import WIDTH
from torch import Tensor, nn

EXPERTS, EACH, INNER = 5, 2, 17
grouped_mm = torch.ops.transformers.grouped_mm_fallback


class Steps:
    """What was computed so far, by name."""

    def __init__(self, layer: ExpertLayer, x: Tensor) -> None:
        self.layer, self.x = layer, x
        self.weights, self.chosen = layer.routed(x)

    experts: Tensor
    sorted: Tensor
    p: Tensor
    scales: Tensor
    offsets: Tensor
    y: Tensor


Part = Callable[["Steps"], Any]


def histogram(e: Tensor) -> Tensor:
    return torch.histc(e.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)


def ends(counts: Tensor) -> Tensor:
    return counts.cumsum(0, dtype=torch.int32)


def inverse(p: Tensor) -> Tensor:
    q = torch.empty_like(p)
    q[p] = torch.arange(p.shape[0])
    return q


def summed(y: Tensor) -> Tensor:
    return y.view(-1, EACH, WIDTH).sum(1)


PARTS: dict[str, Part] = {
    "experts": lambda s: s.chosen.view(-1),
    "sort": lambda s: torch.sort(s.experts),
    "entered": lambda s: s.x[s.p // EACH],
    "scales": lambda s: s.weights.view(-1)[s.p, None],
    "offsets": lambda s: ends(histogram(s.sorted)),
    "biased": lambda s: s.y,
    "left": lambda s: summed((s.y * s.scales)[inverse(s.p)]),
}
"""The usual spelling, step by step; a test gives others for some."""


class ExpertLayer(nn.Module):
    """Each token goes to two of five experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(23)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.other = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / INNER**0.5)
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))
        self.register_buffer("fixed", torch.tensor([3, 9, 14, 20, 28], dtype=torch.int32))

    def routed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers of the experts [N * T, 2] of rows [N * T, WIDTH]."""
        weights, chosen = self.router(x).softmax(-1).topk(EACH)
        return weights, chosen

    def gathered(self, x: Tensor, *, biased: bool = False) -> Tensor:
        """By the weights of each row's experts."""
        rows = x.flatten(0, 1)
        weights, chosen = self.routed(rows)
        y = torch.einsum("rd,rkdm->rkm", rows, self.up[chosen]).relu()
        y = torch.einsum("rkm,rkmd->rkd", y, self.down[chosen])
        y = y + self.bias[chosen] if biased else y
        return (y * weights[..., None]).sum(1).view_as(x)

    def sorted(self, x: Tensor, **parts: Part) -> Tensor:
        """By sorting the rows by expert."""
        given: Mapping[str, Part] = PARTS | parts
        s = Steps(self, x.flatten(0, 1))
        s.experts = given["experts"](s)
        s.sorted, s.p = given["sort"](s)
        s.scales, s.offsets = given["scales"](s), given["offsets"](s)
        s.y = grouped_mm(given["entered"](s), self.up, s.offsets).relu()
        s.y = grouped_mm(s.y, self.down, s.offsets)
        s.y = given["biased"](s)
        result: Tensor = given["left"](s)
        return result.view_as(x)
