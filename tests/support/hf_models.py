"""Tiny random transformers models, one a family, with every size different from every other."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCABULARY = 101
WINDOW = 8

_WIDTHS = {
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
}
_EXTRAS: dict[str, dict[str, Any]] = {
    "Llama": _WIDTHS,
    "Qwen3": _WIDTHS,
    "Mistral": _WIDTHS | {"sliding_window": WINDOW},
    "Gemma3Text": _WIDTHS
    | {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 8,
    },
    "Gemma2": _WIDTHS
    | {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 2.0,
    },
    "GptOss": _WIDTHS
    | {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "Phi3": _WIDTHS,
    "GPTNeoX": {"hidden_size": 48, "intermediate_size": 72, "num_attention_heads": 6},
    "GPTJ": {"n_embd": 48, "n_layer": 2, "n_head": 6, "rotary_dim": 4, "n_positions": 64},
    "GPT2": {"n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 64},
    "Bloom": {"hidden_size": 48, "n_layer": 2, "n_head": 6},
    "Mpt": {"d_model": 48, "n_heads": 6, "n_layers": 2, "max_seq_len": 64},
    "Olmo2": _WIDTHS,
    "Mixtral": _WIDTHS | {"num_local_experts": 4, "sliding_window": None},
    "Qwen2": _WIDTHS,
    "Falcon": {"hidden_size": 48, "num_attention_heads": 6, "alibi": False},
    "Qwen2Moe": _WIDTHS
    | {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
    },
    "Starcoder2": _WIDTHS | {"sliding_window": None},
    "Cohere": _WIDTHS,
    "Granite": _WIDTHS,
    "StableLm": _WIDTHS,
}
_CAUSAL = {"Gemma3Text": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel"}
# These have no SDPA, and compute their softmax in float32 or lower: soft-cap and sinks, ALiBi.
EAGER_ONLY = ("Gemma2", "GptOss")
ALIBI = ("Bloom", "Mpt")
# Spellings of their own for the blend pass only: their attention is that of the others.
MORE = ("Qwen2", "Falcon", "Qwen2Moe", "Starcoder2", "Cohere", "Granite", "StableLm")
FAMILIES = tuple(family for family in _EXTRAS if family not in EAGER_ONLY + ALIBI + MORE)
WINDOWED = ("Mistral", "Gemma3Text")
EXPERTS = ("Mixtral", "GptOss", "Qwen2Moe")


def tiny_model(family: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A random two-layer model of a family, in evaluation mode.

    Weights are five times larger than usual: attention is then far from uniform, so that a wrong
    key or value shows in the logits.
    """
    extras = _EXTRAS[family] | {"num_hidden_layers": 2} | changes
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCABULARY,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **extras,
    )
    name = _CAUSAL.get(family, f"{family}ForCausalLM")
    model = getattr(transformers, name)(config).eval().to(dtype)
    if family in EXPERTS:
        model.set_experts_implementation("eager")  # the grouped matmul has no float64
    return model
