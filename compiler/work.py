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
    """Keys that one `attend` reads, as the cost model sees them.

    Attributes:
        rows: KV rows.
        length: keys of each.
        joined: copied into one tensor first, as they are in several, or those of coarser rows.
    """

    rows: Size
    length: Size
    joined: bool = False


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
        own: KV tokens of all segments as the graph has them, where `runs` are joined ones; None for
            those of `runs`.
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
    own: Size | None = None

    @property
    def own_keys(self) -> Size:
        """Keys that every batch row reads for itself."""
        runs = (run.length for run in self.runs if run.rows == self.batch)
        return sum(runs, sympy.Integer(0))

    @property
    def own_tokens(self) -> Size:
        """KV tokens of all segments as the graph has them, before any join."""
        if self.own is not None:
            return self.own
        return sum((run.rows * run.length for run in self.runs), sympy.Integer(0))

    def with_runs(self, runs: tuple[KeyRun, ...]) -> Work:
        """The same with some runs of other rows or lengths."""
        tokens = sum(
            (b.rows * b.length - a.rows * a.length for a, b in zip(self.runs, runs, strict=True)),
            sympy.Integer(0),
        )
        return replace(self, runs=runs, own=None if self.own is None else self.own + tokens)

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
        return (*own, self.d_k, self.d_v, *runs, *(() if self.own is None else (self.own,)))

    def at(self, number: Callable[[Size], int]) -> Work:
        """The same with every size replaced by a number."""
        names = ("batch", "heads", "q_len", "kv_heads", "naive_heads", "d_k", "d_v")
        numbers: dict[str, Any] = {name: number(getattr(self, name)) for name in names}
        runs = tuple(
            replace(run, rows=number(run.rows), length=number(run.length)) for run in self.runs
        )
        own = None if self.own is None else number(self.own)
        return replace(self, **numbers, runs=runs, own=own)
