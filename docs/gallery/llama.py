"""A Llama of four layers from transformers decodes eight answers to one prompt."""

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
prompt = torch.randint(3, 999, (1, 600))
cache = torch_cascade.SharedPrefixCache.prefill(model, prompt, branches=8, max_suffix=32)
with torch.no_grad():
    report = torch_cascade.explain(
        model, prompt[:, -1:].expand(8, 1), past_key_values=cache, use_cache=True
    )
print(report)
