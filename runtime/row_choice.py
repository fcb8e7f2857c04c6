"""The rows that a blend computes from a check layer on: facts, scores, order, forced rows.

Traced into the compiled graph; `runtime/selection.py` has the selectors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from torch_cascade.runtime.ranks import Ranks
from torch_cascade.runtime.reading import Reading
from torch_cascade.runtime.selection import (
    EXPECTED,
    Facts,
    Selector,
    SelectorError,
    selector_name,
)

Size = int | torch.SymInt


@dataclass(frozen=True)
class Layer:
    """Keys and values at a check layer.

    Attributes:
        k, v: fresh, [N, H, L, D], or [N, H, K, D] for the rows that an earlier check kept.
        k_cached, v_cached: [N, H, L, D].
        fresh_rows, chunks: as in `reuse_kv`.
        kept: int64 [N, K], ascending: which tokens the rows are; None for all.
        wanted: int64 [N, n], tokens that results are asked of, beside the last ones.
        later: [N, L], the highest probability that a fresh token gives each key, averaged over
            heads and later layers; None where the fresh tokens were not run ahead.
        ranks: hold other heads of the same tokens; None for no others.
        unseen: why they cannot be run ahead.
    """

    k: Tensor
    v: Tensor
    k_cached: Tensor
    v_cached: Tensor
    fresh_rows: Tensor
    chunks: Tensor | None = None
    kept: Tensor | None = None
    wanted: Tensor | None = None
    later: Tensor | None = None
    ranks: Ranks | None = None
    unseen: str = ""

    def facts(self, reading: Callable[[], Reading]) -> Facts:
        """What selectors are told; `reading` is of all L keys."""
        offsets = None if self.chunks is None else chunk_offsets(self.chunks)
        k, v = (_summed_in(x) for x in (self.k, self.v))
        k_deviation = _squared(k - self._rows(self.k_cached).to(k.dtype))
        v_deviation = _squared(v - self._rows(self.v_cached).to(v.dtype))
        v_size = _squared(v)
        if self.ranks is not None:  # one exchange for all
            sums = torch.stack([k_deviation, v_deviation, v_size])
            k_deviation, v_deviation, v_size = self.ranks.summed(sums).unbind()
        return Facts(
            k_deviation=k_deviation,
            v_deviation=v_deviation,
            v_size=v_size,
            positions=self.kept_positions(),
            chunks=None if self.chunks is None else self._kept(self.chunks),
            offsets=None if offsets is None else self._kept(offsets),
            attention=lambda: self._kept(self._averaged(reading().attention())),
            later_peak_attention=lambda: self._kept(self._averaged(self._ahead())),
            change=lambda: self._kept(self._changed(reading())),
        )

    def positions(self) -> Tensor:
        """int64 [N, L]: 0 to L - 1."""
        batch, _, length, _ = self.k_cached.shape
        return torch.arange(length, device=self.k.device).expand(batch, length)

    def kept_positions(self) -> Tensor:
        """int64 [N, L], or [N, K]: of the tokens that scores are asked for."""
        return self.positions() if self.kept is None else self.kept

    def ranked(self, scores: Tensor, exits: int) -> Tensor:
        """Rows in the order in which they are to be recomputed, int64 [N, L], or [N, K].

        Fresh and wanted tokens and the last `exits` come first, padding (no chunk, not fresh) last;
        NaN counts as the largest score. Equal scores keep the order of the tokens.
        """
        top = torch.finfo(scores.dtype).max
        scores = torch.nan_to_num(scores, nan=top, posinf=top, neginf=-top)
        if self.chunks is not None:
            scores = scores.masked_fill(self._kept(self.chunks) < 0, -torch.inf)
        positions = self.positions()
        forced = torch.zeros_like(positions, dtype=torch.bool).scatter(1, self.fresh_rows, True)
        if self.wanted is not None:
            forced = forced.scatter(1, self.wanted, True)
        forced = forced | (positions >= positions.shape[1] - exits)
        scores = scores.masked_fill(self._kept(forced), torch.inf)
        return scores.sort(dim=1, descending=True, stable=True).indices

    def _ahead(self) -> Tensor:
        if self.later is not None:
            return self.later.clone()  # a selector may write into it, as into all it calls for
        why = self.unseen or "the selector has no attribute `looks_ahead` that is true"
        raise ValueError(f"later_peak_attention() is not known here: {why}")

    def _averaged(self, x: Tensor) -> Tensor:
        return x if self.ranks is None else self.ranks.averaged(x)

    def _changed(self, reading: Reading) -> Tensor:
        """A sum over heads, so over those of all ranks."""
        found = reading.change(self.k_cached, self.v_cached)
        return found if self.ranks is None else self.ranks.summed(found)

    def _rows(self, x: Tensor) -> Tensor:
        if self.kept is None:
            return x
        index = self.kept[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
        return x.gather(2, index)

    def _kept(self, x: Tensor) -> Tensor:
        return x if self.kept is None else x.gather(1, self.kept)


def choose_rows(
    layer: Layer,
    count: Size,
    exits: int,
    selector: Selector | None,
    reading: Callable[[], Reading],
) -> tuple[Tensor, Tensor]:
    """The rows to compute from a check layer on.

    Args:
        layer: its keys and values.
        count: K, how many; not fewer than the fresh and wanted tokens and the exits.
        exits: how many of the last tokens are asked for.
        selector: gives the scores; None where no others are taken.
        reading: how the fresh tokens read all L keys; called where a selector asks.

    Returns:
        int64 [N, K] twice, ascending: the tokens, and their places among the rows of the layer (the
        same where the layer has all rows).

    Raises:
        SelectorError: the selector raised, or gave no scores.
    """
    if selector is None:
        scores = layer.kept_positions().to(torch.float32) * 0.0
    else:
        scores = _scores(selector, layer.facts(reading))
        if layer.ranks is not None:  # a selector may be random
            scores = layer.ranks.gathered(scores)[0]
    ranked = layer.ranked(scores, exits)
    first = torch.arange(cast("int", count), device=ranked.device).expand(ranked.shape[0], count)
    places = ranked.gather(1, first).sort(dim=1).values
    return (places if layer.kept is None else layer.kept.gather(1, places)), places


def _scores(selector: Selector, facts: Facts) -> Tensor:
    name = selector_name(selector)
    given = {"chunks": facts.chunks, "positions": facts.positions}
    before = {field: x._version for field, x in given.items() if x is not None}
    try:
        scores = selector(facts)
        wrong = _wrong(scores, facts.v_deviation)
    except Exception as error:
        said = str(error).strip().partition("\n")[0].rstrip(".")
        kind = type(error).__name__
        raise SelectorError(f"selector {name}: {kind}: {said}. {EXPECTED}") from error
    if wrong:
        raise SelectorError(f"selector {name}: expected {wrong}")
    for field, version in before.items():
        if getattr(facts, field)._version != version:
            said = f"expected facts that are only read, got a write into {field}"
            raise SelectorError(f"selector {name}: {said}")
    return scores


def _wrong(scores: object, wanted: Tensor) -> str:
    """What is expected of scores, and what they are instead; "" where they are right."""
    if not isinstance(scores, Tensor) or not scores.is_floating_point():
        got = scores.dtype if isinstance(scores, Tensor) else type(scores).__name__
        return f"floating scores, got {got}"
    if scores.device != wanted.device:
        return f"scores on {wanted.device}, got {scores.device}"
    if tuple(scores.shape) != tuple(wanted.shape):
        return f"scores {list(wanted.shape)}, got {list(scores.shape)}"
    return ""


def chunk_offsets(chunks: Tensor) -> Tensor:
    """How many tokens of its chunk stand before each token, int64 [N, L].

    Example:
        >>> chunk_offsets(torch.tensor([[4, 4, 4, 7, 7, -1]]))
        tensor([[0, 1, 2, 0, 1, 0]])
    """
    position = torch.arange(chunks.shape[1], device=chunks.device).expand_as(chunks)
    before = torch.cat([chunks[:, :1] - 1, chunks[:, :-1]], 1)
    starts = torch.where(chunks != before, position, 0)
    return position - torch.cummax(starts, 1).values


def _summed_in(x: Tensor) -> Tensor:
    return x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)


def _squared(x: Tensor) -> Tensor:
    return x.square().sum((1, 3))
