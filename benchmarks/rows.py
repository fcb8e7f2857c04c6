"""The sizes that attention is measured at, and the time that no kernel can beat."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

GOAL_FACTOR = 1.15
GOAL_LAUNCHES_US = 5.0


@dataclass(frozen=True)
class Heads:
    """Sizes of one attention layer: query heads, key/value heads, features, bytes an element."""

    query: int = 32
    kv: int = 8
    dim: int = 128
    element: int = 2


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        requests: B, each with a prefix of its own.
        branches: T, sequences that continue a request's prefix.
        prefix: L, tokens of the prefix.
        queries: S, query tokens of a branch.
        suffix: X, keys that a branch has of its own.
    """

    requests: int
    branches: int
    prefix: int
    queries: int
    suffix: int

    @property
    def batch(self) -> int:
        """N = B * T."""
        return self.requests * self.branches

    def __str__(self) -> str:
        """As on the command line."""
        sizes = (self.requests, self.branches, self.prefix, self.queries, self.suffix)
        return ",".join(map(str, sizes))


@dataclass(frozen=True)
class Ceilings:
    """What this machine reaches, measured in the same run.

    Attributes:
        read: bytes a second of a streaming read.
        matmul: floating-point operations a second of a large matrix product in the same dtype.
        empty_us: microseconds that a graph with one tiny kernel reads; 0 where none was measured.
    """

    read: float
    matmul: float
    empty_us: float = 0.0


@dataclass(frozen=True)
class Floor:
    """The least time for some work, in seconds, and what it is made of."""

    bytes: float
    flops: float
    seconds: float
    bound: str

    @classmethod
    def of(cls, moved: float, flops: float, ceilings: Ceilings) -> Floor:
        """The larger of the times for moving `moved` bytes and for `flops` operations."""
        reading, computing = moved / ceilings.read, flops / ceilings.matmul
        bound = "bytes" if reading >= computing else "flops"
        return cls(moved, flops, max(reading, computing), bound)


# The textbook case first; then tree verification, best-of-n with long suffixes, long prompts.
DEFAULT_ROWS = (
    Row(4, 4, 2000, 5, 5),
    Row(8, 4, 4096, 4, 4),
    Row(1, 8, 32768, 4, 4),
    Row(16, 8, 8192, 4, 4),
    Row(4, 16, 4096, 1, 256),
    Row(1, 64, 8192, 1, 128),
    Row(32, 4, 2048, 4, 4),
)


def parse_row(text: str) -> Row:
    """A row from `B,T,L,S,X`.

    Raises:
        argparse.ArgumentTypeError: not five whole numbers above zero.
    """
    return Row(*parse_sizes(text, "B,T,L,S,X"))


def parse_sizes(text: str, names: str) -> list[int]:
    """Positive whole numbers separated by commas, as many as `names` has.

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    parts = text.split(",")
    expected = names.split(",")
    try:
        sizes = [int(part) for part in parts]
    except ValueError:
        sizes = []
    if len(sizes) != len(expected) or min(sizes, default=0) < 1:
        raise argparse.ArgumentTypeError(
            f"expected {len(expected)} whole numbers above zero, {names}, got {text!r}"
        )
    return sizes


def moved_bytes(row: Row, heads: Heads) -> int:
    """Bytes that must move: each prefix once, every suffix, queries in and outputs out."""
    token = 2 * heads.kv * heads.dim * heads.element  # K and V
    keys = row.requests * row.prefix + row.batch * row.suffix
    queries = row.batch * row.queries * heads.query * heads.dim * heads.element
    return keys * token + 2 * queries


def flops(row: Row, heads: Heads) -> int:
    """Operations of both matrix products, every query against prefix and suffix."""
    queries = row.batch * row.queries * heads.query
    return 4 * queries * heads.dim * (row.prefix + row.suffix)


def floor(row: Row, heads: Heads, ceilings: Ceilings) -> Floor:
    """The least time for one attention."""
    return Floor.of(moved_bytes(row, heads), flops(row, heads), ceilings)


def goal_us(floor_us: float) -> float:
    """What the fused kernel is meant to reach, in microseconds."""
    return GOAL_FACTOR * floor_us + GOAL_LAUNCHES_US


def choose_engines(
    made: argparse.ArgumentParser,
    options: argparse.Namespace,
    known: Sequence[str],
    default: Sequence[str],
) -> None:
    """Settle `--engines`; a usage error where it names none or an unknown one."""
    try:
        options.engines = choose(known, options.engines, default)
    except argparse.ArgumentTypeError as error:
        made.error(f"argument --engines: {error}")


def choose(known: Sequence[str], asked: str | None, default: Sequence[str]) -> list[str]:
    """Engines from a comma-separated list, in the order of `known`.

    Raises:
        argparse.ArgumentTypeError: a name that is not known, or none at all.
    """
    if asked is None:
        return list(default)
    names = [name.strip() for name in asked.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        said = f"unknown engine {unknown[0]!r}" if unknown else "no engine"
        raise argparse.ArgumentTypeError(f"{said}, choose from {', '.join(known)}")
    return [name for name in known if name in names]
