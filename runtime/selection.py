"""Which tokens a blend computes again: what a selector is told, and the selectors there are.

A selector is a callable from `Facts` to scores [N, L]: the tokens with the highest scores are
recomputed. It is traced into the compiled graph, so it is plain torch code on tensors, without
branches on their values. Tokens that have no cached copy are recomputed whatever their scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

Size = int | torch.SymInt


class SelectorError(ValueError):
    """A selector of the user's raised, or gave something else than scores."""


@dataclass(frozen=True)
class Facts:
    """What is known of the tokens at a check layer; L of them, or those that earlier ones kept.

    Deviations are float32 (float64 in a float64 model), sums over heads and features.

    Attributes:
        k_deviation: [N, L], squared L2 distance of the fresh keys to the cached ones.
        v_deviation: [N, L], likewise of the values.
        positions: int64 [N, L], positions of the tokens in the prompt.
        chunks: int64 [N, L], for each token the number of its cached chunk, -1 for none; None where
            `reuse_kv` was not told.
        offsets: int64 [N, L], how many tokens of its chunk stand before it; None without chunks.
        attention: called, gives [N, L]: the mean probability that the fresh tokens give each key
            at the check layer, over heads and fresh tokens. Computed only where it is called.
    """

    k_deviation: Tensor
    v_deviation: Tensor
    positions: Tensor
    chunks: Tensor | None
    offsets: Tensor | None
    attention: Callable[[], Tensor]


class Selector(Protocol):
    """Scores tokens: higher is recomputed first. It may have a `name` for reports.

    With a method `uuid() -> str | None` the compiled graph is cached under it; without one the
    graph is not cached at all, as the code of a callable has no key.

    Example:
        >>> def late_first(facts: Facts) -> Tensor:
        ...     return facts.v_deviation * facts.positions
        >>> import torch_cascade
        >>> from torch_cascade.compiler.options import Options
        >>> Options.resolve({"selector": late_first})[0].selector is late_first
        True
    """

    def __call__(self, facts: Facts, /) -> Tensor:
        """Scores [N, L], floating."""


def by_values(facts: Facts) -> Tensor:
    """Deviation of the values (the original code of CacheBlend, arXiv 2405.16444)."""
    return facts.v_deviation


def by_keys(facts: Facts) -> Tensor:
    """Deviation of the keys (as serving engines do)."""
    return facts.k_deviation


def by_both(facts: Facts) -> Tensor:
    """Deviation of keys and values (the text of CacheBlend, section 4.3)."""
    return facts.k_deviation + facts.v_deviation


def by_heads(facts: Facts) -> Tensor:
    """The first tokens of each chunk (EPIC, arXiv 2410.15332)."""
    assert facts.offsets is not None, "the pass has asked for chunks"
    return -facts.offsets.to(facts.v_deviation.dtype)


def by_chance(facts: Facts) -> Tensor:
    """Uniform in [0, 1): a hash of position and chunk, the same in every run. A control."""
    seed = facts.positions + 1
    if facts.chunks is not None:
        seed = seed + 65537 * (facts.chunks + 1)
    return _hashed(seed).to(facts.v_deviation.dtype)


def by_attention(facts: Facts) -> Tensor:
    """Deviation of the values where the fresh tokens look: measured by `benchmarks/quality.py`.

    At layer 1 attention adds little: of what was tried, a wide and a narrow check did best.
    """
    return facts.attention() * facts.v_deviation


BUILT_IN: Mapping[str, Selector] = {
    "v": by_values,
    "k": by_keys,
    "kv": by_both,
    "heads": by_heads,
    "random": by_chance,
    "attention": by_attention,
}
"""The selectors that the option `selector` knows by name."""

NEEDS_CHUNKS = frozenset({"heads"})
SILENT = frozenset(BUILT_IN) - {"attention"}
"""Those that never ask for the attention."""


def _hashed(x: Tensor) -> Tensor:
    """float32 in [0, 1) for each integer below 2**32; no product exceeds 63 bits."""
    for _ in range(3):
        x = ((x ^ (x >> 16)) * 73244475) & 0xFFFFFFFF
    return (x >> 8).to(torch.float32) * 2.0**-24


@dataclass(frozen=True)
class Layer:
    """Keys and values at a check layer.

    Attributes:
        k, v: fresh, [N, H, L, D], or [N, H, K, D] for the rows that an earlier check kept.
        k_cached, v_cached: [N, H, L, D].
        fresh_rows, chunks: as in `reuse_kv`.
        kept: int64 [N, K], ascending: which tokens the rows are; None for all.
    """

    k: Tensor
    v: Tensor
    k_cached: Tensor
    v_cached: Tensor
    fresh_rows: Tensor
    chunks: Tensor | None = None
    kept: Tensor | None = None

    def facts(self, attention: Callable[[], Tensor]) -> Facts:
        """What selectors are told; `attention` is over all L keys."""
        positions = self.positions()
        offsets = None if self.chunks is None else chunk_offsets(self.chunks)
        return Facts(
            k_deviation=_deviation(self.k, self._rows(self.k_cached)),
            v_deviation=_deviation(self.v, self._rows(self.v_cached)),
            positions=positions if self.kept is None else self.kept,
            chunks=None if self.chunks is None else self._kept(self.chunks),
            offsets=None if offsets is None else self._kept(offsets),
            attention=lambda: self._kept(attention()),
        )

    def positions(self) -> Tensor:
        """int64 [N, L]: 0 to L - 1."""
        batch, _, length, _ = self.k_cached.shape
        return torch.arange(length, device=self.k.device).expand(batch, length)

    def ranked(self, scores: Tensor, exits: int) -> Tensor:
        """Rows in the order in which they are to be recomputed, int64 like the scores.

        Fresh tokens and the last `exits` come first, padding (no chunk, not fresh) last; NaN counts
        as the largest score. Equal scores keep the order of the tokens.
        """
        top = torch.finfo(scores.dtype).max
        scores = torch.nan_to_num(scores, nan=top, posinf=top, neginf=-top)
        if self.chunks is not None:
            scores = scores.masked_fill(self._kept(self.chunks) < 0, -torch.inf)
        positions = self.positions()
        forced = torch.zeros_like(positions, dtype=torch.bool).scatter(1, self.fresh_rows, True)
        forced = forced | (positions >= positions.shape[1] - exits)
        scores = scores.masked_fill(self._kept(forced), torch.inf)
        return scores.sort(dim=1, descending=True, stable=True).indices

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
    attention: Callable[[], Tensor],
) -> tuple[Tensor, Tensor]:
    """The rows to compute from a check layer on.

    Args:
        layer: its keys and values.
        count: K, how many; not fewer than the fresh tokens and the exits.
        exits: how many of the last tokens are asked for.
        selector: gives the scores; None where only fresh tokens and exits are wanted.
        attention: see `Facts`, over all L keys.

    Returns:
        int64 [N, K] twice, ascending: the tokens, and their places among the rows of the layer (the
        same where the layer has all rows).

    Raises:
        SelectorError: the selector raised, or gave no scores.
    """
    if selector is None:
        scores = layer.positions().to(torch.float32) * 0.0
    else:
        scores = _scores(selector, layer.facts(attention))
    ranked = layer.ranked(scores, exits)
    first = torch.arange(cast("int", count), device=ranked.device).expand(ranked.shape[0], count)
    places = ranked.gather(1, first).sort(dim=1).values
    return (places if layer.kept is None else layer.kept.gather(1, places)), places


def _scores(selector: Selector, facts: Facts) -> Tensor:
    name = selector_name(selector)
    try:
        scores = selector(facts)
    except Exception as error:
        raise SelectorError(f"selector {name}: {type(error).__name__}: {error}") from error
    wanted = facts.v_deviation
    if not isinstance(scores, Tensor) or not scores.is_floating_point():
        got = scores.dtype if isinstance(scores, Tensor) else type(scores).__name__
        raise SelectorError(f"selector {name}: expected floating scores, got {got}")
    if tuple(scores.shape) != tuple(wanted.shape):
        sizes = f"{list(wanted.shape)}, got {list(scores.shape)}"
        raise SelectorError(f"selector {name}: expected scores {sizes}")
    return scores


def selector_name(selector: object) -> str:
    """What reports call a selector."""
    if isinstance(selector, str):
        return selector
    named = getattr(selector, "name", None) or getattr(selector, "__name__", None)
    return str(named or type(selector).__name__)


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


def mean_attention(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    fresh_rows: Tensor,
    *,
    is_causal: bool,
    scale: float | None,
    flat: bool = False,
) -> Tensor:
    """The mean probability that some queries give each key, [N, L].

    Args:
        q: queries of the fresh tokens [N, Hq, F, D].
        k: keys [N, Hkv, L, D]; query head h reads key head h // (Hq // Hkv).
        mask: broadcastable to [N, Hq, F, L], as in SDPA.
        fresh_rows: int64 [N, F], positions of the queries.
        is_causal: key j is visible to a query at or after it only.
        scale: factor of the scores; None for 1/sqrt(D).
        flat: the mask is [.., N * F, L], with the queries of all batch rows.
    """
    if mask is not None and flat:
        mask = mask.reshape(-1, *fresh_rows.shape, mask.shape[-1]).transpose(0, 1)
    kind = torch.float64 if q.dtype == torch.float64 else torch.float32
    heads, kv_heads = q.shape[1], k.shape[1]
    q, k = q.to(kind).contiguous(), k.to(kind)
    grouped = q.view(q.shape[0], kv_heads, heads // kv_heads, *q.shape[2:])
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    scores = (grouped @ k[:, :, None].transpose(-1, -2) * factor).flatten(1, 2)
    if is_causal:
        keys = torch.arange(k.shape[2], device=k.device)
        visible = keys <= fresh_rows[:, None, :, None]
        scores = scores.masked_fill(~visible, -torch.inf)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask.to(kind)
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - torch.where(top == -torch.inf, 0.0, top))
    total = weights.sum(-1, keepdim=True)
    return (weights / torch.where(total == 0, 1.0, total)).mean((1, 2))


def _deviation(fresh: Tensor, cached: Tensor) -> Tensor:
    kind = torch.float64 if fresh.dtype == torch.float64 else torch.float32
    return (fresh.to(kind) - cached.to(kind)).square().sum((1, 3))


def resolve(selector: str | Selector) -> Selector:
    """A selector by name, or itself."""
    return BUILT_IN[selector] if isinstance(selector, str) else selector
