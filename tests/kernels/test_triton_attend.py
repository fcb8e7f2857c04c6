"""The Triton kernels against the float64 oracle: one feature after another, in all their forms.

On a machine without a GPU they run in Triton's interpreter.
"""

import itertools

import pytest
import torch

pytest.importorskip("triton")

from support.attend_cases import MASKS
from support.triton_scenes import (
    PREFIX,
    SMALL,
    SUFFIX,
    Scene,
    both_ways,
    check,
    each_way,
    launch,
    one_way,
    scenes,
)

TWO = Scene()
ONE = TWO.but(parts=(PREFIX,))

# --- every way to cut the work --------------------------------------------------------------------


@one_way
def test_one_segment(mode, device):
    check(ONE, mode, device)


@each_way
def test_two_segments(mode, device):
    check(TWO, mode, device)


@pytest.mark.parametrize("tile", [(16, 32), (32, 16), (64, 64)], ids=str)
@pytest.mark.parametrize("tail", [False, True], ids=["own", "tail"])
def test_tiles(tail, tile, device):
    check(TWO, launch(2, 1, tail=tail, tile=tile), device)


def test_more_splits_than_tiles_of_keys(device):
    check(TWO, launch(5, 3), device)


@pytest.mark.parametrize("reverse", [False, True], ids=["in-order", "reversed"])
@both_ways
def test_parts_in_either_order(mode, reverse, device):
    scene = SMALL.but(parts=SMALL.parts[::-1] if reverse else SMALL.parts)
    check(scene, mode, device)


NESTED = {
    "one-prefix": (PREFIX.but(branches=4), SUFFIX),
    "shared-by-pairs": (PREFIX.but(branches=4), SUFFIX.but(branches=2, keys=19)),
    "not-shared": (PREFIX.but(branches=1), SUFFIX),
    "both-by-all": (PREFIX.but(branches=4), SUFFIX.but(branches=4)),
}


@pytest.mark.parametrize("parts", NESTED.values(), ids=NESTED)
@both_ways
def test_who_shares(mode, parts, device):
    check(SMALL.but(parts=parts), mode, device)


THREE = (PREFIX.but(branches=4, keys=18), PREFIX.but(branches=2, keys=17), SUFFIX)
MANY = {"three": THREE, "four": (*THREE, SUFFIX.but(keys=2)), "five": (*THREE, *THREE[1:])}


@pytest.mark.parametrize("tail", [False, True], ids=["own", "tail"])
@pytest.mark.parametrize("parts", MANY.values(), ids=MANY)
def test_many_parts(parts, tail, device):
    check(SMALL.but(parts=parts, sinks="H1"), launch(2, 1, tail=tail), device)


# --- sizes ----------------------------------------------------------------------------------------

DIMS = [(a, a) for a in (32, 64, 72, 80, 96, 128, 256)] + [(192, 128), (16, 24), (24, 16), (1, 3)]


@scenes(*({"dk": a, "dv": b} for a, b in DIMS))
@both_ways
def test_head_sizes(mode, scene, device):
    check(scene, mode, device)


@scenes(
    *({"group": g, "kv_heads": h} for g, h in ((1, 3), (7, 1), (2, 3))),
    *({"queries": m} for m in (1, 2, 7)),
)
@both_ways
def test_heads_and_queries(mode, scene, device):
    check(scene, mode, device)


@scenes(
    *({"prefix": {"keys": n}} for n in (0, 1, 15, 16, 17)),
    *({"suffix": {"keys": n}} for n in (0, 1, 15, 16, 17)),
    {"prefix": {"keys": 0}, "suffix": {"keys": 0}},
    {"prefix": {"keys": 0}, "suffix": {"keys": 0}, "sinks": "H1"},
)
@both_ways
def test_numbers_of_keys(mode, scene, device):
    check(scene, mode, device)


@scenes({"n": 0}, {"queries": 0})
@both_ways
def test_no_rows(mode, scene, device):
    call = scene.call()
    o, lse = call(device, configs=[mode])
    assert o.shape == call.q.shape
    assert lse.shape == call.q.shape[:3]


# --- what hides a key -----------------------------------------------------------------------------


@scenes(
    *(
        {where: {"mask": mask, "additive": additive}}
        for mask, additive, where in itertools.product(MASKS, (False, True), ("prefix", "suffix"))
        if len(mask) in (1, 4)
    )
)
def test_masks(scene, device):
    tail = scene.parts[1].mask != ""
    check(scene, launch(1, 1, direct=tail, tail=tail), device)


@scenes(
    {"prefix": {"mask": "N1ML"}, "suffix": {"mask": "1HML", "additive": True}},
    {"prefix": {"mask": "NHML", "additive": True}, "suffix": {"mask": "ML"}, "sinks": "NHM"},
    {"prefix": {"mask": "NHM1"}, "suffix": {"mask": "NHM1"}},
)
@each_way
def test_masks_of_both(mode, scene, device):
    check(scene, mode, device)


@scenes(
    *({"suffix": {"positions": p, "kv_start": 4}} for p in ("M", "1M", "NM", "N1", "1")),
    *({"prefix": {"positions": p, "kv_start": 7}} for p in ("M", "NM")),
    *({"suffix": {"positions": "NM", "window": w}} for w in (1, 3)),
    *({"prefix": {"positions": "NM", "window": w}} for w in (1, 9)),
    {"prefix": {"positions": "M", "window": 9}, "suffix": {"positions": "M", "keys": 19}},
    {"prefix": {"positions": "NM", "mask": "N1ML"}, "suffix": {"positions": "NM", "mask": "ML"}},
)
@both_ways
def test_positions_and_windows(mode, scene, device):
    check(scene, mode, device)


@scenes(
    *({"prefix": {"lens": lens, "nan": nan}} for lens in ((0.5, 1), (0, 2)) for nan in (0, 1)),
    *({"suffix": {"lens": lens, "nan": True}} for lens in ((0.5, 1, 0.2), (0, 2), (0,))),
    {"prefix": {"lens": (0.5, 1), "mask": "N1ML"}, "suffix": {"lens": (0, 1), "mask": "ML"}},
    {"prefix": {"lens": (0.5,), "positions": "NM"}, "suffix": {"lens": (0.7,), "positions": "M"}},
    {"prefix": {"lens": (0,)}, "suffix": {"lens": (0,), "nan": True}, "sinks": "N1M"},
)
@both_ways
def test_lengths(mode, scene, device):
    check(scene, mode, device)


def test_lengths_cut_splits_and_tiles(device):
    check(TWO.but(prefix={"lens": (0.45, 0.9), "nan": True}), launch(3, 1, tail=True), device)


# --- scores ---------------------------------------------------------------------------------------

AT = {"prefix": {"positions": "NM", "kv_start": 2}, "suffix": {"positions": "M", "kv_start": 23}}


@scenes(
    {"softcap": 2.0, "q_factor": 8.0},
    {"softcap": 30.0, "prefix": {"mask": "N1ML", "additive": True}},
    *({"scale": s} for s in (1.0, -0.3, 0.0)),
    *({"q_factor": f} for f in (20.0, 200.0, 1e4)),
    {"alibi": True, **AT},
    {"alibi": True, "softcap": 3.0, "sinks": "H1", **AT},
    {"alibi": True, "dtype": torch.bfloat16, **AT},
)
@both_ways
def test_scores(mode, scene, device):
    check(scene, mode, device)


@scenes(*({"sinks": s} for s in ("H1", "NHM", "1HM", "N11", "M", "")))
@each_way
def test_sinks_count_once(mode, scene, device):
    check(scene, mode, device)
