"""The launches compiled for GPUs that are not there: they fit, spill nothing, use tensor cores."""

import re

import pytest
import torch

pytest.importorskip("triton")

from support.cross_compile import A100, B200, H200, Workload, compiled, launches

from torch_cascade.kernels.launch_config import SlotConfig, Widths, shared_bytes
from torch_cascade.kernels.triton_attend import attend_parts

pytestmark = pytest.mark.skipif(
    not hasattr(attend_parts, "params"), reason="TRITON_INTERPRET=1: nothing can be compiled"
)
BF16 = Workload()
TARGETS = [A100, H200, B200]
# Few tall tiles, many splits; then a suffix too long to be a tail.
LONG = BF16.but(requests=4, branches=16, suffix=256, queries=1)
# Several tiles of rows read the same keys.
BUSY = LONG.but(branches=32)
# Rows of a prompt that are computed anew: they see the keys up to their positions.
SCATTERED = BF16.but(requests=1, branches=1, segments=1, queries=1267, prefix=8192)
FP32 = BF16.but(dtype=torch.float32)
PAGED = BF16.but(page=16, lens=True, suffix=16)
# One of each kind: what a change is most likely to break.
CORE = [
    BF16,
    LONG,
    BUSY,
    BUSY.but(suffix=4, dk=64, dv=64),
    PAGED,
    SCATTERED,
    BF16.but(branches=16, softcap=30.0, window=1024, sinks=True),
    LONG.but(mask=torch.bool, dk=80, dv=80),
]
# Bytes of stack a thread may spill to; the core has none on Hopper and Blackwell. Half precision: a
# few values that are not of the loop; more on Ampere, whose tensor cores take Q and the weights
# from registers; more where 64 rows of 256 numbers are summed in registers (128 of the 255 that a
# thread has) or both slots have tall tiles. Float32 products ("ieee") are summed on the ordinary
# cores from tiles in registers, which do not fit; nothing is tuned for speed there. With both loops
# and a tail with lengths, 17 addresses wait in the stack, written before the loops and read after.
SPILLS, LENGTHS_SPILLS, AMPERE_SPILLS, WIDE_SPILLS, FLOAT32_SPILLS = 32, 72, 128, 320, 8192


def everything():
    """The whole grid of features, sizes and dtypes."""
    yield from CORE
    for dim in (16, 96, 192, 256):
        yield BUSY.but(suffix=4, dk=dim, dv=128 if dim == 192 else dim, lens=dim == 96)
    for base in (BF16, LONG):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for dim in (16, 32, 64, 96, 128, 192, 256):
                yield base.but(dtype=dtype, dk=dim, dv=128 if dim == 192 else dim)
        for feature in (
            {"mask": torch.bool},
            {"mask": torch.bfloat16},
            {"window": 512},
            {"lens": True},
            {"page": 16},
            {"page": 16, "lens": True},
            {"softcap": 30.0},
            {"alibi": True},
            {"sinks": True},
            {"segments": 1},
            {"segments": 3},
            {"batch_invariant": True},
            {"positions": False},
            {"fp8": True},
            {"fp8": True, "page": 16, "lens": True},
            {"kv_heads": 1},
            {"kv_heads": 32},
            {"queries": 128, "branches": 1},
            {"requests": 64, "prefix": 128},
        ):
            yield base.but(**feature)


def check(workload, target):
    found = launches([workload], target)
    assert found
    for launch in found:
        binary = compiled(launch, target)
        where = f"{launch} of {workload} on {target.name}: {binary.registers} registers"
        assert binary.shared <= target.limits.shared_memory, where
        assert binary.stack <= spills(workload, target), f"{where}, {binary.stack} bytes of stack"
        if launch.kernel is attend_parts:
            check_attend(launch, binary, workload, target)


def spills(workload, target):
    if workload.dtype == torch.float32:
        return FLOAT32_SPILLS
    if workload.dk > 192 or workload.batch_invariant:
        return WIDE_SPILLS
    if target is A100:
        return AMPERE_SPILLS
    if workload.lens and workload.branches == BUSY.branches:
        return LENGTHS_SPILLS
    return 0 if workload in CORE else SPILLS


def check_attend(launch, binary, workload, target):
    """The estimate of shared memory holds, and 64 rows are Hopper's warp group products."""
    slots = [
        SlotConfig(*(launch.constant(f"{name}_{slot}") for name in names), 1)
        for names in [("BLOCK_M", "BLOCK_N", "STAGES")]
        for slot in "ab"
    ]
    kv_bytes = 1 if workload.fp8 else workload.dtype.itemsize
    widths = Widths(workload.dk, workload.dv, workload.dtype.itemsize, kv_bytes)
    estimates = [shared_bytes(slot, widths) for slot in slots]
    # Triton mostly lets the two slots' tiles share their memory, but not always.
    estimate = sum(estimates) if launch.constant("SLOTS") == 2 else max(estimates)
    assert binary.shared <= estimate + SCRATCH, (binary.shared, estimate)
    if target is H200 and workload.dtype != torch.float32 and slots[0].block_m == 64:
        assert "wgmma.mma_async" in binary.ptx
    sinks = launch.constant("DIRECT") and launch.constant("SINKS")  # compared before: `relative`
    if target is not B200 and not sinks:  # B200: instructions for two numbers at a time
        found = exponents(binary.ptx)
        assert found
        assert not FUSED.intersection(found)


# ptxas makes one instruction of a product and a sum, in which the product is not rounded: a score
# times the scale less the maximum, which is rounded, is then not 0 where the score is the maximum.
FUSED = {("fma",), ("sub", "mul"), ("add", "mul")}


def exponents(ptx):
    """For each power of two that is computed: what makes its exponent, and the operand of that."""
    made = {}
    for name, result, operands in re.findall(r"(\w+)\.[\w.]*f32\s+(%r\d+), ([^;]+);", ptx):
        made[result] = (name, operands.split(", ")[0])
    found = []
    for exponent in re.findall(r"ex2\.approx[\w.]*\s+%r\d+, (%r\d+);", ptx):
        name, operand = made.get(exponent, ("", ""))
        sum_of = made.get(operand, ("",))[:1] if name in ("sub", "add") else ()
        found.append((name, *sum_of))
    return found


# Reductions over warps and conversions of layouts; the mask's tile.
SCRATCH = 20 * 1024


@pytest.mark.parametrize("workload", CORE, ids=str)
@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_core(target, workload):
    check(workload, target)


@pytest.mark.slow
@pytest.mark.parametrize("workload", [*dict.fromkeys(everything())][len(CORE) :], ids=str)
@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_everything(target, workload):
    if workload.fp8 and target is A100:
        pytest.skip("Triton converts fp8 from sm_89 on; passes/devices.py converts before")
    check(workload, target)


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_the_quick_loop_is_for_the_generation_it_was_measured_on(target):
    """For sm_100 it is not even compiled: Triton 3.6 fails in a pass of its own."""
    attend, _merge = launches([BUSY], target)
    assert attend.constant("QUICK") is (target is H200)


def test_the_launches_are_those_of_a_call():
    """Two segments: one launch that attends and one that merges; three: two and one."""
    names = [str(launch) for launch in launches([LONG], H200)]
    assert names == ["attend_parts", "merge_parts"]
    names = [str(launch) for launch in launches([LONG.but(segments=3)], H200)]
    assert names == ["attend_parts", "attend_parts", "merge_parts"]
    (attend,) = launches([BF16.but(requests=64)], H200)
    assert attend.constant("DIRECT")
