"""The ops of the namespace `cascade`: the contract every pass and every kernel works by.

Importing this module defines them. The functions below are thin: they call the op and carry its
contract. Axis names: N query rows, R key/value rows, T branches (N = R * T), Hq query heads,
Hkv key/value heads (Hq = Hkv * G), M queries, L keys, Dk and Dv head sizes; F input features of
`linears`.

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

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from torch_cascade.kernels.register import SCHEMAS

__all__ = ["SCHEMAS", "attend", "linears", "merge", "reuse_kv", "sdpa"]

Size = int | torch.SymInt


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
    kv_lens: Tensor | None = None,
    page_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over one segment of the keys, as a partial result that `merge` can complete.

    `o = softmax(s) v` and `lse = log sum_j exp(s_j)` over the scores `s = q k^T * scale`
    (soft-capped, then biased and masked). All rules of visibility that are given apply together. A
    query that sees no key has o = 0 and lse = -inf, the identity of `merge`; so has every query
    where L = 0.

    Args:
        q: queries [N, Hq, M, Dk]; float32, bfloat16, float16 or float64 (not with fp8 k and v).
        k: keys [R, Hkv, L, Dk], dtype of q or float8_e4m3fn; query row n reads KV row
            n // branches, query head h reads KV head h // (Hq // Hkv).
        v: values [R, Hkv, L, Dv], dtype of k; Dv may differ from Dk.
        mask: broadcastable to [N, Hq, M, L]; bool (True = visible), or floating (added to the
            scaled scores in the accumulation dtype; float64 only with float64 q).
        branches: T, query rows for each KV row: N = R * T.
        scale: factor of the scores; None for 1/sqrt(Dk).
        q_positions: int64, broadcastable to [N, M]: key j is visible to query m of row n iff
            kv_start + j <= q_positions[n, m].
        kv_start: position of key 0; read only with q_positions.
        window: also hide key j unless kv_start + j > q_positions[n, m] - window; needs q_positions.
        softcap: c > 0 replaces each score s by c * tanh(s / c), before biases and masks.
        kv_lens: int32 or int64 [R]: key j of KV row r is visible only if j < kv_lens[r]. Any value
            is allowed: from 0 down no key is visible, from L up all are. The keys and values that
            it hides may hold anything, NaN included.
        page_table: int32 or int64 [R, P]: k and v are then pools [blocks, Hkv, page_size, D] (any
            strides, as of a transposed view of [blocks, page_size, Hkv, D]), L = P * page_size,
            and key j of KV row r is k[page_table[r, j // page_size], :, j % page_size]. An entry
            whose page lies wholly at or past kv_lens[r] may be any number (such as -1); the others
            must name a block.
        k_scale: float32 [Hkv], only with fp8: the keys are k * k_scale[head]; None for 1.
        v_scale: likewise for the values.
        alibi_slopes: float32 [Hq]: adds alibi_slopes[h] * (kv_start + j - q_positions[n, m]) to
            the scaled and soft-capped score; needs q_positions.

    Returns:
        o [N, Hq, M, Dv] and lse [N, Hq, M] (natural logarithm), both contiguous and both in the
        accumulation dtype: float64 for float64 inputs, else float32.

    Raises:
        TypeError: a dtype differs from the above.
        ValueError: a rank, size, device, or number does.
        RuntimeError: an input requires grad while autograd is recording.

    Source:
        Hydragen (arXiv 2402.05099), Flash-Decoding and FlashInfer compute such partials;
        soft-capping as in Gemma 2 (arXiv 2408.00118); pages as in vLLM (arXiv 2309.06180); ALiBi
        (arXiv 2108.12409).

    Example:
        >>> q, kv = torch.randn(6, 4, 1, 16), torch.randn(2, 2, 9, 16)
        >>> o, lse = attend(q, kv, kv, branches=3)
        >>> tuple(o.shape), tuple(lse.shape)
        ((6, 4, 1, 16), (6, 4, 1))

        Two requests of 5 and 8 keys in pages of 4; the first leaves its last page entry unused:

        >>> pool = torch.randn(7, 2, 4, 16)
        >>> table, lens = torch.tensor([[6, 2, -1], [0, 5, 1]]), torch.tensor([5, 8])
        >>> o, _ = attend(q, pool, pool, branches=3, page_table=table, kv_lens=lens)
        >>> first = torch.cat([pool[6], pool[2]], 1)[None, :, :5]
        >>> torch.allclose(o[:3], attend(q[:3], first, first, branches=3)[0], atol=1e-5)
        True
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
            kv_lens=kv_lens,
            page_table=page_table,
            k_scale=k_scale,
            v_scale=v_scale,
            alibi_slopes=alibi_slopes,
        ),
    )


def merge(
    o: Sequence[Tensor], lse: Sequence[Tensor], *, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Partial attentions over disjoint key sets -> the attention over their union.

    `lse = log sum_i e^lse_i` and `o = sum_i e^(lse_i - lse) o_i`, computed relative to the largest
    lse_i, so any magnitude is safe. Associative and commutative up to rounding.

    A part whose lse is -inf saw no key and contributes nothing, whatever its o holds (even NaN);
    if all are -inf the result is (0, -inf). An lse of +inf can only come from overflow: the result
    then has lse = +inf, and o is the mean of the parts at +inf. An lse of NaN stays NaN.

    Attention sinks are one more key a row, of value zero: with them, lse' = log(e^lse + e^sink) and
    o' = e^(lse - lse') o. They count once, however many parts there are; so of nested merges only
    one may have them. A sink of -inf is none. A row that saw no key has o = 0 and lse = its sink.

    Args:
        o: one partial output or more, each [..., D], all float32 or all float64.
        lse: their log-sum-exps (natural logarithm), each [...], dtype of o.
        sinks: scores of the sinks, broadcastable to [...], such as [Hq, 1] for one a head; float32,
            bfloat16, float16, or float64 where the parts are.

    Returns:
        o [..., D] and lse [...], contiguous, dtype of the parts. One part without
        sinks comes back unchanged, as a copy (with o = 0 where its lse is -inf).

    Raises:
        TypeError: a dtype differs from the above.
        ValueError: no parts, or a number of parts, rank, size or device differs.
        RuntimeError: an input requires grad while autograd is recording.

    Source:
        Online softmax (arXiv 1805.02867); the merge of partial attention states in Flash-Decoding,
        Hydragen (arXiv 2402.05099, section 3.1) and FlashInfer (arXiv 2501.01005, section 2.2; its
        lse is base 2, ours is base e). Sinks as in gpt-oss (arXiv 2508.10925) and StreamingLLM's
        zero sink (arXiv 2309.17453).

    Example:
        >>> ones, empty = torch.ones(1, 4), torch.full((1,), -torch.inf)
        >>> merge([ones, 5 * ones], [torch.zeros(1), empty])[0]
        tensor([[1., 1., 1., 1.]])

        A sink as likely as all keys together takes half:

        >>> merge([ones], [torch.zeros(1)], sinks=torch.zeros(1))[0]
        tensor([[0.5000, 0.5000, 0.5000, 0.5000]])
    """
    return cast("tuple[Tensor, Tensor]", torch.ops.cascade.merge(list(o), list(lse), sinks=sinks))


def reuse_kv(
    k: Tensor,
    v: Tensor,
    k_cached: Tensor,
    v_cached: Tensor,
    fresh_rows: Tensor,
    chunks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Marks a layer whose cached keys and values may stand in for the freshly computed ones.

    To be called in each attention layer of a prefill, between the rotation of the keys and the
    attention, which reads what it returns. Its value is the fresh k and v, unchanged: in eager mode
    and with any other backend everything is recomputed, which is exact. Compiled with
    `backend="cascade"`, the pass `blend` recomputes, below a check layer, only the tokens that need
    it most, and takes the cached keys and values of the others.

    Args:
        k: fresh keys [N, Hkv, L, Dk], rotated for their positions 0 to L - 1.
        v: fresh values [N, Hkv, L, Dv], dtype of k.
        k_cached: cached keys, rotated for the same positions, shape and dtype of k. The rows that
            fresh_rows names may hold anything finite.
        v_cached: cached values, shape and dtype of v; likewise.
        fresh_rows: int64 [N, F], 1 <= F <= L, the tokens that have no cached copy, distinct in each
            batch row and the last token among them. A batch row that has fewer is filled up with
            padding tokens, or with cached ones. The same tensor for all layers.
        chunks: int64 [N, L], for each token the number of the cached chunk it is from, -1 where it
            is from none; for selectors that look at chunks, and to keep padding from being
            recomputed. The same tensor for all layers.

    Returns:
        Copies of k and v, contiguous.

    Raises:
        TypeError: a dtype differs from the above.
        ValueError: a rank, size or device does.
        RuntimeError: an input requires grad while autograd is recording.

    Source:
        CacheBlend (arXiv 2405.16444), section 4.

    Example:
        A layer of a model that is not from transformers; positions are learned, so cached keys need
        no rotation. Of its last token only the output is asked for:

        >>> import torch_cascade
        >>> class Layer(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)
        ...     def forward(self, x, cached, fresh):
        ...         heads = self.qkv(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4)
        ...         q, k, v = heads.unbind(0)
        ...         if cached is not None:
        ...             k, v = torch_cascade.reuse_kv(k, v, *cached, fresh)
        ...         o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        ...         return x + self.out(o.transpose(1, 2).flatten(2)), (k, v)
        >>> layers = torch.nn.ModuleList(Layer() for _ in range(3))
        >>> def prefill(x, caches, fresh):
        ...     kept = []
        ...     for layer, cached in zip(layers, caches):
        ...         x, pair = layer(x, cached, fresh)
        ...         kept.append(pair)
        ...     return x[:, -1:], kept
        >>> x, fresh = torch.randn(1, 12, 32), torch.tensor([[10, 11]])
        >>> compiled = torch.compile(prefill, backend="cascade", options={"min_tokens": 4})
        >>> with torch.no_grad():
        ...     _, caches = prefill(x, [None] * 3, fresh)
        ...     report = torch_cascade.explain(compiled, x, caches, fresh)
        >>> report.compilations[0].blend.layers
        ('computed', 'checked', 'reused')
    """
    return cast(
        "tuple[Tensor, Tensor]",
        torch.ops.cascade.reuse_kv(k, v, k_cached, v_cached, fresh_rows, chunks),
    )


def linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """Products of the same rows with several weights: `[linear(x, w, b) for w, b in ...]`.

    What the pass `linears` makes of the linear layers that read the same few rows, so that one
    launch reads all their weights.

    Args:
        x: rows [M, F], floating.
        weights: one or more [Fi, F], dtype of x.
        biases: [Fi] for each weight, dtype of x; None for none.

    Returns:
        [M, Fi] for each weight, contiguous, dtype of x.

    Raises:
        TypeError: a dtype differs from the above.
        ValueError: no weights, or a number of biases, rank, size or device differs.
        RuntimeError: an input requires grad while autograd is recording.

    Source:
        Horizontal fusion; serving engines do it when they load a model ("qkv_proj",
        "gate_up_proj" in vLLM and SGLang).

    Example:
        >>> x, w_q, w_k = torch.randn(3, 16), torch.randn(8, 16), torch.randn(4, 16)
        >>> q, k = linears(x, [w_q, w_k])
        >>> torch.equal(q, torch.nn.functional.linear(x, w_q)), tuple(k.shape)
        (True, (3, 4))
    """
    given = None if biases is None else list(biases)
    return cast("list[Tensor]", torch.ops.cascade.linears(x, list(weights), given))
