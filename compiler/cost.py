"""Does a rewrite pay: bytes of each strategy as sympy expressions, and the one guard we ever add.

Both sides of a decision compute the same function, so it concerns speed only. Where the sizes do
not settle it, the comparison itself becomes a guard (`guards="auto"`): sizes on the same side
share one artefact, and a size that crosses compiles the other side once.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    assert sizes.shape_env is not None  # static sizes were settled by the caller
    if free_unbacked_symbols(pays) or None in numbers:
        return Decision(True, "sizes known only at run time: taken as long", *numbers)
    guarded = options.guards == "auto" and _ranges_are_default(pays, sizes)
    if guarded:
        apply = bool(sizes.shape_env.create_symboolnode(pays))
    else:
        naive, cascade = numbers
        assert naive is not None and cascade is not None
        apply = cascade < naive
    taken = str(pays if apply else sympy.Not(pays))
    return Decision(
        apply,
        "fewer KV bytes" if apply else "as many KV bytes or more",
        *numbers,
        guard=taken if guarded else "",
        reason=None if apply else Reason.NOT_PROFITABLE,
    )


def _ranges_are_default(condition: sympy.Basic, sizes: Sizes) -> bool:
    """True iff no symbol has a user's upper bound: a guard inside it would be an error to them."""
    assert sizes.shape_env is not None
    ranges = sizes.shape_env.var_to_range
    return all(
        s not in ranges or ranges[s].upper in (int_oo, sympy.oo) or ranges[s].upper >= 2**31
        for s in condition.free_symbols
    )
