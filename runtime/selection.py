"""Which tokens a blend computes again: what a selector is told, and the selectors there are.

A selector is a callable from `Facts` to scores [N, L]: the tokens with the highest scores are
recomputed. It is traced into the compiled graph, so it is plain torch code on tensors, without
branches on their values. Tokens that have no cached copy are recomputed whatever their scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

EXPECTED = (
    "A selector is traced into the compiled graph: expected plain torch code on the tensors of its "
    "facts, which neither reads their values (`item`, `tolist`, `numpy`, `if`, sizes that depend "
    "on them) nor takes tensors from elsewhere"
)


class SelectorError(ValueError):
    """A selector of the user's raised, or gave something else than scores."""


@dataclass(frozen=True)
class Facts:
    """What is known of the tokens at a check layer; L of them, or those that earlier ones kept.

    Deviations are float32 (float64 in a float64 model), sums over heads and features.

    Attributes:
        k_deviation: [N, L], squared L2 distance of the fresh keys to the cached ones.
        v_deviation: [N, L], likewise of the values.
        v_size: [N, L], squared L2 norm of the fresh values.
        positions: int64 [N, L], positions of the tokens in the prompt.
        chunks: int64 [N, L], for each token the number of its cached chunk, -1 for none; None where
            `reuse_kv` was not told.
        offsets: int64 [N, L], how many tokens of its chunk stand before it; None without chunks.
        attention: called, gives [N, L]: the mean probability that the fresh tokens give each key
            at the check layer, over heads and fresh tokens. Computed only where it is called.
        later_peak_attention: called, gives [N, L]: the highest probability that a fresh token gives
            each key, averaged over heads and over all layers below the check layer, where the fresh
            tokens run over the cached copies of all others. Known to selectors with an attribute
            `looks_ahead` that is true: the fresh tokens are then computed twice.
        change: called, gives [N, L]: how far the output of the check layer's attention would move
            if this token alone kept its cached key and value; the longest move of all fresh tokens,
            summed over heads. Computed only where it is called.
    """

    k_deviation: Tensor
    v_deviation: Tensor
    v_size: Tensor
    positions: Tensor
    chunks: Tensor | None
    offsets: Tensor | None
    attention: Callable[[], Tensor]
    later_peak_attention: Callable[[], Tensor]
    change: Callable[[], Tensor]


class Selector(Protocol):
    """Scores tokens: higher is recomputed first. It may have a `name` for reports.

    With an attribute `looks_ahead` that is true it may ask for `Facts.later_peak_attention`.

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
    """The first tokens of each chunk (EPIC, arXiv 2410.15332) whose reuse is wrong.

    A chunk that stands after what it was cached after, as the first one does, comes last.
    """
    assert facts.offsets is not None, "the pass has asked for chunks"
    scores = -facts.offsets.to(facts.v_deviation.dtype)
    return scores.masked_fill(_in_exact_chunk(facts), -torch.inf)


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


def by_change(facts: Facts) -> Tensor:
    """What the fresh tokens would read differently: keys, values and attention in one.

    It tells more at later layers: of what was tried, five checks of ever fewer tokens did best.
    """
    return facts.change()


def by_question(facts: Facts) -> Tensor:
    """Relative deviation of the values, where the fresh tokens look in the layers to come.

    Sizes of values differ from layer to layer, and where attention rests they are small: what share
    of a value is wrong at the check layer tells more of later layers than by how much it is.
    """
    least = torch.finfo(torch.float32).tiny
    wrong = (facts.v_deviation / facts.v_size.clamp_min(least)).sqrt()
    return wrong * facts.later_peak_attention()


BUILT_IN: Mapping[str, Selector] = {
    "v": by_values,
    "k": by_keys,
    "kv": by_both,
    "heads": by_heads,
    "random": by_chance,
    "attention": by_attention,
    "change": by_change,
    "question": by_question,
}
"""The selectors that the option `selector` knows by name."""

ROUNDING = 1e-3
"""Of the largest deviation: a squared one in bfloat16 that is rounding stays far below."""

NEEDS_CHUNKS = frozenset({"heads"})
ASKING = frozenset({"attention", "change"})
"""Those that ask how the fresh tokens read the prompt at the check layer; a callable may."""


def _in_exact_chunk(facts: Facts) -> Tensor:
    """Bool [N, L]: the first token of its chunk deviates by rounding only.

    It sees the chunk's context and little else, so it deviates as soon as that is another one.
    """
    assert facts.chunks is not None and facts.offsets is not None
    begins = facts.positions - facts.offsets
    place = torch.arange(begins.shape[1], device=begins.device).expand_as(begins)
    before = torch.cat([begins[:, :1] - 1, begins[:, :-1]], 1)
    first = torch.cummax(torch.where(begins != before, place, 0), 1).values
    cached = facts.v_deviation.masked_fill(facts.chunks < 0, 0.0)
    of_head = cached.gather(1, first)
    return of_head <= ROUNDING * of_head.amax(1, keepdim=True)


def _hashed(x: Tensor) -> Tensor:
    """float32 in [0, 1) for each integer below 2**32; no product exceeds 63 bits."""
    for _ in range(3):
        x = ((x ^ (x >> 16)) * 73244475) & 0xFFFFFFFF
    return (x >> 8).to(torch.float32) * 2.0**-24


def looks_ahead(selector: object) -> bool:
    """Whether a selector, or the name of one, is told where the fresh tokens look later."""
    return selector == "question" or bool(getattr(selector, "looks_ahead", False))


def selector_name(selector: object) -> str:
    """What reports call a selector."""
    if isinstance(selector, str):
        return selector
    named = getattr(selector, "name", None) or getattr(selector, "__name__", None)
    return str(named or type(selector).__name__)


def resolve(selector: str | Selector) -> Selector:
    """A selector by name, or itself."""
    return BUILT_IN[selector] if isinstance(selector, str) else selector
