"""Random inputs of one attention, with needles, and the same attention in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torch_cascade.benchmarks.rows import Heads, Row


@dataclass(frozen=True)
class Inputs:
    """Axes as in `rows.Row`; N = B * T, Hq query heads, Hkv key/value heads, D features.

    Attributes:
        row: the sizes.
        q: [N, Hq, S, D], a transposed view of [N, S, Hq, D]: what a model's projection leaves.
        prefix_k, prefix_v: [B, Hkv, L, D], contiguous, as caches keep them.
        suffix_k, suffix_v: [N, Hkv, X, D], contiguous.
    """

    row: Row
    q: Tensor
    prefix_k: Tensor
    prefix_v: Tensor
    suffix_k: Tensor
    suffix_v: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, then prefix keys and values, then suffix keys and values."""
        return self.q, self.prefix_k, self.prefix_v, self.suffix_k, self.suffix_v

    def expanded(self) -> tuple[Tensor, Tensor]:
        """Keys and values [N, Hkv, L + X, D] as a stock cache holds them."""
        branches = self.row.branches
        return (
            torch.cat([self.prefix_k.repeat_interleave(branches, 0), self.suffix_k], 2),
            torch.cat([self.prefix_v.repeat_interleave(branches, 0), self.suffix_v], 2),
        )


def draw(row: Row, heads: Heads, device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    """Normal queries, keys and values: every key weighs about the same.

    A missing block of the prefix shows in such an output, which is an average over all keys.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator).to(dtype)

    prefix = (row.requests, heads.kv, row.prefix, heads.dim)
    suffix = (row.batch, heads.kv, row.suffix, heads.dim)
    return Inputs(
        row,
        normal(row.batch, row.queries, heads.query, heads.dim).transpose(1, 2),
        normal(*prefix),
        normal(*prefix),
        normal(*suffix),
        normal(*suffix),
    )


def with_needles(inputs: Inputs) -> Inputs:
    """The same with keys that stand out: the last prefix token, the first and last suffix keys.

    A long random prefix hides every mistake in a suffix. A needle is the sum of the queries that
    share its key, so each of them scores about sqrt(D) there, as much as thousands of other keys
    together. The last prefix token serves one branch in each KV head, another one in the next.
    """
    n, hq, s, d = inputs.q.shape
    hkv = inputs.prefix_k.shape[1]
    branches = inputs.row.branches
    sums = inputs.q.float().reshape(n, hkv, (hq // hkv) * s, d).sum(2)
    head = torch.arange(hkv, device=sums.device)
    chosen = sums.reshape(-1, branches, hkv, d)[:, head % branches, head]
    prefix_k, suffix_k = inputs.prefix_k.clone(), inputs.suffix_k.clone()
    prefix_k[:, :, -1] = chosen.to(prefix_k.dtype)
    for place in (0, -1):
        suffix_k[:, :, place] = sums.to(suffix_k.dtype)
    return replace(inputs, prefix_k=prefix_k, suffix_k=suffix_k)


def reference(inputs: Inputs) -> Tensor:
    """The attention in float64, request by request: [N, Hq, S, D]."""
    return torch.cat([_one_request(inputs, request) for request in range(inputs.row.requests)])


def _one_request(inputs: Inputs, request: int) -> Tensor:
    branches = inputs.row.branches
    rows = slice(request * branches, (request + 1) * branches)
    q = inputs.q[rows].double()
    t, hq, s, d = q.shape
    hkv = inputs.prefix_k.shape[1]
    q = q.reshape(t, hkv, hq // hkv, s, d) / d**0.5
    prefix_k, prefix_v = inputs.prefix_k[request].double(), inputs.prefix_v[request].double()
    suffix_k, suffix_v = inputs.suffix_k[rows].double(), inputs.suffix_v[rows].double()
    scores = torch.cat(
        [
            torch.einsum("thgsd,hld->thgsl", q, prefix_k),
            torch.einsum("thgsd,thxd->thgsx", q, suffix_k),
        ],
        -1,
    )
    weights = scores.softmax(-1)
    of_prefix, of_suffix = weights.split([inputs.row.prefix, inputs.row.suffix], -1)
    out = torch.einsum("thgsl,hld->thgsd", of_prefix, prefix_v)
    out = out + torch.einsum("thgsx,thxd->thgsd", of_suffix, suffix_v)
    return out.reshape(t, hq, s, d)
