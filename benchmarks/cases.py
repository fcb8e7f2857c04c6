"""The sizes that decoding is measured at, and the least time of one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch_cascade.benchmarks import models
from torch_cascade.benchmarks.rows import Ceilings, Floor, parse_sizes

GOAL_FACTOR = 1.4


@dataclass(frozen=True)
class Case:
    """B requests, T branches of each, prompts of L tokens."""

    requests: int
    branches: int
    length: int

    @property
    def batch(self) -> int:
        """N = B * T, sequences decoded."""
        return self.requests * self.branches

    def __str__(self) -> str:
        """As on the command line."""
        return f"{self.requests},{self.branches},{self.length}"


DEFAULT_CASES = (Case(1, 16, 4096), Case(1, 16, 16384), Case(1, 8, 32768), Case(1, 64, 16384))


def parse_case(text: str) -> Case:
    """A case from `B,T,L`.

    Raises:
        argparse.ArgumentTypeError: not three whole numbers above zero.
    """
    return Case(*parse_sizes(text, "B,T,L"))


@dataclass(frozen=True)
class Size:
    """What of a model decides the floor.

    Attributes:
        elements: weights that a step reads.
        weights: their bytes.
        token: bytes of one token's keys and values in all layers.
        layers, heads, dim: of attention, heads of the queries.
    """

    elements: int
    weights: int
    token: int
    layers: int
    heads: int
    dim: int

    @classmethod
    def of(cls, model: Any, prefix: list[models.KeyValue]) -> Size:
        """Of a model and a prefix of its cache."""
        config = model.config.get_text_config()
        elements, weights = models.weights_read(model)
        dim = prefix[0][0].shape[-1]
        token = models.token_bytes(prefix)
        return cls(elements, weights, token, len(prefix), config.num_attention_heads, dim)


def floor(case: Case, size: Size, suffix: float, ceilings: Ceilings, shared: bool = True) -> Floor:
    """The least time of a step whose branches have `suffix` tokens of their own.

    With `shared` each prompt's keys and values are read once, else once a branch: what an engine
    that expands them must read.
    """
    prompts = case.requests if shared else case.batch
    tokens = prompts * case.length + case.batch * suffix
    attention = 4 * case.batch * size.layers * size.heads * size.dim * (case.length + suffix)
    matmuls = 2 * size.elements * case.batch
    return Floor.of(size.weights + tokens * size.token, matmuls + attention, ceilings)
