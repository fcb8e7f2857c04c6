"""Launch configurations: what holds for all of them, over a wide grid of shapes and devices."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_cascade.kernels.launch_config import (
    DeviceLimits,
    LaunchConfig,
    SlotConfig,
    SlotShape,
    Widths,
    attend_config,
    invariant_config,
    merge_config,
    padded,
    shared_bytes,
)

A100 = DeviceLimits(processors=108, shared_memory=163 * 1024, generation=8)
H200 = DeviceLimits(processors=132, shared_memory=227 * 1024)
SMALL_GPU = DeviceLimits(20, 99 * 1024, generation=8)  # sm_86, sm_89
B200 = DeviceLimits(processors=148, shared_memory=227 * 1024, generation=10)
DEVICES = [A100, H200, SMALL_GPU, B200]
BF16, FP32 = Widths(128, 128, 2, 2), Widths(128, 128, 4, 4)
WIDTHS = [
    Widths(d_k, d_v, q_bytes, kv_bytes)
    for d_k, d_v in ((16, 16), (64, 64), (80, 96), (128, 128), (192, 128), (256, 256))
    for q_bytes, kv_bytes in ((2, 2), (2, 1), (4, 4))
]
LENGTHS = [0, 1, 15, 16, 17, 63, 64, 65, 300, 4096, 32_768, 1_000_000]
ROWS = [0, 1, 5, 16, 17, 64, 65, 1000]
TILES = [0, 1, 8, 131, 132, 133, 10_000]


def is_power_of_two(number):
    return number > 0 and number & (number - 1) == 0


def assert_valid(config, shapes, widths, limits):
    """What the kernel and the device ask of a configuration."""
    assert 1 <= len(config.slots) == len(shapes) <= 2
    assert config.warps in (4, 8)
    assert not config.tail or len(config.slots) == 2
    for slot, shape in zip(config.slots, shapes, strict=True):
        assert is_power_of_two(slot.block_m)
        assert is_power_of_two(slot.block_n)
        assert 16 <= slot.block_m <= 128
        assert 16 <= slot.block_n <= 128
        assert 1 <= slot.stages <= 4
        assert 1 <= slot.splits <= 64
        assert slot.splits <= max(1, -(-shape.kv_len // slot.block_n)), "a split without keys"
        assert shared_bytes(slot, widths) <= limits.shared_memory
    if config.tail:  # one tile of rows reads both
        assert config.slots[0].block_m == config.slots[1].block_m
        assert config.slots[1].splits == 1
    if config.direct:
        assert config.splits == 1
    assert config.splits == sum(s.splits for s in config.slots[: 1 if config.tail else 2])


@pytest.mark.parametrize("limits", DEVICES, ids=["A100", "H200", "small", "B200"])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_every_configuration_is_valid(widths, limits):
    for tiles, rows, keys in itertools.product(TILES, ROWS, LENGTHS):
        shapes = [SlotShape(tiles, rows, keys)]
        for alone in (False, True):
            config = attend_config(shapes, widths, limits, alone=alone, nested=False)
            assert_valid(config, shapes, widths, limits)
            assert not config.direct or alone
        assert_valid(invariant_config(shapes, widths, limits), shapes, widths, limits)


shape = st.builds(
    SlotShape,
    st.integers(0, 20_000),
    st.integers(0, 2000),
    st.integers(0, 200_000) | st.integers(0, 70),
)
widths = st.builds(
    lambda d_k, d_v, kinds: Widths(d_k, d_v, *kinds),
    st.integers(1, 256),
    st.integers(1, 256),
    st.sampled_from([(2, 2), (2, 1), (4, 4), (4, 1)]),
)
devices = st.sampled_from(DEVICES)
pairs = st.lists(shape, min_size=1, max_size=2)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(pairs, widths, devices, st.booleans(), st.booleans())
def test_any_shapes(shapes, widths, limits, alone, nested):
    config = attend_config(shapes, widths, limits, alone=alone, nested=nested)
    assert_valid(config, shapes, widths, limits)
    assert alone or not config.direct
    assert nested or not config.tail
    assert attend_config(shapes, widths, limits, alone=alone, nested=nested) == config


@settings(max_examples=200, deadline=None, derandomize=True)
@given(pairs, widths, devices, st.integers(1, 999), st.integers(1, 999))
def test_batch_invariance_depends_on_lengths_only(shapes, widths, limits, tiles, rows):
    config = invariant_config(shapes, widths, limits)
    assert_valid(config, shapes, widths, limits)
    others = [s._replace(tiles_of=tiles, rows=rows) for s in shapes]
    assert invariant_config(others, widths, limits) == config
    assert not config.tail, "the keys of siblings would share a tile"
    assert not config.direct, "another number of parts would finish otherwise"


def test_batch_invariance_splits_long_segments():
    (slot,) = invariant_config([SlotShape(1, 1, 32_768)], BF16, H200).slots
    assert slot.splits > 8


# --- the choices themselves -----------------------------------------------------------------------


@pytest.mark.parametrize("keys", [4096, 32_768])
def test_few_tiles_are_split_over_the_whole_device(keys):
    (slot,) = attend_config([SlotShape(8, 64, keys)], BF16, H200, alone=True, nested=False).slots
    assert 8 * (slot.splits + 1) > H200.processors


def test_many_tiles_are_not_split():
    config = attend_config([SlotShape(4096, 64, 4096)], BF16, H200, alone=True, nested=False)
    assert config.slots[0].splits == 1
    assert config.direct


def test_short_suffixes_of_a_request_are_a_tail():
    prefix, short, long = SlotShape(64, 16, 4096), SlotShape(256, 4, 4), SlotShape(256, 4, 400)
    for suffix, nested, tail in ((short, True, True), (short, False, False), (long, True, False)):
        config = attend_config([prefix, suffix], BF16, H200, alone=True, nested=nested)
        assert config.tail == tail


@pytest.mark.parametrize(("rows", "height"), [(1, 16), (16, 16), (17, 64), (32, 64), (200, 64)])
def test_tiles_are_16_rows_or_64(rows, height):
    """The matrix instructions for 32 rows are slower than those for 64 of which half are empty."""
    config = attend_config([SlotShape(8, rows, 4096)], BF16, H200, alone=True, nested=False)
    assert config.slots[0].block_m == height
    config = attend_config([SlotShape(8, rows, 4096)], FP32, H200, alone=True, nested=False)
    assert config.slots[0].block_m == min(32, padded(rows))


@pytest.mark.parametrize(
    ("limits", "height", "quick"), [(A100, 32, False), (H200, 64, True), (B200, 64, False)]
)
def test_each_generation_has_its_own_matrix_instructions(limits, height, quick):
    low, high = SlotShape(8, 32, 4096), SlotShape(8, 256, 4096)
    config = attend_config([low], BF16, limits, alone=True, nested=False)
    assert config.slots[0].block_m == height
    assert attend_config([high], BF16, limits, alone=True, nested=False).quick is quick


@pytest.mark.parametrize(
    ("rows", "kind", "quick"),
    [(64, BF16, False), (65, BF16, True), (256, BF16, True), (256, FP32, False)],
)
def test_instructions_are_saved_where_they_are_what_takes_time(rows, kind, quick):
    shapes = [SlotShape(8, rows, 4096), SlotShape(64, 4, 500)]
    assert attend_config(shapes, kind, H200, alone=True, nested=True).quick is quick
    assert attend_config(shapes[:1], kind, H200, alone=True, nested=False).quick is quick
    assert not invariant_config(shapes, kind, H200).quick


def items(shapes, config):
    """Programs of each slot."""
    pairs = zip(shapes, config.slots, strict=True)
    return [s.tiles_of * -(-s.rows // slot.block_m) * slot.splits for s, slot in pairs]


def test_programs_of_both_slots_are_resident_at_once():
    """B, T, L, S, X = 2, 2, 8192, 16, 256: a second wave took as long as the first."""
    shapes = [SlotShape(16, 128, 8192), SlotShape(32, 64, 256)]
    config = attend_config(shapes, BF16, H200, alone=True, nested=True)
    assert items(shapes, config) == [32 * 7, 32]


@pytest.mark.parametrize("branches", [16, 64])
def test_many_suffixes_take_no_room_from_the_prefix(branches):
    shapes = [SlotShape(32, 4 * branches, 4096), SlotShape(32 * branches, 4, 256)]
    both = attend_config(shapes, BF16, H200, alone=True, nested=True)
    alone = attend_config(shapes[:1], BF16, H200, alone=True, nested=False)
    assert both.slots[0] == alone.slots[0]


def test_a_second_wave_of_short_suffixes_is_better_than_a_long_prefix():
    shapes = [SlotShape(8, 80, 4096), SlotShape(160, 4, 64)]
    both = attend_config(shapes, BF16, H200, alone=True, nested=True)
    assert items(shapes, both) == [256, 160]


def test_a_long_suffix_is_split_into_runs_like_those_of_the_prefix():
    shapes = [SlotShape(8, 128, 4096), SlotShape(16, 64, 4096)]
    config = attend_config(shapes, BF16, H200, alone=True, nested=True)
    runs = [s.kv_len / slot.splits for s, slot in zip(shapes, config.slots, strict=True)]
    assert runs[1] >= 0.8 * runs[0] and config.slots[1].splits > 1


def test_what_does_not_fit_is_made_smaller():
    """Two tiles of 64 x 256 float32 K and V, twice, and that of Q: more than an A100 has."""
    wide = FP32._replace(d_k=256, d_v=256)
    assert shared_bytes(SlotConfig(64, 32, 2, 1), wide) > A100.shared_memory
    shapes = [SlotShape(8, 64, 4096)]
    for config in (
        attend_config(shapes, wide, A100, alone=True, nested=False),
        invariant_config(shapes, wide, A100),
    ):
        assert_valid(config, shapes, wide, A100)


@pytest.mark.parametrize(
    ("size", "expected"), [(0, 16), (1, 16), (16, 16), (17, 32), (80, 128), (256, 256)]
)
def test_padded(size, expected):
    assert padded(size) == expected


def test_padded_to_another_least():
    assert [padded(n, least=1) for n in (0, 1, 2, 3, 9)] == [1, 1, 2, 4, 16]


@pytest.mark.parametrize("parts", [1, 2, 3, 17, 130])
@pytest.mark.parametrize("rows", [1, 100, 4096, 10_000, 1_000_000])
def test_merge_config(parts, rows):
    config = merge_config(parts, rows)
    assert is_power_of_two(config.rows)
    assert config.rows <= 8
    assert 1 <= config.unroll <= parts
    assert is_power_of_two(config.warps)


def test_configurations_are_values():
    config = LaunchConfig((SlotConfig(64, 64, 3, 4), SlotConfig(16, 64, 3, 2)))
    assert config.splits == 6
    assert dataclasses.replace(config, tail=True).splits == 4
    assert hash(config) == hash(dataclasses.replace(config))
