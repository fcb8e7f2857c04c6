"""A small Llama, trained to follow chains of variables."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_cascade.benchmarks import chain_task as task

LAYERS = 6
SIZES = {
    "vocab_size": task.VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
RATE = 2e-3
WARM_UP = 100


class Sides(nn.Module):
    """A token's vector is the sum of its sides': a statement need not be put together first."""

    def __init__(self, width: int) -> None:
        """Draw both tables."""
        super().__init__()
        self.left = nn.Embedding(task.NAMES, width)
        self.right = nn.Embedding(task.RIGHT, width)
        for table in (self.left, self.right):
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, ids: Tensor) -> Tensor:
        """Vectors [.., width] of ids [..]."""
        left, right = task.sides(ids)
        vector: Tensor = self.left(left) + self.right(right)
        return vector


def build(seed: int) -> tuple[Any, Sides]:
    """The model with random weights, and the tables that its embedding is made of."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES))
    return model, Sides(int(SIZES["hidden_size"] or 0))


def train(
    seed: int,
    steps: int,
    batch: int,
    device: str = "cpu",
    say: Callable[[str], None] = lambda text: None,
) -> Any:
    """A trained model in evaluation mode, with an ordinary embedding table.

    The loss asks for the root value at every question and every statement; the latter stands in
    for what pre-training would teach.

    Args:
        seed: of weights and data.
        steps: of AdamW.
        batch: prompts a step.
        device: to train on.
        say: told now and then how it goes.
    """
    model, sides = build(seed)
    model, sides = model.to(device), sides.to(device)
    parameters = [p for name, p in model.named_parameters() if "embed_tokens" not in name]
    optimizer = torch.optim.AdamW([*parameters, *sides.parameters()], RATE, weight_decay=0.01)
    plan = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    generator = torch.Generator().manual_seed(seed)
    began = time.monotonic()
    for step in range(1, steps + 1):
        chains = task.draw(batch, generator).to(device)
        hidden = model.model(inputs_embeds=sides(chains.ids), use_cache=False).last_hidden_state
        logits = functional.linear(hidden, model.lm_head.weight[: task.VALUES])
        loss = functional.cross_entropy(
            logits.flatten(0, 1), chains.answers.flatten(), ignore_index=-1
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        plan.step()
        if step % 100 == 0 or step == steps:
            by_hop = ", ".join(f"{x:.2f}" for x in accuracy(logits[:, task.CACHED :], chains))
            say(
                f"step {step}: loss {loss.item():.3f}, right by hops {by_hop}; "
                f"{time.monotonic() - began:.0f} s"
            )
    with torch.no_grad():
        model.model.embed_tokens.weight[task.VALUES :] = sides(
            torch.arange(task.VALUES, task.VOCABULARY, device=device)
        )
    return model.eval().requires_grad_(False)


def _rate(step: int, steps: int) -> float:
    warm = min(1.0, (step + 1) / WARM_UP)
    return warm * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))


def accuracy(logits: Tensor, chains: task.Chains) -> list[float]:
    """Share of right answers, for 1 to `CHUNKS` hops.

    Args:
        logits: [N, QUESTIONS, >= VALUES].
        chains: what was asked.
    """
    right = logits[..., : task.VALUES].argmax(-1) == chains.answers[:, task.CACHED :]
    return [float(right[chains.hops == hop].double().mean()) for hop in range(1, task.CHUNKS + 1)]
