"""`cascade::sdpa` in plain torch: eager, fake and lowered it is one and the same call."""

from __future__ import annotations

import torch
from torch import Tensor


def sdpa_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Torch's `scaled_dot_product_attention` without dropout.

    On fake tensors this gives exactly the dtype and the strides that the real call has, whichever
    backend torch chooses; nothing of that choice is repeated here.

    Args: see `torch_cascade.kernels.ops.sdpa`.
    """
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
    )
