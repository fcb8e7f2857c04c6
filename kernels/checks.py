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
_ACCUMULATION = (torch.float32, torch.float64)


def check_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    branches: Size,
    q_positions: Tensor | None,
    window: Size | None,
    softcap: float | None,
) -> None:
    """Arguments of `cascade::attend`.

    Raises:
        TypeError: a dtype is not as the contract says.
        ValueError: a rank, size, device or number is not.
    """
    op = "attend"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _rank(op, name, tensor, 4)
        _like(op, name, tensor, "q", q)
    _dtype(op, "q", q, _FLOATING)
    if _known(branches < 1):
        raise _error(op, "branches", "at least 1", branches)
    rows = branches * k.size(0)
    _size(op, "q", q, 0, rows, "branches * k.size(0)")
    if _known(k.size(1) < 1) or _known(q.size(1) % k.size(1) != 0):
        raise _error(op, "q", f"size(1) a multiple of k.size(1) = {k.size(1)}", q.size(1))
    _size(op, "k", k, 3, q.size(3), "q.size(3)")
    for dim in range(3):
        _size(op, "v", v, dim, k.size(dim), f"k.size({dim})")
    if mask is not None:
        _check_mask(op, mask, q, (q.size(0), q.size(1), q.size(2), k.size(2)))
    if q_positions is not None:
        _dtype(op, "q_positions", q_positions, (torch.int64,))
        _broadcasts(op, "q_positions", q_positions, (q.size(0), q.size(2)))
        _device(op, "q_positions", q_positions, "q", q)
    if window is not None and q_positions is None:
        raise _error(op, "window", "None where q_positions is None", window)
    if window is not None and _known(window < 1):
        raise _error(op, "window", "at least 1", window)
    if softcap is not None and _known(softcap <= 0):
        raise _error(op, "softcap", "a positive number", softcap)


def check_merge(o: Sequence[Tensor], lse: Sequence[Tensor]) -> None:
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


def check_reuse_kv(
    k: Tensor, v: Tensor, k_cached: Tensor, v_cached: Tensor, fresh_rows: Tensor
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
    _rank(op, "fresh_rows", fresh_rows, 2)
    _dtype(op, "fresh_rows", fresh_rows, (torch.int64,))
    _device(op, "fresh_rows", fresh_rows, "k", k)
    _size(op, "fresh_rows", fresh_rows, 0, k.size(0), "k.size(0)")


def check_no_grad(op: str, tensors: Sequence[Tensor]) -> None:
    """No op of this package has a derivative; a detached result would be a silent error.

    Raises:
        RuntimeError: autograd is recording and a tensor requires grad.
    """
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise RuntimeError(
            f"cascade::{op} has no derivative and an input requires grad: call it under "
            "torch.no_grad(), or leave the attention as torch's scaled_dot_product_attention"
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


def _error(op: str, name: str, expected: str, actual: object) -> ValueError:
    return ValueError(f"cascade::{op}: {name}: expected {expected}, got {actual}")


def _known(condition: bool | torch.SymBool) -> bool:
    """True iff the condition is provable; adds no guard."""
    if isinstance(condition, bool):
        return condition
    # Imported here: eager callers need no sympy.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)
