"""The inner loop of `triton_attend.py`: a tile of query rows against a run of keys.

Scores are kept in units of log2 (RAW: before the scale); maxima, sums and outputs in float32.
Arguments come in groups: `rows` (which query rows the tile holds), `keys` (where K and V are) and
`seen` (what hides a key).
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def rows_of(row_block, kv_row, kv_head, branches, group, q_len, rows, BLOCK_M: tl.constexpr):
    """The packed rows of a tile: (which exist, batch row, head, query), each [BLOCK_M]."""
    packed = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    batch = kv_row * branches + packed // (group * q_len)
    head = kv_head * group + packed % group
    return packed < rows, batch, head, (packed // group) % q_len


@triton.jit
def place_at(batch, head, token, stride_n, stride_h, stride_m):
    """The element of a row in a tensor [N, Hq, M, ...], int64: any of its strides may be huge."""
    at = batch.to(tl.int64) * stride_n
    return at + head.to(tl.int64) * stride_h + token.to(tl.int64) * stride_m


@triton.jit
def load_queries(q, rows, strides, D: tl.constexpr, PAD: tl.constexpr):
    """The query tile [BLOCK_M, PAD], 0 beyond the rows and the head size."""
    row_ok, batch, head, token = rows
    stride_n, stride_h, stride_m = strides
    d = tl.arange(0, PAD)
    at = place_at(batch, head, token, stride_n, stride_h, stride_m)
    ok = row_ok[:, None] & (d < D)[None, :]
    return tl.load(q + at[:, None] + d[None, :], mask=ok, other=0.0)


@triton.jit
def tanh(x):
    """Hyperbolic tangent of float32; its error is absolute (1e-7) where |x| is small."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    magnitude = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -magnitude, magnitude)


@triton.jit
def offsets(
    start,
    row,
    key,
    in_range,
    row_stride,
    key_stride,
    table,
    table_stride,
    page_size,
    BLOCK_N: tl.constexpr,
    PAGED: tl.constexpr,
    GROUPED: tl.constexpr,
    STEP: tl.constexpr,
):
    """Where the keys of a tile are: (scalar int64, [BLOCK_N] to be added to it).

    Contiguous keys have an offset that no tile changes; STEP is their stride where it is known to
    be small, so that offsets fit 32 bits and fold into addresses.
    """
    base = tl.zeros([], tl.int64)
    if PAGED:
        at_page = row.to(tl.int64) * table_stride + key // page_size
        page = tl.load(table + at_page, mask=in_range, other=0).to(tl.int64)
        return base, page * row_stride + (key % page_size).to(tl.int64) * key_stride
    elif GROUPED:
        return base, row.to(tl.int64) * row_stride + key.to(tl.int64) * key_stride
    elif STEP != 0:
        return row.to(tl.int64) * row_stride + (base + start) * STEP, tl.arange(0, BLOCK_N) * STEP
    else:
        lane = tl.arange(0, BLOCK_N).to(tl.int64)
        return row.to(tl.int64) * row_stride + (base + start) * key_stride, lane * key_stride


@triton.jit
def keys_at(
    k, start, row, key, in_range, row_stride, key_stride, paging, d,
    D: tl.constexpr, BLOCK_N: tl.constexpr, PAGED: tl.constexpr, GROUPED: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """A tile of keys [D padded, BLOCK_N], 0 beyond the head size and what is not in range."""
    table, table_stride, page_size = paging
    base, at = offsets(
        start, row, key, in_range, row_stride, key_stride, table, table_stride, page_size,
        BLOCK_N, PAGED, GROUPED, STEP,
    )  # fmt: skip
    ok = in_range[None, :] if D == d.shape[0] else in_range[None, :] & (d < D)[:, None]
    return tl.load(k + base + at[None, :] + d[:, None], mask=ok, other=0.0)


@triton.jit
def values_at(
    v, start, row, key, in_range, row_stride, key_stride, paging, d,
    D: tl.constexpr, BLOCK_N: tl.constexpr, PAGED: tl.constexpr, GROUPED: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """A tile of values [BLOCK_N, D padded], likewise."""
    table, table_stride, page_size = paging
    base, at = offsets(
        start, row, key, in_range, row_stride, key_stride, table, table_stride, page_size,
        BLOCK_N, PAGED, GROUPED, STEP,
    )  # fmt: skip
    ok = in_range[:, None] if D == d.shape[0] else in_range[:, None] & (d < D)[None, :]
    return tl.load(v + base + at[:, None] + d[None, :], mask=ok, other=0.0)


@triton.jit
def bounds_of(rows, seen, kv_len, WINDOW: tl.constexpr):
    """By positions, row i sees the keys [begin, end) of its segment: (position, begin, end)."""
    row_ok, batch, _head, token = rows
    positions, stride_n, stride_m, kv_start, window = seen[5:10]
    at = batch.to(tl.int64) * stride_n + token.to(tl.int64) * stride_m
    position = tl.load(positions + at, mask=row_ok, other=0) - kv_start
    end = tl.minimum(tl.maximum(position + 1, 0), kv_len).to(tl.int32)
    begin = tl.zeros_like(end)
    if WINDOW:
        begin = tl.minimum(tl.maximum(position + 1 - window, 0), kv_len).to(tl.int32)
    return position, begin, end


@triton.jit
def seen_by_all(rows, seen, kv_len, low, high, BLOCK_N: tl.constexpr, POSITIONS: tl.constexpr):
    """How far positions hide none of the keys [low, high) from any row: whole tiles from low on."""
    if not POSITIONS:
        return high
    else:
        _position, _begin, end = bounds_of(rows, seen, kv_len, False)
        least = tl.min(tl.where(rows[0], end, kv_len), 0)
        return low + tl.maximum(tl.minimum(least, high) - low, 0) // BLOCK_N * BLOCK_N


@triton.jit
def masked(scores, rows, seen, key, in_range, MASK: tl.constexpr):
    """The scores with a mask tensor applied: MASK 1 is bool (True = visible), 2 is added."""
    row_ok, batch, head, token = rows
    mask, stride_n, stride_h, stride_m, stride_k = seen[0:5]
    at = place_at(batch, head, token, stride_n, stride_h, stride_m)
    at = at[:, None] + key.to(tl.int64)[None, :] * stride_k
    value = tl.load(mask + at, mask=row_ok[:, None] & in_range[None, :], other=0)
    if MASK == 1:
        return tl.where(value != 0, scores, float("-inf"))
    else:
        bias = value.to(tl.float32) * LOG2E
        # The lowest number of float32 and bfloat16 hides a key from others, but is no infinity.
        overflow = (bias == float("-inf")) & (value != float("-inf"))
        return scores + tl.where(overflow, LOWEST, bias)


@triton.jit
def visible(
    key,
    in_range,
    part,
    owner,
    begin,
    end,
    GROUPED: tl.constexpr,
    POSITIONS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Which keys of a tile each row may see, apart from masks: [1 | BLOCK_M, BLOCK_N]."""
    seen = in_range[None, :]
    if GROUPED:
        seen = seen & (part[None, :] == owner[:, None])
    if POSITIONS:
        seen = seen & (key[None, :] < end[:, None])
    if WINDOW:
        seen = seen & (key[None, :] >= begin[:, None])
    return seen


@triton.jit
def weigh(scores, top, factor, RAW: tl.constexpr):
    """Weights of a tile relative to the new maximum: (weights, maximum, how the old ones shrink).

    RAW: scores and maxima are still to be multiplied by `factor`, which is positive. That has to
    follow the subtraction, or a compiler makes one fused instruction of both: the product is then
    rounded in the maximum only, and scores of 1e10 that are all equal are e^500 apart.
    """
    new_top = tl.maximum(top, tl.max(scores, 1))
    # A row that has seen no key yet: any finite reference keeps its weights at 0.
    reference = tl.where(new_top == float("-inf"), 0.0, new_top)
    behind = scores - reference[:, None]
    shrink = top - reference
    if RAW:
        behind *= factor
        shrink *= factor
    return tl.exp2(behind), new_top, tl.exp2(shrink)


@triton.jit
def attend_run(
    q_tile,
    state,
    rows,
    owner,
    kv_row,
    kv_head,
    low,
    high,
    kv_len,
    scale,
    softcap,
    slopes,
    keys,
    seen,
    k_scale,
    v_scale,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    PAD_K: tl.constexpr,
    PAD_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASK: tl.constexpr,
    POSITIONS: tl.constexpr,
    WINDOW: tl.constexpr,
    LENS: tl.constexpr,
    PAGED: tl.constexpr,
    SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    RAW: tl.constexpr,
    PRECISION: tl.constexpr,
    K_STEP: tl.constexpr,
    V_STEP: tl.constexpr,
    STAGES: tl.constexpr,
    GROUPED: tl.constexpr,
):
    """The state (top, total, acc) of a tile after the keys [low, high) of KV row kv_row.

    RAW: the state's maximum, as the scores, is to be multiplied by the scale, a positive number;
    only where nothing is added to the scores.
    GROUPED: the keys of the KV rows kv_row, kv_row + 1, ... stand one after another, kv_len each,
    and a query row sees those of the KV row kv_row + owner only. Otherwise `owner` is not read.
    """
    top, total, acc = state
    k, v, k_row, k_head, k_key, v_row, v_head, v_key = keys[0:8]
    paging = keys[8:11]
    d_k = tl.arange(0, PAD_K)
    d_v = tl.arange(0, PAD_V)
    k += kv_head.to(tl.int64) * k_head
    v += kv_head.to(tl.int64) * v_head
    if SCALED:
        scale *= tl.load(k_scale + kv_head)
        value_scale = tl.load(v_scale + kv_head)
        # On float32 sums: a weight times the scale, rounded to the dtype of q, would be off by it.
        earlier, earlier_top = acc, top
        acc = tl.zeros_like(acc)
    if LENS and not GROUPED:
        # from 0 on before it is an int32: a length may be any int64
        high = tl.maximum(tl.minimum(high, tl.load(seen[10] + kv_row)), 0).to(tl.int32)
    if POSITIONS:
        row_ok, _batch, head, _token = rows
        position, begin, end = bounds_of(rows, seen, kv_len, WINDOW)
        if not GROUPED:
            high = tl.minimum(high, tl.max(tl.where(row_ok, end, 0), 0))
            if WINDOW:
                first = tl.min(tl.where(row_ok, begin, kv_len), 0)
                low = tl.maximum(low, low + (first - low) // BLOCK_N * BLOCK_N)
        if ALIBI:
            slope = tl.load(slopes + head, mask=row_ok, other=0.0) * LOG2E
    else:
        begin = owner  # not read
        end = owner

    factor = scale * LOG2E
    for start in tl.range(low, high, BLOCK_N, num_stages=STAGES):
        key = start + tl.arange(0, BLOCK_N)
        in_range = key < high
        row = kv_row
        part = key
        if GROUPED:
            part = key // kv_len
            key = key % kv_len
            row = kv_row + part
            if LENS:  # what no length covers is not read
                length = tl.load(seen[10] + row, mask=in_range, other=0)
                in_range = in_range & (key < length)
        k_tile = keys_at(
            k, start, row, key, in_range, k_row, k_key, paging, d_k,
            D_K, BLOCK_N, PAGED, GROUPED, K_STEP,
        )  # fmt: skip
        scores = tl.dot(q_tile, k_tile.to(q_tile.dtype), input_precision=PRECISION)

        if SOFTCAP:
            scores = tanh(scores * (scale / softcap)) * (softcap * LOG2E)
        elif not RAW:
            scores = scores * factor
        if ALIBI:
            scores += slope[:, None] * (key[None, :] - position[:, None]).to(tl.float32)
        if MASK != 0:
            scores = masked(scores, rows, seen, key, in_range, MASK)
        if GROUPED or POSITIONS:
            seen_here = visible(key, in_range, part, owner, begin, end, GROUPED, POSITIONS, WINDOW)
            scores = tl.where(seen_here, scores, float("-inf"))
        elif not RAW:  # at every tile: see `weigh` about products that are subtracted from
            scores = tl.where(in_range[None, :], scores, float("-inf"))
        elif start + BLOCK_N > high:
            scores = tl.where(in_range[None, :], scores, float("-inf"))
        weights, top, shrink = weigh(scores, top, factor, RAW)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]

        v_tile = values_at(
            v, start, row, key, in_range, v_row, v_key, paging, d_v,
            D_V, BLOCK_N, PAGED, GROUPED, V_STEP,
        )  # fmt: skip
        weights = weights.to(q_tile.dtype)
        acc = tl.dot(weights, v_tile.to(q_tile.dtype), acc, input_precision=PRECISION)
    if SCALED:
        shrink = tl.exp2(earlier_top - tl.where(top == float("-inf"), 0.0, top))
        acc = acc * value_scale + earlier * shrink[:, None]
    return top, total, acc


@triton.jit
def empty_state(BLOCK_M: tl.constexpr, PAD_V: tl.constexpr):
    """The state of a tile that has seen no key: (top, total, acc)."""
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    return top, tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, PAD_V], tl.float32)


@triton.jit
def result_of(state, scale, RAW: tl.constexpr):
    """A partial result (o [BLOCK_M, PAD_V], lse [BLOCK_M] in units of log2) from a state."""
    top, total, acc = state
    if RAW:
        top *= scale * LOG2E
    unseen = total == 0  # not total <= 0: a NaN must come out as NaN, in o and lse
    total = tl.where(unseen, 1.0, total)
    return acc / total[:, None], tl.where(unseen, float("-inf"), top + tl.log2(total))
