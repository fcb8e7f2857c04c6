"""Three attentions that are left as they are, and why."""

import torch
import torch.nn.functional as F
from torch import Tensor

import torch_cascade


def attentions(q: Tensor, expanded: Tensor, prompt: Tensor, generated: Tensor) -> list[Tensor]:
    """The first gets keys that were expanded before, the second returns its weights."""
    keys, values = expanded
    first = F.scaled_dot_product_attention(q, keys, values)

    keys, values = torch.cat([prompt.repeat_interleave(8, dim=1), generated], dim=3)
    weights = torch.softmax(q @ keys.mT * 0.125, dim=-1)
    second = weights @ values

    keys, values = torch.cat([prompt[..., :2, :].repeat_interleave(8, dim=1), generated], dim=3)
    third = F.scaled_dot_product_attention(q, keys, values)  # two keys to share are too few
    return [first, second, weights, third]


q = torch.randn(2 * 8, 4, 1, 64)
prompt = torch.randn(2, 2, 4, 1000, 64)
generated = torch.randn(2, 2 * 8, 4, 5, 64)
report = torch_cascade.explain(attentions, q, prompt.repeat_interleave(8, dim=1), prompt, generated)
print(report)
