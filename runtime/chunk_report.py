"""What of a prompt was cached and from where it came; what a store holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch_cascade.runtime.chunk_parts import Ids
from torch_cascade.runtime.chunk_plan import Cached, Plan


@dataclass(frozen=True)
class PartReport:
    """One part of a prompt.

    Attributes:
        prompt: the row of the batch.
        part: counts the parts of the row.
        tokens: how many it has.
        reused: how many of them have a cached copy.
        tier: where that was: "gpu", "cpu" or "disk"; "fresh" for none.
        nbytes: of the cached keys and values of these tokens.
        exact: it was cached after the same tokens as it stands after here, so it is what a full
            prefill computes.
    """

    prompt: int
    part: int
    tokens: int
    reused: int
    tier: str
    nbytes: int
    exact: bool


@dataclass(frozen=True)
class BlendReport:
    """What a blended batch of prompts consists of.

    Attributes:
        parts: every part of every prompt.
        refused: files of its chunks that could not be used, and why.
    """

    parts: tuple[PartReport, ...]
    refused: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Of all prompts, without padding."""
        return sum(part.tokens for part in self.parts)

    @property
    def reused(self) -> int:
        """Tokens with a cached copy; all others are computed."""
        return sum(part.reused for part in self.parts)

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of keys and values by the tier that they came from."""
        counts: Counter[str] = Counter()
        for part in self.parts:
            counts[part.tier] += part.nbytes
        return {tier: count for tier, count in counts.items() if count}

    def __str__(self) -> str:
        """A line for everything, then one for each part."""
        loaded = ", ".join(f"{count:,} bytes from {tier}" for tier, count in self.nbytes.items())
        lines = [f"{self.reused} of {self.tokens} tokens have cached copies: {loaded or 'none'}"]
        for part in self.parts:
            exact = ", exact" if part.exact else ""
            lines.append(
                f"  prompt {part.prompt}, part {part.part}: {part.reused} of {part.tokens} tokens "
                f"from {part.tier}{exact}"
            )
        return "\n".join([*lines, *(f"  refused: {reason}" for reason in self.refused)])


def blend_report(
    plan: Plan, found: Sequence[Sequence[tuple[Cached, str] | None]], refused: tuple[str, ...]
) -> BlendReport:
    """What a plan reuses of the chunks that were found, with the tiers they were found in."""
    reused = {
        (n, placed.span.start): placed.span.length
        for n, row in enumerate(plan.rows)
        for placed in row
    }
    parts = []
    for n, (row, spans) in enumerate(zip(found, plan.layout.spans, strict=True)):
        tokens = plan.layout.tokens[n]
        for i, (hit, span) in enumerate(zip(row, spans, strict=True)):
            count = reused.get((n, span.start), 0)
            cached, tier = hit if hit is not None and count else (None, "fresh")
            share = 0 if cached is None else cached.nbytes * count // span.length
            exact = cached is not None and _stands_after(cached.key.context, tokens, span.position)
            parts.append(PartReport(n, i, span.length, count, tier, share, exact))
    return BlendReport(tuple(parts), refused)


def _stands_after(context: Ids, tokens: Ids, place: int) -> bool:
    """Whether the first `place` of a prompt's tokens are the context."""
    return len(context) == place and context == tokens[:place]


@dataclass(frozen=True)
class TierReport:
    """What one tier holds.

    Attributes:
        name: "gpu", "cpu" or "disk".
        chunks: how many.
        nbytes: how large they are.
        budget: bytes; None for no limit.
        hits: chunks of prompts that were found here first.
    """

    name: str
    chunks: int
    nbytes: int
    budget: int | None
    hits: int


@dataclass(frozen=True)
class StoreReport:
    """What a store holds.

    Attributes:
        tiers: the fastest first.
        misses: parts of prompts that had no cached copy.
        refused: files that could not be used, and why.
    """

    tiers: tuple[TierReport, ...]
    misses: int
    refused: tuple[str, ...]

    def __str__(self) -> str:
        """A line a tier."""
        lines = [
            f"{t.name}: {t.chunks} chunks, {t.nbytes:,} of "
            f"{'unlimited' if t.budget is None else f'{t.budget:,}'} bytes, {t.hits} hits"
            for t in self.tiers
        ]
        refused = [f"refused: {reason}" for reason in self.refused]
        return "\n".join([*lines, f"misses: {self.misses}", *refused])
