"""The Triton kernels against the float64 oracle: dtypes, layouts, pages and fp8."""

import itertools

import pytest
import torch

pytest.importorskip("triton")

from support.triton_scenes import PREFIX, SMALL, assert_right, both_ways, check, launch, scenes

from torch_cascade.kernels.reference import attend_reference
from torch_cascade.kernels.triton_call import KeyPart
from torch_cascade.kernels.triton_launch import attend_merge, attend_triton

FLOATING = [torch.bfloat16, torch.float16, torch.float32]
TAIL = launch(2, 1, tail=True)


# --- dtypes ---------------------------------------------------------------------------------------


@scenes(
    *(
        {"dtype": dtype, **more}
        for dtype in FLOATING[:2]
        for more in (
            {},
            {"prefix": {"mask": "N1ML", "additive": True}, "suffix": {"mask": "1HML"}},
            {"suffix": {"positions": "M", "keys": 19}, "sinks": "H1", "softcap": 5.0},
            {"dk": 80, "dv": 96, "layout": "by_token"},
        )
    )
)
@both_ways
def test_half_precision(mode, scene, device):
    check(scene, mode, device)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("sinks", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dtypes_of_sinks(sinks, dtype, device):
    call = SMALL.but(dtype=dtype, sinks="H1").call()
    call = call.but(sinks=call.sinks.to(sinks))
    for mode in (launch(2, 1), launch(1, 1, direct=True, tail=True)):
        assert_right(call(device, configs=[mode]), call)


ORDERS = [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 2, 0, 3)]


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@both_ways
def test_dtype_and_layout_of_the_result(mode, dtype, order, device):
    """The result is the float32 one, rounded once, in the order that was asked for."""
    call = SMALL.but(dtype=dtype).call()
    whole, lse = call(device, configs=[mode])
    o, same_lse = call(device, configs=[mode], out_dtype=dtype, out_order=order)
    assert torch.equal(o, whole.to(dtype))
    assert torch.equal(lse, same_lse)
    assert o.permute(order).is_contiguous()
    assert lse.is_contiguous()


def test_float64_is_refused():
    q = torch.zeros(1, 1, 1, 16, dtype=torch.float64)
    with pytest.raises(TypeError, match="q: expected float32, bfloat16 or float16, got"):
        attend_merge(q, [KeyPart(q, q)])


def test_no_parts_are_refused():
    with pytest.raises(ValueError, match="parts: expected one or more, got 0"):
        attend_merge(torch.zeros(1, 1, 1, 16), [])


# --- layouts --------------------------------------------------------------------------------------


@scenes(
    *({"layout": x, "dtype": d} for x in ("by_token", "spread") for d in FLOATING[::2]),
    {"layout": "by_token", "kv_heads": 2, "prefix": {"mask": "N1ML"}},
)
@both_ways
def test_layouts(mode, scene, device):
    check(scene, mode, device)


def test_operands_that_are_views(device):
    """Broadcast keys, a mask that is a transposed view, positions and lengths with strides."""
    call = SMALL.call()
    prefix, suffix = call.parts
    shared = [x[:1].expand(2, -1, -1, -1) for x in (prefix.k, prefix.v)]
    mask = (torch.rand(21, 3, 1, 4) > 0.4).permute(3, 2, 1, 0)
    positions = torch.randint(-1, 6, (3, 8)).t()[::2]
    lens = torch.tensor([5, 99, 3, 99, 0, 99, 4, 99])[::2]
    parts = [
        prefix._replace(k=shared[0], v=shared[1], mask=mask),
        suffix._replace(q_positions=positions, kv_lens=lens),
    ]
    call = call.but(parts=parts)
    assert_right(call(device, configs=[launch(2, 1)]), call)
    assert_right(call(device, configs=[TAIL]), call)


def test_no_argument_is_written(device):
    call = SMALL.but(sinks="H1", prefix={"mask": "N1ML"}, suffix={"lens": (0.5,)}).call()
    tensors = [x for part in (call.parts[0], call.parts[1], [call.q, call.sinks]) for x in part]
    tensors = [x.to(device) for x in tensors if isinstance(x, torch.Tensor)]
    before = [x.clone() for x in tensors]
    call(device, configs=[TAIL])
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


# --- pages ----------------------------------------------------------------------------------------

PAGES = {1: 21, 3: 21, 7: 21, 16: 32}


@scenes(
    *(
        {"prefix": {"page": p, "keys": k, "lens": lens, "nan": True}}
        for (p, k), lens in itertools.product(PAGES.items(), ((), (0.55, 0.9), (0, 2)))
    ),
    *(
        {"suffix": {"page": p, "keys": k, "lens": lens, "nan": True}}
        for (p, k), lens in itertools.product(((1, 5), (3, 6), (16, 16)), ((), (0.5, 1, 0)))
    ),
    {
        "kv_heads": 3,
        "group": 1,
        "prefix": {"page": 3, "positions": "NM", "window": 5, "mask": "N1ML"},
        "suffix": {"page": 3, "keys": 6, "positions": "M", "lens": (0.4, 1)},
    },
    {"dtype": torch.bfloat16, "dk": 72, "prefix": {"page": 3, "lens": (0.7,)}},
)
@both_ways
def test_pages(mode, scene, device):
    check(scene, mode, device)


# --- fp8 ------------------------------------------------------------------------------------------


@scenes(
    *({"dtype": d, "prefix": {"fp8": True}, "suffix": {"fp8": True}} for d in FLOATING),
    {
        "dtype": torch.bfloat16,
        "kv_heads": 2,
        "sinks": "H1",
        "prefix": {"fp8": True, "page": 3, "lens": (0.55, 0.9), "nan": True},
        "suffix": {"fp8": True, "page": 3, "keys": 6, "lens": (1, 0.4)},
    },
)
@both_ways
def test_fp8(mode, scene, device):
    check(scene, mode, device)


@pytest.mark.parametrize("name", ["k_scale", "v_scale", "both", "neither"])
def test_which_scales_are_given(name, device):
    call = SMALL.but(prefix={"fp8": True}, suffix={"fp8": True}).call()
    left_out = {"k_scale": ["v_scale"], "v_scale": ["k_scale"], "both": []}
    without = dict.fromkeys(left_out.get(name, ["k_scale", "v_scale"]))
    call = call.but(parts=[part._replace(**without) for part in call.parts])
    assert_right(call(device, configs=[TAIL]), call)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_one_key_comes_out_as_scaled(dtype, device):
    """Its weight is 1: nothing may be rounded to the dtype of q."""
    segment = PREFIX.but(branches=1, keys=1, fp8=True)
    call = SMALL.but(parts=(segment,), dtype=dtype).call()
    assert_right(call(device, configs=[launch(1, direct=True)]), call)


@pytest.mark.parametrize("k_scale", [-0.7, 0.0])
def test_scales_that_turn_or_drop_the_keys(k_scale, device):
    call = SMALL.but(prefix={"fp8": True, "mask": "N1ML"}, suffix={"fp8": True}).call()
    scale = torch.full((1,), k_scale)
    call = call.but(parts=[part._replace(k_scale=scale) for part in call.parts])
    assert_right(call(device, configs=[TAIL]), call)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_all_values_of_fp8(dtype, device):
    """Each query sees one key: the output is the value."""
    bits = torch.arange(256, dtype=torch.uint8)
    values = bits[(bits & 127) != 127].view(torch.float8_e4m3fn)  # no NaN
    v = values.repeat_interleave(16).view(1, 1, 254, 16)
    q = torch.zeros(1, 1, 254, 16, dtype=dtype)
    o, _ = attend_triton(
        q.to(device), *[v.to(device)] * 2, mask=torch.eye(254, dtype=torch.bool, device=device)
    )
    assert torch.equal(o.cpu(), v.float())


def test_one_part_is_attend(device):
    """All options of the op, by their names."""
    q, kv = torch.randn(6, 4, 3, 16), torch.randn(2, 2, 21, 16)
    options = {
        "mask": torch.rand(6, 1, 3, 21) > 0.2,
        "branches": 3,
        "scale": 0.3,
        "q_positions": torch.randint(9, 30, (6, 3)),
        "kv_start": 8,
        "window": 15,
        "softcap": 3.0,
        "kv_lens": torch.tensor([20, 11]),
        "alibi_slopes": torch.rand(4) - 0.3,
    }
    on_device = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    result = attend_triton(q.to(device), *[kv.to(device)] * 2, **on_device)
    wanted = attend_reference(q, kv, kv, **options)
    for got, reference in zip(result, wanted, strict=True):
        assert got.is_contiguous()
        torch.testing.assert_close(got.cpu(), reference.float())
