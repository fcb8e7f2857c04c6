"""Two levels: a system prompt of all requests, and the prompt of each of them."""

import torch
import torch.nn.functional as F
from torch import Tensor

import torch_cascade


def attention(q: Tensor, system: Tensor, prompt: Tensor, generated: Tensor) -> Tensor:
    """Three requests of four branches each."""
    shared = system.expand(-1, 12, -1, -1, -1)
    keys, values = torch.cat([shared, prompt.repeat_interleave(4, dim=1), generated], dim=3)
    return F.scaled_dot_product_attention(q, keys, values)


q = torch.randn(3 * 4, 4, 1, 64)
system = torch.randn(2, 1, 4, 2000, 64)
prompt = torch.randn(2, 3, 4, 300, 64)
generated = torch.randn(2, 3 * 4, 4, 9, 64)
report = torch_cascade.explain(attention, q, system, prompt, generated)
print(report)
