"""Products of the same few rows with several weights: sizes, the least time, random inputs."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from torch_cascade.benchmarks.rows import Ceilings, Floor
from torch_cascade.kernels.linears_config import COLUMNS, FEATURES, MOST_WEIGHTS

_WRITTEN = re.compile(r"([0-9]+),([0-9]+),([0-9]+(?:\+[0-9]+)*)")


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        rows: M, tokens of a decoding step.
        features: K, that all weights read.
        columns: Ni of each weight [Ni, K].
    """

    rows: int
    features: int
    columns: tuple[int, ...]

    def __str__(self) -> str:
        """As on the command line."""
        return f"{self.rows},{self.features},{'+'.join(map(str, self.columns))}"


# What a layer multiplies by: q, k, v; output; gate, up; down.
LLAMA_3_8B = ((4096, (4096, 1024, 1024)), (4096, (4096,)), (4096, (14336,) * 2), (14336, (4096,)))
QWEN_2_5_7B = ((3584, (3584, 512, 512)), (3584, (3584,)), (3584, (18944,) * 2), (18944, (3584,)))
DEFAULT_ROWS = (
    *(Row(rows, *weights) for rows, weights in product((16, 4, 64), LLAMA_3_8B)),
    *(Row(16, *weights) for weights in QWEN_2_5_7B),
)


def parse_row(text: str) -> Row:
    """A row from `M,K,N` or `M,K,N+N+N`.

    Raises:
        argparse.ArgumentTypeError: anything else, or sizes that no launch of the kernel takes.
    """
    written = _WRITTEN.fullmatch(text)
    if written is None:
        raise argparse.ArgumentTypeError(f"expected whole numbers, M,K,N or M,K,N+N, got {text!r}")
    rows, features = int(written[1]), int(written[2])
    columns = tuple(map(int, written[3].split("+")))
    steps = features % FEATURES == 0 and all(n % COLUMNS == 0 for n in columns)
    if not steps or min(rows, features, *columns) < 1 or len(columns) > MOST_WEIGHTS:
        raise argparse.ArgumentTypeError(
            f"expected rows, K in steps of {FEATURES}, and up to {MOST_WEIGHTS} N in steps of "
            f"{COLUMNS}, got {text!r}"
        )
    return Row(rows, features, columns)


def moved_bytes(row: Row, bias: bool, element: int) -> int:
    """Bytes that must move: rows in, every weight and bias, results out, each once."""
    columns = sum(row.columns)
    elements = row.rows * row.features + columns * row.features + row.rows * columns
    return element * (elements + (columns if bias else 0))


def flops(row: Row) -> int:
    """Operations of all products."""
    return 2 * row.rows * row.features * sum(row.columns)


def floor(row: Row, bias: bool, element: int, ceilings: Ceilings) -> Floor:
    """The least time for all products, of elements of `element` bytes."""
    return Floor.of(moved_bytes(row, bias, element), flops(row), ceilings)


@dataclass(frozen=True)
class Inputs:
    """x [M, K], weights [Ni, K] and biases [Ni] or None, all contiguous."""

    x: Tensor
    weights: list[Tensor]
    biases: list[Tensor] | None

    def double(self) -> Inputs:
        """The same in float64."""
        biases = None if self.biases is None else [bias.double() for bias in self.biases]
        return Inputs(self.x.double(), [weight.double() for weight in self.weights], biases)


def draw(row: Row, bias: bool, device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    """Normal numbers; products of variance 1, so that a bias of variance 1 is as large."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    x = normal(row.rows, row.features).to(dtype)
    scale = row.features**-0.5
    weights = [normal(n, row.features).mul_(scale).to(dtype) for n in row.columns]
    biases = [normal(n).to(dtype) for n in row.columns] if bias else None
    return Inputs(x, weights, biases)
