"""Candidates of launch configurations: what is enumerated, what fits, what is chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from torch_cascade.benchmarks import candidates, inputs, peers, rows
from torch_cascade.benchmarks.rows import Heads, Row
from torch_cascade.kernels.launch_config import DeviceLimits, LaunchConfig, SlotConfig

H200 = DeviceLimits(processors=132, shared_memory=232448)
SMALL = DeviceLimits(processors=20, shared_memory=99 * 1024)
EVERY_ROW = pytest.mark.parametrize("row", rows.DEFAULT_ROWS, ids=str)


def every(row: Row, limits: DeviceLimits = H200) -> list[LaunchConfig]:
    return candidates.enumerate_all(row, Heads(), limits)


def test_every_combination_is_there():
    made = every(Row(1, 8, 32768, 4, 4))  # 128 packed rows: all tiles; 32 keys of a tail
    prefixes = {(c.slots[0].block_m, c.slots[0].block_n, c.slots[0].stages) for c in made}
    assert prefixes == {(m, n, s) for m, n in candidates.TILES for s in (2, 3)}
    for tile in prefixes:
        of_tile = [c for c in made if tile == (*vars(c.slots[0]).values(),)[:3]]
        # 8 KV heads, in one or two tiles of rows: 1, 2 and 3 programs a multiprocessor.
        expected = {16, 33, 49} if tile[0] == 128 else {8, 16, 24}
        assert {c.slots[0].splits for c in of_tile} == expected
        assert {c.warps for c in of_tile} == {8 if tile[0] == 128 else 4}
        for splits in expected:
            seconds = [
                (c.tail, c.slots[1].block_n, c.slots[1].stages)
                for c in of_tile
                if c.slots[0].splits == splits and not c.quick
            ]
            tails = [(True, keys, tile[2]) for keys in (16, 32, 64)]
            assert sorted(seconds) == sorted([*tails, (False, 16, 2)])


def test_both_loops_are_tried_of_everything():
    made = every(Row(1, 8, 32768, 4, 4))
    assert {c for c in made if c.quick} == {replace(c, quick=True) for c in made if not c.quick}
    assert not any(c.quick for c in every(Row(1, 8, 32768, 4, 4), H200._replace(generation=10)))


def test_tiles_of_the_suffix():
    made = every(Row(4, 16, 4096, 1, 256))
    seconds = {c.slots[1] for c in made}
    assert seconds == {SlotConfig(16, n, s, 1) for n, s in ((64, 3), (64, 2), (128, 2))}
    assert not any(c.tail for c in made)  # 4,096 keys a tile
    one_or_two_tiles = {c.slots[1] for c in every(Row(1, 64, 8192, 1, 128))}
    assert one_or_two_tiles == seconds
    assert {c.slots[1] for c in every(Row(1, 64, 8192, 1, 60))} == {SlotConfig(16, 64, 2, 1)}


def test_a_tail_is_tried_beyond_what_is_chosen_but_not_far():
    assert any(c.tail for c in every(Row(1, 8, 4096, 1, 64)))
    assert not any(c.tail for c in every(Row(1, 8, 4096, 1, 65)))


@EVERY_ROW
def test_no_candidate_comes_twice_and_names_tell_them_apart(row):
    made = every(row)
    assert len({candidates.name(c) for c in made}) == len(set(made)) == len(made)


@EVERY_ROW
def test_configurations_make_sense(row):
    prefix, suffix = candidates.shapes(row, Heads())
    for config in every(row):
        first, second = config.slots
        assert (first.splits - 1) * first.block_n < row.prefix  # no split without keys
        assert config.direct == (config.tail and first.splits == 1)
        assert first.block_m <= (16 if prefix.rows <= 16 else max(64, 2 * prefix.rows - 1))
        assert config.tail or second.block_m <= max(16, 2 * suffix.rows - 1)


def test_few_rows_and_few_keys_make_small_tiles():
    made = every(Row(1, 1, 40, 1, 3))  # 4 packed rows
    assert {c.slots[0].block_m for c in made} == {16}
    assert {c.warps for c in made} == {4}
    assert {c.slots[0].splits for c in made if c.slots[0].block_n == 64} == {1}
    assert {c.slots[0].splits for c in made if c.slots[0].block_n == 32} == {2}


def test_names():
    first = SlotConfig(64, 32, 3, 8)
    tail = LaunchConfig((first, SlotConfig(64, 16, 2, 1)), tail=True)
    apart = LaunchConfig((first, SlotConfig(16, 64, 2, 4)), warps=8)
    quick = replace(tail, quick=True)
    assert candidates.name(quick) == "64x32x3, 4 warps, quick, splits 8, tail 16x2"
    assert candidates.name(tail) == "64x32x3, 4 warps, splits 8, tail 16x2"
    assert candidates.name(apart) == "64x32x3, 8 warps, splits 8, suffix 16x64x2, splits 4"


def test_what_does_not_fit():
    """64 rows, 64 keys: 24 KiB of queries and weights, 32 KiB of keys and values a stage."""
    heads, second = Heads(), SlotConfig(16, 16, 2, 1)
    two, three = (LaunchConfig((SlotConfig(64, 64, n, 1), second)) for n in (2, 3))
    assert candidates.fits(three, heads, H200)
    assert candidates.fits(two, heads, SMALL) and not candidates.fits(three, heads, SMALL)
    large_suffix = LaunchConfig((SlotConfig(16, 16, 2, 1), SlotConfig(16, 128, 3, 1)))
    assert not candidates.fits(large_suffix, heads, SMALL)


@EVERY_ROW
def test_the_chosen_one_is_what_the_kernel_takes(row, monkeypatch):
    launch = pytest.importorskip("torch_cascade.kernels.triton_launch")
    taken = []
    monkeypatch.setattr(launch, "_launch_attend", lambda *given: taken.append(given[2]))
    monkeypatch.setattr(launch, "_launch_merge", lambda *given: None)
    heads = Heads()

    def empty(*sizes):
        return torch.empty(sizes, device="meta", dtype=torch.bfloat16)

    q = empty(row.batch, row.queries, heads.query, heads.dim).transpose(1, 2)
    prefix = [empty(row.requests, heads.kv, row.prefix, heads.dim) for _ in "kv"]
    suffix = [empty(row.batch, heads.kv, row.suffix, heads.dim) for _ in "kv"]
    given = inputs.Inputs(row, q, *prefix, *suffix)
    peers.kernel(given)()
    chosen = candidates.chosen(row, heads, launch.device_limits(q.device))
    assert taken == [chosen]
    other = LaunchConfig(chosen.slots, warps=8)
    peers.kernel(given, [other])()
    assert taken == [chosen, other]
