"""`cascade::attend` in Triton: up to two key segments, each split over its keys, in one launch.

A program computes one tile of packed query rows against one run of keys of one segment. The query
rows of one K/V row are those of its T branches, M queries and G heads, packed as row
(t * M + m) * G + g: keys and values are read once for all of them, and nothing else knows about
groups (Hydragen, arXiv 2402.05099, section 3.2). The split over keys is that of Flash-Decoding; the
loop is the online softmax of FlashAttention-2 (arXiv 2307.08691), in `triton_step.py`.

The two segments ("slots") differ in everything but the queries. Slot a is the more widely shared
one: few, tall tiles of rows, many splits. Slot b, the suffixes of the branches, is either
- a tail: the suffixes of all branches of a tile are short enough to be one more run of keys of the
  last split of slot a, where each row sees its own branch's keys only; or
- programs of its own, after those of slot a.

DIRECT: there is one partial result a row, which is the result. Otherwise partial results are
left in o_part and lse_part for `triton_merge.py`. Completing them in the same launch (by the
program that finishes last, or by programs that wait) was slower, as was to spread the programs of
slot b among those of slot a: benchmarks/LOG.md.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_cascade.kernels.triton_finish import finish
from torch_cascade.kernels.triton_quick import attend_quick
from torch_cascade.kernels.triton_step import (
    attend_run,
    empty_state,
    load_queries,
    rows_of,
    seen_by_all,
)


@triton.jit
def tile_of(
    item, rows, splits, kv_heads, branches, group, q_len,
    BLOCK_M: tl.constexpr, BACKWARDS: tl.constexpr,
):  # fmt: skip
    """(rows, split, KV row, KV head) of an item of a slot, the tile of rows varying fastest.

    The row tiles that read the same keys run side by side, and the cache serves all but the first.
    BACKWARDS: the last rows, which see most keys where positions ascend, come first, so that no
    long program is left to run alone at the end.
    """
    row_blocks = tl.cdiv(rows, BLOCK_M)
    pair = item // (row_blocks * splits)
    kv_row, kv_head = pair // kv_heads, pair % kv_heads
    row_block = item % row_blocks
    if BACKWARDS:
        row_block = row_blocks - 1 - row_block
    tile = rows_of(row_block, kv_row, kv_head, branches, group, q_len, rows, BLOCK_M)
    return tile, (item // row_blocks) % splits, kv_row, kv_head


@triton.jit
def attend_parts(
    q,
    o_part,
    lse_part,
    out,
    lse_out,
    sinks,
    heads,
    kv_heads,
    q_len,
    group,
    part_rows,
    q_stride_n,
    q_stride_h,
    q_stride_m,
    out_stride_n,
    out_stride_h,
    out_stride_m,
    sinks_stride_n,
    sinks_stride_h,
    sinks_stride_m,
    scale,
    softcap,
    slopes,
    items_a,
    ratio,
    k_a,
    v_a,
    k_stride_r_a,
    k_stride_h_a,
    k_stride_k_a,
    v_stride_r_a,
    v_stride_h_a,
    v_stride_k_a,
    table_a,
    table_stride_a,
    page_size_a,
    mask_a,
    mask_stride_n_a,
    mask_stride_h_a,
    mask_stride_m_a,
    mask_stride_k_a,
    positions_a,
    positions_stride_n_a,
    positions_stride_m_a,
    kv_start_a,
    window_a,
    kv_lens_a,
    k_scale_a,
    v_scale_a,
    kv_len_a,
    branches_a,
    splits_a,
    split_len_a,
    split_base_a,
    rows_a,
    k_b,
    v_b,
    k_stride_r_b,
    k_stride_h_b,
    k_stride_k_b,
    v_stride_r_b,
    v_stride_h_b,
    v_stride_k_b,
    table_b,
    table_stride_b,
    page_size_b,
    mask_b,
    mask_stride_n_b,
    mask_stride_h_b,
    mask_stride_m_b,
    mask_stride_k_b,
    positions_b,
    positions_stride_n_b,
    positions_stride_m_b,
    kv_start_b,
    window_b,
    kv_lens_b,
    k_scale_b,
    v_scale_b,
    kv_len_b,
    branches_b,
    splits_b,
    split_len_b,
    split_base_b,
    rows_b,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    PAD_K: tl.constexpr,
    PAD_V: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    POSITIVE: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    DIRECT: tl.constexpr,
    SLOTS: tl.constexpr,
    TAIL: tl.constexpr,
    QUICK: tl.constexpr,
    BLOCK_M_a: tl.constexpr,
    BLOCK_N_a: tl.constexpr,
    STAGES_a: tl.constexpr,
    MASK_a: tl.constexpr,
    POSITIONS_a: tl.constexpr,
    WINDOW_a: tl.constexpr,
    LENS_a: tl.constexpr,
    PAGED_a: tl.constexpr,
    SCALED_a: tl.constexpr,
    K_STEP_a: tl.constexpr,
    V_STEP_a: tl.constexpr,
    BLOCK_M_b: tl.constexpr,
    BLOCK_N_b: tl.constexpr,
    STAGES_b: tl.constexpr,
    MASK_b: tl.constexpr,
    POSITIONS_b: tl.constexpr,
    WINDOW_b: tl.constexpr,
    LENS_b: tl.constexpr,
    PAGED_b: tl.constexpr,
    SCALED_b: tl.constexpr,
    K_STEP_b: tl.constexpr,
    V_STEP_b: tl.constexpr,
):
    """A tile and a split of slot a a program, then (SLOTS == 2) of slot b.

    Grid: items_a + items_b programs, where a slot has KV rows * KV heads * splits * row tiles
    items. A KV row of slot a stands over `ratio` KV rows of slot b.
    """
    PLAIN: tl.constexpr = POSITIVE and not SOFTCAP and not ALIBI
    RAW_B: tl.constexpr = PLAIN and MASK_b != 2 and not SCALED_b
    RAW_A: tl.constexpr = PLAIN and MASK_a != 2 and not SCALED_a and (RAW_B or not TAIL)
    item = tl.program_id(0)
    scale = tl.cast(scale, tl.float32)  # Inductor passes Python floats as float64
    softcap = tl.cast(softcap, tl.float32)
    q_strides = (q_stride_n, q_stride_h, q_stride_m)
    partials = (o_part, lse_part, tl.cast(part_rows, tl.int64))
    result = (out, (out_stride_n, out_stride_h, out_stride_m), lse_out)
    sink_info = (sinks, sinks_stride_n, sinks_stride_h, sinks_stride_m)
    keys_a = (
        k_a, v_a, k_stride_r_a, k_stride_h_a, k_stride_k_a, v_stride_r_a, v_stride_h_a,
        v_stride_k_a, table_a, table_stride_a, page_size_a,
    )  # fmt: skip
    seen_a = (
        mask_a, mask_stride_n_a, mask_stride_h_a, mask_stride_m_a, mask_stride_k_a, positions_a,
        positions_stride_n_a, positions_stride_m_a, kv_start_a, window_a, kv_lens_a,
    )  # fmt: skip
    keys_b = (
        k_b, v_b, k_stride_r_b, k_stride_h_b, k_stride_k_b, v_stride_r_b, v_stride_h_b,
        v_stride_k_b, table_b, table_stride_b, page_size_b,
    )  # fmt: skip
    seen_b = (
        mask_b, mask_stride_n_b, mask_stride_h_b, mask_stride_m_b, mask_stride_k_b, positions_b,
        positions_stride_n_b, positions_stride_m_b, kv_start_b, window_b, kv_lens_b,
    )  # fmt: skip
    if item < items_a:
        row_info, split, kv_row, kv_head = tile_of(
            item, rows_a, splits_a, kv_heads, branches_a, group, q_len, BLOCK_M_a, POSITIONS_a
        )
        q_tile = load_queries(q, row_info, q_strides, D_K, PAD_K)
        state = empty_state(BLOCK_M_a, PAD_V)
        low = split * split_len_a
        high = tl.minimum(low + split_len_a, kv_len_a)
        if QUICK and RAW_A and MASK_a == 0 and not WINDOW_a:
            open_to = seen_by_all(row_info, seen_a, kv_len_a, low, high, BLOCK_N_a, POSITIONS_a)
            state, low = attend_quick(
                q_tile, kv_row, kv_head, low, open_to, scale, keys_a, kv_lens_a,
                D_K, D_V, PAD_K, PAD_V, BLOCK_N_a, LENS_a, PAGED_a, PRECISION, K_STEP_a, V_STEP_a,
                STAGES_a,
            )  # fmt: skip
        state = attend_run(
            q_tile, state, row_info, row_info[3], kv_row, kv_head, low, high, kv_len_a,
            scale, softcap, slopes, keys_a, seen_a, k_scale_a, v_scale_a,
            D_K, D_V, PAD_K, PAD_V, BLOCK_N_a, MASK_a, POSITIONS_a, WINDOW_a, LENS_a,
            PAGED_a, SCALED_a, SOFTCAP, ALIBI, RAW_A, PRECISION, K_STEP_a,
            V_STEP_a, STAGES_a, False,
        )  # fmt: skip
        if TAIL:
            owner = (row_info[1] - kv_row * branches_a) // branches_b
            tail = tl.where(split == splits_a - 1, ratio * kv_len_b, 0)
            state = attend_run(
                q_tile, state, row_info, owner, kv_row * ratio, kv_head, 0, tail, kv_len_b,
                scale, softcap, slopes, keys_b, seen_b, k_scale_b, v_scale_b,
                D_K, D_V, PAD_K, PAD_V, BLOCK_N_b, MASK_b, POSITIONS_b, WINDOW_b, LENS_b,
                PAGED_b, SCALED_b, SOFTCAP, ALIBI, RAW_A, PRECISION, K_STEP_b,
                V_STEP_b, STAGES_b, True,
            )  # fmt: skip
        finish(
            state, scale, split + split_base_a, row_info, heads, q_len, sink_info, partials, result,
            D_V, RAW_A, DIRECT, SINKS,
        )  # fmt: skip
    elif SLOTS == 2:
        item -= items_a
        row_info_b, split, kv_row, kv_head = tile_of(
            item, rows_b, splits_b, kv_heads, branches_b, group, q_len, BLOCK_M_b, POSITIONS_b
        )
        q_tile_b = load_queries(q, row_info_b, q_strides, D_K, PAD_K)
        low = split * split_len_b
        high = tl.minimum(low + split_len_b, kv_len_b)
        state_b = attend_run(
            q_tile_b, empty_state(BLOCK_M_b, PAD_V), row_info_b, row_info_b[3], kv_row, kv_head,
            low, high, kv_len_b, scale, softcap, slopes, keys_b, seen_b, k_scale_b, v_scale_b,
            D_K, D_V, PAD_K, PAD_V, BLOCK_N_b, MASK_b, POSITIONS_b, WINDOW_b, LENS_b, PAGED_b,
            SCALED_b, SOFTCAP, ALIBI, RAW_B, PRECISION, K_STEP_b, V_STEP_b, STAGES_b, False,
        )  # fmt: skip
        finish(
            state_b, scale, split + split_base_b, row_info_b, heads, q_len, sink_info, partials,
            result, D_V, RAW_B, False, SINKS,
        )  # fmt: skip
