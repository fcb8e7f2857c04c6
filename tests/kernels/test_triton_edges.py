"""The Triton kernels at special numbers: rows without keys, infinities, NaN, large scores."""

import math

import pytest
import torch

pytest.importorskip("triton")

from support.triton_scenes import (
    PREFIX,
    SMALL,
    SUFFIX,
    TWO_SEGMENTS,
    assert_right,
    both_ways,
    each_way,
    launch,
)

INF = math.inf
OWN, TAIL = launch(2, 1), launch(2, 1, tail=True)


def hidden(call, rows):
    """The call with masks that hide every key of these query rows."""
    visible = torch.ones(call.q.size(0), 1, call.q.size(2), 1, dtype=torch.bool)
    visible[rows] = False
    return call.but(parts=[part._replace(mask=visible) for part in call.parts])


# --- rows without keys ----------------------------------------------------------------------------


@each_way
def test_a_row_without_keys_is_empty(mode, device):
    call = hidden(SMALL.call(), [1, 2])
    o, lse = call(device, configs=[mode])
    assert (o[1:3] == 0).all()
    assert (lse[1:3] == -INF).all()
    assert_right((o, lse), call)


@each_way
def test_a_row_without_keys_is_its_sink(mode, device):
    sinks = torch.tensor([-1e30, 0.5, -INF])[:, None]
    call = hidden(SMALL.call(), [1, 2]).but(sinks=sinks)
    o, lse = call(device, configs=[mode])
    assert (o[1:3] == 0).all()
    torch.testing.assert_close(lse[1:3], sinks.expand(2, 3, 3))
    assert_right((o[[0, 3]], lse[[0, 3]]), _rows(call, [0, 3]))


def _rows(call, rows):
    """The call's oracle for some rows only."""

    class Rows(type(call)):
        def oracle(self, dtype=torch.float64):
            return tuple(x[rows] for x in super().oracle(dtype))

    return Rows(call.q, call.parts, call.sinks, call.options)


@each_way
def test_a_sink_of_minus_infinity_is_none(mode, device):
    call = SMALL.call()
    with_sinks = call.but(sinks=torch.full((3, 1), -INF))
    for got, expected in zip(
        with_sinks(device, configs=[mode]), call(device, configs=[mode]), strict=True
    ):
        torch.testing.assert_close(got, expected)


@each_way
def test_a_very_large_sink_takes_everything(mode, device):
    o, lse = SMALL.call().but(sinks=torch.tensor(1e30))(device, configs=[mode])
    assert (o == 0).all()
    torch.testing.assert_close(lse, torch.full_like(lse, 1e30))


@each_way
def test_an_infinite_sink_takes_all_weight(mode, device):
    """As a part at +inf does in `merge`, however the partials are completed."""
    o, lse = SMALL.call().but(sinks=torch.tensor(INF))(device, configs=[mode])
    assert (o == 0).all() and (lse == INF).all()


# --- masks of very large numbers ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("whole", [False, True], ids=["some-keys", "all-keys"])
@both_ways
def test_a_mask_filled_with_the_lowest_number_hides_nothing(mode, whole, dtype, device):
    """Where all keys have it, the row is their mean: what eager code makes of a padding row."""
    call = SMALL.but(dtype=dtype).call()
    parts = []
    for part in call.parts:
        shape = (4, 1, 3, int(part.kv_len))
        hide = torch.rand(shape) > 0.5
        hide[1] = whole
        fill = torch.zeros(shape, dtype=dtype).masked_fill(hide, torch.finfo(dtype).min)
        parts.append(part._replace(mask=fill))
    call = call.but(parts=parts)
    o, lse = call(device, configs=[mode])
    # The kernel's lse are logarithms of base 2 inside: the lowest ones saturate.
    lowest = call.oracle()[1] < -1e38
    assert lowest.any() == (whole and dtype != torch.float16)
    assert (lse[lowest] < -2e38).all()
    assert_right((o, torch.where(lowest, call.oracle(torch.float32)[1], lse)), call)


# --- not finite -----------------------------------------------------------------------------------


@each_way
def test_nan_in_a_query_stays_in_its_row(mode, device):
    call = SMALL.call()
    expected = call(device, configs=[mode])
    call.q[2, 1, 1, 3] = math.nan
    for got, wanted in zip(call(device, configs=[mode]), expected, strict=True):
        assert got[2, 1, 1].isnan().all()
        mine = torch.zeros(got.shape[:3], dtype=torch.bool)
        mine[2, 1, 1] = True
        assert torch.equal(got[~mine], wanted[~mine])


@each_way
def test_nan_in_a_seen_key_is_seen(mode, device):
    """Not hidden by a maximum that skips NaN."""
    call = SMALL.call()
    call.parts[1].k[1, 0, 2] = math.nan
    o, lse = call(device, configs=[mode])
    assert o[1].isnan().all()
    assert lse[1].isnan().all()
    assert not o[[0, 2, 3]].isnan().any()


@each_way
def test_scores_of_minus_infinity_hide(mode, device):
    call = SMALL.call()
    for part in call.parts:
        mask = torch.zeros(4, 1, 3, int(part.kv_len))
        mask[..., ::2] = -INF
        mask[3] = -INF
        call = call.but(parts=[p if p is not part else p._replace(mask=mask) for p in call.parts])
    assert_right(call(device, configs=[mode]), call)


@each_way
def test_an_overflow_shows(mode, device):
    """A score of +inf: NaN in eager code, too; never a finite number that looks right."""
    call = SMALL.call()
    call.q[:] = 1.0
    call.parts[1].k[1, 0, 2] = 3e38
    o, lse = call(device, configs=[mode])
    assert o[1].isnan().all()
    assert (~torch.isfinite(lse[1])).all()
    assert torch.isfinite(o[[0, 2, 3]]).all()


@pytest.mark.parametrize("score", [-1e5, 1e5, -1e30])
@each_way
def test_no_finite_number_stands_for_minus_infinity(mode, score, device):
    call = SMALL.call()
    call.q.zero_()[..., 0] = 1.0
    for part in call.parts:
        part.k.zero_()[..., 0] = score
    call = call.but(options={**call.options, "scale": 1.0})
    assert_right(call(device, configs=[mode]), call)


# --- needles --------------------------------------------------------------------------------------

PLACES = {
    "first-of-prefix": (0, 0, 0),
    "end-of-a-tile": (0, 0, 15),
    "start-of-a-tile": (0, 0, 16),
    "last-of-prefix": (0, 0, -1),
    "first-of-suffix": (1, 1, 0),
    "last-of-suffix": (1, 1, -1),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("mode", [OWN, TAIL, TWO_SEGMENTS["direct-tail"]], ids=["own", "t2", "t1"])
def test_a_needle_decides_for_its_rows_only(mode, place, device):
    """Its value comes out of the rows that see it, and of no other."""
    index, row, key = place
    call = SMALL.call()
    call.q[:] = 1.0
    for part in call.parts:
        part.k.zero_()
        part.v.zero_()
    part = call.parts[index]
    part.k[row, :, key], part.v[row, :, key] = 10.0, torch.arange(16.0)
    o, _ = call(device, configs=[mode])
    mine = range(row * part.branches, (row + 1) * part.branches)
    others = [n for n in range(4) if n not in mine]
    torch.testing.assert_close(o[list(mine)], torch.arange(16.0).expand(len(mine), 3, 3, 16))
    assert (o[others] == 0).all()


@pytest.mark.parametrize("mode", [OWN, TAIL], ids=["own", "tail"])
def test_a_forbidden_needle_changes_no_bit(mode, device):
    """In a sibling's suffix, past a length, after a position, before a window."""
    at = {"positions": "M", "kv_start": 21, "window": 9}
    scene = SMALL.but(
        parts=(PREFIX.but(branches=2, keys=21, lens=(0.8,)), SUFFIX.but(keys=6, lens=(0.7,), **at))
    )
    call = scene.call()
    suffix = call.parts[1]._replace(q_positions=torch.tensor([21, 22, 23]))
    call = call.but(parts=[call.parts[0], suffix])
    expected = call(device, configs=[mode])
    assert_right(expected, call)
    for part, row, key in ((0, 0, 16), (0, 1, -1), (1, 2, 4), (1, 2, 3)):
        call.parts[part].k[row, :, key], call.parts[part].v[row, :, key] = 99.0, -1e4
    changed = call(device, configs=[mode])
    for got, wanted in zip(changed, expected, strict=True):
        assert torch.equal(got, wanted)


# --- numbers at the ends of their ranges ----------------------------------------------------------


@pytest.mark.parametrize("mode", [OWN, TAIL], ids=["own", "tail"])
def test_lengths_of_any_size(mode, device):
    call = SMALL.call()
    lens = torch.tensor([2**63 - 1, 2**32, -(2**63), 3]), torch.tensor([-(2**31), 2**31 - 1]).int()
    parts = [
        call.parts[0]._replace(kv_lens=lens[1]),
        call.parts[1]._replace(kv_lens=lens[0]),
    ]
    call = call.but(parts=parts)
    assert_right(call(device, configs=[mode]), call)


@pytest.mark.parametrize("window", [None, 2**40], ids=["no-window", "wide-window"])
@pytest.mark.parametrize("mode", [OWN, TAIL], ids=["own", "tail"])
def test_positions_of_any_size(mode, window, device):
    """Beyond 32 bits both ways; `kv_start`, too."""
    call = SMALL.call()
    positions = torch.tensor([2**40, -(2**40), 2])
    parts = [part._replace(q_positions=positions, window=window) for part in call.parts]
    call = call.but(parts=parts)
    assert_right(call(device, configs=[mode]), call)


@pytest.mark.parametrize("mode", [OWN, TAIL], ids=["own", "tail"])
def test_a_start_before_zero(mode, device):
    call = SMALL.call()
    parts = [
        call.parts[0]._replace(q_positions=torch.tensor([-9, -3, 2]), kv_start=-20, window=7),
        call.parts[1]._replace(q_positions=torch.tensor([1, 3, 9]), kv_start=1),
    ]
    call = call.but(parts=parts)
    assert_right(call(device, configs=[mode]), call)
