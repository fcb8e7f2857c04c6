"""The cost model as numbers: units, monotony, break-even, errors of the device's figures."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import sympy
from support.cost_cases import DEVICES, SCENES, work

from torch_cascade.compiler import cost, cost_terms
from torch_cascade.compiler.break_even import crossing
from torch_cascade.compiler.decide import priced
from torch_cascade.compiler.device import Device
from torch_cascade.compiler.units import SECOND, unit_of
from torch_cascade.compiler.work import KeyRun, Work

devices = pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
PREFIXES = [1, 3, 16, 50, 100, 333, 1000, 5000, 20000]
# One program more or less in a wave turns what is a tie within a few percent.
ROUNDING = 1.05
TOPKS = [2, 3, 4, 7, 8, 16, 33, 64]


def scenes(device: Device, **changed: int) -> list[Work]:
    return [work(device.kind, **{**scene, **changed}) for scene in SCENES]


def test_every_formula_is_a_time():
    """Each kernel of each way, in named symbols and written out."""
    kernels = {
        kernel
        for device in DEVICES.values()
        for each in [*scenes(device), *scenes(device, element=2)]
        for way in priced(each, device).ways().values()
        for kernel in way.kernels
    }
    assert len(kernels) > 10
    for kernel in kernels:
        assert unit_of(kernel.seconds) == unit_of(kernel.formula) == SECOND, kernel.name


@pytest.mark.parametrize("name", ["H200", "generic CPU"])
def test_the_time_is_the_formula_with_the_numbers_put_in(name):
    device = DEVICES[name]
    for way in priced(work(device.kind, root=7), device).ways().values():
        exact = cost_terms.total(way.kernels).xreplace(
            {symbol: sympy.Float(value) for symbol, value in way.values.items()}
        )
        assert float(exact) == pytest.approx(way.seconds, rel=1e-9)


@devices
def test_each_symbol_is_printed_with_its_number(device):
    facts = priced(work(device.kind), device)
    for way in facts.ways().values():
        said = " ".join([*way.lines(), *way.numbers().values()])
        assert all(symbol in said for symbol in way.numbers())
        assert way.numbers()["N"] == "8" and way.numbers()["read"].endswith("byte/s")


def turns_back(facts: list) -> list:
    """Where a cascade paid and no longer does as a size grows, but for what tiles round."""
    return [
        (before, after)
        for before, after in pairwise(facts)
        if before.pays and not after.pays and min(before.margin, after.margin) > ROUNDING
    ]


@devices
def test_more_shared_keys_never_turn_a_cascade_back(device):
    for each in scenes(device):
        facts = priced(each, device)
        assert not turns_back([facts.with_prefix(length) for length in PREFIXES]), each


@devices
def test_more_branches_never_turn_a_cascade_back(device):
    for each in scenes(device):
        facts = priced(each, device)
        assert not turns_back([facts.with_branches(branches) for branches in TOPKS]), each


@devices
def test_long_prefixes_of_many_branches_pay_and_tiny_ones_do_not(device):
    assert priced(work(device.kind, branches=16, prefix=8000), device).pays
    assert priced(work(device.kind, branches=16, prefix=8000), device).margin > 3
    tiny = work("cpu", requests=1, branches=2, prefix=1, suffix=1, heads=1, kv_heads=1)
    if device.kind == "cpu":
        assert not priced(tiny, device).pays


@devices
def test_one_branch_never_pays(device):
    """Nothing is shared, even where the plain graph's copies cost more than a merge."""
    for each in scenes(device, branches=1, root=0, prefix=20000):
        facts = priced(each, device)
        assert not facts.pays and facts.break_even() == {}


@devices
def test_break_even_is_the_root_of_the_difference(device):
    found = 0
    for each in scenes(device):
        facts = priced(each, device)
        for name, vary in (("prefix", facts.with_prefix), ("branches", facts.with_branches)):
            root = facts.break_even()[name]
            if root is None:
                continue
            found += 1
            gains = [_gain(vary(root - 1)), _gain(vary(root))]
            assert gains[0] <= 0 < gains[1] or vary(root - 1).pays != vary(root).pays
    assert found or device.kind == "cuda"


def _gain(facts) -> float:
    return facts.plain.seconds - facts.cascade.seconds


@devices
def test_errors_of_a_tenth_change_decisions_near_the_frontier_only(device):
    for each in scenes(device):
        facts = priced(each, device)
        for name, factor in ((n, f) for n in device.figures for f in (0.9, 1.1)):
            other = priced(each, device.with_values({name: device[name] * factor}, "wrong"))
            if other.pays != facts.pays:
                assert facts.margin < 1.1 / 0.9, (each, name, factor)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_each_figure_counts_somewhere(kind):
    """A figure that no formula reads would be measured for nothing."""
    unused: set[str] = set()
    for device in [d for d in DEVICES.values() if d.kind == kind]:
        unused = set(device.figures) if not unused else unused
        for each in [*scenes(device), *scenes(device, width=128, element=4)]:
            base = _seconds(each, device)
            for name, factor in ((n, f) for n in list(unused) for f in (0.1, 10)):
                changed = device.with_values({name: device[name] * factor}, "wrong")
                if _seconds(each, changed) != base:
                    unused.discard(name)
    assert unused <= {"matmul.float16", "matmul.float32"}  # of another dtype, or what others part


def _seconds(each: Work, device: Device) -> tuple[float, float]:
    return cost.plain(each, device).seconds, cost.cascade(each, device).seconds


@devices
def test_time_grows_with_every_size(device):
    sizes = {"prefix": [64, 640, 6400], "requests": [1, 10, 100]}
    if device.kind == "cpu":  # a GPU's kernels read a long suffix in another way than a short one
        sizes["suffix"] = [2, 20, 200, 2000]
    for name, values in sizes.items():
        for way in (cost.plain, cost.cascade):
            times = [way(work(device.kind, **{name: v}), device).seconds for v in values]
            assert all(a < b for a, b in pairwise(times)), (name, way.__name__, times)


def test_a_view_is_cheaper_than_a_copy_on_a_gpu_and_no_different_on_a_cpu():
    """Inductor copies an expanded view for the CPU's attention, but not for a GPU's."""
    for device in DEVICES.values():
        view, copy = (
            cost.plain(work(device.kind, copied=copied), device).seconds for copied in (False, True)
        )
        assert (view < copy) == (device.kind == "cuda")


def test_empty_segments_cost_nothing():
    device = DEVICES["generic CPU"]
    both = work("cpu", suffix=0)
    alone = replace(both, runs=both.runs[:1])
    assert _seconds(both, device) == _seconds(alone, device)


def test_half_precision_keys_are_converted_on_a_cpu():
    device = DEVICES["generic CPU"]
    names = [k.name for k in cost.cascade(work("cpu", element=2), device).kernels]
    assert "keys_0 to float32" in names and "keys_1 to float32" in names
    assert not [k for k in cost.cascade(work("cpu"), device).kernels if "float32" in k.name]


@pytest.mark.parametrize("levels", [2, 3, 4])
def test_launches_are_those_of_the_kernels(levels):
    """Segments by two from the last on, the most shared first, as `triton_launch` pairs them."""
    runs = tuple(KeyRun(2**i, 1000 + i) for i in range(levels))
    each = replace(work("cuda", requests=2 ** (levels - 2), branches=2), runs=runs)
    made = cost.launches(each, DEVICES["H200"])
    pairs = [order for order, _ in made]
    assert pairs == {2: [[0, 1]], 3: [[0], [1, 2]], 4: [[0, 1], [2, 3]]}[levels]


@pytest.mark.parametrize("at", [1, 36, 37, 38, 10**6])
def test_crossing_finds_the_nearest_change(at):
    assert crossing(lambda size: size >= 37, at, 1) == 37
    assert crossing(lambda size: size < 37, at, 1) == 37


def test_crossing_looks_no_farther_than_it_may():
    assert crossing(lambda size: size >= 37, at=10, least=1, most=30) is None
    assert crossing(lambda size: size >= 37, at=50, least=40) is None
    assert crossing(lambda size: 20 <= size < 30, at=28, least=1) == 30
    assert crossing(lambda size: True, at=5, least=5, most=5) is None
