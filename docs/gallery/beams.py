"""Eight beams behind each of two prompts, in plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor

import torch_cascade


def attention(q: Tensor, prompt: Tensor, generated: Tensor) -> Tensor:
    """Every beam sees the keys and values of its prompt, then its own."""
    keys, values = torch.cat([prompt.repeat_interleave(8, dim=1), generated], dim=3)
    return F.scaled_dot_product_attention(q, keys, values)


q = torch.randn(2 * 8, 4, 1, 64)
prompt = torch.randn(2, 2, 4, 1000, 64)  # keys and values, prompts, heads, tokens, features
generated = torch.randn(2, 2 * 8, 4, 5, 64)
report = torch_cascade.explain(attention, q, prompt, generated)
print(report)
