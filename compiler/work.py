"""One attention as the cost model is told of it: its sizes, symbolic or numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch

from torch_cascade.compiler.graph import Size


@dataclass(frozen=True)
class KeyRun:
    """One segment as the cost model sees it: `rows` KV rows of `length` keys."""

    rows: Size
    length: Size


@dataclass(frozen=True)
class Work:
    """The sizes of one attention that matter for its time.

    Attributes:
        batch, heads, q_len: the query rows N, query heads and tokens a row.
        kv_heads: heads of the base K and V.
        naive_heads: heads of K and V as the graph hands them to attention.
        d_k, d_v: features of keys and values.
        q_bytes, kv_bytes: bytes of an element of q, and of K and V where they are stored.
        dtype: of q, "bfloat16" and so on.
        copied: the graph writes K and V for every branch; False where it only views them.
        device: where it runs.
        runs: the segments.
    """

    batch: Size
    heads: Size
    q_len: Size
    kv_heads: Size
    naive_heads: Size
    d_k: Size
    d_v: Size
    q_bytes: int
    kv_bytes: int
    dtype: str
    copied: bool
    device: torch.device
    runs: tuple[KeyRun, ...]

    @property
    def token_bytes(self) -> Size:
        """Bytes of one token's K and V in one head."""
        return (self.d_k + self.d_v) * self.kv_bytes

    @property
    def acc_bytes(self) -> int:
        """Bytes of an element of a partial result."""
        return 8 if self.q_bytes == 8 else 4

    def naive_bytes(self) -> Size:
        """KV bytes that attention over the expanded batch reads."""
        keys = sum((run.length for run in self.runs), sympy.Integer(0))
        return self.batch * self.kv_heads * self.token_bytes * keys

    def cascade_bytes(self) -> Size:
        """KV bytes read once a row, plus each partial result written and read."""
        tokens = sum((run.rows * run.length for run in self.runs), sympy.Integer(0))
        partials = len(self.runs) if len(self.runs) > 1 else 0
        row = self.acc_bytes * (self.d_v + 1)
        merged = 2 * partials * self.batch * self.heads * self.q_len * row
        return self.kv_heads * self.token_bytes * tokens + merged

    def sizes(self) -> tuple[Size, ...]:
        """Every size that may be symbolic."""
        runs = [size for run in self.runs for size in (run.rows, run.length)]
        own = (self.batch, self.heads, self.q_len, self.kv_heads, self.naive_heads)
        return (*own, self.d_k, self.d_v, *runs)

    def at(self, number: Callable[[Size], int]) -> Work:
        """The same with every size replaced by a number."""
        names = ("batch", "heads", "q_len", "kv_heads", "naive_heads", "d_k", "d_v")
        numbers: dict[str, Any] = {name: number(getattr(self, name)) for name in names}
        runs = tuple(KeyRun(number(run.rows), number(run.length)) for run in self.runs)
        return replace(self, **numbers, runs=runs)
