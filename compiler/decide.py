"""Does a rewrite pay: both ways priced, and the one guard that a decision may add.

Both sides of a decision compute the same function, so it concerns time only. Where a symbolic size
could turn it (`compiler/break_even.py`), one inequality on that size becomes a guard
(`guards="auto"`): sizes on the same side share one artefact, and a size that crosses compiles the
other side once. Nothing is specialised; the other sizes are taken as they are now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import sympy
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy.numbers import int_oo

from torch_cascade.compiler import cost
from torch_cascade.compiler.break_even import MOST, crossing
from torch_cascade.compiler.calibration import device_for
from torch_cascade.compiler.device import Device
from torch_cascade.compiler.graph import Size, Sizes
from torch_cascade.compiler.options import Options
from torch_cascade.compiler.price import Price
from torch_cascade.compiler.report import Reason
from torch_cascade.compiler.work import Work

# What a size that is known only at run time is taken for.
UNKNOWN = 1024
# A join that gives keys to every branch must save so much: where it did not (one H200), it cost up
# to 80 %, and what it saved at best was 17 %.
_UNSHARED = 1.05


class DecideError(ValueError):
    """A callable `decide` that raised, or returned something else than a bool."""


@dataclass(frozen=True)
class Facts:
    """What a decision is made from; a callable `options={"decide": fn}` is given one.

    Attributes:
        work: the sizes, as numbers: those of the call being compiled.
        device: with the figures that were used.
        plain, cascade: both ways, with their formulas and times.
        exact: no size is symbolic.
        assumed: sizes known only at run time, each taken for `UNKNOWN`.
    """

    work: Work
    device: Device
    plain: Price
    cascade: Price
    exact: bool
    assumed: tuple[str, ...] = ()

    def ways(self) -> dict[str, Price]:
        """Both by name."""
        return {"plain": self.plain, "cascade": self.cascade}

    @property
    def pays(self) -> bool:
        """True iff the cascade is the faster way; never where nothing is shared."""
        shared = any(run.rows < self.work.batch for run in self.work.runs if run.length)
        return shared and self.cascade.seconds < self.plain.seconds

    @property
    def margin(self) -> float:
        """How many times longer the slower way takes."""
        times = sorted((self.plain.seconds, self.cascade.seconds))
        return times[1] / times[0]

    @property
    def level(self) -> int:
        """The segment that most rows share: of those the longest."""
        runs = self.work.runs
        return min(range(len(runs)), key=lambda i: (runs[i].rows, -runs[i].length))

    def with_prefix(self, length: int) -> Facts:
        """The same with another length of the segment that most rows share."""
        runs = list(self.work.runs)
        runs[self.level] = replace(runs[self.level], length=length)
        return priced(self.work.with_runs(tuple(runs)), self.device)

    def with_branches(self, branches: int) -> Facts:
        """The same with as many branches for each row of the last shared level."""
        work = self.work
        rows = max(run.rows for run in work.runs if run.rows < work.batch)
        batch = rows * branches
        runs = tuple(
            replace(run, rows=batch) if run.rows == work.batch else run for run in work.runs
        )
        return priced(replace(work.with_runs(runs), batch=batch), self.device)

    def break_even(self) -> dict[str, int | None]:
        """The prefix and the number of branches nearest to these at which the decision turns."""
        if all(run.rows == self.work.batch for run in self.work.runs):
            return {}
        prefix = self.work.runs[self.level].length
        shared = max(run.rows for run in self.work.runs if run.rows < self.work.batch)
        branches = self.work.batch // shared
        return {
            "prefix": crossing(lambda n: self.with_prefix(n).pays, prefix, min(1, prefix)),
            "branches": crossing(lambda n: self.with_branches(n).pays, branches, 1, 4096),
        }


@lru_cache(maxsize=4096)
def priced(work: Work, device: Device) -> Facts:
    """Facts of sizes that are numbers."""
    return Facts(work, device, cost.plain(work, device), cost.cascade(work, device), exact=True)


@dataclass(frozen=True)
class Decision:
    """What was decided, and on what grounds.

    Attributes:
        apply: rewrite or not.
        why: one sentence.
        naive, cascade: KV bytes for the sizes being compiled.
        guard: the inequality that now guards the artefact, as text; "" for none.
        reason: why not, where `apply` is false.
        facts: the numbers; None where there were none to be had.
        break_even: the nearest prefix and number of branches that turn the decision.
    """

    apply: bool
    why: str
    naive: int | None = None
    cascade: int | None = None
    guard: str = ""
    reason: Reason | None = None
    facts: Facts | None = None
    break_even: Mapping[str, int | None] | None = None


@dataclass(frozen=True)
class _Numbers:
    """Sizes as numbers: hints, what a symbol is set to, and `UNKNOWN` for what has no hint."""

    sizes: Sizes
    given: Mapping[sympy.Symbol, int]

    def __call__(self, size: Size) -> int:
        expr = sympy.sympify(size)
        return int(expr.xreplace({s: self.of_symbol(s) for s in expr.free_symbols}))

    def of_symbol(self, symbol: sympy.Symbol) -> sympy.Integer:
        """The number of one symbol."""
        number = self.given.get(symbol)
        if number is None:
            number = self.sizes.hint(symbol)
        return sympy.Integer(UNKNOWN if number is None else number)


def decide(work: Work, sizes: Sizes, options: Options) -> Decision:
    """Choose between the naive graph and the cascade for one attention.

    A guard is added only with `decide="auto"`, `guards="auto"` and a symbolic size at which the
    decision turns, if it is backed and without a range given by the user.

    Raises:
        DecideError: a callable `decide` raised, or returned something else than a bool.
    """
    device = device_for(work.device, options.calibration)
    symbols = {s for size in work.sizes() for s in sympy.sympify(size).free_symbols}
    assumed = tuple(sorted(str(s) for s in symbols if free_unbacked_symbols(s)))
    now = replace(priced(work.at(_Numbers(sizes, {})), device), exact=not symbols, assumed=assumed)
    made = _chosen(now, options)
    decision = replace(
        made,
        naive=int(now.work.naive_bytes()),
        cascade=int(now.work.cascade_bytes()),
        facts=now,
        break_even=now.break_even(),
        reason=None if made.apply else made.reason or Reason.NOT_PROFITABLE,
    )
    if options.decide != "auto" or not symbols:
        return decision
    return _guarded(decision, work, sizes, options)


def cheapest(works: Sequence[Work], sizes: Sizes, options: Options) -> int:
    """Which of several cascades of one attention takes the least time; the first of equals.

    Decided on the sizes of the call being compiled and never guarded: all are right. Not on a CPU:
    there the copy that joins keys took 4 times as long as all that it saved (measured).

    Args:
        works: the levels as the graph has them first.
        sizes: of the graph.
        options: of the compilation.
    """
    if options.decide != "auto" or len(works) == 1 or works[0].device.type == "cpu":
        return 0
    device = device_for(works[0].device, options.calibration)
    return cheapest_of([work.at(_Numbers(sizes, {})) for work in works], device)


def cheapest_of(works: Sequence[Work], device: Device) -> int:
    """The same for sizes that are numbers."""
    own = works[0].own_keys
    times = [
        cost.cascade(work, device).seconds * (_UNSHARED if work.own_keys > own else 1)
        for work in works
    ]
    return times.index(min(times))


def _asked(callable_: Callable[[Facts], object], now: Facts) -> bool:
    try:
        answer = callable_(now)
    except Exception as error:
        raise DecideError(f"option 'decide': the callable raised {error!r}") from error
    if isinstance(answer, bool):
        return answer
    raise DecideError(f"option 'decide': expected the callable to return a bool, got {answer!r}")


def _chosen(now: Facts, options: Options) -> Decision:
    if options.decide == "never":
        return Decision(False, "decide=never", reason=Reason.NEVER)
    if options.decide == "always":
        return Decision(True, "decide=always")
    if callable(options.decide):
        return Decision(_asked(options.decide, now), "as the callable decides")
    said = "faster" if now.pays else "not faster"
    if now.assumed:
        said += f"; {', '.join(now.assumed)} known only at run time, taken for {UNKNOWN}: no guard"
    return Decision(now.pays, said)


def _guarded(decision: Decision, work: Work, sizes: Sizes, options: Options) -> Decision:
    """The decision with the guard that it needs, or with what is said instead of one."""
    turn = next(_turns(decision, work, sizes), None)
    if turn is None:
        return decision
    symbol, size = turn
    if options.guards != "auto":
        return replace(decision, why=f"{decision.why}; turns at {symbol} = {size}, guards=never")
    if not has_default_range(symbol, sizes):
        why = f"{decision.why}; turns at {symbol} = {size}, but its range was given: no guard"
        return replace(decision, why=why)
    below = sizes.hint(symbol) < size  # type: ignore[operator]
    condition = sympy.Lt(symbol, size) if below else sympy.Ge(symbol, size)
    assert sizes.shape_env is not None
    bool(sizes.shape_env.create_symboolnode(condition))
    return replace(decision, guard=str(condition))


def _turns(decision: Decision, work: Work, sizes: Sizes) -> Iterator[tuple[sympy.Symbol, int]]:
    """Each backed symbol at which the decision turns, with the size; lengths of prefixes first."""
    assert decision.facts is not None
    for symbol in _in_order(work, sizes):
        at = sizes.hint(symbol)
        if at is None:
            continue
        low, high = _range(symbol, sizes)
        found = crossing(_side(symbol, work, sizes, decision.facts.device), at, min(low, at), high)
        if found is not None:
            yield symbol, found


def _side(symbol: sympy.Symbol, work: Work, sizes: Sizes, device: Device) -> Callable[[int], bool]:
    """Whether the cascade pays at another value of a symbol."""

    def pays(value: int) -> bool:
        return priced(work.at(_Numbers(sizes, {symbol: value})), device).pays

    return pays


def _in_order(work: Work, sizes: Sizes) -> list[sympy.Symbol]:
    """Symbols of the lengths of shared segments, then those of the batch, then the others."""
    shared = [run.length for run in work.runs if not sizes.equal(run.rows, work.batch)]
    listed = [*shared, work.batch, *work.sizes()]
    found = dict.fromkeys(
        s for size in listed for s in sorted(sympy.sympify(size).free_symbols, key=str)
    )
    return list(found)


def _range(symbol: sympy.Symbol, sizes: Sizes) -> tuple[int, int]:
    """The values that a symbol may have, as far as they are looked at."""
    assert sizes.shape_env is not None
    known = sizes.shape_env.var_to_range.get(symbol)
    if known is None:
        return 1, MOST
    unbounded = known.upper in (int_oo, sympy.oo) or known.upper > MOST
    return max(1, int(known.lower)), MOST if unbounded else int(known.upper)


def has_default_range(symbol: sympy.Symbol, sizes: Sizes) -> bool:
    """True iff a user gave no upper bound: a guard inside it would be an error to them."""
    assert sizes.shape_env is not None
    known = sizes.shape_env.var_to_range.get(symbol)
    return known is None or known.upper in (int_oo, sympy.oo) or known.upper >= 2**31
