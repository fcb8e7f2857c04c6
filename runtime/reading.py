"""How the fresh tokens read a prompt at a check layer: their attention, and what it hangs on.

Traced into the compiled graph, for the selectors that ask.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

LOWEST, HIGHEST = -6.0, 20.0
"""Between these a score may fall or rise where a cached key takes a fresh one's place.

Further down the token is forgotten, further up it alone is read; the exponential stays finite.
"""


@dataclass(frozen=True)
class Reading:
    """Queries of the fresh tokens and what they attend to.

    Attributes:
        q: queries of the fresh tokens [N, Hq, F, D].
        k, v: keys and values [N, Hkv, L, D], [N, Hkv, L, Dv]; query head h reads head
            h // (Hq // Hkv).
        mask: broadcastable to [N, Hq, F, L], as in SDPA.
        fresh_rows: int64 [N, F], positions of the queries.
        chunks: int64 [N, L], the cached chunk of each token, -1 for none; None where not known.
            Queries of cached tokens, which fill up rows with fewer fresh ones, do not count.
        is_causal: key j is visible to a query at or after it only.
        scale: factor of the scores; None for 1/sqrt(D).
        flat: the mask is [.., N * F, L], with the queries of all batch rows.
        short: scores are of the dtype of q rather than float32, which is faster.
        lse: [N, Hq, F], logarithm of the sum of the exponentials of each query's visible scores
            where it is known, -inf for a query that sees nothing.
        differs: why what is cached is no key or value as these are; "" where it is.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    fresh_rows: Tensor
    chunks: Tensor | None = None
    is_causal: bool = False
    scale: float | None = None
    flat: bool = False
    short: bool = False
    lse: Tensor | None = None
    differs: str = ""

    def attention(self) -> Tensor:
        """The mean probability that the queries give each key, [N, L]."""
        if self._counted is None:
            return self._weights.mean((1, 2))
        return self._weights.sum(2).mean(1) / self._counted.sum(1)[:, None]

    def peak_attention(self) -> Tensor:
        """The highest probability that a query gives each key, averaged over heads, [N, L]."""
        return self._weights.amax(2).mean(1)

    def change(self, k_cached: Tensor, v_cached: Tensor) -> Tensor:
        """How far attention's output moves where one token alone keeps its cached copy, [N, L].

        For a query that gives token j the share p of its attention, with r = exp(q . (k_cached - k)
        * scale), the output o moves by

            p / (1 - p + p r) * ((v - v_cached) + (1 - r) * (v_cached - o))

        of which the length counts: the longest of all queries, summed over heads.

        Args:
            k_cached: [N, H, L, D], rotated as k is; Hkv is a multiple of H.
            v_cached: [N, H, L, Dv].

        Raises:
            ValueError: they differ.

        Example:
            >>> q, k, v = torch.randn(3, 1, 2, 5, 4).unbind()
            >>> reading = Reading(q[:, :, 4:], k, v, None, torch.tensor([[4]]))
            >>> reading.change(k, v)
            tensor([[0., 0., 0., 0., 0.]])
        """
        if self.differs:
            raise ValueError(f"change() is not known here: {self.differs}")
        kind = self._kind()
        k, v, queries = self.k.to(kind), self.v.to(kind), self._packed(self._queries())
        old_k, old_v = self._by_head(k_cached), self._by_head(v_cached)
        weights = self._packed(self._weights)
        gain = (queries @ (old_k - k).transpose(-1, -2)).clamp(LOWEST, HIGHEST).exp()
        out, moved, lost = weights @ v, v - old_v, 1 - gain
        # |moved + lost * (old_v - out)|, without a tensor of [.., F, L, Dv].
        across = (moved * old_v).sum(-1)[..., None, :] - out @ moved.transpose(-1, -2)
        apart = _squared(old_v)[..., None, :] - 2 * out @ old_v.transpose(-1, -2)
        apart = apart + _squared(out)[..., None]
        length = _squared(moved)[..., None, :] + lost * (2 * across + lost * apart)
        share = weights / (1 - weights + weights * gain)
        moves = (share * length.clamp_min(0).sqrt()).view_as(self._weights)
        return moves.amax(2).sum(1)

    def _kind(self) -> torch.dtype:
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    def _queries(self) -> Tensor:
        """Scaled, [N, Hq, F, D]."""
        factor = float(self.q.shape[-1] ** -0.5) if self.scale is None else self.scale
        return self.q.to(self._kind()) * factor

    def _packed(self, x: Tensor) -> Tensor:
        """[N, Hkv, Hq // Hkv * F, ..] of [N, Hq, F, ..]: a product repeats no head of keys."""
        return x.reshape(x.shape[0], self.k.shape[1], -1, x.shape[3])

    def _by_head(self, cached: Tensor) -> Tensor:
        """[N, Hkv, L, D] of what is cached for fewer heads."""
        times = self.k.shape[1] // cached.shape[1]
        return cached.to(self._kind()).repeat_interleave(times, 1)

    @cached_property
    def _weights(self) -> Tensor:
        """Probabilities [N, Hq, F, L]; zeros of a query that sees nothing."""
        kind, mask = self._kind(), self.mask
        short = self.q.dtype if self.short else kind
        k = self.k.to(short)
        if mask is not None and self.flat:
            mask = mask.reshape(-1, *self.fresh_rows.shape, mask.shape[-1]).transpose(0, 1)
        scores = (self._packed(self._queries().to(short)) @ k.transpose(-1, -2)).to(kind)
        scores = scores.view(*self.q.shape[:3], k.shape[2])
        if self.is_causal:
            keys = torch.arange(k.shape[2], device=k.device)
            visible = keys <= self.fresh_rows[:, None, :, None]
            scores = scores.masked_fill(~visible, -torch.inf)
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -torch.inf)
        elif mask is not None:
            scores = scores + mask.to(kind)
        weights = self._shares(scores)
        if self._counted is None:
            return weights
        return weights.masked_fill(~self._counted[:, None, :, None], 0.0)

    def _shares(self, scores: Tensor) -> Tensor:
        if self.lse is not None:
            return torch.exp(scores - _finite(self.lse)[..., None])
        weights = torch.exp(scores - _finite(scores.amax(-1, keepdim=True)))
        total = weights.sum(-1, keepdim=True)
        return weights / torch.where(total == 0, 1.0, total)

    @cached_property
    def _counted(self) -> Tensor | None:
        """Bool [N, F], the queries of fresh tokens; all of a row that has none."""
        if self.chunks is None:
            return None
        fresh = self.chunks.gather(1, self.fresh_rows) < 0
        return fresh | ~fresh.any(1, keepdim=True)


def _finite(x: Tensor) -> Tensor:
    return torch.where(x == -torch.inf, 0.0, x)


def _squared(x: Tensor) -> Tensor:
    return x.square().sum(-1)
