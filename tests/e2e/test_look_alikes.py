"""Programs that look like a shared prefix: what is none is left alone, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import look_alikes_keys, look_alikes_rows, look_alikes_scores  # noqa: F401
from support.backend import eager_cascade
from support.look_alikes import CORPUS, LookAlike
from support.programs import plain
from support.tolerance import assert_close_to_reference
from torch._dynamo.utils import counters

from torch_cascade.compiler.report import Reason

CASES = [
    pytest.param(case, dynamic, id=f"{name}-dynamic" if dynamic else name)
    for name, case in CORPUS.items()
    for dynamic in case.dynamic
]
REASONS = {reason.value for reason in Reason} - {Reason.PASS_FAILED.value}


def _tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _compiled(case: LookAlike, dynamic: bool, backend: Any) -> tuple[torch.Tensor, ...]:
    torch._dynamo.reset()
    compiled = torch.compile(case.fn, backend=backend, dynamic=dynamic, fullgraph=True)
    with torch.no_grad():
        return _tuple(compiled(*case.inputs()))


def _assert_same_form(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.stride() == expected.stride()


@pytest.mark.parametrize(("case", "dynamic"), CASES)
def test_look_alike(case: LookAlike, dynamic: bool) -> None:
    actual = _compiled(case, dynamic, eager_cascade(decide="always", verify=True))
    tally = dict(counters["cascade"])
    declined = {k.removeprefix("declined.") for k in tally if k.startswith("declined.")}
    assert declined <= REASONS, declined
    if case.verdict == "never":
        assert tally.get("rewritten", 0) == 0, tally
    expected = _tuple(case.fn(*case.inputs()))
    for ours, theirs in zip(actual, expected, strict=True):
        _assert_same_form(ours, theirs)
    if tally.get("rewritten", 0):
        exact = _tuple(case.fn(*case.inputs(torch.float64)))
        for triple in zip(actual, expected, exact, strict=True):
            assert_close_to_reference(*triple)
        return
    # Not eager code: torch 2.13's own attention patterns take a softmax over any axis for one over
    # the keys, so three programs of the corpus are wrong under plain Inductor.
    for ours, theirs in zip(actual, _compiled(case, dynamic, plain), strict=True):
        assert torch.equal(ours, theirs), "not what Inductor computes"


def test_the_corpus_is_no_smaller() -> None:
    assert len(CORPUS) >= 70
    assert sum(case.verdict == "never" for case in CORPUS.values()) >= 40
