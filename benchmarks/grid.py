"""The shapes that decisions are judged on: two planes of prefix and topk, and a fixed sample."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from torch_cascade.benchmarks.rows import Heads

SEED = 5
SAMPLE = 190
# Bytes of K and V expanded for every branch: what the naive graph holds.
MOST_BYTES = {"cuda": 2**30, "cpu": 96 * 2**20}
# Products of one attention, in floating-point operations.
MOST_FLOPS = {"cuda": 4e11, "cpu": 4e9}

PREFIXES = (16, 48, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
TOPKS = (2, 3, 4, 8, 16, 32, 64)
SUFFIXES = (1, 4, 16, 64, 256, 1024)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
QUERIES = (1, 1, 1, 4, 16)
ROOTS = (16, 64, 256, 1024, 4096, 16384)
HEADS = {
    "cuda": (
        Heads(32, 8, 128),
        Heads(64, 8, 128),
        Heads(16, 16, 128),
        Heads(32, 1, 128),
        Heads(32, 8, 64),
        Heads(16, 4, 256),
    ),
    "cpu": (
        Heads(8, 2, 64, 4),
        Heads(9, 3, 64, 4),
        Heads(8, 8, 64, 4),
        Heads(8, 1, 128, 4),
        Heads(4, 2, 256, 4),
    ),
}


@dataclass(frozen=True)
class Shape:
    """One attention over a shared prefix.

    Attributes:
        requests: B.
        branches: T, of each request.
        root: R, keys that all requests share before their own prefixes; 0 for none.
        prefix: L, keys of each request's own prefix.
        queries: S, query tokens of a branch.
        suffix: X, keys that a branch has of its own; 0 for none.
        heads: of the layer.
    """

    requests: int
    branches: int
    root: int
    prefix: int
    queries: int
    suffix: int
    heads: Heads

    @property
    def batch(self) -> int:
        """N = B * T."""
        return self.requests * self.branches

    @property
    def keys(self) -> int:
        """Keys that a query sees."""
        return self.root + self.prefix + self.suffix

    @property
    def token(self) -> int:
        """Bytes of one token's K and V in all heads."""
        return 2 * self.heads.kv * self.heads.dim * self.heads.element

    @property
    def expanded(self) -> int:
        """Bytes of K and V with a copy for every branch."""
        return self.batch * self.keys * self.token

    @property
    def flops(self) -> int:
        """Operations of both matrix products."""
        return 4 * self.batch * self.queries * self.heads.query * self.heads.dim * self.keys

    def __str__(self) -> str:
        """`B,T,R,L,S,X,Hq,Hkv,D`."""
        sizes = (self.requests, self.branches, self.root, self.prefix, self.queries, self.suffix)
        return ",".join(map(str, (*sizes, self.heads.query, self.heads.kv, self.heads.dim)))


COLUMNS = "B,T,R,L,S,X,Hq,Hkv,D"


def grid(device_type: str) -> list[Shape]:
    """Every shape once, in an order of which each beginning is a fair sample."""
    draw = random.Random(SEED)
    shapes = dict.fromkeys(s for s in _planes(device_type) if fits(s, device_type))
    wanted = len(shapes) + SAMPLE
    while len(shapes) < wanted:
        drawn = _drawn(draw, device_type)
        if fits(drawn, device_type):
            shapes[drawn] = None
    listed = list(shapes)
    draw.shuffle(listed)
    return listed


def fits(shape: Shape, device_type: str) -> bool:
    """Is it small enough to be measured many times?"""
    small = shape.expanded <= MOST_BYTES[device_type]
    return small and shape.flops <= MOST_FLOPS[device_type]


def plane(device_type: str, requests: int) -> list[Shape]:
    """Prefix by topk, one new token and 16 keys a branch: what the map is drawn of."""
    heads = HEADS[device_type][0]
    return [
        Shape(requests, topk, 0, prefix, 1, 16, heads)
        for prefix in (16, 64, 256, 1024, 4096, 16384)
        for topk in (1, 2, 4, 8, 16, 64)
    ]


def _planes(device_type: str) -> Iterator[Shape]:
    yield from plane(device_type, 1)
    yield from plane(device_type, 4)


def _drawn(draw: random.Random, device_type: str) -> Shape:
    """One shape; a quarter have two levels of prefixes, one in twelve has no suffix."""
    heads = draw.choice(HEADS[device_type])
    requests, branches = draw.choice(BATCHES), draw.choice(TOPKS)
    levels = draw.random()
    if levels < 0.25:
        return Shape(
            max(requests, 2),
            branches,
            draw.choice(ROOTS),
            draw.choice(PREFIXES),
            draw.choice(QUERIES),
            draw.choice(SUFFIXES),
            heads,
        )
    suffix = 0 if levels > 11 / 12 else draw.choice(SUFFIXES)
    prefix, queries = draw.choice(PREFIXES), draw.choice(QUERIES)
    return Shape(requests if suffix else 1, branches, 0, prefix, queries, suffix, heads)
