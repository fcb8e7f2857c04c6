"""Does blending pay: enough cached tokens, and the one guard that says so for symbolic sizes."""

from __future__ import annotations

from fractions import Fraction

import sympy
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from torch_cascade.compiler.decide import Decision, has_default_range
from torch_cascade.compiler.graph import Size, Sizes
from torch_cascade.compiler.options import Options
from torch_cascade.compiler.report import Reason


def decide_reuse(cached: Size, ratio: Fraction, sizes: Sizes, options: Options) -> Decision:
    """Choose between recomputing all tokens of a prompt and blending.

    A guard may be added, as by `decide`. A callable `decide` is about attention: here it counts as
    "auto".

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


def _settled(condition: sympy.Rel, sizes: Sizes, options: Options) -> tuple[bool, str]:
    """A condition on backed sizes, in the call being compiled; and the guard that it became."""
    assert sizes.shape_env is not None  # static sizes were settled by the caller
    default = all(has_default_range(symbol, sizes) for symbol in condition.free_symbols)
    guarded = options.guards == "auto" and default
    if guarded:
        holds = bool(sizes.shape_env.create_symboolnode(condition))
    else:
        values = {s: sizes.hint(s) for s in condition.free_symbols}
        holds = bool(condition.subs(values))
    taken = str(condition if holds else sympy.Not(condition))
    return holds, taken if guarded else ""
