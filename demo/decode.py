"""Decoding with all engines step by step, on the same random numbers, and comparing choices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_cascade.demo.engines import Engine

TEMPERATURE = 0.7


@dataclass(frozen=True)
class Difference:
    """The first step at which an engine chose another token than the reference.

    Attributes:
        branch: which branch.
        step: which step, from 0.
        margin: how far the reference's token was ahead of the runner-up, in logits: a small one
            says that rounding decided.
    """

    branch: int
    step: int
    margin: float


def decode(
    engines: list[Engine],
    argument: str,
    prompt: Tensor,
    branches: int,
    vocabulary: int,
    steps: int,
    progress: Callable[[int, Engine], None],
) -> None:
    """Advance every engine by one step, then all by the next; times and tokens land in them.

    Tokens are sampled by the Gumbel-max rule: the largest of logits / temperature + noise. Noise
    depends on branch and step alone, so engines that compute the same choose the same.

    Args:
        engines: see `engines.build`.
        argument: name under which the model takes its cache.
        prompt: int64 [1, L]; its last token is the first one fed.
        branches: N.
        vocabulary: V.
        steps: tokens to add to every branch.
        progress: called before each step of each engine.
    """
    last = {engine.name: prompt[:, -1:].expand(branches, 1).clone() for engine in engines}
    seeds = [torch.Generator().manual_seed(branch) for branch in range(branches)]
    for step in range(steps):
        noise = torch.stack([_gumbel(vocabulary, seed) for seed in seeds]).to(prompt.device)
        first = step % len(engines)  # nobody always runs right after the same one
        for engine in engines[first:] + engines[:first]:
            progress(step, engine)
            with torch.no_grad():
                fed = last[engine.name]
                last[engine.name] = engine.step(argument, fed, noise, TEMPERATURE)


def _gumbel(size: int, generator: torch.Generator) -> Tensor:
    return -(-torch.rand(size, generator=generator).log()).log()


def differences(engine: Engine, reference: Engine) -> list[Difference]:
    """Where each branch first left the reference's; later steps follow from that one."""
    ours, theirs = torch.stack(engine.tokens), torch.stack(reference.tokens)
    found = []
    for branch in range(ours.shape[1]):
        steps = (ours[:, branch] != theirs[:, branch]).nonzero()
        if steps.numel():
            step = int(steps[0])
            found.append(Difference(branch, step, float(reference.margins[step][branch])))
    return found
