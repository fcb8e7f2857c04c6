"""What the passes found and did: reasons, declines, sites, the report.

Every analysis returns its result or a `Declined`. The reasons are a closed enum so they can be
counted, documented and tested; the dynamic part stands in `Declined.detail`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Reason(enum.Enum):
    """Why an attention was not rewritten. The value is a stable identifier for tools."""

    # Capture: the call is not raised to `cascade::sdpa`.
    REQUIRES_GRAD = "requires-grad"
    DROPOUT = "dropout"
    HIGHER_ORDER_BODY = "higher-order-body"
    FLEX_ATTENTION = "flex-attention"
    MULTI_HEAD_ATTENTION = "multi-head-attention"
    SDPA_KERNEL_CONTEXT = "sdpa-kernel-context"
    TENSOR_SCALE = "tensor-scale"
    FLOAT64 = "float64"
    UNSUPPORTED_CALL = "unsupported-call"
    AUTOCAST_MIXED = "autocast-mixed"
    # Hand-written attention: looks like attention, but not provably the same function.
    SPELLING = "spelling"
    FINITE_FILL = "finite-fill"
    SCORES_USED = "scores-used"
    # Analysis: K and V.
    NO_SHARED_PREFIX = "no-shared-prefix"
    KV_MISMATCH = "kv-mismatch"
    RANK = "rank"
    LAYOUT = "layout"
    EMPTY_SEGMENT = "empty-segment"
    MASK_SHAPE = "mask-shape"
    # Decision.
    NOT_PROFITABLE = "not-profitable"
    NEVER = "decide-never"
    UNBACKED_SIZE = "unbacked-size"
    # Lowering.
    NO_KERNEL = "no-kernel"
    # The pass itself failed: a bug of this package, never silent.
    PASS_FAILED = "pass-failed"
    DISABLED = "disabled"


@dataclass(frozen=True)
class Declined:
    """A refusal with its reason; falsy, so `if site:` reads well at the call site.

    Attributes:
        reason: the closed-enum reason.
        node: name of the graph node it concerns ("" where there is none).
        detail: what was found, with numbers; for people.
        hint: what the user could change ("" where nothing helps).
    """

    reason: Reason
    node: str = ""
    detail: str = ""
    hint: str = ""

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        where = f" at {self.node}" if self.node else ""
        detail = f": {self.detail}" if self.detail else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{self.reason.value}{where}{detail}{hint}"
