"""The backend on a GPU: values, CUDA graphs, generated code. Skipped where there is no GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from support.tolerance import assert_close_to_reference
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from torch_cascade.compiler.backend import recent
from torch_cascade.compiler.report import Reason

pytestmark = pytest.mark.cuda

B, T, H, G, P, S, D = 2, 3, 5, 2, 71, 67, 64
N = B * T
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ALWAYS = {"decide": "always", "strict": True}
HIDDEN = 13  # the first of these prefix keys are hidden by `masked`


def inputs(dtype: torch.dtype, m: int = 3, branches: int = T) -> list[torch.Tensor]:
    """q, prefix K and V, suffix K and V; with a needle in the prefix and in the suffix."""
    n = B * branches
    q = torch.randn(n, m, H * G, D).transpose(1, 2)
    prefix_k, prefix_v = torch.randn(B, H, P, D), torch.randn(B, H, P, D)
    suffix_k, suffix_v = torch.randn(n, H, S, D), torch.randn(n, H, S, D)
    prefix_k[:, :, -1], prefix_v[:, :, -1] = q[::branches, ::G, 0], 10.0
    suffix_k[:, :, S // 2], suffix_v[:, :, S // 2] = q[:, ::G, m - 1], -10.0
    return [x.to("cuda", dtype) for x in (q, prefix_k, prefix_v, suffix_k, suffix_v)]


def joined(prefix: torch.Tensor, suffix: torch.Tensor) -> torch.Tensor:
    times = suffix.shape[0] // prefix.shape[0]
    return torch.cat([prefix.repeat_interleave(times, 0), suffix], 2)


def attention(q, pk, pv, sk, sv, mask=None, **options):
    k, v = joined(pk, sk), joined(pv, sv)
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True, **options)


def bottom_right(q, pk, pv, sk, sv):
    """Causal, the last query sees everything."""
    total = pk.shape[2] + sk.shape[2]
    keys = torch.arange(total, device=q.device)
    queries = torch.arange(q.shape[2], device=q.device)[:, None] + total - q.shape[2]
    return attention(q, pk, pv, sk, sv, keys <= queries)


def top_left(q, *kv):
    """Torch's own causal: only prefix keys are seen."""
    return attention(q, *kv, is_causal=True)


def masked(q, pk, pv, sk, sv):
    """A float mask a head, some keys hidden."""
    keys = torch.arange(pk.shape[2] + sk.shape[2], device=q.device)
    bias = -0.01 * keys * torch.arange(1, H * G + 1, device=q.device)[:, None, None]
    return attention(q, pk, pv, sk, sv, bias.masked_fill(keys < HIDDEN, float("-inf")).to(q.dtype))


def hand_written(q, pk, pv, sk, sv):
    k, v = (joined(*x).repeat_interleave(G, 1) for x in ((pk, sk), (pv, sv)))
    weights = torch.softmax(q @ k.transpose(-1, -2) * 0.3, -1)
    return (weights @ v).transpose(1, 2).flatten(2)


def layers(q, *kv, count=2):
    for _ in range(count):
        q = attention(q.sin(), *kv)
    return q


def deep(q, *kv):
    return layers(q, *kv, count=5)


def alone(q, pk, pv, sk, sv):
    """Nothing but the prefix."""
    return F.scaled_dot_product_attention(
        q, *(x.repeat_interleave(T, 0) for x in (pk, pv)), enable_gqa=True
    )


PROGRAMS = [attention, bottom_right, top_left, masked, hand_written, layers, alone]


def check(fn: Callable, run: Callable, values: Sequence[torch.Tensor]) -> None:
    """`run` computes `fn` as closely to float64 as eager does, in the same layout."""
    with torch.no_grad():
        actual, eager = run(*values), fn(*values)
        reference = fn(*(x.double() for x in values))
    assert actual.dtype == eager.dtype
    assert_close_to_reference(actual, eager, reference)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fn", PROGRAMS)
def test_programs(fn, dtype):
    run = torch.compile(fn, backend="cascade", dynamic=False, options={**ALWAYS, "verify": True})
    check(fn, run, inputs(dtype))
    assert [s.rewritten for s in recent()[-1].sites] == [True] * (2 if fn is layers else 1)


@pytest.mark.parametrize("fn", [attention, bottom_right, layers])
def test_symbolic_sizes(fn):
    run = torch.compile(fn, backend="cascade", dynamic=True, options=ALWAYS)
    for m, branches in ((3, 3), (1, 5), (130, 2)):
        check(fn, run, inputs(torch.bfloat16, m, branches))


def test_strides_are_those_of_torch():
    values = inputs(torch.float16)
    with torch.no_grad():
        actual = torch.compile(attention, backend="cascade", options=ALWAYS)(*values)
        assert actual.stride() == attention(*values).stride()


def test_a_row_that_sees_nothing():
    """NaN under SDPA's math, 0 under its fused kernels: whatever torch gives, nothing leaks."""

    def fn(q, pk, pv, sk, sv):
        seen = torch.arange(q.shape[2], device=q.device)[:, None] > 0
        return attention(q, pk, pv, sk, sv, seen.expand(-1, pk.shape[2] + sk.shape[2]))

    values = inputs(torch.float32)
    with torch.no_grad():
        actual = torch.compile(fn, backend="cascade", options=ALWAYS)(*values)
        reference = fn(*(x.double() for x in values))
        eager = fn(*values)
    assert torch.isfinite(actual[:, :, 1:]).all()
    assert_close_to_reference(actual[:, :, 1:], eager[:, :, 1:], reference[:, :, 1:])
    assert (actual[:, :, 0].nan_to_num(0.0) == 0).all()


def test_float64_is_left_alone():
    values = [x.double() for x in inputs(torch.float32)]
    with torch.no_grad():
        run = torch.compile(attention, backend="cascade", options={"decide": "always"})
        torch.testing.assert_close(run(*values), attention(*values))
    assert [s.declined.reason for s in recent()[-1].sites] == [Reason.FLOAT64]


def test_nothing_shared_is_what_inductor_computes():
    def fn(q, pk, pv, sk, sv):
        return F.scaled_dot_product_attention(q, sk, sv, enable_gqa=True)

    values = inputs(torch.bfloat16)
    with torch.no_grad():
        expected = torch.compile(fn, backend="inductor")(*values)
        torch._dynamo.reset()
        assert torch.equal(torch.compile(fn, backend="cascade")(*values), expected)


# --- generated code -------------------------------------------------------------------------------


def long_inputs() -> list[torch.Tensor]:
    """A decode step over a prefix of which the expansion is larger than any partial result."""
    kv = [torch.randn(B, H, 3000, D), torch.randn(B, H, 3000, D)]
    kv += [torch.randn(N, H, 9, D), torch.randn(N, H, 9, D)]
    return [x.to("cuda", torch.bfloat16) for x in (torch.randn(N, H * G, 1, D), *kv)]


def allocated(code: str) -> list[int]:
    """Elements of every buffer the generated code allocates."""
    shapes = re.findall(r"empty_strided_cuda\(\(([^)]*)\)", code)
    return [
        int(torch.Size([int(s) for s in shape.split(",") if s.strip()]).numel()) for shape in shapes
    ]


def test_kernels_stand_in_the_generated_code():
    values = long_inputs()
    with torch.no_grad():
        run = torch.compile(deep, backend="cascade", dynamic=False)
        result, (code,) = run_and_get_code(run, *values)
    assert recent()[-1].rewritten == 5
    assert "attend_parts" in code and "torch.ops.cascade" not in code
    # Not one a layer: the first, whose query lies as the caller's, and the others.
    assert code.count("def attend_parts") <= 2
    assert not re.search(r"extern_kernels\.|torch\.ops\.aten\._(scaled|flash|efficient)", code)
    assert max(allocated(code)) < N * H * 3000 * D
    check(deep, lambda *_: result, values)


# --- CUDA graphs ----------------------------------------------------------------------------------


def skips() -> int:
    return counters["inductor"]["cudagraph_skips"]


@pytest.mark.parametrize("fn", [attention, bottom_right, masked, hand_written, layers])
def test_reduce_overhead(fn):
    """Replayed with new data, also on another stream; no part of the graph is left out."""
    run = torch.compile(fn, backend="cascade", dynamic=False, mode="reduce-overhead")
    before = _decided(run, fn)
    side = torch.cuda.Stream()
    for _ in range(2):
        values = inputs(torch.bfloat16)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            check(fn, lambda *args: run(*args).clone(), values)
        torch.cuda.current_stream().wait_stream(side)
        check(fn, lambda *args: run(*args).clone(), inputs(torch.bfloat16))
    assert skips() == 0 and before == 1
    assert counters["inductor"]["cudagraph_recorded_non_static_inputs"] > 0  # it was recorded


def _decided(run: Callable, fn: Callable) -> bool:
    """Warm up and record; whether everything was rewritten."""
    for _ in range(3):
        check(fn, lambda *args: run(*args).clone(), inputs(torch.bfloat16))
    return all(site.rewritten for site in recent()[-1].sites)


@pytest.mark.parametrize("mode", ["max-autotune-no-cudagraphs", "max-autotune"])
def test_other_modes(mode):
    run = torch.compile(layers, backend="cascade", dynamic=False, mode=mode)
    for _ in range(3):
        check(layers, lambda *args: run(*args).clone(), inputs(torch.bfloat16))
    assert recent()[-1].rewritten == 2 and skips() == 0


# --- batch invariance -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fn", [attention, bottom_right])
def test_batch_invariance(fn, dtype):
    """A branch's bits are the same with 1 or 30 others beside it, and in a batch of one request."""
    many = 31
    q, pk, pv, sk, sv = inputs(dtype, branches=many)
    results = []
    for chosen in (slice(0, many), slice(0, 2), slice(0, 17)):
        rows = [x.unflatten(0, (B, many))[:, chosen].flatten(0, 1) for x in (q, sk, sv)]
        results.append(_invariant(fn)(rows[0], pk, pv, *rows[1:]).unflatten(0, (B, -1))[:, :2])
    rows = [x[:many] for x in (q, sk, sv)]
    single = _invariant(fn)(rows[0], pk[:1], pv[:1], *rows[1:])
    results.append(torch.stack([single[:2], results[0][1]]))
    assert all(torch.equal(result, results[0]) for result in results[1:])


def _invariant(fn: Callable) -> Callable:
    torch._dynamo.reset()
    options = {**ALWAYS, "batch_invariant": True}
    return torch.no_grad()(torch.compile(fn, backend="cascade", dynamic=False, options=options))
