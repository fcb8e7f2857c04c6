"""Rotations of keys alone, against complex numbers in float64."""

import itertools
import math

import pytest
import torch
from support.tolerance import max_error
from torch.fx.experimental.proxy_tensor import make_fx

from torch_cascade.runtime.positions import (
    Frequencies,
    RotatedSlice,
    SinCosTable,
    join,
    rotate_keys,
    turn,
)

WHERE = [
    RotatedSlice(4),
    RotatedSlice(4, interleaved=True),
    RotatedSlice(2, start=0),
    RotatedSlice(3, start=2, interleaved=True),
    RotatedSlice(2, start=4),
    RotatedSlice(1, start=3, interleaved=True),
    RotatedSlice(3, start=1, clockwise=True),
]
SHIFTS = [(0, 1), (0, 16), (7, 3), (131_072, 5), (0, 131_072), (1_000_000, 999_000)]
SLICES = pytest.mark.parametrize("where", WHERE, ids=str)


def frequencies(pairs, theta=10_000.0, factor=1.0):
    return Frequencies(theta ** -(torch.arange(pairs) / pairs), factor)


def oracle(keys, where, old, new):
    """`old` and `new`: angles [..., T, pairs]; everything in complex float64."""
    part = keys.double()[..., where.start : where.end]
    order = torch.arange(2 * where.pairs)
    order = order.view(-1, 2).T if where.interleaved else order.view(2, -1)
    z = torch.complex(part[..., order[0]], part[..., order[1]])
    angle = new.double() - old.double()
    z = z * torch.polar(torch.ones(()).double(), -angle if where.clockwise else angle)[:, None]
    out = keys.double().clone()
    out[..., where.start + order[0]] = z.real
    out[..., where.start + order[1]] = z.imag
    return out


def angles(table, positions):
    """As models have them: the product in float32, exact from there on."""
    return positions.float()[..., None] * table.inv_freq.float()


def rounding(keys):
    """What float32 costs a feature: 4 ulp of sine and cosine each, and the products."""
    return 8 * torch.finfo(torch.float32).eps * keys.double().abs().max().item() * math.sqrt(2)


def assert_rounded_once(moved, wanted, keys):
    """Each feature is the exact one, but for float32's errors and one rounding to its dtype."""
    kind = torch.finfo(keys.dtype)
    allowed = kind.eps / 2 * wanted.abs() + kind.smallest_normal * kind.eps + rounding(keys)
    excess = ((moved.double() - wanted).abs() - allowed).max().item()
    assert excess <= 0, excess


@SLICES
@pytest.mark.parametrize(("old", "new"), SHIFTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_equals_complex_multiplication(where, old, new, dtype):
    table = frequencies(where.pairs)
    keys = torch.randn(2, 3, 5, 8).to(dtype)
    here, there = torch.arange(5) + old, torch.arange(5) + new
    moved = rotate_keys(keys, turn(table, table, here, there), where)
    wanted = oracle(keys, where, angles(table, here)[None], angles(table, there)[None])
    assert moved.dtype == dtype
    assert_rounded_once(moved, wanted, keys)
    assert max_error(keys, wanted) > 0.1, "the shift must matter"


@SLICES
def test_other_features_keep_their_bits(where):
    table, keys = frequencies(where.pairs), torch.randn(1, 2, 4, 8).bfloat16()
    moved = rotate_keys(keys, turn(table, table, torch.arange(4), torch.arange(4) + 16), where)
    assert torch.equal(moved[..., : where.start], keys[..., : where.start])
    assert torch.equal(moved[..., where.end :], keys[..., where.end :])
    assert moved.data_ptr() != keys.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_shift_changes_no_bit(dtype):
    table, keys = frequencies(4, factor=1.2), torch.randn(1, 2, 4, 8).to(dtype)
    here = torch.tensor([0, 5, 131_071, 16_777_217])
    by = turn(table, table, here, here)
    assert torch.equal(by.cos, torch.ones_like(by.cos)) and not by.sin.any()
    assert torch.equal(rotate_keys(keys, by, WHERE[0]), keys)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shift", [1, 16])
def test_twelve_pairs_no_power_of_two(interleaved, shift):
    where, table = RotatedSlice(12, interleaved=interleaved), frequencies(12)
    keys, here = torch.randn(1, 1, 3, 24), torch.arange(3)
    moved = rotate_keys(keys, turn(table, table, here, here + shift), where)
    wanted = oracle(keys, where, angles(table, here)[None], angles(table, here + shift)[None])
    assert max_error(moved, wanted) <= rounding(keys)


def test_rows_with_offsets_of_their_own():
    table, where = frequencies(4), WHERE[0]
    keys, here = torch.randn(3, 2, 5, 8), torch.arange(5)
    starts = torch.tensor([0, 7, 1000])[:, None] + here
    together = rotate_keys(keys, turn(table, table, here, starts), where)
    for row in range(3):
        alone = turn(table, table, here, starts[row])
        assert torch.equal(together[row : row + 1], rotate_keys(keys[row : row + 1], alone, where))
    back = rotate_keys(together, turn(table, table, starts, here), where)
    assert max_error(back, keys.double()) <= 2 * rounding(keys)


def test_there_and_back_from_the_original():
    """Forty moves: from the original each is as good as the first, one after another they drift."""
    table, where = frequencies(4), WHERE[0]
    original, here = torch.randn(1, 2, 64, 8).bfloat16(), torch.arange(64)
    stops = list(itertools.islice(itertools.cycle([100, 7, 0]), 41))
    chained = original
    for old, new in itertools.pairwise([0, *stops]):
        chained = rotate_keys(chained, turn(table, table, here + old, here + new), where)
    direct = rotate_keys(original, turn(table, table, here, here + stops[-1]), where)
    wanted = oracle(
        original, where, angles(table, here)[None], angles(table, here + stops[-1])[None]
    )
    assert_rounded_once(direct, wanted, original)
    with pytest.raises(AssertionError):
        assert_rounded_once(chained, wanted, original)


def test_tables_of_different_lengths():
    """Dynamic NTK, long-rope: undo one table, do the other, change of the factor included."""
    old, new = frequencies(4, factor=1.1), frequencies(4, theta=500_000.0, factor=1.3)
    keys, here, there = torch.randn(1, 2, 5, 8), torch.arange(5) + 20, torch.arange(5) + 500
    moved = rotate_keys(keys, turn(old, new, here, there), WHERE[0])
    wanted = oracle(keys, WHERE[0], angles(old, here)[None], angles(new, there)[None]) * 1.3 / 1.1
    assert max_error(moved, wanted) <= 1.3 / 1.1 * rounding(keys)


def test_the_same_factor_cancels():
    keys, here = torch.randn(1, 2, 5, 8), torch.arange(5)
    plain, scaled = frequencies(4), frequencies(4, factor=1.1386)
    by = [turn(t, t, here, here + 1000, torch.float64) for t in (plain, scaled)]
    wanted = rotate_keys(keys.double(), by[0], WHERE[0])
    assert max_error(rotate_keys(keys.double(), by[1], WHERE[0]), wanted) <= rounding(keys)


def test_a_table_of_sines_is_read_as_it_is():
    table = frequencies(2)
    cos, sin = table.cos_sin(torch.arange(64))
    stored, here = SinCosTable(torch.cat([sin, cos], -1)), torch.arange(5)
    a, b = turn(table, table, here, here + 59), turn(stored, stored, here, here + 59)
    assert torch.equal(a.cos, b.cos) and torch.equal(a.sin, b.sin)


def test_a_low_precision_table_keeps_positions():
    """Position 4097 has no bfloat16; a table that was cast is used as the model uses it."""
    table = Frequencies(frequencies(4).inv_freq.bfloat16())
    keys, here = torch.randn(1, 1, 1, 8), torch.tensor([4096])
    moved = rotate_keys(keys, turn(table, table, here, here + 1), WHERE[0])
    wanted = oracle(keys, WHERE[0], angles(table, here)[None], angles(table, here + 1)[None])
    assert max_error(moved, wanted) <= rounding(keys) < max_error(keys, wanted)


def test_join():
    a, b, here = frequencies(4), frequencies(4, theta=100.0), torch.arange(3)
    keys = torch.randn(1, 2, 6, 8)
    turns = [turn(a, a, here, here + 4), turn(b, a, here, here + 7)]
    whole = rotate_keys(keys, join(turns), WHERE[0])
    parts = [rotate_keys(keys[:, :, 3 * i : 3 * i + 3], turns[i], WHERE[0]) for i in range(2)]
    assert torch.equal(whole, torch.cat(parts, 2))
    by_rows = rotate_keys(keys.view(2, 2, 3, 8), join(turns, rows=True), WHERE[0])
    assert torch.equal(by_rows[1:], rotate_keys(keys.view(2, 2, 3, 8)[1:], turns[1], WHERE[0]))
    with pytest.raises(ValueError, match="at least one"):
        join([])


FAULTS = [
    (TypeError, "old_positions must be int64, got torch.int32", {"old": torch.arange(5).int()}),
    (TypeError, "new_positions must be int64, got torch.float32", {"new": torch.arange(5.0)}),
    (ValueError, "mrope", {"new": torch.arange(5).expand(3, 1, 5)}),
    (ValueError, r"\[tokens\] or \[rows, tokens\], got \[\]", {"new": torch.tensor(3)}),
    (ValueError, "same tokens", {"new": torch.arange(4)}),
    (ValueError, "4 and 3 pairs", {"table": frequencies(3)}),
    (TypeError, "dequantize", {"keys": torch.zeros(1, 2, 5, 8).to(torch.float8_e4m3fn)}),
    (TypeError, "int8", {"keys": torch.zeros(1, 2, 5, 8, dtype=torch.int8)}),
    (ValueError, "tokens", {"keys": torch.zeros(1, 2, 6, 8)}),
    (ValueError, "must be .rows, heads, tokens, features", {"keys": torch.zeros(2, 5, 8)}),
    (ValueError, "do not fit", {"keys": torch.zeros(1, 2, 5, 6)}),
    (ValueError, "do not fit", {"where": RotatedSlice(3)}),
    (ValueError, "2 row", {"old": torch.arange(10).view(2, 5), "keys": torch.zeros(3, 2, 5, 8)}),
]


@pytest.mark.parametrize(("error", "words", "changes"), FAULTS, ids=range(len(FAULTS)))
def test_faulty_arguments(error, words, changes):
    given = {
        "old": torch.arange(5),
        "new": torch.arange(5),
        "table": frequencies(4),
        "keys": torch.zeros(1, 2, 5, 8),
        "where": WHERE[0],
    } | changes
    with pytest.raises(error, match=words):
        by = turn(frequencies(4), given["table"], given["old"], given["new"])
        rotate_keys(given["keys"], by, given["where"])


@pytest.mark.parametrize("position", [-1, 64])
def test_a_table_ends(position):
    table = SinCosTable(torch.randn(64, 8))
    with pytest.raises(ValueError, match="from 0 to 63"):
        turn(table, table, torch.tensor([0]), torch.tensor([position]))


def _blend(keys, inv_freq, here, there):
    table = Frequencies(inv_freq, 1.25)
    by = turn(table, table, here, there)
    return [rotate_keys(keys, by, where) for where in WHERE[:2]]


def test_one_graph_for_all_lengths():
    compiled = torch.compile(_blend, backend="aot_eager", fullgraph=True, dynamic=True)
    counters = torch._dynamo.utils.counters
    for tokens, rows in ((5, 2), (9, 3), (131, 2)):
        here = torch.arange(tokens)
        there = here + torch.randint(0, 1000, (rows, 1))
        inputs = torch.randn(rows, 3, tokens, 8), frequencies(4).inv_freq, here, there
        for got, wanted in zip(compiled(*inputs), _blend(*inputs), strict=True):
            assert torch.equal(got, wanted)
    assert counters["stats"]["unique_graphs"] == 1


def test_sine_and_cosine_once_for_all_layers():
    inputs = torch.randn(1, 3, 5, 8), frequencies(4).inv_freq, torch.arange(5), torch.arange(5) + 9
    graph = make_fx(_blend, tracing_mode="symbolic")(*inputs).graph
    names = [str(node.target) for node in graph.nodes]
    assert names.count("aten.cos.default") == names.count("aten.sin.default") == 2


def test_a_turn_can_be_an_input_of_compiled_code():
    table, keys, here = frequencies(4), torch.randn(2, 3, 5, 8), torch.arange(5)
    by = turn(table, table, here, here + 3)
    compiled = torch.compile(
        lambda keys, by: rotate_keys(keys, by, WHERE[0]), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(keys, by), rotate_keys(keys, by, WHERE[0]))
