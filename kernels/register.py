"""Registers the ops of the namespace `cascade`: schemas, and what the dispatcher calls for a key.

The contract of the ops is in `kernels/ops.py`, which imports this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map_only

from torch_cascade.kernels.checks import (
    check_attend,
    check_linears,
    check_merge,
    check_no_grad,
    check_reuse_kv,
)
from torch_cascade.kernels.cpu_attend import attend_cpu, attend_math
from torch_cascade.kernels.linears import linears_torch
from torch_cascade.kernels.merge import merge_torch
from torch_cascade.kernels.sdpa import sdpa_torch

SCHEMAS = {
    "sdpa": "(Tensor q, Tensor k, Tensor v, Tensor? attn_mask=None, bool is_causal=False, *, "
    "float? scale=None, bool enable_gqa=False) -> Tensor",
    "attend": "(Tensor q, Tensor k, Tensor v, Tensor? mask=None, *, SymInt branches=1, "
    "float? scale=None, Tensor? q_positions=None, SymInt kv_start=0, SymInt? window=None, "
    "float? softcap=None, Tensor? kv_lens=None, Tensor? page_table=None, Tensor? k_scale=None, "
    "Tensor? v_scale=None, Tensor? alibi_slopes=None) -> (Tensor o, Tensor lse)",
    "merge": "(Tensor[] o, Tensor[] lse, *, Tensor? sinks=None) -> (Tensor o, Tensor lse)",
    "reuse_kv": "(Tensor k, Tensor v, Tensor k_cached, Tensor v_cached, Tensor fresh_rows, "
    "Tensor? chunks=None) -> (Tensor k, Tensor v)",
    "linears": "(Tensor x, Tensor[] weights, Tensor[]? biases=None) -> Tensor[]",
}


def _attend_fake(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    check_attend(q, k, v, mask, **options)
    rows = (q.size(0), q.size(1), q.size(2))
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*rows, v.size(3)), dtype=dtype), q.new_empty(rows, dtype=dtype)


def _attend_eager(kernel: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    def checked(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        check_attend(q, k, v, mask, **options)
        return kernel(q, k, v, mask, **options)

    return checked


def _attend_cuda(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    if q.dtype == torch.float64:
        return attend_math(q, k, v, mask, **options)
    # Imported here: who has no GPU needs no Triton.
    from torch_cascade.kernels.triton_launch import attend_triton

    return attend_triton(q, k, v, mask, **options)


def _merge_eager(
    o: list[Tensor], lse: list[Tensor], *, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    check_merge(o, lse, sinks=sinks)
    return merge_torch(o, lse, sinks=sinks)


def _merge_fake(
    o: list[Tensor], lse: list[Tensor], *, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    check_merge(o, lse, sinks=sinks)
    return o[0].new_empty(o[0].shape), lse[0].new_empty(lse[0].shape)


def _reuse_kv(
    k: Tensor,
    v: Tensor,
    k_cached: Tensor,
    v_cached: Tensor,
    fresh_rows: Tensor,
    chunks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    check_reuse_kv(k, v, k_cached, v_cached, fresh_rows, chunks)
    layout = torch.contiguous_format
    return k.clone(memory_format=layout), v.clone(memory_format=layout)


def _linears_eager(
    x: Tensor, weights: list[Tensor], biases: list[Tensor] | None = None
) -> list[Tensor]:
    check_linears(x, weights, biases)
    return list(linears_torch(x, weights, biases))


def _linears_fake(
    x: Tensor, weights: list[Tensor], biases: list[Tensor] | None = None
) -> list[Tensor]:
    check_linears(x, weights, biases)
    return [x.new_empty((x.size(0), weight.size(0))) for weight in weights]


def _refuse_grad(name: str) -> Callable[..., Any]:
    """The autograd kernel of an op: no derivative is better than a silently detached result."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        check_no_grad(name, tensors)
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(torch.ops.cascade, name)(*args, **kwargs)

    return kernel


def _autocast(name: str, device_type: str, key: torch._C.DispatchKey) -> Callable[..., Any]:
    """The autocast kernel of an op: casts what torch's lower-precision policy casts, for sdpa only.

    The nested call runs with autocast off, else the products inside would be cast one by one.
    """

    def cast_argument(tensor: Tensor) -> Tensor:
        eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
        here = tensor.device.type == device_type
        return tensor.to(torch.get_autocast_dtype(device_type)) if eligible and here else tensor

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            if name == "sdpa":
                args, kwargs = tree_map_only(Tensor, cast_argument, (args, kwargs))
            return getattr(torch.ops.cascade, name)(*args, **kwargs)

    return kernel


_EAGER: dict[str, Callable[..., Any]] = {
    "sdpa": sdpa_torch,
    "attend": _attend_eager(attend_math),
    "merge": _merge_eager,
    "reuse_kv": _reuse_kv,
    "linears": _linears_eager,
}
_FAKE: dict[str, Callable[..., Any]] = {
    "sdpa": sdpa_torch,
    "attend": _attend_fake,
    "merge": _merge_fake,
    "reuse_kv": _reuse_kv,
    "linears": _linears_fake,
}
_AUTOCAST = {
    "cpu": torch._C.DispatchKey.AutocastCPU,
    "cuda": torch._C.DispatchKey.AutocastCUDA,
}

_library = cast("Callable[..., Any]", torch.library.Library)("cascade", "DEF")
for _name, _schema in SCHEMAS.items():
    _library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(_name, _EAGER[_name], "CompositeExplicitAutograd")
    _library.impl(_name, _refuse_grad(_name), "Autograd")
    for _device_type, _key in _AUTOCAST.items():
        _library.impl(_name, _autocast(_name, _device_type, _key), _key.name)
    torch.library.register_fake(f"cascade::{_name}", _FAKE[_name], lib=_library)
_library.impl("attend", _attend_eager(attend_cpu), "CPU")
_library.impl("attend", _attend_eager(_attend_cuda), "CUDA")
