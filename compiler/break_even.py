"""Where a cascade begins to pay: integer roots of the difference of two times.

The times have maxima and roundings in them, so a root is searched for and not solved for: outwards
from the size at hand, until the sign changes, then by bisection. The nearest change counts.
"""

from __future__ import annotations

from collections.abc import Callable

# How far a size is followed: beyond this no cascade begins or ceases to pay.
MOST = 2**20


def crossing(pays: Callable[[int], bool], at: int, least: int, most: int = MOST) -> int | None:
    """The smallest size of the other side of the change nearest to `at`.

    Args:
        pays: the side of a size.
        at: the size at hand; `least <= at`.
        least: the smallest size there is.
        most: the largest.

    Returns:
        The first size after the change: `pays(c) != pays(c - 1)`. None where there is no change.

    Example:
        >>> crossing(lambda size: size >= 37, at=1000, least=1)
        37
        >>> crossing(lambda size: True, at=1000, least=1) is None
        True
    """
    side = pays(at)
    below = _other_side(pays, side, at, least, down=True)
    above = _other_side(pays, side, at, max(most, at), down=False)
    found = [bisected(pays, low, high) for low, high in (below, above) if low < high]
    return min(found, key=lambda size: abs(size - at), default=None)


def _other_side(
    pays: Callable[[int], bool], side: bool, at: int, end: int, *, down: bool
) -> tuple[int, int]:
    """Two sizes with a change between them, going away from `at` in doubling steps."""
    near, step = at, 1
    while near != end:
        far = max(end, at - step) if down else min(end, at + step)
        if pays(far) != side:
            return (far, near) if down else (near, far)
        near, step = far, 2 * step
    return at, at


def bisected(pays: Callable[[int], bool], low: int, high: int) -> int:
    """The first size that is not on the side of `low`, which is another than that of `high`."""
    side = pays(low)
    while high - low > 1:
        middle = (low + high) // 2
        if pays(middle) == side:
            low = middle
        else:
            high = middle
    return high
