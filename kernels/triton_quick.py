"""A faster inner loop of `triton_attend.py`: keys that nothing hides, scores used as they are.

`triton_step.py` subtracts the largest score so far from every score, and multiplies the output by
how much that has grown at every tile. Only differences matter, though: any reference does that
leaves the weights within the range of their dtype. Here that is the largest score of the first tile
for the whole run (as FlashAttention-4 skips most of its rescaling), so that no tile waits for a
maximum, sums and maxima stay in their threads until the end, and the output is only ever added to.

Whether the range was kept is checked at the end, and if not, the run is computed again by the other
loop: rare, as scores have to grow by a factor of 2^LIMIT after the first tile, and never wrong.

Where positions hide keys, these are the keys before the first hidden one (`seen_by_all`); the rest
is the other loop's, which goes on from the state that this one leaves.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_cascade.kernels.triton_step import LOG2E, empty_state, keys_at, values_at

FOLD = tl.constexpr(8)  # columns of a tile that sums and maxima are kept for: none is exchanged
ROOM = tl.constexpr(2.0**100)  # outputs below leave room for any that a tail adds to them


@triton.jit
def attend_quick(
    q_tile,
    kv_row,
    kv_head,
    low,
    high,
    scale,
    keys,
    kv_lens,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    PAD_K: tl.constexpr,
    PAD_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LENS: tl.constexpr,
    PAGED: tl.constexpr,
    PRECISION: tl.constexpr,
    K_STEP: tl.constexpr,
    V_STEP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """(state after the keys [low, high) of KV row kv_row, first key that is still to be seen).

    What comes back is either the finished state and `high`, or the empty state and `low`. It is one
    of `attend_run` with RAW: its `top` is to be multiplied by the scale, and may be any reference
    that weights are relative to, not the largest score.
    """
    # Weights are at most 2^LIMIT times those of the first tile: within the range of their dtype.
    LIMIT: tl.constexpr = 15 if q_tile.dtype == tl.float16 else 64
    k, v, k_row, k_head, k_key, v_row, v_head, v_key = keys[0:8]
    paging = keys[8:11]
    d_k = tl.arange(0, PAD_K)
    d_v = tl.arange(0, PAD_V)
    k += kv_head.to(tl.int64) * k_head
    v += kv_head.to(tl.int64) * v_head
    if LENS:
        # from 0 on before it is an int32: a length may be any int64
        high = tl.maximum(tl.minimum(high, tl.load(kv_lens + kv_row)), 0).to(tl.int32)
    factor = scale * LOG2E
    BLOCK_M: tl.constexpr = q_tile.shape[0]
    top, _total, acc = empty_state(BLOCK_M, PAD_V)
    totals = tl.zeros([BLOCK_M, FOLD], tl.float32)
    peaks = tl.full([BLOCK_M, FOLD], float("-inf"), tl.float32)
    for start in tl.range(low, high, BLOCK_N, num_stages=STAGES):
        key = start + tl.arange(0, BLOCK_N)
        in_range = key < high
        k_tile = keys_at(
            k, start, kv_row, key, in_range, k_row, k_key, paging, d_k,
            D_K, BLOCK_N, PAGED, False, K_STEP,
        )  # fmt: skip
        scores = tl.dot(q_tile, k_tile.to(q_tile.dtype), input_precision=PRECISION)
        if start + BLOCK_N > high:
            scores = tl.where(in_range[None, :], scores, float("-inf"))
        if start == low:
            top = tl.max(scores, 1)
            top = tl.where(top == float("-inf"), 0.0, top)
        folded = tl.reshape(scores, [BLOCK_M, BLOCK_N // FOLD, FOLD])
        peaks = tl.maximum(peaks, tl.max(folded, 1))
        # After the subtraction: see `weigh` about scores that are multiplied before it.
        weights = tl.exp2((scores - top[:, None]) * factor)
        totals += tl.sum(tl.reshape(weights, [BLOCK_M, BLOCK_N // FOLD, FOLD]), 1)
        v_tile = values_at(
            v, start, kv_row, key, in_range, v_row, v_key, paging, d_v,
            D_V, BLOCK_N, PAGED, False, V_STEP,
        )  # fmt: skip
        weights = weights.to(q_tile.dtype)
        acc = tl.dot(weights, v_tile.to(q_tile.dtype), acc, input_precision=PRECISION)
    growth = (tl.max(peaks, 1) - top) * factor
    total = tl.sum(totals, 1)
    # Negative where the first tile has no finite score: float16 would round small weights by more.
    kept = (growth >= 0) & (growth <= LIMIT)
    kept = kept & (tl.sum(tl.abs(acc), 1) < ROOM)  # not the maximum: that passes over NaN
    # A row with a NaN among its scores is NaN by either loop: it takes no other rows along.
    kept = kept | (total != total)
    if tl.min(kept.to(tl.int32), 0) == 1:
        low = high
    else:
        top, total, acc = empty_state(BLOCK_M, PAD_V)
    return (top, total, acc), low
