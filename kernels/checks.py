"""Argument checks of the cascade ops, for real and fake tensors.

A check fails only where it is provably violated, so it adds no guard on a symbolic size: sizes that
cannot be compared pass, as the analyses that emit these ops have proved their relations already.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Size = int | torch.SymInt

_FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_FP8 = torch.float8_e4m3fn
_INTEGERS = (torch.int32, torch.int64)
_ACCUMULATION = (torch.float32, torch.float64)


def check_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    branches: Size = 1,
    scale: float | None = None,
    q_positions: Tensor | None = None,
    kv_start: Size = 0,
    window: Size | None = None,
    softcap: float | None = None,
    kv_lens: Tensor | None = None,
    page_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> None:
    """Arguments of `cascade::attend`.

    Raises:
        TypeError: a dtype is not as the contract says.
        ValueError: a rank, size, device or number is not.
    """
    op = "attend"
    _check_kv_dtypes(q, k, v, k_scale, v_scale)
    if _known(branches < 1):
        raise _error(op, "branches", "at least 1", branches)
    rows, keys = _check_rows(q, k, page_table, branches)
    if _known(k.size(1) < 1) or _known(q.size(1) % k.size(1) != 0):
        raise _error(op, "q", f"size(1) a multiple of k.size(1) = {k.size(1)}", q.size(1))
    _size(op, "k", k, 3, q.size(3), "q.size(3)")
    for dim in range(3):
        _size(op, "v", v, dim, k.size(dim), f"k.size({dim})")
    if mask is not None:
        _check_mask(op, mask, q, (q.size(0), q.size(1), q.size(2), keys))
    if q_positions is not None:
        _dtype(op, "q_positions", q_positions, (torch.int64,))
        _broadcasts(op, "q_positions", q_positions, (q.size(0), q.size(2)))
        _device(op, "q_positions", q_positions, "q", q)
    for name, option in (("window", window), ("alibi_slopes", alibi_slopes)):
        if option is not None and q_positions is None:
            raise _error(op, name, "None where q_positions is None", _shown(option))
    if window is not None and _known(window < 1):
        raise _error(op, "window", "at least 1", window)
    if softcap is not None and _known(softcap <= 0):
        raise _error(op, "softcap", "a positive number", softcap)
    _vector(op, "kv_lens", kv_lens, _INTEGERS, rows, "the number of KV rows", q)
    slopes = (torch.float32,)
    _vector(op, "alibi_slopes", alibi_slopes, slopes, q.size(1), "q.size(1)", q)


def _check_kv_dtypes(
    q: Tensor, k: Tensor, v: Tensor, k_scale: Tensor | None, v_scale: Tensor | None
) -> None:
    """Ranks, dtypes and devices of q, k, v; k and v are like q, or both fp8 with scales."""
    op = "attend"
    fp8 = k.dtype == _FP8
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _rank(op, name, tensor, 4)
        _device(op, name, tensor, "q", q)
    if fp8:
        _like(op, "v", v, "k", k)
    else:
        _like(op, "k", k, "q", q)
        _like(op, "v", v, "q", q)
    _dtype(op, "q", q, _FLOATING[:3] if fp8 else _FLOATING)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None and not fp8:
            expected = f"None where k and v are not {_FP8}"
            raise _error(op, name, expected, _shown(scale))
        _vector(op, name, scale, (torch.float32,), k.size(1), "k.size(1)", q)


def _check_rows(
    q: Tensor, k: Tensor, page_table: Tensor | None, branches: Size
) -> tuple[Size, Size]:
    """The numbers R and L of KV rows and keys; checks the page table and q's rows against them."""
    op = "attend"
    if page_table is None:
        _size(op, "q", q, 0, branches * k.size(0), "branches * k.size(0)")
        return k.size(0), k.size(2)
    _rank(op, "page_table", page_table, 2)
    _dtype(op, "page_table", page_table, _INTEGERS)
    _device(op, "page_table", page_table, "q", q)
    for dim, meaning in ((0, "block"), (2, "key in a page")):
        if _known(k.size(dim) < 1):
            raise _error(op, "k", f"at least 1 {meaning} where page_table is given", _shape(k))
    rows = page_table.size(0)
    _size(op, "q", q, 0, branches * rows, "branches * page_table.size(0)")
    return rows, page_table.size(1) * k.size(2)


def check_merge(o: Sequence[Tensor], lse: Sequence[Tensor], *, sinks: Tensor | None = None) -> None:
    """Arguments of `cascade::merge`.

    Raises:
        TypeError: a dtype is not as the contract says.
        ValueError: a rank, size, device or the number of parts is not.
    """
    op = "merge"
    if not o or len(o) != len(lse):
        raise _error(op, "lse", f"one part or more, as many as o has ({len(o)})", len(lse))
    _dtype(op, "o[0]", o[0], _ACCUMULATION)
    for i, (part, part_lse) in enumerate(zip(o, lse, strict=True)):
        rank = o[0].dim()
        for name, tensor, dims in ((f"o[{i}]", part, rank), (f"lse[{i}]", part_lse, rank - 1)):
            _rank(op, name, tensor, dims)
            _like(op, name, tensor, "o[0]", o[0])
            for dim in range(tensor.dim()):
                _size(op, name, tensor, dim, o[0].size(dim), f"o[0].size({dim})")
    if sinks is not None:
        _dtype(op, "sinks", sinks, [d for d in _FLOATING if d in (*_FLOATING[:3], o[0].dtype)])
        _device(op, "sinks", sinks, "o[0]", o[0])
        _broadcasts(op, "sinks", sinks, tuple(lse[0].shape))


def check_reuse_kv(
    k: Tensor,
    v: Tensor,
    k_cached: Tensor,
    v_cached: Tensor,
    fresh_rows: Tensor,
    chunks: Tensor | None = None,
) -> None:
    """Arguments of `cascade::reuse_kv`.

    Raises:
        TypeError: a dtype is not as the contract says.
        ValueError: a rank, size or device is not.
    """
    op = "reuse_kv"
    for name, tensor in (("k", k), ("v", v), ("k_cached", k_cached), ("v_cached", v_cached)):
        _rank(op, name, tensor, 4)
        _like(op, name, tensor, "k", k)
        for dim in range(3):
            _size(op, name, tensor, dim, k.size(dim), f"k.size({dim})")
    _size(op, "k_cached", k_cached, 3, k.size(3), "k.size(3)")
    _size(op, "v_cached", v_cached, 3, v.size(3), "v.size(3)")
    for name, rows in (("fresh_rows", fresh_rows), ("chunks", chunks)):
        if rows is None:
            continue
        _rank(op, name, rows, 2)
        _dtype(op, name, rows, (torch.int64,))
        _device(op, name, rows, "k", k)
        _size(op, name, rows, 0, k.size(0), "k.size(0)")
    if _known(fresh_rows.size(1) < 1) or _known(fresh_rows.size(1) > k.size(2)):
        expected = f"1 to k.size(2) = {k.size(2)} tokens a row (the last is always among them)"
        raise _error(op, "fresh_rows", expected, _shape(fresh_rows))
    if chunks is not None:
        _size(op, "chunks", chunks, 1, k.size(2), "k.size(2)")


def check_linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None = None
) -> None:
    """Arguments of `cascade::linears`.

    Raises:
        TypeError: a dtype is not as the contract says.
        ValueError: a rank, size, device or number of tensors is not.
    """
    op = "linears"
    _rank(op, "x", x, 2)
    _dtype(op, "x", x, _FLOATING)
    if not weights:
        raise _error(op, "weights", "one or more", 0)
    if biases is not None and len(biases) != len(weights):
        raise _error(op, "biases", f"as many as weights, {len(weights)}", len(biases))
    for i, weight in enumerate(weights):
        _rank(op, f"weights[{i}]", weight, 2)
        _like(op, f"weights[{i}]", weight, "x", x)
        _size(op, f"weights[{i}]", weight, 1, x.size(1), "x.size(1)")
        if biases is not None:
            columns = (weight.size(0), f"weights[{i}].size(0)")
            _vector(op, f"biases[{i}]", biases[i], (x.dtype,), *columns, x)


def check_no_grad(op: str, tensors: Sequence[Tensor]) -> None:
    """No op of this package has a derivative; a detached result would be a silent error.

    Raises:
        RuntimeError: autograd is recording and a tensor requires grad.
    """
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise RuntimeError(
            f"cascade::{op} has no derivative and an input requires grad: call it under "
            "torch.no_grad(), or leave to torch what it computes"
        )


def _check_mask(op: str, mask: Tensor, q: Tensor, scores: tuple[Size, ...]) -> None:
    allowed = (torch.bool, *(d for d in _FLOATING if d != torch.float64 or d == q.dtype))
    _dtype(op, "mask", mask, allowed)
    _device(op, "mask", mask, "q", q)
    _broadcasts(op, "mask", mask, scores)


def _rank(op: str, name: str, tensor: Tensor, rank: int) -> None:
    if tensor.dim() != rank:
        raise _error(op, name, f"{rank} dims", f"{tensor.dim()} dims, {_shape(tensor)}")


def _size(op: str, name: str, tensor: Tensor, dim: int, size: Size, meaning: str) -> None:
    if _known(tensor.size(dim) != size):
        raise _error(op, name, f"size({dim}) == {meaning} = {size}", _shape(tensor))


def _vector(
    op: str,
    name: str,
    tensor: Tensor | None,
    dtypes: Sequence[torch.dtype],
    size: Size,
    meaning: str,
    q: Tensor,
) -> None:
    """An optional 1-D tensor of `size` numbers on the device of q."""
    if tensor is None:
        return
    _rank(op, name, tensor, 1)
    _dtype(op, name, tensor, dtypes)
    _device(op, name, tensor, "q", q)
    _size(op, name, tensor, 0, size, meaning)


def _broadcasts(op: str, name: str, tensor: Tensor, shape: tuple[Size, ...]) -> None:
    """Each dim of `tensor`, from the last, is 1 or that of `shape`."""
    pairs = list(zip(reversed(tensor.shape), reversed(shape), strict=False))
    wrong = any(_known(have != 1) and _known(have != want) for have, want in pairs)
    if wrong or tensor.dim() > len(shape):
        raise _error(op, name, f"a shape broadcastable to {tuple(shape)}", _shape(tensor))


def _dtype(op: str, name: str, tensor: Tensor, allowed: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in allowed:
        names = " or ".join(str(dtype) for dtype in allowed)
        raise TypeError(f"cascade::{op}: {name}: expected {names}, got {tensor.dtype}")


def _device(op: str, name: str, tensor: Tensor, other: str, reference: Tensor) -> None:
    if tensor.device != reference.device:
        raise _error(op, name, f"the device of {other}, {reference.device}", tensor.device)


def _like(op: str, name: str, tensor: Tensor, other: str, reference: Tensor) -> None:
    _device(op, name, tensor, other, reference)
    if tensor.dtype != reference.dtype:
        raise TypeError(
            f"cascade::{op}: {name}: expected the dtype of {other}, {reference.dtype}, "
            f"got {tensor.dtype}"
        )


def _shape(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}"


def _shown(argument: object) -> object:
    return f"a tensor of {_shape(argument)}" if isinstance(argument, Tensor) else argument


def _error(op: str, name: str, expected: str, actual: object) -> ValueError:
    return ValueError(f"cascade::{op}: {name}: expected {expected}, got {actual}")


def _known(condition: bool | torch.SymBool) -> bool:
    """True iff the condition is provable; adds no guard."""
    if isinstance(condition, bool):
        return condition
    # Imported here: eager callers need no sympy.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)
