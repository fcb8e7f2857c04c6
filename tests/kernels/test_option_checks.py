"""What `attend` and `merge` say about options that break the contract."""

import pytest
import torch
from support.option_cases import FP8, PLAIN
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_cascade.kernels import ops

# R = 2, T = 3, Hkv = 2, G = 3, M = 5, P = 3 pages of 4 keys, 8 blocks.
DENSE = PLAIN.but(dk=8)
PAGED = DENSE.but(page=4)
SCALED = DENSE.but(fp8=True, scales=True)
POSITIONS = torch.zeros(6, 5, dtype=torch.int64)
TABLE = torch.zeros(2, 3, dtype=torch.int64)
LENS = torch.tensor([3, 4])


def wrong(case, **changes):
    """Arguments of `attend` that are right except for the changes."""
    args, options = case.arguments()
    return {**dict(zip(("q", "k", "v", "mask"), args, strict=True)), **options, **changes}


WRONG = {
    "kv_lens: expected 1 dims, got 2 dims, shape (2, 1)": lambda: wrong(
        DENSE, kv_lens=LENS[:, None]
    ),
    "kv_lens: expected torch.int32 or torch.int64, got torch.float32": lambda: wrong(
        DENSE, kv_lens=LENS.float()
    ),
    "kv_lens: expected size(0) == the number of KV rows = 2, got shape (6,)": lambda: wrong(
        DENSE, kv_lens=LENS.repeat(3)
    ),
    "kv_lens: expected size(0) == the number of KV rows = 2, got shape (8,)": lambda: wrong(
        PAGED, kv_lens=LENS.repeat(4)
    ),
    "kv_lens: expected the device of q, cpu, got meta": lambda: wrong(
        DENSE, kv_lens=LENS.to("meta")
    ),
    "page_table: expected 2 dims, got 1 dims, shape (3,)": lambda: wrong(
        PAGED, page_table=TABLE[0]
    ),
    "page_table: expected torch.int32 or torch.int64, got torch.int16": lambda: wrong(
        PAGED, page_table=TABLE.short()
    ),
    "page_table: expected the device of q, cpu, got meta": lambda: wrong(
        PAGED, page_table=TABLE.to("meta")
    ),
    "q: expected size(0) == branches * page_table.size(0) = 9, got shape (6, 6, 5, 8)": lambda: (
        wrong(PAGED, page_table=TABLE[[0, 0, 0]])
    ),
    "k: expected at least 1 block where page_table is given, got shape (0, 2, 4, 8)": lambda: wrong(
        PAGED, k=torch.empty(0, 2, 4, 8)
    ),
    "k: expected at least 1 key in a page where page_table is given, got shape (8, 2, 0, 8)": (
        lambda: wrong(PAGED, k=torch.empty(8, 2, 0, 8))
    ),
    "v: expected size(2) == k.size(2) = 4, got shape (8, 2, 3, 16)": lambda: wrong(
        PAGED, v=torch.empty(8, 2, 3, 16)
    ),
    "v: expected size(0) == k.size(0) = 8, got shape (2, 2, 4, 16)": lambda: wrong(
        PAGED, v=torch.empty(2, 2, 4, 16)
    ),
    "mask: expected a shape broadcastable to (6, 6, 5, 12), got shape (5, 4)": lambda: wrong(
        PAGED, mask=torch.ones(5, 4, dtype=torch.bool)
    ),
    "k: expected the dtype of q, torch.float32, got torch.float8_e5m2": lambda: wrong(
        DENSE, k=wrong(DENSE)["k"].to(torch.float8_e5m2)
    ),
    "v: expected the dtype of k, torch.float8_e4m3fn, got torch.float32": lambda: wrong(
        SCALED, v=wrong(DENSE)["v"]
    ),
    "v: expected the dtype of q, torch.float32, got torch.float8_e4m3fn": lambda: wrong(
        DENSE, v=wrong(DENSE)["v"].to(FP8)
    ),
    "q: expected torch.float32 or torch.bfloat16 or torch.float16, got torch.float64": lambda: (
        wrong(SCALED, q=wrong(SCALED)["q"].double())
    ),
    "q: expected torch.float32 or torch.bfloat16 or torch.float16, got torch.float8_e4m3fn": (
        lambda: wrong(SCALED, q=wrong(SCALED)["q"].to(FP8))
    ),
    **{
        f"{name}: {message}": change
        for name in ("k_scale", "v_scale")
        for message, change in {
            "expected None where k and v are not torch.float8_e4m3fn, got a tensor of shape (2,)": (
                lambda name=name: wrong(DENSE, **{name: torch.ones(2)})
            ),
            "expected 1 dims, got 0 dims, shape ()": lambda name=name: wrong(
                SCALED, **{name: torch.ones(())}
            ),
            "expected torch.float32, got torch.bfloat16": lambda name=name: wrong(
                SCALED, **{name: torch.ones(2).bfloat16()}
            ),
            "expected size(0) == k.size(1) = 2, got shape (6,)": lambda name=name: wrong(
                SCALED, **{name: torch.ones(6)}
            ),
            "expected the device of q, cpu, got meta": lambda name=name: wrong(
                SCALED, **{name: torch.ones(2, device="meta")}
            ),
        }.items()
    },
    "alibi_slopes: expected None where q_positions is None, got a tensor of shape (6,)": lambda: (
        wrong(DENSE, alibi_slopes=torch.ones(6))
    ),
    "alibi_slopes: expected 1 dims, got 2 dims": lambda: wrong(
        DENSE, alibi_slopes=torch.ones(2, 3), q_positions=POSITIONS
    ),
    "alibi_slopes: expected torch.float32, got torch.float64": lambda: wrong(
        DENSE, alibi_slopes=torch.ones(6).double(), q_positions=POSITIONS
    ),
    "alibi_slopes: expected size(0) == q.size(1) = 6, got shape (2,)": lambda: wrong(
        DENSE, alibi_slopes=torch.ones(2), q_positions=POSITIONS
    ),
    "alibi_slopes: expected the device of q, cpu, got meta": lambda: wrong(
        DENSE, alibi_slopes=torch.ones(6, device="meta"), q_positions=POSITIONS
    ),
}


def test_the_arguments_are_right_without_the_change():
    for case in (DENSE, PAGED, SCALED):
        ops.attend(**wrong(case))
    ops.attend(**wrong(DENSE, alibi_slopes=torch.ones(6), q_positions=POSITIONS))
    ops.attend(**wrong(DENSE, kv_lens=LENS))


@pytest.mark.parametrize("fake", [False, True], ids=["eager", "fake"])
@pytest.mark.parametrize("message", WRONG)
def test_attend_says_what_is_wrong(message, fake):
    arguments = WRONG[message]()
    if fake and "device" in message:
        pytest.skip("fake tensors refuse other devices themselves")
    if fake:
        mode = FakeTensorMode()
        tensors = {n: a for n, a in arguments.items() if isinstance(a, torch.Tensor)}
        arguments.update({n: mode.from_tensor(a) for n, a in tensors.items()})
    kind = TypeError if "dtype of" in message or "expected torch." in message else ValueError
    with pytest.raises(kind) as error:
        ops.attend(**arguments)
    assert str(error.value).startswith(f"cascade::attend: {message}")


OUT, LSE = torch.randn(2, 6, 5, 16), torch.randn(2, 6, 5)
WRONG_SINKS = {
    "expected torch.float32 or torch.bfloat16 or torch.float16, got torch.float64": (
        [OUT],
        [LSE],
        torch.zeros(6, 1).double(),
    ),
    "expected torch.float32 or torch.bfloat16 or torch.float16 or torch.float64, got torch.int64": (
        [OUT.double()],
        [LSE.double()],
        torch.zeros(6, 1).long(),
    ),
    "expected a shape broadcastable to (2, 6, 5), got shape (6,)": ([OUT], [LSE], torch.zeros(6)),
    "expected a shape broadcastable to (2, 6, 5), got shape (2, 1, 6, 5)": (
        [OUT],
        [LSE],
        torch.zeros(2, 1, 6, 5),
    ),
}


@pytest.mark.parametrize("fake", [False, True], ids=["eager", "fake"])
@pytest.mark.parametrize("message", WRONG_SINKS)
def test_merge_says_what_is_wrong_with_sinks(message, fake):
    o, lse, sinks = WRONG_SINKS[message]
    if fake:
        mode = FakeTensorMode()
        o, lse, sinks = (
            [mode.from_tensor(o[0])],
            [mode.from_tensor(lse[0])],
            mode.from_tensor(sinks),
        )
    with pytest.raises((TypeError, ValueError)) as error:
        ops.merge(o, lse, sinks=sinks)
    assert str(error.value) == f"cascade::merge: sinks: {message}"


def test_sinks_of_another_device():
    with pytest.raises(ValueError, match=r"sinks: expected the device of o\[0\], cpu, got meta"):
        ops.merge([OUT], [LSE], sinks=torch.zeros(6, 1, device="meta"))


@pytest.mark.parametrize("name", ["k_scale", "alibi_slopes"])
def test_options_that_require_grad_are_refused(name):
    args, options = SCALED.but(alibi=True, positions="NM").arguments()
    options[name].requires_grad_()
    with pytest.raises(RuntimeError, match=r"cascade::attend has no derivative"):
        ops.attend(*args, **options)


def test_sinks_that_require_grad_are_refused():
    sinks = torch.zeros(6, 1, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"cascade::merge has no derivative"):
        ops.merge([OUT], [LSE], sinks=sinks)
