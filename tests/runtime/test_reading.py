"""How the fresh tokens read a prompt: their attention, and what of it a cached copy changes."""

import math
from dataclasses import replace

import pytest
import torch
from support.leave_one import change
from support.tolerance import assert_close_to_reference

from torch_cascade.runtime.reading import Reading

N, HEADS, KV, F, L, D, DV = 2, 6, 3, 4, 9, 5, 7
ROWS = torch.tensor([[8, 2, 5, 7]] * N)


def reading_of(dtype=torch.float32, heads=KV):
    """Random queries, keys and values; a mask by which the second query of row 1 sees nothing."""
    generator = torch.Generator().manual_seed(2)
    sizes = (N, HEADS, F, D), (N, heads, L, D), (N, heads, L, DV)
    q, k, v = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    mask = torch.rand(N, 1, F, L, generator=generator) > 0.3
    mask[1, :, 1] = False
    return Reading(q, k, v, mask, ROWS, is_causal=True, scale=0.3)


def seen_of(reading):
    """Bool [N, 1, F, L]."""
    return reading.mask & (torch.arange(L) <= ROWS[:, None, :, None])


def cached_of(reading, heads=KV):
    generator = torch.Generator().manual_seed(4)
    sizes = (N, heads, L, D), (N, heads, L, DV)
    return [torch.randn(size, generator=generator).to(reading.q.dtype) for size in sizes]


def one_by_one(reading, k_cached, v_cached):
    """[N, L], each token put back by itself."""

    def heads(x):
        return x.repeat_interleave(HEADS // x.shape[1], 1)

    kv = [heads(x) for x in (reading.k, reading.v, k_cached, v_cached)]
    seen = seen_of(reading)
    rows = [change(reading.q[n], *(x[n] for x in kv), seen[n, 0], 0.3) for n in range(N)]
    return torch.stack(rows)


def test_attention():
    reading = reading_of()
    seen = seen_of(reading)

    def plain(q, k):
        scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) * 0.3
        return scores.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num(0)

    got, peak = reading.attention(), reading.peak_attention()
    eager, exact = plain(reading.q, reading.k), plain(reading.q.double(), reading.k.double())
    assert_close_to_reference(got, eager.mean((1, 2)), exact.mean((1, 2)))
    assert_close_to_reference(peak, eager.amax(2).mean(1), exact.amax(2).mean(1))
    flat = reading.mask.transpose(0, 1).reshape(1, N * F, L)
    assert torch.equal(replace(reading, mask=flat, flat=True).attention(), got)
    added = torch.where(reading.mask, 0.0, -math.inf)
    assert torch.equal(replace(reading, mask=added).attention(), got)


def test_what_probabilities_add_up_to_may_be_known():
    """Also that a query sees nothing: its logarithm is -inf."""
    reading = reading_of()
    scores = reading.q @ reading.k.repeat_interleave(2, 1).transpose(-1, -2) * 0.3
    lse = scores.masked_fill(~seen_of(reading), -math.inf).logsumexp(-1)
    assert (lse[1, :, 1] == -math.inf).all()
    known = replace(reading, lse=lse)
    torch.testing.assert_close(known.peak_attention(), reading.peak_attention())
    torch.testing.assert_close(known.attention(), reading.attention())


@pytest.mark.parametrize(("read", "kept"), [(KV, KV), (HEADS, KV), (KV, 1)])
def test_a_change_is_that_of_the_output_where_one_token_keeps_its_copy(read, kept):
    """Keys and values may be read as they are cached, or each of them repeated."""
    reading, exact = reading_of(heads=read), reading_of(torch.float64, heads=read)
    got = reading.change(*cached_of(reading, kept))
    wanted = one_by_one(exact, *cached_of(exact, kept))
    assert_close_to_reference(got, one_by_one(reading, *cached_of(reading, kept)), wanted)
    assert wanted.argsort(1).tolist() == got.argsort(1).tolist()


def test_cached_tokens_that_fill_up_a_row_are_no_question():
    """Of each row those with a chunk do not count, unless there are no others."""
    reading = reading_of()
    chunks = torch.zeros(N, L, dtype=torch.int64)
    chunks[0, ROWS[0, [0, 2]]] = -1
    known, cached = replace(reading, chunks=chunks), cached_of(reading)
    few = [
        replace(
            reading,
            q=reading.q[:, :, rows],
            mask=reading.mask[:, :, rows],
            fresh_rows=ROWS[:, rows],
        )
        for rows in ([0, 2], [0, 1, 2, 3])
    ]
    for of in (Reading.attention, Reading.peak_attention, lambda x: x.change(*cached)):
        wanted = torch.stack([of(one)[n] for n, one in enumerate(few)])
        torch.testing.assert_close(of(known), wanted)
        assert not torch.allclose(of(known), of(reading))


def test_what_nobody_sees_and_what_is_as_it_was_changes_nothing():
    reading = reading_of()
    k_cached, v_cached = cached_of(reading)
    reading.mask[:, :, :, 3] = False
    k_cached[:, :, 5], v_cached[:, :, 5] = reading.k[:, :, 5], reading.v[:, :, 5]
    got = reading.change(k_cached, v_cached)
    assert (got[:, [3, 5]] == 0).all() and (got[:, [0, 1, 2, 4]] > 0).all()


@pytest.mark.parametrize("far", [-1e4, 1e4])
def test_keys_far_off_move_the_output_no_further_than_values_are_apart(far):
    """A cached key that nobody would read, or that alone would be read."""
    reading = reading_of()
    k_cached, v_cached = cached_of(reading)
    k_cached[:, :, 4] = far * reading.q.mean((1, 2))[:, None]
    got = reading.change(k_cached, v_cached)
    longest = max(x.norm(dim=-1).max() for x in (reading.v, v_cached))
    assert torch.isfinite(got).all() and (got <= HEADS * 2 * longest).all()


def test_short_dtypes_are_computed_in_float32():
    short = reading_of(torch.bfloat16)
    assert short.change(*cached_of(short)).dtype == torch.float32
    assert short.attention().dtype == torch.float32
    rough, exact = replace(short, short=True).peak_attention(), short.peak_attention()
    assert rough.dtype == torch.float32 and not torch.equal(rough, exact)
    assert ((rough - exact).abs() <= exact / 64).all()  # a unit of bfloat16 in scores of 2 to 4


def test_other_keys_than_the_cached_ones_are_an_error():
    reading = replace(reading_of(), differs="keys [2, 3] of [3, 2]")
    with pytest.raises(ValueError, match=r"change\(\) is not known here: keys \[2, 3\] of \[3, 2"):
        reading.change(*cached_of(reading))
    assert reading.attention().shape == (N, L)
