"""What the code of ops may ask about sizes, which are symbols where it is traced."""

from __future__ import annotations

import torch


def known(condition: bool | torch.SymBool) -> bool:
    """True iff the condition is provable; adds no guard."""
    if isinstance(condition, bool):
        return condition
    # Imported here: eager callers need no sympy.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)
