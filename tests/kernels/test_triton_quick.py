"""The loop with one reference score: when it is kept, when the other loop takes over."""

import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from support.triton_scenes import (
    PREFIX,
    SMALL,
    TWO_SEGMENTS,
    assert_right,
    launch,
)

from torch_cascade.kernels import launchable
from torch_cascade.kernels.triton_quick import attend_quick
from torch_cascade.kernels.triton_step import result_of, rows_of, seen_by_all

ONE = SMALL.but(parts=(PREFIX.but(branches=4, keys=40),))
QUICK = launch(1, quick=True)
KEYS, FIRST, LATER = 40, 3, 33


@triton.jit
def one_tile(q, k, v, o, lse, seen, keys):
    """16 query rows of 16 features against `keys` keys, in tiles of 16."""
    row, d = tl.arange(0, 16), tl.arange(0, 16)
    at = row[:, None] * 16 + d[None, :]
    zero = tl.program_id(0)
    where = (k, v, zero, zero, 16, zero, zero, 16, q, zero, 1)
    state, low = attend_quick(
        tl.load(q + at), zero, zero, zero, keys, 1.0, where, q,
        16, 16, 16, 16, 16, False, False, "ieee", 16, 16, 2,
    )  # fmt: skip
    result, logarithm = result_of(state, 1.0, True)
    tl.store(o + at, result)
    tl.store(lse + row, logarithm)
    tl.store(seen, low)


def seen_by(scores, device, dtype=torch.float32, value=1.0):
    """(o, lse in log2, the first key left) for given scores of all rows, scale 1; value: of V."""
    q = torch.zeros(16, 16, dtype=dtype)
    q[:, 0] = 1.0
    k, v = torch.zeros(len(scores), 16), torch.zeros(len(scores), 16) + value
    k[:, 0] = torch.tensor(scores)
    o, lse = torch.full((16, 16), math.nan), torch.full((16,), math.nan)
    seen = torch.tensor(-1, dtype=torch.int32)
    there = [x.to(device) for x in (q, k, v, o, lse, seen)]
    launchable.called(one_tile)[(1,)](*there, len(scores))
    return tuple(x.cpu() for x in there[3:])


def rising(by, keys=KEYS):
    """Zeros, and a score of a later tile that is larger by 2^by."""
    scores = [0.0] * keys
    scores[LATER] = by * math.log(2.0)
    return scores


def test_a_run_within_the_limit_is_finished(device):
    o, lse, left = seen_by(rising(20), device)
    assert left == KEYS
    torch.testing.assert_close(o, torch.ones(16, 16))
    torch.testing.assert_close(lse, torch.full((16,), math.log2(2.0**20 + KEYS - 1)))


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 64), (torch.bfloat16, 64), (torch.float16, 15)], ids=str
)
def test_scores_that_grow_too_much_are_left_to_the_other_loop(dtype, limit, device):
    """Those of a float16 weight are at most 2^16."""
    assert seen_by(rising(limit - 1), device, dtype)[2] == KEYS
    o, lse, left = seen_by(rising(limit + 1), device, dtype)
    assert left == 0
    assert (o == 0).all() and (lse == -math.inf).all()


def test_one_row_that_grows_takes_its_tile_along(device):
    """Here all rows do; what matters is that none is finished alone: they share `low`."""
    _, _, kept = seen_by(rising(63), device)
    _, _, left = seen_by(rising(66), device)
    assert (kept, left) == (KEYS, 0)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3e38])
def test_an_output_that_is_not_finite_is_left(value, device):
    """Weights up to 2^64 times a large value are more than float32 holds; the others are not."""
    _, _, left = seen_by(rising(60), device, value=value)
    assert left == 0


def test_an_output_with_a_nan_column_is_left(device):
    """inf - inf in one feature, from one tile and the next: a maximum of the others is finite."""
    scores = rising(40)
    scores[LATER - 16] = scores[LATER]
    value = torch.ones(KEYS, 16)
    value[LATER - 16, 0], value[LATER, 0] = 1e38, -1e38
    _, _, left = seen_by(scores, device, value=value)
    assert left == 0


@pytest.mark.parametrize("place", [FIRST, LATER])
def test_a_score_that_is_nan_makes_its_row_nan(place, device):
    scores = [0.0] * KEYS
    scores[place] = math.nan
    o, lse, left = seen_by(scores, device)
    assert left == KEYS
    assert o.isnan().all() and lse.isnan().all()


@pytest.mark.parametrize("place", [FIRST, LATER])
def test_an_infinite_score_is_no_number(place, device):
    """As in eager code: inf - inf. Where the other loop has to find that out, it does."""
    scores = [0.0] * KEYS
    scores[place] = math.inf
    o, lse, left = seen_by(scores, device)
    assert left == (KEYS if place == FIRST else 0)
    assert place == LATER or (o.isnan().all() and lse.isnan().all())
    call = ONE.call()
    call.q[:] = 1.0
    call.parts[0].k[:, :, place] = 3e38
    assert call(device, configs=[QUICK])[0].isnan().all()


@pytest.mark.parametrize("later", [-math.inf, 0.0, -10.0, -1000.0, 1000.0])
def test_a_first_tile_without_a_finite_score(later, device):
    """Its reference is 0: kept if the others are that or little more, else not."""
    _, lse, left = seen_by([-math.inf] * 16 + [later] * 8, device)
    assert left == (24 if later == 0.0 else 0)
    if later == 0.0:
        torch.testing.assert_close(lse, torch.full((16,), 3.0))


def test_no_keys(device):
    o, lse, left = seen_by([], device)
    assert left == 0
    assert (o == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("keys", [1, 15, 16, 17, 40])
def test_a_tile_that_is_not_full(keys, device):
    o, lse, left = seen_by([-700.0] * keys, device, value=-3.0)
    assert left == keys
    torch.testing.assert_close(o, torch.full((16, 16), -3.0))
    torch.testing.assert_close(lse, torch.full((16,), -700 / math.log(2.0) + math.log2(keys)))


# --- in a launch ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("factor", [3.0, 40.0, 400.0], ids=["small", "large", "huge"])
@pytest.mark.parametrize("place", [FIRST, LATER, -1], ids=["first", "later", "last"])
def test_a_needle_of_any_height(place, factor, dtype, device):
    call = ONE.but(dtype=dtype).call()
    part = call.parts[0]
    part.k[:, :, place] = call.q[0, :1, 0] * factor
    part.v[:, :, place] = 7.0
    assert_right(call(device, configs=[QUICK]), call, quick=True)


def test_what_the_other_loop_takes_over_has_its_bits(device):
    call = ONE.call()
    call.parts[0].k[:, :, LATER] = 1e4
    quick = call(device, configs=[QUICK])
    plain = call(device, configs=[replace(QUICK, quick=False)])
    for got, wanted in zip(quick, plain, strict=True):
        assert torch.equal(got, wanted)


def test_large_values(device):
    call = ONE.call()
    call.parts[0].v.mul_(1e36)
    call.parts[0].k[:, :, LATER] = call.q[0, :1, 0] * 3
    assert_right(call(device, configs=[QUICK]), call)


def test_a_tail_of_large_values_after_scores_that_grow(device):
    """Sums of 2^40 times the values would leave no room for it: the sum of both overflowed."""
    call = SMALL.but(dtype=torch.bfloat16, prefix={"keys": KEYS}).call()
    prefix, suffix = call.parts
    call.q[:], prefix.k[:], suffix.k[:] = 1.0, 0.0, 0.0
    prefix.k[:, :, LATER] = 40 * math.log(2.0) / 4  # 16 features, scale 1/4
    prefix.v[:, :, LATER], suffix.v[:] = 1e26, 1e38
    o, lse = call(device, configs=[TWO_SEGMENTS["quick-tail"]])
    assert o.isfinite().all()
    assert_right((o, lse), call, quick=True)


@pytest.mark.parametrize("quick", [True, False])
def test_a_scale_that_is_0_in_float32(quick, device):
    """Positive, but nothing may be multiplied by it that can be infinite."""
    call = ONE.but(scale=1e-46).call()
    assert_right(call(device, configs=[replace(QUICK, quick=quick)]), call)


@pytest.mark.parametrize("page", [0, 4])
def test_lengths_and_pages(page, device):
    scene = ONE.but(prefix={"lens": (0.2, 0.9), "page": page, "nan": True, "branches": 2})
    call = scene.call()
    assert_right(call(device, configs=[QUICK]), call)


# --- where positions hide keys --------------------------------------------------------------------


@triton.jit
def open_keys(positions, kv_start, found, rows, low, high, keys):
    """`seen_by_all` of one tile of 16 rows, a position each, in tiles of 16 keys."""
    zero = tl.program_id(0)
    tile = rows_of(zero, zero, zero, 1, 1, rows, rows, 16)
    seen = (zero, zero, zero, zero, zero, positions, zero, 1, kv_start, zero)
    tl.store(found, seen_by_all(tile, seen, keys, low, high, 16, True))


@pytest.mark.parametrize(
    ("positions", "low", "high", "expected"),
    [
        ([99], 0, 90, 90 // 16 * 16),
        ([99], 0, 96, 96),
        ([47, 99], 0, 96, 48),
        ([99, 46], 0, 96, 32),
        ([50, 14], 0, 96, 0),
        ([-3, 50], 16, 96, 16),
        ([40, 60], 48, 96, 48),
        ([60, 90], 32, 48, 48),
        ([63, 90], 32, 96, 64),
    ],
)
@pytest.mark.parametrize("kv_start", [0, 7])
def test_whole_tiles_that_every_row_sees(positions, low, high, expected, kv_start, device):
    """Rows beyond the last one hide nothing, whatever stands where their positions would be."""
    given = torch.tensor([*(p + kv_start for p in positions), -1, -1], device=device)
    found = torch.tensor(-1, dtype=torch.int32, device=device)
    kernel = launchable.called(open_keys)
    kernel[(1,)](given, kv_start, found, len(positions), low, high, 96)
    assert found.item() == expected


SCATTERED = SMALL.but(
    n=2, queries=24, group=2, parts=(PREFIX.but(branches=1, keys=90, positions="NM"),)
)


def scattered(positions, **changes):
    """A call whose rows stand at given positions, with a needle at and after each of them."""
    call = SCATTERED.but(**changes).call()
    part = call.parts[0]
    positions = torch.as_tensor(positions).expand(2, 24)
    for row in range(2):
        for query, position in enumerate(positions[row].tolist()):
            for place, value in ((position, 7.0), (position + 1, -9.0)):
                if 0 <= place < part.kv_len and query % 5 == 0:
                    part.k[row, :, place] = call.q[row, :1, query] * 2
                    part.v[row, :, place] = value
    return call.but(parts=[part._replace(q_positions=positions)])


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "first",
    [0, 30, 66],
    ids=["from-the-start", "between", "near-the-end"],
)
def test_scattered_rows(first, dtype, splits, device):
    """The quick loop does what all rows of a tile see, the other one the rest."""
    positions = first + torch.arange(24) * (89 - first) // 23
    call = scattered(positions, dtype=dtype)
    assert_right(call(device, configs=[launch(splits, quick=True)]), call, quick=True)


def test_scattered_rows_in_any_order(device):
    positions = torch.stack([torch.randperm(90)[:24], torch.randint(-3, 95, (24,))])
    call = scattered(positions)
    assert_right(call(device, configs=[launch(2, quick=True)]), call, quick=True)


def test_scattered_rows_with_lengths(device):
    call = scattered(torch.arange(24) * 3 + 20, prefix={"lens": (0.3, 0.9), "nan": True})
    assert_right(call(device, configs=[launch(2, quick=True)]), call, quick=True)


def test_scattered_rows_with_a_window(device):
    """The ordinary loop does it all: a window hides the first keys of late rows."""
    call = scattered(torch.arange(24) * 3 + 20, prefix={"window": 11})
    assert_right(call(device, configs=[launch(2, quick=True)]), call)


def test_the_rest_of_scattered_rows_is_seen_where_the_quick_loop_gives_up(device):
    """A score that grows too much before the first hidden key: all keys, by the other loop."""
    call = scattered(torch.arange(24) + 60)
    call.parts[0].k[:, :, LATER] = 1e4
    quick = call(device, configs=[QUICK])
    plain = call(device, configs=[replace(QUICK, quick=False)])
    for got, wanted in zip(quick, plain, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("length", [-(2**31) - 5, -(2**32) + 7, -(2**63), 2**32 + 7, 2**63 - 1])
def test_lengths_of_any_int64(length, quick, device):
    """None of them is cut to its last 32 bits."""
    call = ONE.but(prefix={"lens": (0.2, 0.9), "branches": 2}).call()
    call.parts[0].kv_lens[:] = torch.tensor([length, 9])
    assert_right(call(device, configs=[replace(QUICK, quick=quick)]), call)
