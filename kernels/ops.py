"""The four ops of the namespace `cascade`: the contract every pass and every kernel works by.

Importing this module defines them. The functions below are thin: they call the op and carry its
contract. Axis names: N query rows, R key/value rows, T branches (N = R * T), Hq query heads,
Hkv key/value heads (Hq = Hkv * G), M queries, L keys, Dk and Dv head sizes.

For all ops: functional (no argument is written), no result aliases an argument, log-sum-exps are
natural logarithms, and the fake kernels give exact dtypes and strides. Checks run on real and on
fake tensors; on symbolic sizes they refuse what is provably wrong and add no guard. No op has a
derivative: if autograd is recording and an input requires grad, the op raises. Under
`torch.autocast`, `sdpa` computes in the autocast dtype as torch does; the others keep their dtypes.

Example:
    A batch of 3 branches over one prefix, equal to attention over the concatenated keys:

    >>> q = torch.randn(3, 4, 1, 16)
    >>> prefix, suffix = torch.randn(1, 2, 9, 16), torch.randn(3, 2, 5, 16)
    >>> o_prefix, lse_prefix = attend(q, prefix, prefix, branches=3)
    >>> o_suffix, lse_suffix = attend(q, suffix, suffix)
    >>> o, _ = merge([o_prefix, o_suffix], [lse_prefix, lse_suffix])
    >>> whole = torch.cat([prefix.expand(3, 2, 9, 16), suffix], 2)
    >>> torch.allclose(o, sdpa(q, whole, whole, enable_gqa=True), atol=1e-5)
    True
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map_only

from torch_cascade.kernels.checks import (
    check_attend,
    check_merge,
    check_no_grad,
    check_reuse_kv,
)
from torch_cascade.kernels.cpu_attend import attend_cpu, attend_math
from torch_cascade.kernels.merge import merge_torch
from torch_cascade.kernels.sdpa import sdpa_torch

Size = int | torch.SymInt

SCHEMAS = {
    "sdpa": "(Tensor q, Tensor k, Tensor v, Tensor? attn_mask=None, bool is_causal=False, *, "
    "float? scale=None, bool enable_gqa=False) -> Tensor",
    "attend": "(Tensor q, Tensor k, Tensor v, Tensor? mask=None, *, SymInt branches=1, "
    "float? scale=None, Tensor? q_positions=None, SymInt kv_start=0, SymInt? window=None, "
    "float? softcap=None) -> (Tensor o, Tensor lse)",
    "merge": "(Tensor[] o, Tensor[] lse) -> (Tensor o, Tensor lse)",
    "reuse_kv": "(Tensor k, Tensor v, Tensor k_cached, Tensor v_cached, Tensor fresh_rows) -> "
    "(Tensor k, Tensor v)",
}


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """One attention with exactly the meaning of torch's `scaled_dot_product_attention`, kept whole.

    AOTAutograd splits the torch function into backend-specific ops; this op stays one node. It
    takes what torch takes (with dropout_p = 0), raises what torch raises, and its result has the
    dtype (autocast included) and the strides of the real call.

    Args:
        q: queries [..., Hq, M, Dk].
        k: keys [..., Hkv, L, Dk].
        v: values [..., Hkv, L, Dv].
        attn_mask: broadcastable to [..., Hq, M, L]; bool (True = visible) or floating (added).
        is_causal: key j visible to query i iff j <= i (top-left aligned, also for M != L).
        scale: factor of the scores; None for 1/sqrt(Dk).
        enable_gqa: let Hkv divide Hq; query head h reads KV head h // (Hq // Hkv).

    Returns:
        o [..., Hq, M, Dv].

    Raises:
        RuntimeError: what torch raises for these arguments; or an input requires grad.

    Source:
        `torch.nn.functional.scaled_dot_product_attention`.

    Example:
        >>> q, kv = torch.randn(2, 4, 3, 16), torch.randn(2, 4, 7, 16)
        >>> tuple(sdpa(q, kv, kv).shape)
        (2, 4, 3, 16)
    """
    return cast(
        "Tensor",
        torch.ops.cascade.sdpa(q, k, v, attn_mask, is_causal, scale=scale, enable_gqa=enable_gqa),
    )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    branches: Size = 1,
    scale: float | None = None,
    q_positions: Tensor | None = None,
    kv_start: Size = 0,
    window: Size | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over one segment of the keys, as a partial result that `merge` can complete.

    `o = softmax(s) v` and `lse = log sum_j exp(s_j)` over the scores `s = q k^T * scale`
    (soft-capped, then masked). All rules of visibility that are given apply together. A query that
    sees no key has o = 0 and lse = -inf, the identity of `merge`; so has every query where L = 0.

    Args:
        q: queries [N, Hq, M, Dk]; float32, bfloat16, float16 or float64.
        k: keys [R, Hkv, L, Dk], dtype of q; query row n reads KV row n // branches, query head h
            reads KV head h // (Hq // Hkv).
        v: values [R, Hkv, L, Dv], dtype of q; Dv may differ from Dk.
        mask: broadcastable to [N, Hq, M, L]; bool (True = visible), or floating (added to the
            scaled scores in the accumulation dtype; float64 only with float64 q).
        branches: T, query rows for each KV row: N = R * T.
        scale: factor of the scores; None for 1/sqrt(Dk).
        q_positions: int64, broadcastable to [N, M]: key j is visible to query m of row n iff
            kv_start + j <= q_positions[n, m].
        kv_start: position of key 0; read only with q_positions.
        window: also hide key j unless kv_start + j > q_positions[n, m] - window; needs q_positions.
        softcap: c > 0 replaces each score s by c * tanh(s / c), before the masks.

    Returns:
        o [N, Hq, M, Dv] and lse [N, Hq, M] (natural logarithm), both contiguous and both in the
        accumulation dtype: float64 for float64 inputs, else float32.

    Raises:
        TypeError: a dtype differs from the above.
        ValueError: a rank, size, device, or number does.
        RuntimeError: an input requires grad while autograd is recording.

    Source:
        Hydragen (arXiv 2402.05099), Flash-Decoding and FlashInfer compute such partials;
        soft-capping as in Gemma 2 (arXiv 2408.00118).

    Example:
        >>> q, kv = torch.randn(6, 4, 1, 16), torch.randn(2, 2, 9, 16)
        >>> o, lse = attend(q, kv, kv, branches=3)
        >>> tuple(o.shape), tuple(lse.shape)
        ((6, 4, 1, 16), (6, 4, 1))
    """
    return cast(
        "tuple[Tensor, Tensor]",
        torch.ops.cascade.attend(
            q,
            k,
            v,
            mask,
            branches=branches,
            scale=scale,
            q_positions=q_positions,
            kv_start=kv_start,
            window=window,
            softcap=softcap,
        ),
    )


def merge(o: Sequence[Tensor], lse: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Partial attentions over disjoint key sets -> the attention over their union.

    `lse = log sum_i e^lse_i` and `o = sum_i e^(lse_i - lse) o_i`, computed relative to the largest
    lse_i, so any magnitude is safe. Associative and commutative up to rounding.

    A part whose lse is -inf saw no key and contributes nothing, whatever its o holds (even NaN);
    if all are -inf the result is (0, -inf). An lse of +inf can only come from overflow: the result
    then has lse = +inf, and o is the mean of the parts at +inf. An lse of NaN stays NaN.

    Args:
        o: one partial output or more, each [..., D], all float32 or all float64.
        lse: their log-sum-exps (natural logarithm), each [...], dtype of o.

    Returns:
        o [..., D] and lse [...], contiguous, dtype of the parts. One part comes back unchanged, as
        a copy (with o = 0 where its lse is -inf).

    Raises:
        TypeError: a dtype differs from the above.
        ValueError: no parts, or a number of parts, rank, size or device differs.
        RuntimeError: an input requires grad while autograd is recording.

    Source:
        Online softmax (arXiv 1805.02867); the merge of partial attention states in Flash-Decoding,
        Hydragen (arXiv 2402.05099, section 3.1) and FlashInfer (arXiv 2501.01005, section 2.2; its
        lse is base 2, ours is base e).

    Example:
        >>> ones, empty = torch.ones(1, 4), torch.full((1,), -torch.inf)
        >>> merge([ones, 5 * ones], [torch.zeros(1), empty])[0]
        tensor([[1., 1., 1., 1.]])
    """
    return cast("tuple[Tensor, Tensor]", torch.ops.cascade.merge(list(o), list(lse)))


def reuse_kv(
    k: Tensor, v: Tensor, k_cached: Tensor, v_cached: Tensor, fresh_rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Marks a layer whose cached keys and values may stand in for the freshly computed ones.

    The value is always the fresh k and v (full recomputation: exact). A pass may replace the op by
    cached rows with the rows that deviate most recomputed (CacheBlend, arXiv 2405.16444).

    Args:
        k: fresh keys [N, Hkv, L, Dk], rotated for their positions.
        v: fresh values [N, Hkv, L, Dv], dtype of k.
        k_cached: cached keys at the same positions, shape and dtype of k; the rows that fresh_rows
            names are not read.
        v_cached: cached values, shape and dtype of v; likewise.
        fresh_rows: int64 [N, F], the tokens that have no cached copy.

    Returns:
        Copies of k and v, contiguous.

    Raises:
        TypeError: a dtype differs from the above.
        ValueError: a rank, size or device does.
        RuntimeError: an input requires grad while autograd is recording.

    Example:
        >>> k, v = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16)
        >>> fused, _ = reuse_kv(k, v, k + 1, v + 1, torch.tensor([[4]]))
        >>> torch.equal(fused, k)
        True
    """
    return cast(
        "tuple[Tensor, Tensor]",
        torch.ops.cascade.reuse_kv(k, v, k_cached, v_cached, fresh_rows),
    )


# --- what the dispatcher calls --------------------------------------------------------------------


def _attend_fake(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    _check_attend(q, k, v, mask, options)
    rows = (q.size(0), q.size(1), q.size(2))
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*rows, v.size(3)), dtype=dtype), q.new_empty(rows, dtype=dtype)


def _attend_eager(kernel: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    def checked(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        _check_attend(q, k, v, mask, options)
        return kernel(q, k, v, mask, **options)

    return checked


def _check_attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]
) -> None:
    get = options.get
    branches, positions = get("branches", 1), get("q_positions")
    check_attend(q, k, v, mask, branches, positions, get("window"), get("softcap"))


def _merge_eager(o: list[Tensor], lse: list[Tensor]) -> tuple[Tensor, Tensor]:
    check_merge(o, lse)
    return merge_torch(o, lse)


def _merge_fake(o: list[Tensor], lse: list[Tensor]) -> tuple[Tensor, Tensor]:
    check_merge(o, lse)
    return o[0].new_empty(o[0].shape), lse[0].new_empty(lse[0].shape)


def _reuse_kv(
    k: Tensor, v: Tensor, k_cached: Tensor, v_cached: Tensor, fresh_rows: Tensor
) -> tuple[Tensor, Tensor]:
    check_reuse_kv(k, v, k_cached, v_cached, fresh_rows)
    layout = torch.contiguous_format
    return k.clone(memory_format=layout), v.clone(memory_format=layout)


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
}
_FAKE: dict[str, Callable[..., Any]] = {
    "sdpa": sdpa_torch,
    "attend": _attend_fake,
    "merge": _merge_fake,
    "reuse_kv": _reuse_kv,
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
