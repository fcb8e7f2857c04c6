"""Are decoding steps right? Watched rows against the same model in a higher precision."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_cascade.benchmarks import check
from torch_cascade.benchmarks.decode import Running, Way
from torch_cascade.benchmarks.models import KeyValue

EAGER = Way("reference", "dynamic")
HIGHER = {torch.float32: torch.float64}  # of all others: float32


@dataclass(frozen=True)
class Reference:
    """Logits of the watched rows, [steps, W, V].

    Attributes:
        exact: by the model in a higher precision.
        eager: by the model as it is, uncompiled, with a stock cache.
    """

    exact: Tensor
    eager: Tensor


def watched_rows(batch: int, count: int, device: torch.device) -> Tensor:
    """At most `count` rows, from the first to the last, evenly: int64 [W]."""
    count = min(count, batch)
    return torch.linspace(0, batch - 1, count, device=device).round().long()


def reference(
    model: Any,
    prefix: Sequence[KeyValue],
    branches: int,
    watched: Tensor,
    fed: Sequence[Tensor],
) -> Reference:
    """Decode the watched rows alone, in two precisions.

    Args:
        model: it is copied for the higher precision, which takes twice its memory.
        prefix: [B, Hkv, L, D] of every layer.
        branches: T.
        watched: int64 [W].
        fed: int64 [N, 1] a step.
    """
    requests = watched // branches
    rows = [(k[requests], v[requests]) for k, v in prefix]
    tokens = [step[watched] for step in fed]
    eager = _decode(model, rows, tokens)
    higher = HIGHER.get(model.dtype, torch.float32)
    precise = copy.deepcopy(model).to(higher)
    rows = [(k.to(higher), v.to(higher)) for k, v in rows]
    return Reference(_decode(precise, rows, tokens), eager)


def _decode(model: Any, rows: list[KeyValue], tokens: list[Tensor]) -> Tensor:
    everything = torch.arange(tokens[0].shape[0], device=tokens[0].device)
    running = Running.start(EAGER, model, rows, 1, len(tokens), everything)
    for fed in tokens:
        running.step(fed)
    return torch.stack(running.logits)


def judge(logits: Tensor, known: Reference) -> tuple[check.Verdict, dict[str, Any]]:
    """Compare logits [steps, W, V] with the reference.

    Returns:
        The verdict; and of the greedy choices how many there are, how many differ from the
        reference's, and how far behind the reference's first the farthest chosen one was, in
        logits (`eager`: the same of eager code, whose rounding decides ties as well).
    """
    verdict = check.judge(logits, known.eager, known.exact)
    choices = choices_like(logits, known.exact)
    return verdict, choices | {"eager": choices_like(known.eager, known.exact)}


def choices_like(logits: Tensor, exact: Tensor) -> dict[str, Any]:
    """Greedy choices from `logits` [..., V] against those from `exact`."""
    ours, theirs = logits.argmax(-1, keepdim=True), exact.argmax(-1, keepdim=True)
    behind = exact.gather(-1, theirs) - exact.gather(-1, ours)
    return {
        "choices": ours.numel(),
        "different": int((ours != theirs).sum()),
        "farthest_margin": behind.max().item(),
    }
