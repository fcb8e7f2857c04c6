"""The Triton kernels against the float64 oracle: options and sizes drawn at random, together."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from support.triton_scenes import Scene, Segment, assert_right, configs_of, launch

MASKS = ["", "", "L", "ML", "N1ML", "1HML", "NHM1"]
POSITIONS = ["M", "NM", "N1", "1"]
fractions = st.lists(st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.5]), min_size=1, max_size=3)


@st.composite
def segments(draw, branches, by_position, fp8):
    page = draw(st.sampled_from([0, 0, 1, 3, 5]))
    keys = draw(st.integers(0, 7)) * page if page else draw(st.integers(0, 35))
    positions = draw(st.sampled_from(POSITIONS if by_position else ["", *POSITIONS]))
    return Segment(
        branches=branches,
        keys=keys,
        mask=draw(st.sampled_from(MASKS)),
        additive=draw(st.booleans()),
        positions=positions,
        kv_start=draw(st.integers(-5, 40)),
        window=draw(st.none() | st.integers(1, 40)) if positions else None,
        lens=tuple(draw(st.just([]) | fractions)),
        page=page,
        nan=draw(st.booleans()),
        fp8=fp8,
    )


@st.composite
def scenes(draw):
    shared, pairs = draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (4, 2), (2, 2)]))
    alibi, fp8 = draw(st.booleans()), draw(st.integers(0, 4)) == 0
    number = draw(st.integers(1, 3))
    branches = [4, shared, pairs][-number:] if number > 1 else [shared]
    return Scene(
        parts=tuple(draw(segments(b, alibi, fp8)) for b in branches),
        n=4,
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 3)),
        queries=draw(st.integers(1, 5)),
        dk=draw(st.sampled_from([8, 16, 20, 40])),
        dv=draw(st.sampled_from([8, 16, 20, 40])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        scale=draw(st.none() | st.sampled_from([0.2, 1.0, -0.3])),
        softcap=draw(st.none() | st.sampled_from([2.0, 20.0])),
        alibi=alibi,
        sinks=draw(st.sampled_from(["", "H1", "NHM"])),
        layout=draw(st.sampled_from(["dense", "by_token", "spread"])),
    )


@st.composite
def modes(draw, scene):
    if len(scene.parts) == 1:
        return draw(st.sampled_from([launch(1, direct=True), launch(3), launch(2, quick=True)]))
    two, single = [launch(1, 1), launch(2, 2), launch(2, 1, tail=True)], len(scene.parts) == 2
    direct = [launch(1, 1, direct=True, tail=True)] if single else []
    mode = draw(st.sampled_from(two + direct))
    return replace(mode, quick=draw(st.booleans()))


def run(data, device):
    scene = data.draw(scenes())
    mode = data.draw(modes(scene))
    call = scene.call()
    result = call(device, configs=configs_of(scene.parts, mode))
    assert_right(result, call, quick=mode.quick)


RULES = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}


@settings(max_examples=25, **RULES)
@given(st.data())
def test_random_calls(device, data):
    torch.manual_seed(0)
    run(data, device)


@pytest.mark.slow
@settings(max_examples=400, **RULES)
@given(st.data())
def test_many_random_calls(device, data):
    torch.manual_seed(1)
    run(data, device)
