"""A sliding window over a padded prompt and a static suffix: the mask's parts in one graph.

Inductor 2.13 does not compile a vectorised reduction over such a mask, and plain SDPA has none.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from support.tolerance import assert_close_to_reference

R, T, H, P, S, D = 2, 8, 4, 299, 6, 16
N, WINDOW = R * T, 64


def attention(q, prefix_k, prefix_v, suffix_k, suffix_v, present, position):
    k = torch.cat([prefix_k.repeat_interleave(T, 0), suffix_k], 2)
    v = torch.cat([prefix_v.repeat_interleave(T, 0), suffix_v], 2)
    key = torch.arange(P + S)[None, None, None]
    query = (torch.arange(1) + position)[None, None, :, None]
    padded = F.pad(present.bool(), (0, P + S - present.shape[1]))
    seen = padded[torch.arange(N)[:, None, None, None], key]
    return F.scaled_dot_product_attention(q, k, v, (key <= query) & (key > query - WINDOW) & seen)


def test_a_padded_window_compiles():
    torch._dynamo.reset()
    shapes = [(N, H, 1, D), (R, H, P, D), (R, H, P, D), (N, H, S, D), (N, H, S, D)]
    values = [torch.randn(shape) for shape in shapes]
    position = P
    present = torch.rand(N, position + 1) < 0.7
    present[:, -1] = True
    rest = (present.long(), torch.tensor(position))
    with torch.no_grad():
        run = torch.compile(attention, backend="cascade", options={"strict": True})
        actual, eager = run(*values, *rest), attention(*values, *rest)
        reference = attention(*(x.double() for x in values), *rest)
    assert_close_to_reference(actual, eager, reference)
