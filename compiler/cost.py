"""Does a rewrite pay: bytes of each strategy as sympy expressions, and the one guard we ever add.

Both sides of a decision compute the same function, so it concerns speed only. Where the sizes do
not settle it, the comparison itself becomes a guard (`guards="auto"`): sizes on the same side
share one artefact, and a size that crosses compiles the other side once.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import sympy
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy.numbers import int_oo

from torch_cascade.compiler.graph import Size, Sizes
from torch_cascade.compiler.options import Options
from torch_cascade.compiler.report import Reason


@dataclass(frozen=True)
class KeyRun:
    """One segment as the cost model sees it: `rows` KV rows of `length` keys."""

    rows: Size
    length: Size


@dataclass(frozen=True)
class Work:
    """The sizes of one attention that matter for its traffic.

    Attributes:
        batch, heads, q_len: the query rows N, query heads and tokens a row.
        kv_heads: heads of the base K and V.
        token_bytes: bytes of one token's K and V in one head.
        partial_bytes: bytes of one partial result: a float32 row of V and its log-sum-exp.
        runs: the segments.
    """

    batch: Size
    heads: Size
    q_len: Size
    kv_heads: Size
    token_bytes: Size
    partial_bytes: Size
    runs: tuple[KeyRun, ...]

    def naive_bytes(self) -> Size:
        """KV bytes that attention over the expanded batch reads."""
        keys = sum((run.length for run in self.runs), sympy.Integer(0))
        return self.batch * self.kv_heads * self.token_bytes * keys

    def cascade_bytes(self) -> Size:
        """KV bytes read once a row, plus each partial result written and read."""
        tokens = sum((run.rows * run.length for run in self.runs), sympy.Integer(0))
        partials = len(self.runs) if len(self.runs) > 1 else 0
        merged = 2 * partials * self.batch * self.heads * self.q_len * self.partial_bytes
        return self.kv_heads * self.token_bytes * tokens + merged


@dataclass(frozen=True)
class Decision:
    """What was decided, and on what grounds.

    Attributes:
        apply: rewrite or not.
        why: one sentence.
        naive, cascade: bytes for the sizes being compiled (None where a size has no hint).
        guard: the inequality that now guards the artefact, as text; "" for none.
        reason: why not, where `apply` is false.
    """

    apply: bool
    why: str
    naive: int | None = None
    cascade: int | None = None
    guard: str = ""
    reason: Reason | None = None


def decide(work: Work, sizes: Sizes, options: Options) -> Decision:
    """Choose between the naive graph and the cascade for one attention.

    A guard is added only with `decide="auto"`, `guards="auto"` and sizes that do not settle the
    comparison, all of them backed and without a range given by the user.
    """
    naive, cascade = work.naive_bytes(), work.cascade_bytes()
    numbers = sizes.hint(naive), sizes.hint(cascade)
    if options.decide == "never":
        return Decision(False, "decide=never", *numbers, reason=Reason.NEVER)
    if options.decide == "always":
        return Decision(True, "decide=always", *numbers)
    pays = sympy.Lt(cascade, naive)
    if sizes.known(pays):
        return Decision(True, "fewer KV bytes for all sizes", *numbers)
    if sizes.known(sympy.Ge(cascade, naive)):
        why = "as many KV bytes or more"
        return Decision(False, why, *numbers, reason=Reason.NOT_PROFITABLE)
    return _decide_on_hint(pays, numbers, sizes, options)


def _decide_on_hint(
    pays: sympy.Rel, numbers: tuple[int | None, int | None], sizes: Sizes, options: Options
) -> Decision:
    if free_unbacked_symbols(pays) or None in numbers:
        return Decision(True, "sizes known only at run time: taken as long", *numbers)
    apply, guard = _settled(pays, sizes, options)
    return Decision(
        apply,
        "fewer KV bytes" if apply else "as many KV bytes or more",
        *numbers,
        guard=guard,
        reason=None if apply else Reason.NOT_PROFITABLE,
    )


def _settled(condition: sympy.Rel, sizes: Sizes, options: Options) -> tuple[bool, str]:
    """A condition on backed sizes, in the call being compiled; and the guard that it became."""
    assert sizes.shape_env is not None  # static sizes were settled by the caller
    guarded = options.guards == "auto" and _ranges_are_default(condition, sizes)
    if guarded:
        holds = bool(sizes.shape_env.create_symboolnode(condition))
    else:
        values = {s: sizes.hint(s) for s in condition.free_symbols}
        holds = bool(condition.subs(values))
    taken = str(condition if holds else sympy.Not(condition))
    return holds, taken if guarded else ""


def decide_reuse(cached: Size, ratio: Fraction, sizes: Sizes, options: Options) -> Decision:
    """Choose between recomputing all tokens of a prompt and blending.

    A guard may be added, as by `decide`.

    Args:
        cached: how many tokens have a cached copy.
        ratio: the largest share of them that is recomputed.
        sizes: facts about the sizes.
        options: what the user wants.
    """
    least = options.min_tokens
    if options.decide == "never":
        return Decision(False, "decide=never", reason=Reason.NEVER)
    if options.decide == "always":
        return Decision(True, "decide=always")
    if ratio == 1:
        return Decision(False, "ratio 1 recomputes every token", reason=Reason.NOT_PROFITABLE)
    enough, few = f"min_tokens={least} cached tokens or more", f"fewer than min_tokens={least}"
    condition = sympy.Ge(cached, least)
    if sizes.known(condition):
        return Decision(True, f"{cached} cached tokens, {enough}")
    if sizes.known(sympy.Not(condition)):
        return Decision(False, f"{cached} cached tokens, {few}", reason=Reason.MIN_TOKENS)
    if free_unbacked_symbols(condition):
        return Decision(True, "sizes known only at run time: taken as long")
    apply, guard = _settled(condition, sizes, options)
    why = f"{sizes.hint(cached)} cached tokens, {enough if apply else few}"
    return Decision(apply, why, guard=guard, reason=None if apply else Reason.MIN_TOKENS)


def _ranges_are_default(condition: sympy.Basic, sizes: Sizes) -> bool:
    """True iff no symbol has a user's upper bound: a guard inside it would be an error to them."""
    assert sizes.shape_env is not None
    ranges = sizes.shape_env.var_to_range
    return all(
        s not in ranges or ranges[s].upper in (int_oo, sympy.oo) or ranges[s].upper >= 2**31
        for s in condition.free_symbols
    )
