"""Grouped heads, and a mask that hides the padding of shorter prompts."""

import torch
import torch.nn.functional as F
from torch import Tensor

import torch_cascade


def attention(q: Tensor, prompt: Tensor, generated: Tensor, lengths: Tensor) -> Tensor:
    """Six branches of three prompts, which are padded on the right."""
    keys, values = torch.cat([prompt.repeat_interleave(6, dim=1), generated], dim=3)
    seen = torch.arange(800) < lengths.repeat_interleave(6)[:, None]
    mask = torch.cat([seen, seen.new_ones(18, 7)], dim=1)[:, None, None]
    return F.scaled_dot_product_attention(q, keys, values, mask, enable_gqa=True)


q = torch.randn(3 * 6, 8, 1, 64)
prompt = torch.randn(2, 3, 2, 800, 64)  # two key/value heads for eight query heads
generated = torch.randn(2, 3 * 6, 2, 7, 64)
report = torch_cascade.explain(attention, q, prompt, generated, torch.tensor([800, 512, 77]))
print(report)
