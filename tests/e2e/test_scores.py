"""Soft-caps and attention sinks through the cascade: on all parts, and counted once."""

from __future__ import annotations

import json
import math

import pytest
import torch
from support.promises import check, compiled, declined, shared_inputs

from torch_cascade.compiler.backend import recent
from torch_cascade.compiler.explain import explain

INF = math.inf
MIN = torch.finfo(torch.float32).min
# Rows, heads, queries, keys of `shared_inputs`.
N, H, M, P, S = 6, 2, 5, 7, 4


def joined(q, kp, ks, vp, vs):
    t = q.shape[0] // kp.shape[0]
    k = torch.cat([kp.repeat_interleave(t, 0), ks], 2)
    v = torch.cat([vp.repeat_interleave(t, 0), vs], 2)
    return q @ k.transpose(2, 3) * 0.25, v


def with_sinks(q, kp, ks, vp, vs, sinks, mask=None):
    """gpt-oss; a bool mask fills with -inf, a floating one is added."""
    scores, v = joined(q, kp, ks, vp, vs)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -INF)
    elif mask is not None:
        scores = scores + mask
    scores = torch.cat([scores, sinks.expand(*scores.shape[:3], 1)], -1)
    scores = scores - scores.max(-1, keepdim=True).values
    return scores.softmax(-1)[..., :-1] @ v


def sinks_of(*values):
    return torch.tensor(values).view(1, H, 1, 1)


def calls(name):
    """Lines of the graph after the passes that call an op of ours."""
    return [line for line in recent()[-1].after.splitlines() if f"cascade.{name}" in line]


@pytest.mark.parametrize("size", [-30.0, 0.0, 2.0, 5.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sink_is_counted_once(size, dtype):
    """As large as a needle it halves an output; counted a part it would leave a third."""
    inputs = shared_inputs(dtype=dtype)
    check(with_sinks, *inputs, sinks_of(size, size / 2).to(dtype))
    assert len(calls("attend")) == 2 and len(calls("merge")) == 1
    assert "sinks" in calls("merge")[0] and "sinks" not in "".join(calls("attend"))


def test_a_sink_halves_the_weight_of_an_equal_needle():
    """The needles of both parts score 4; the sink 4 + log 2: it takes what both of them take."""
    q, kp, ks, vp, vs = shared_inputs()
    kp[:, :, -1] = ks[:, :, -1] = 0.0
    kp[:, :, :-1] = ks[:, :, :-1] = 0.0
    q[..., 0], kp[:, :, -1, 0], ks[:, :, -1, 0] = 4.0, 40.0, 40.0
    sinks = torch.full((1, H, 1, 1), 40.0 + math.log(2))
    out = compiled(with_sinks)(q, kp, ks, vp, vs, sinks)
    torch.testing.assert_close(out, torch.full_like(out, 5.0), rtol=1e-4, atol=0)


@pytest.mark.parametrize("shape", [(H, 1, 1), (N, H, M, 1), (N, 1, 1, 1), (M, 1), (1,), ()])
def test_sinks_of_any_shape(shape):
    check(with_sinks, *shared_inputs(), torch.randn(shape).mul(3), dynamic=bool(shape))


def test_rows_that_see_the_sink_only():
    """Zero; and NaN, as eager has it, where the sink hides too."""
    mask = torch.ones(N, 1, M, P + S, dtype=torch.bool)
    mask[:, :, 2] = False
    mask[1, :, 3, :P] = False
    mask[1, :, 1, P:] = False
    check(with_sinks, *shared_inputs(), sinks_of(1.0, -INF), mask)


@pytest.mark.parametrize("sink", [-INF, MIN, MIN / 2, -1e4, 0.0, 60.0])
@pytest.mark.parametrize("suffix", [0, S])
def test_rows_of_finite_masks_only(sink, suffix):
    """Uniform over the keys below which no sink is; an equal sink is one key more; else zero."""
    mask = torch.zeros(N, 1, M, P + suffix)
    mask[:, :, 2] = MIN
    mask[1, :, 3, :P] = MIN
    mask[2, :, 1, 2:] = MIN
    mask[3, :, 1, :1] = -INF
    mask[3, :, 1, 1:] = MIN
    check(with_sinks, *shared_inputs(suffix=suffix), sinks_of(sink, 1.0), mask)


def test_one_part_and_a_sink():
    """Branches that added nothing yet: one `attend`, and the sink is merged all the same."""

    def fn(q, kp, vp, sinks):
        k, v = (x.repeat_interleave(3, 0) for x in (kp, vp))
        scores = torch.cat([q @ k.transpose(2, 3) * 0.25, sinks.expand(N, H, M, 1)], -1)
        return scores.softmax(-1)[..., :-1] @ v

    q, kp, _, vp, _ = shared_inputs()
    check(fn, q, kp, vp, sinks_of(2.0, 4.0))
    assert len(calls("attend")) == 1 and "sinks" in calls("merge")[0]


def test_sinks_of_a_batch_in_another_order():
    """`repeat` order: row n reads prefix n % 2, and its own sink."""

    def fn(q, kp, ks, vp, vs, sinks):
        k, v = (torch.cat([p.repeat(3, 1, 1, 1), s], 2) for p, s in ((kp, ks), (vp, vs)))
        scores = torch.cat([q @ k.transpose(2, 3) * 0.25, sinks.expand(N, H, M, 1)], -1)
        return scores.softmax(-1)[..., :-1] @ v

    check(fn, *shared_inputs(), torch.randn(N, 1, M, 1).mul(3))


def test_sinks_of_merged_heads():
    """Rows and heads in one batch dim, as one head a row."""

    def fn(q, kp, ks, vp, vs, sinks):
        k, v = (torch.cat([p.repeat_interleave(3, 0), s], 1) for p, s in ((kp, ks), (vp, vs)))
        scores = torch.cat([torch.bmm(q, k.transpose(1, 2)) * 0.25, sinks], -1)
        return torch.bmm(scores.softmax(-1)[..., :-1], v)

    inputs = [x[:, 0] for x in shared_inputs(heads=1)]
    check(fn, *inputs, torch.randn(N, M, 1).mul(3))


def capped(q, kp, ks, vp, vs, mask=None):
    scores, v = joined(q, kp, ks, vp, vs)
    scores = torch.tanh(scores / 2.0) * 2.0
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_soft_cap_on_all_parts(dynamic, dtype):
    """Scores of up to 32 against a cap of 2: without it one needle takes everything."""
    q, *kv = shared_inputs(dtype=dtype)
    check(capped, q * 8, *kv, dynamic=dynamic)
    assert len(calls("attend")) == 2
    assert all("softcap=2" in line for line in calls("attend"))


def test_a_mask_is_added_after_the_cap():
    mask = torch.randn(N, 1, M, P + S).mul(3)
    mask[..., 1] = mask[2, :, 3, :P] = -INF
    q, *kv = shared_inputs()
    check(capped, q * 8, *kv, mask)


def test_three_levels_with_cap_and_sinks():
    """A system prompt, a prefix a request, a suffix a branch: the sink is still one key."""

    def fn(q, system, kp, ks, values, vp, vs, sinks):
        k = torch.cat([system.expand(N, -1, -1, -1), kp.repeat_interleave(3, 0), ks], 2)
        v = torch.cat([values.expand(N, -1, -1, -1), vp.repeat_interleave(3, 0), vs], 2)
        scores = 3.0 * torch.tanh(q @ k.transpose(2, 3) * (0.25 / 3.0))
        scores = torch.cat([sinks.expand(N, H, M, 1), scores], -1)
        return scores.softmax(-1)[..., 1:] @ v

    q, kp, ks, vp, vs = shared_inputs()
    system, values = torch.randn(1, H, 9, 16), torch.randn(1, H, 9, 16)
    check(fn, q * 4, system, kp, ks, values, vp, vs, sinks_of(2.0, 3.0))
    assert len(calls("attend")) == 3 and len(calls("merge")) == 1


def test_reports_tell_of_cap_and_sinks():
    def fn(q, kp, ks, vp, vs, sinks):
        scores, v = joined(q, kp, ks, vp, vs)
        scores = torch.cat([torch.tanh(scores / 3.5) * 3.5, sinks.expand(N, H, M, 1)], -1)
        return scores.softmax(-1)[..., :-1] @ v

    report = explain(fn, *shared_inputs(), sinks_of(2.0, 3.0))
    assert "scores: soft-cap 3.5, sinks arg5_1 [1, 2, 1, 1]" in str(report)
    (site,) = json.loads(report.to_json())["graphs"][0]["sites"]
    assert site["scores"].startswith("soft-cap 3.5") and len(site["segments"]) == 2


def biased(fill, rising):
    """ALiBi, and hidden keys filled with a finite number."""

    def fn(q, kp, ks, vp, vs, hidden):
        scores, v = joined(q, kp, ks, vp, vs)
        heads = torch.arange(1, H + 1).view(1, H, 1, 1)
        keys = torch.arange(v.shape[2])
        bias = heads * keys * 0.5
        scores = scores + (bias if rising else -bias)
        return scores.masked_fill(hidden & (keys > 0), fill).softmax(-1) @ v

    return fn


@pytest.mark.parametrize(
    ("fill", "rising", "dynamic", "rewritten"),
    [
        (MIN, False, False, 1),
        (-1e9, False, False, 1),
        (MIN, True, True, 1),
        (-1e9, True, True, 0),  # of so many keys that the bias lifts a hidden one
        (MIN, False, True, 0),  # of so many keys that the bias hides the visible one
        (-1e4, True, False, 0),
    ],
)
def test_finite_fills_beside_alibi(fill, rising, dynamic, rewritten):
    hidden = torch.rand(N, 1, M, P + S) < 0.5
    hidden[0, :, 1] = True
    check(biased(fill, rising), *shared_inputs(), hidden, dynamic=dynamic, rewritten=rewritten)


def test_finite_fills_beside_a_bias_of_unknown_values():
    """The bias may be -inf where the key is visible, and then the row is uniform."""

    def fn(q, kp, ks, vp, vs, hidden, bias):
        scores, v = joined(q, kp, ks, vp, vs)
        hidden = hidden & (torch.arange(v.shape[2]) > 0)
        return (scores + bias).masked_fill(hidden, MIN).softmax(-1) @ v

    hidden, bias = torch.rand(N, 1, M, P + S) < 0.5, torch.randn(1, H, 1, P + S)
    hidden[0, :, 1], bias[..., 0] = True, -INF
    check(fn, *shared_inputs(), hidden, bias, rewritten=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sinks_in_float32_beside_lower_scores(dtype):
    """As models keep them that hold their sinks in float32: joining promotes the scores."""

    def fn(q, kp, ks, vp, vs, sinks):
        scores, v = joined(q, kp, ks, vp, vs)
        scores = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
        return scores.softmax(-1)[..., :-1].to(v.dtype) @ v

    check(fn, *shared_inputs(dtype=dtype), torch.tensor([3.0, -1.0]))


def test_sinks_in_float64_beside_float32_scores_are_declined():
    def fn(q, kp, ks, vp, vs, sinks):
        scores, v = joined(q, kp, ks, vp, vs)
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1)
        return scores.softmax(-1)[..., :-1].to(v.dtype) @ v

    check(fn, *shared_inputs(), sinks_of(3.0, -1.0).double(), rewritten=0)
    assert "autocast-mixed" in declined()
