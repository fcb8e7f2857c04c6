"""Keys and values stored as float8_e4m3fn: read as stored, with one factor a head at most."""

from __future__ import annotations

import pytest
import torch
from support.paged import (
    PAGE,
    B,
    Build,
    D,
    G,
    H,
    N,
    T,
    Tensors,
    attends,
    attention,
    check,
    nhd,
    tensors,
    values_of,
)
from torch import Tensor

from torch_cascade.compiler.graph import tensor

FP8 = torch.float8_e4m3fn


def paged(t: Tensors, w: str) -> Tensor:
    """Prefix pages [N, H, P * PAGE, D], still fp8."""
    return nhd(t[f"fp8_{w}"], t["table"].repeat_interleave(T, 0))


def dense(t: Tensors, w: str) -> Tensor:
    """A dense prefix [N, H, PAGE, D], still fp8."""
    return t[f"fp8_{w}"][:B].transpose(1, 2).repeat_interleave(T, 0)


def own(t: Tensors, w: str) -> Tensor:
    return nhd(t[f"fp8_{w}"], t["suffix"])


def wide(t: Tensors, keys: Tensor) -> Tensor:
    return keys.to(t["q"].dtype)


def per_head(t: Tensors, w: str) -> Tensor:
    return t[f"{w}_scale"].to(t["q"].dtype).reshape(H, 1, 1)


STORED: dict[str, tuple[Build, bool, bool]] = {
    # name: build, pages, scales
    "dense": (lambda t, w: torch.cat([wide(t, dense(t, w)), wide(t, own(t, w))], 2), False, False),
    "paged": (lambda t, w: torch.cat([wide(t, paged(t, w)), wide(t, own(t, w))], 2), True, False),
    "converted at the end": (
        lambda t, w: wide(t, torch.cat([paged(t, w), own(t, w)], 2)),
        True,
        False,
    ),
    "scaled parts": (
        lambda t, w: torch.cat([wide(t, x) * per_head(t, w) for x in (paged(t, w), own(t, w))], 2),
        True,
        True,
    ),
    "scaled at the end": (
        lambda t, w: wide(t, torch.cat([paged(t, w), own(t, w)], 2)) * per_head(t, w),
        True,
        True,
    ),
    "scaled before it is expanded": (
        lambda t, w: torch.cat(
            [
                (wide(t, t[f"fp8_{w}"][:B].transpose(1, 2)) * per_head(t, w)).repeat_interleave(
                    T, 0
                ),
                wide(t, own(t, w)) * per_head(t, w),
            ],
            2,
        ),
        False,
        True,
    ),
    "scaled in float32": (
        lambda t, w: (
            wide(t, per_head(t, w).float() * torch.cat([paged(t, w), own(t, w)], 2).float())
            if t["q"].dtype != torch.float64
            else per_head(t, w) * torch.cat([paged(t, w), own(t, w)], 2).double()
        ),
        True,
        True,
    ),
    "scaled by a number": (
        lambda t, w: wide(t, torch.cat([paged(t, w), own(t, w)], 2)) * 0.625,
        True,
        True,
    ),
    "scaled by one element": (
        lambda t, w: wide(t, torch.cat([paged(t, w), own(t, w)], 2)) * per_head(t, w)[1],
        True,
        True,
    ),
    "heads last when scaled": (
        lambda t, w: (
            wide(t, torch.cat([paged(t, w), own(t, w)], 2)).transpose(1, 2)
            * per_head(t, w).reshape(H, 1)
        ).transpose(1, 2),
        True,
        True,
    ),
}


def values(dtype: torch.dtype) -> list[Tensor]:
    t = tensors()
    t["q"] = t["q"].to(dtype)
    return values_of(t)


@pytest.mark.parametrize("name", STORED)
def test_read_as_stored(name: str) -> None:
    build, pages, scales = STORED[name]
    fn, given = attention(build), values(torch.bfloat16)
    for part in attends(fn, given):
        k, v = tensor(part.args[1]), tensor(part.args[2])
        assert (k.dtype, v.dtype) == (FP8, FP8)
        for scale in ("k_scale", "v_scale"):
            assert (scale in part.kwargs) == scales
            assert not scales or tensor(part.kwargs[scale]).shape == (H,)
    prefix = attends(fn, given)[0]
    assert ("page_table" in prefix.kwargs) == pages
    check(fn, given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_precisions(dtype: torch.dtype) -> None:
    fn, given = attention(STORED["scaled parts"][0]), values(dtype)
    assert {tensor(part.args[1]).dtype for part in attends(fn, given)} == {FP8}
    check(fn, given)


def test_only_keys_are_scaled() -> None:
    scaled, plain = STORED["scaled parts"][0], STORED["paged"][0]
    fn, given = attention(scaled, plain), values(torch.bfloat16)
    prefix, _ = attends(fn, given)
    assert "k_scale" in prefix.kwargs and "v_scale" not in prefix.kwargs
    check(fn, given)


def per_token(t: Tensors, w: str) -> Tensor:
    keys = wide(t, paged(t, w))
    token = torch.arange(keys.shape[2], dtype=keys.dtype)[:, None]
    return torch.cat([keys * (1 + token / 64), wide(t, own(t, w))], 2)


def per_row(t: Tensors, w: str) -> Tensor:
    row = torch.arange(N, dtype=t["q"].dtype)[:, None, None, None] + 1
    return torch.cat([wide(t, dense(t, w)) * row, wide(t, own(t, w))], 2)


def twice(t: Tensors, w: str) -> Tensor:
    return STORED["scaled at the end"][0](t, w) * per_head(t, w)


def squeezed(t: Tensors, w: str) -> Tensor:
    """Rounded to fp8 once more: no view of what is stored (3 * fp8 is exact in bfloat16)."""
    half = (wide(t, t[f"fp8_{w}"][:B].transpose(1, 2)) * 3).to(FP8)
    return torch.cat([wide(t, half.repeat_interleave(T, 0)), wide(t, own(t, w))], 2)


def other_fp8(t: Tensors, w: str) -> Tensor:
    prefix = t[f"fp8_{w}"][:B].transpose(1, 2).to(torch.float8_e5m2).repeat_interleave(T, 0)
    return torch.cat([wide(t, prefix), wide(t, own(t, w))], 2)


NOT_SCALED: dict[str, Build] = {
    "a factor a token": per_token,
    "a factor a row": per_row,
    "two factors": twice,
    "fp8 of another kind": other_fp8,
}


@pytest.mark.parametrize("name", NOT_SCALED)
def test_look_alikes(name: str) -> None:
    """No scale of the kernel can say it: what is read is the converted tensor, or nothing is."""
    fn, given = attention(NOT_SCALED[name]), values(torch.bfloat16)
    parts = attends(fn, given)
    assert not parts or tensor(parts[0].args[1]).dtype == torch.bfloat16
    assert not any("k_scale" in part.kwargs for part in parts[:1])
    if parts:
        check(fn, given)


def test_fp8_rounded_in_the_graph_is_what_is_read() -> None:
    fn, given = attention(squeezed), values(torch.bfloat16)
    prefix, _ = attends(fn, given)
    assert tensor(prefix.args[1]).shape == (B, H, PAGE, D)
    check(fn, given)


def test_fp8_keys_beside_other_values() -> None:
    """The kernel takes both or neither: converted, and scaled, for the shared rows only."""

    def build(t: Tensors, w: str) -> Tensor:
        if w == "k":
            return STORED["scaled parts"][0](t, w)
        prefix = nhd(t["nhd_v"], t["table"].repeat_interleave(T, 0))
        return wide(t, torch.cat([prefix, nhd(t["nhd_v"], t["suffix"])], 2))

    fn, given = attention(build), values(torch.bfloat16)
    prefix, _ = attends(fn, given)
    assert tensor(prefix.args[1]).dtype == torch.bfloat16
    assert tensor(prefix.args[1]).shape[0] == B
    check(fn, given)


def test_factor_of_query_heads() -> None:
    """Scaled after the heads were repeated: neighbours of a group differ, no head of K says it."""

    def build(t: Tensors, w: str) -> Tensor:
        factor = torch.arange(H * G, dtype=t["q"].dtype)[:, None, None] / 8 + 1
        parts = [wide(t, x).repeat_interleave(G, 1) for x in (dense(t, w), own(t, w))]
        return torch.cat([parts[0] * factor, parts[1] * factor], 2)

    fn, given = attention(build), values(torch.bfloat16)
    assert not attends(fn, given)
