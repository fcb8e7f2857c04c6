"""A question about two cached documents: 15 % of their tokens are computed again."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import torch_cascade

config = LlamaConfig(
    vocab_size=999,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
)
model = LlamaForCausalLM(config).eval()
first, second, question = (torch.randint(3, 999, (n,)).tolist() for n in (300, 200, 20))
store = torch_cascade.ChunkStore(model)
store.add(first)
store.add(second)
blended = store.blend([second, first, question])
with torch.no_grad():
    report = torch_cascade.explain(model, **blended, logits_to_keep=1)
print(blended.report)
print(report)
