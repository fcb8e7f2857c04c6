"""Ways to reuse cached chunks, and how much of a prompt each of them computes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

FULL = "full"
REUSE = "reuse"
CHECK = 1
"""The layer where plain selectors choose: the first whose keys depend on other tokens."""

PLAIN = ("random", "heads", "k", "v", "kv", "attention", "change", "question")
_FIVE: dict[int, Fraction | None] = {
    1: Fraction(27, 10),
    3: Fraction(13, 10),
    5: Fraction(11, 10),
    9: Fraction(1),
    12: None,
}
GRADUAL = {
    "gradual v": ("v", {1: Fraction(2), 2: Fraction(4, 3), 3: None}),
    "gradual attention": ("attention", {1: Fraction(7, 3), 3: None}),
    "gradual change": ("change", _FIVE),
    "gradual question": ("question", _FIVE),
}
"""Selector, and the ratio at each check layer as a multiple of the arm's; None: what is left."""

LEAST = Fraction(3, 4)

NAMES = (*PLAIN, *GRADUAL)


@dataclass(frozen=True)
class Arm:
    """One way to reuse.

    Attributes:
        name: for tables.
        ratio: of the cached tokens, computed again in a layer, on average as `rows` says.
        options: of `torch.compile(..., backend="cascade")`.
    """

    name: str
    ratio: Fraction
    options: dict[str, Any]

    def __str__(self) -> str:
        """Name and ratio."""
        return f"{self.name} {float(self.ratio):g}"


def reuse() -> Arm:
    """Nothing is computed again."""
    return Arm(REUSE, Fraction(0), {"recompute_ratio": "0"})


def full() -> Arm:
    """Everything is, by way of the pass: what is left is rounding."""
    return Arm(FULL, Fraction(1), {"recompute_ratio": "1"})


def arm(name: str, ratio: Fraction, layers: int) -> Arm:
    """The arm of that name at a ratio.

    Args:
        name: one of `NAMES`.
        ratio: above 0, below 1.
        layers: of the model.
    """
    if name in PLAIN:
        return Arm(name, ratio, {"selector": name, "check_layers": {CHECK: str(ratio)}})
    selector, multiples = GRADUAL[name]
    stages = gradual(multiples, ratio, layers)
    written = {layer: str(value) for layer, value in stages.items()}
    return Arm(name, ratio, {"selector": selector, "check_layers": written})


def selector_of(name: str) -> str:
    """The option `selector` of an arm."""
    return GRADUAL[name][0] if name in GRADUAL else name


def rows(stages: dict[int, Fraction], layers: int) -> Fraction:
    """Cached rows computed, summed over layers, as a multiple of the cached tokens.

    Layers before the first check compute all. From a check layer on the kept ones count (of a check
    layer itself keys and values are computed for the rows before it, which is not counted).

    Example:
        >>> rows({1: Fraction(1, 4)}, 5), rows({1: Fraction(1, 2), 3: Fraction(1, 10)}, 5)
        (Fraction(2, 1), Fraction(11, 5))
    """
    checks = sorted(stages)
    ends = [*checks[1:], layers]
    kept = [stages[check] * (end - check) for check, end in zip(checks, ends, strict=True)]
    return checks[0] + sum(kept, Fraction(0))


def gradual(
    multiples: dict[int, Fraction | None], ratio: Fraction, layers: int
) -> dict[int, Fraction]:
    """Ratios at several check layers that compute as many rows as `{1: ratio}` does.

    Args:
        multiples: for each check layer its ratio as a multiple of `ratio`, cut to 1; None for the
            last, which takes what is left. In a model so shallow that this would be less than
            `LEAST` of `ratio`, all are moved towards 1.
        ratio: of the single check.
        layers: of the model.

    Raises:
        ValueError: the model has too few layers.

    Example:
        >>> gradual({1: Fraction(2), 3: None}, Fraction(1, 10), 11)
        {1: Fraction(1, 5), 3: Fraction(3, 40)}
    """
    *earlier, last = sorted(multiples)
    if last >= layers:
        raise ValueError(f"check layer {last} of a model of {layers} layers")
    more = {x: (multiples[x] or Fraction(1)) - 1 for x in earlier}
    spans = dict(zip(earlier, (y - x for x, y in pairwise([*earlier, last])), strict=True))
    excess = sum((more[x] * spans[x] for x in earlier), Fraction(0))
    moved = min(Fraction(1), (1 - LEAST) * (layers - last) / excess)
    stages = {x: min(Fraction(1), (1 + moved * more[x]) * ratio) for x in earlier}
    used = rows(stages | {last: Fraction(0)}, layers)
    return stages | {last: (rows({CHECK: ratio}, layers) - used) / (layers - last)}


def check_budget(arm: Arm, cached: int, last: int) -> None:
    """A blend whose logits are asked of n tokens computes n - 1 cached rows at least.

    (They might not be fresh, as far as the graph knows.) A smaller budget would not be kept.

    Args:
        arm: any.
        cached: tokens with cached copies.
        last: n.

    Raises:
        ValueError: it would not be; `reuse` is let through, as its extra rows are the first tokens
            of the prompt, whose cached copies are exact.
    """
    for share in arm.options.get("check_layers", {}).values():
        rows_kept = math.ceil(Fraction(share) * cached)
        if rows_kept < last - 1:
            raise ValueError(
                f"{arm} keeps {rows_kept} of {cached} cached rows, but logits of {last} tokens "
                f"take {last - 1}: ask for fewer fresh tokens, or a larger ratio"
            )


def all_arms(names: Sequence[str], ratios: Sequence[Fraction], layers: int) -> list[Arm]:
    """Reuse, full, then ratio by ratio every named arm that the model has layers for."""
    layered = [x for x in names if layers > (max(GRADUAL[x][1]) if x in GRADUAL else CHECK) + 1]
    return [reuse(), full(), *(arm(x, ratio, layers) for ratio in ratios for x in layered)]
