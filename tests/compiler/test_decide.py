"""Decisions: guards on symbolic sizes, sizes that must not be guarded, what users decide."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from support import machines
from support.backend import eager_cascade
from support.shared_prefix import P, T, attention, inputs

from torch_cascade.compiler import calibration
from torch_cascade.compiler.backend import recent
from torch_cascade.compiler.decide import UNKNOWN, Decision, Facts
from torch_cascade.compiler.options import Options
from torch_cascade.compiler.pipeline import Pipeline
from torch_cascade.compiler.record import Compilation
from torch_cascade.compiler.report import Reason


@pytest.fixture(autouse=True)
def _a_real_machine(monkeypatch):
    """Launches cost something here: short prefixes do not pay."""
    monkeypatch.setattr(calibration, "_table", lambda device, threads: machines.CPU)


def decision() -> Decision:
    (site,) = recent()[-1].sites
    assert site.decision is not None
    return site.decision


def run(*values: torch.Tensor, dynamic: bool | None = None, **options: Any) -> Decision:
    compiled = torch.compile(attention, backend=eager_cascade(**options), dynamic=dynamic)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*values), attention(*values))
    return decision()


# --- static sizes ---------------------------------------------------------------------------------


def test_the_grounds_of_a_decision():
    made = run(*inputs(3000), dynamic=False)
    assert made.apply and made.facts is not None and made.facts.exact and not made.guard
    assert made.facts.plain.seconds > made.facts.cascade.seconds
    assert made.facts.work.runs[0].length == 3000
    root = made.break_even["prefix"]
    assert 1 < root < 3000 and 1 < made.break_even["branches"] <= T
    assert run(*inputs(root), dynamic=False).apply
    refused = run(*inputs(root - 1), dynamic=False)
    assert not refused.apply and refused.reason is Reason.NOT_PROFITABLE
    assert refused.break_even["prefix"] == root


# --- symbolic sizes -------------------------------------------------------------------------------


def marked(prefix: int, **bounds: int) -> list[torch.Tensor]:
    values = inputs(prefix)
    torch._dynamo.mark_dynamic(values[1], 2, **bounds)
    return values


def test_one_inequality_and_one_compilation_a_side():
    root = run(*inputs(3000), dynamic=False).break_even["prefix"]
    torch._dynamo.reset()
    compiled = torch.compile(attention, backend=eager_cascade())
    sides: list[tuple[int, bool, str]] = []
    with torch.no_grad():
        for prefix in (3000, root + 1, root, 900, root - 1, root // 2, 2, root, root - 1):
            before = recent()
            values = marked(prefix)
            torch.testing.assert_close(compiled(*values), attention(*values))
            new = [r for r in recent() if all(r is not old for old in before)]
            sides += [(prefix, r.sites[0].decision.apply, r.sites[0].decision.guard) for r in new]
    (first, pays, above), (second, loses, below) = sides
    assert (first, pays, second, loses) == (3000, True, root - 1, False)
    assert re.fullmatch(rf"s\d+ >= {root}", above) and re.fullmatch(rf"s\d+ < {root}", below)


def test_a_range_of_the_user_is_not_guarded():
    made = run(*marked(3000, min=2, max=5000))
    assert made.apply and made.guard == "" and "its range was given: no guard" in made.why


def test_a_range_on_one_side_needs_no_guard_and_says_nothing():
    made = run(*marked(3000, min=2000, max=5000))
    assert made.apply and made.guard == "" and "range" not in made.why


def test_guards_never_says_where_it_would_turn():
    made = run(*marked(3000), guards="never")
    assert made.apply and made.guard == "" and "guards=never" in made.why


def test_sizes_known_only_at_run_time_are_assumed():
    def cut(q, prefix, suffix, length):
        size = length.item()
        torch._check(size >= 2)
        torch._check(size <= prefix.shape[2])
        return attention(q, prefix.narrow(2, 0, size), suffix)

    q, prefix, suffix = inputs(3000)
    compiled = torch.compile(cut, backend=eager_cascade(), fullgraph=True)
    with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad():
        for size in (2000, 3):
            actual = compiled(q, prefix, suffix, torch.tensor(size))
            torch.testing.assert_close(actual, attention(q, prefix[:, :, :size], suffix))
    made = decision()
    assert made.apply and made.guard == "" and made.facts.assumed
    assert f"known only at run time, taken for {UNKNOWN}: no guard" in made.why


def test_with_every_size_symbolic_there_is_one_inequality():
    made = run(*inputs(60), dynamic=True)
    assert re.fullmatch(r"s\d+ (<|>=) \d+", made.guard)


# --- what users decide ----------------------------------------------------------------------------


def test_always_and_never():
    always = run(*inputs(P), decide="always")
    assert always.apply and always.guard == "" and always.facts is not None
    never = run(*inputs(3000), decide="never")
    assert not never.apply and never.reason is Reason.NEVER and never.facts.pays


def test_a_callable_is_given_the_facts():
    seen: list[Facts] = []

    def long_prefixes(facts: Facts) -> bool:
        seen.append(facts)
        return facts.work.runs[0].length > 1000

    assert run(*inputs(3000), decide=long_prefixes).apply
    refused = run(*inputs(40), decide=long_prefixes)
    assert not refused.apply and refused.reason is Reason.NOT_PROFITABLE
    assert "as the callable decides" in refused.why
    assert [facts.work.runs[0].length for facts in seen] == [3000, 40]
    assert seen[0].pays and seen[0].device is machines.CPU


def test_a_callable_that_answers_something_else_is_an_error():
    with pytest.raises(Exception, match="expected the callable to return a bool, got 'yes'"):
        run(*inputs(3000), decide=lambda facts: "yes")


def test_a_callable_that_raises_is_an_error_of_its_own():
    with pytest.raises(Exception, match="option 'decide': the callable raised ZeroDivisionError"):
        run(*inputs(3000), decide=lambda facts: 1 // 0)


def test_a_calibration_that_cannot_be_used_is_no_failure_of_a_pass(tmp_path):
    nothing = str(tmp_path / "nothing.json")
    with pytest.raises(Exception, match=r"option 'calibration' .*nothing\.json: .*No such file"):
        run(*inputs(3000), calibration=nothing)


class Keyed:
    """A callable with a key."""

    def __init__(self, key: str) -> None:
        self.key = key

    def __call__(self, facts: Facts) -> bool:
        return True

    def uuid(self) -> str:
        return self.key


def test_a_callable_without_a_key_is_not_cached():
    assert _uuid(Options(decide=lambda facts: True)) is None
    keys = {_uuid(Options(decide=Keyed(key))) for key in "ab"} | {_uuid(Options())}
    assert len(keys) == 3 and None not in keys


def test_the_figures_are_part_of_the_key(monkeypatch):
    before = _uuid(Options())
    slower = machines.CPU.with_values({"launch": 1.0}, "a test")
    monkeypatch.setattr(calibration, "_table", lambda device, threads: slower)
    assert _uuid(Options()) != before


def _uuid(options: Options) -> str | None:
    return Pipeline(options, Compilation()).uuid()
