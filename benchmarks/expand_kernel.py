"""A Triton kernel that copies as much as Inductor's own for `cat([expand(a), expand(b), c])`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def expand_join(
    a,
    b,
    c,
    out,
    heads,
    len_a,
    len_b,
    len_c,
    div_a,
    div_b,
    blocks,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[n, h] = a[n // div_a, h], b[n // div_b, h], c[n, h] along the keys; all contiguous.

    A program copies BLOCK elements of one row and head. As in Inductor's code, all but one of the
    loads of an element are masked off.
    """
    pair = tl.program_id(0) // blocks
    row, head = pair // heads, pair % heads
    place = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    end_a, end_b, end_c = len_a * WIDTH, (len_a + len_b) * WIDTH, (len_a + len_b + len_c) * WIDTH
    start_a = ((row // div_a) * heads + head).to(tl.int64) * len_a * WIDTH
    start_b = ((row // div_b) * heads + head).to(tl.int64) * len_b * WIDTH
    start_c = (row * heads + head).to(tl.int64) * len_c * WIDTH
    in_a = place < end_a
    in_b = (place >= end_a) & (place < end_b)
    in_c = (place >= end_b) & (place < end_c)
    from_a = tl.load(a + start_a + place, mask=in_a, other=0.0)
    from_b = tl.load(b + start_b + place - end_a, mask=in_b, other=0.0)
    from_c = tl.load(c + start_c + place - end_b, mask=in_c, other=0.0)
    value = tl.where(in_a, from_a, tl.where(in_b, from_b, from_c))
    tl.store(out + pair.to(tl.int64) * end_c + place, value, mask=place < end_c)
