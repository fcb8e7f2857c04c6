"""What the passes found and did: reasons, declines, sites, the report.

Every analysis returns its result or a `Declined`. The reasons are a closed enum so they can be
counted, documented and tested; the dynamic part stands in `Declined.detail`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Reason(enum.Enum):
    """Why an attention or a reuse was not rewritten. The value is a stable identifier for tools."""

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
    OF_BLEND = "of-blend"
    KV_MISMATCH = "kv-mismatch"
    RANK = "rank"
    LAYOUT = "layout"
    EMPTY_SEGMENT = "empty-segment"
    MASK_SHAPE = "mask-shape"
    # Analysis: token rows.
    NO_TOKEN_RULE = "no-token-rule"
    TOKENS_MIXED = "tokens-mixed"
    ALL_TOKENS = "all-tokens"
    CHECK_LAYER = "check-layer"
    REUSE_MISMATCH = "reuse-mismatch"
    SELECTOR = "selector"
    # Decision.
    NOT_PROFITABLE = "not-profitable"
    MIN_TOKENS = "min-tokens"
    NEVER = "decide-never"
    # Lowering.
    NO_KERNEL = "no-kernel"
    # Analysis: linear layers.
    NO_LINEAR = "no-linear"
    # The pass itself failed: a bug of this package, never silent.
    PASS_FAILED = "pass-failed"


@dataclass(frozen=True)
class Explanation:
    """What a reason means, for the README and for reports.

    Attributes:
        meaning: why the attention was left as it is.
        remedy: what the user can do about it ("" where nothing is to be done).
    """

    meaning: str
    remedy: str = ""


_OUTSIDE = "Call attention outside of it."
_BUG = "Please report it with the warning's text; that attention is computed as Inductor would."

EXPLANATIONS: dict[Reason, Explanation] = {
    Reason.REQUIRES_GRAD: Explanation(
        "The graph is compiled for training: an input requires a gradient.",
        "Run under `torch.no_grad()` or `torch.inference_mode()`.",
    ),
    Reason.DROPOUT: Explanation(
        "The attention drops probabilities at random.", "Call `model.eval()`, or pass dropout 0."
    ),
    Reason.HIGHER_ORDER_BODY: Explanation(
        "The attention stands in the body of a higher-order op (checkpoint, cond, map, scan).",
        _OUTSIDE,
    ),
    Reason.FLEX_ATTENTION: Explanation(
        "`flex_attention` compiles its own kernel from its own mask function.",
        "Use `scaled_dot_product_attention`.",
    ),
    Reason.MULTI_HEAD_ATTENTION: Explanation(
        "`nn.MultiheadAttention` arrives as one call that hides its attention.",
        "Project q, k, v yourself and call `scaled_dot_product_attention`.",
    ),
    Reason.SDPA_KERNEL_CONTEXT: Explanation(
        "The compiled function itself chooses the kernel of this call, with `sdpa_kernel` or so.",
        "Enter `torch.nn.attention.sdpa_kernel` outside of the compiled function.",
    ),
    Reason.TENSOR_SCALE: Explanation(
        "The scale is a tensor, so its value is unknown.", "Pass a Python float, or scale q."
    ),
    Reason.FLOAT64: Explanation(
        "The kernels of this device compute in float32 at best.",
        "Use float32 or a lower precision.",
    ),
    Reason.UNSUPPORTED_CALL: Explanation(
        "The attention call has arguments, a dtype or a device that no kernel here takes.",
    ),
    Reason.AUTOCAST_MIXED: Explanation(
        "The operands of one attention have different dtypes.",
        "Cast q, k and v to one dtype before the call.",
    ),
    Reason.SPELLING: Explanation(
        "It looks like attention written by hand, but is not provably the same function.",
        "Call `scaled_dot_product_attention`.",
    ),
    Reason.FINITE_FILL: Explanation(
        "The mask fills with a large finite number, which is not the same as hiding a key.",
        "Mask with `-inf` or a boolean mask.",
    ),
    Reason.SCORES_USED: Explanation(
        "The scores or probabilities are used elsewhere, so they must exist whole.",
        "Do not return attention weights.",
    ),
    Reason.NO_SHARED_PREFIX: Explanation(
        "Keys and values are not provably expanded from fewer rows inside the graph.",
        "Expand inside the compiled function, or use `SharedPrefixCache`.",
    ),
    Reason.OF_BLEND: Explanation(
        "Its keys and values are those of a prompt of cached chunks, which the pass `blend` looks "
        "after: what became of them is said where layers are reused.",
    ),
    Reason.KV_MISMATCH: Explanation(
        "Keys and values are put together differently.", "Build both in the same way."
    ),
    Reason.RANK: Explanation(
        "The operands have neither 3 nor 4 dimensions, or batch sizes that do not agree.",
        "Reshape to [batch, heads, tokens, features].",
    ),
    Reason.LAYOUT: Explanation(
        "An op between the prefix and the attention mixes axes in a way that is not understood.",
        "Concatenate along the tokens and expand along the batch.",
    ),
    Reason.EMPTY_SEGMENT: Explanation(
        "The shared keys are empty, or no query sees them; on a CPU also: only data tells whether "
        "there are keys and queries."
    ),
    Reason.MASK_SHAPE: Explanation(
        "The mask does not provably broadcast to [batch, heads, queries, keys].",
        "Give the mask 4 dimensions.",
    ),
    Reason.NO_TOKEN_RULE: Explanation(
        "Below the check layer stands an op without a rule for computing some tokens only.",
        "Ask for a rule; all tokens are computed.",
    ),
    Reason.TOKENS_MIXED: Explanation(
        "Below the check layer an op mixes tokens, so some of them cannot be computed alone.",
        "Outside of attention, keep tokens apart: of experts, take "
        "`set_experts_implementation('grouped_mm')` or `'batched_mm'`; of logits ask for the last "
        "tokens only.",
    ),
    Reason.ALL_TOKENS: Explanation(
        "Results are asked for tokens that a blend does not compute. This is an error.",
        "Ask for the last tokens only, inside the compiled function: pass `logits_to_keep=1`, or "
        "write `hidden[:, -1:]`; for tokens elsewhere `hidden[:, index]` with an index that is "
        "given. A graph break makes all that goes on behind it a result, too.",
    ),
    Reason.CHECK_LAYER: Explanation(
        "The graph has no such layer as `check_layers` names.",
        "Name layers from 0, fewer than the model has; a graph break begins to count anew.",
    ),
    Reason.REUSE_MISMATCH: Explanation(
        "The layers do not agree on the tokens that are cached.",
        "Give `reuse_kv` the same `fresh_rows` and `chunks` in all layers, and keys of one length.",
    ),
    Reason.SELECTOR: Explanation(
        "The selector needs to know what the graph does not say.",
        "Give `reuse_kv` its `chunks`, call `scaled_dot_product_attention`, or choose another one.",
    ),
    Reason.NOT_PROFITABLE: Explanation(
        "The cost model says that the rewrite is not faster at these sizes.",
        "`decide=always` rewrites all the same.",
    ),
    Reason.MIN_TOKENS: Explanation(
        "Fewer tokens are cached than `min_tokens` says.", "Lower `min_tokens`."
    ),
    Reason.NEVER: Explanation("`decide=never` was asked for: analysis only."),
    Reason.NO_KERNEL: Explanation("No kernel for this device computes the rewritten attention."),
    Reason.NO_LINEAR: Explanation(
        "It is no linear layer with weights that are inputs of the graph, so the pass `linears` "
        "leaves it to Inductor.",
    ),
    Reason.PASS_FAILED: Explanation("A pass raised an exception: a bug of this package.", _BUG),
}
"""One entry for each reason, in the order of the enum; the README's table is checked against it."""


@dataclass(frozen=True)
class Declined:
    """A refusal with its reason; falsy, so `if site:` reads well at the call site.

    Attributes:
        reason: the closed-enum reason.
        node: name of the graph node it concerns ("" where there is none).
        detail: what was found, with numbers; for people.
        hint: what the user could change ("" where nothing helps).
        where: the user's source line, as `compiler.record.source_line` gives it; set where the
            node is not in the graph the passes see.
    """

    reason: Reason
    node: str = ""
    detail: str = ""
    hint: str = ""
    where: str = ""

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        where = f" at {self.node}" if self.node else ""
        detail = f": {self.detail}" if self.detail else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{self.reason.value}{where}{detail}{hint}"
