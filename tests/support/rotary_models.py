"""Tiny random decoders, one for each way in which keys are rotated, and their tables by formula."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor

VOCABULARY = 101
LONGEST = 64
THETA = 10_000.0
_WIDTHS = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": LONGEST,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WIDE = _WIDTHS | {"head_dim": 8}
_GPT = {"vocab_size": VOCABULARY, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": LONGEST}
_TYPES = ["sliding_attention", "full_attention", "full_attention"]
SHORT, LONG = [1.0, 1.1, 1.2, 1.3], [1.0, 2.0, 3.0, 4.0]
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": THETA,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "short_factor": SHORT,
    "long_factor": LONG,
}
_MSCALE = {"short_mscale": 1.1, "long_mscale": 1.3}


@dataclass(frozen=True)
class Case:
    """A model, and how its keys are rotated: (features, neighbours are pairs), or None, a layer."""

    family: str
    config: dict[str, Any] = field(default_factory=dict)
    rotated: tuple[tuple[str, bool] | None, ...] = (("0:8", False),) * 3
    causal: str = ""
    # Relative positions are not all that counts: scores depend on the length, too.
    by_length: bool = False
    limit: int | None = None

    def model(self, dtype: torch.dtype = torch.float32) -> Any:
        """In evaluation mode; norms have weights other than one."""
        config = getattr(transformers, f"{self.family}Config")(initializer_range=0.1, **self.config)
        name = self.causal or f"{self.family}ForCausalLM"
        model = getattr(transformers, name)(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.3 * torch.randn_like(parameter))
        if "num_experts_per_tok" in self.config:
            model.set_experts_implementation("eager")  # the grouped matmul has no float64
        return model.to(dtype)


def _llama(**rope: Any) -> dict[str, Any]:
    return _WIDE | {"rope_parameters": {"rope_theta": THETA} | rope}


_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": LONGEST,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": LONGEST}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

CASES = {
    "default": Case("Llama", _llama()),
    "linear": Case("Llama", _llama(rope_type="linear", factor=4.0)),
    "dynamic": Case("Llama", _llama(rope_type="dynamic", factor=4.0), by_length=True),
    "llama3": Case("Llama", _llama(**_LLAMA3)),
    "yarn": Case("Llama", _llama(**_YARN)),
    "longrope": Case("Llama", _llama(**_LONGROPE), by_length=True),
    "phi3": Case(
        "Phi3",
        _WIDTHS | {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 32},
        by_length=True,
    ),
    "phimoe": Case(
        "Phimoe",
        _WIDTHS | _EXPERTS | {"rope_parameters": _LONGROPE | _MSCALE, "head_dim": 8},
        by_length=True,
    ),
    "gpt_neox": Case("GPTNeoX", _WIDTHS | {"hidden_size": 96}, (("0:4", False),) * 3),
    "gptj": Case("GPTJ", _GPT | {"rotary_dim": 4}, (("0:4", True),) * 2, limit=LONGEST),
    "codegen": Case("CodeGen", _GPT | {"rotary_dim": 4}, (("0:4", True),) * 2, limit=LONGEST),
    "stablelm": Case("StableLm", _WIDTHS | {"hidden_size": 96}, (("0:4", False),) * 3),
    "phi": Case("Phi", _WIDTHS | {"partial_rotary_factor": 0.5}, (("0:4", False),) * 3),
    "gemma3": Case(
        "Gemma3Text",
        _WIDE | {"layer_types": _TYPES, "sliding_window": 8},
        causal="Gemma3ForCausalLM",
    ),
    "qwen3": Case("Qwen3", _WIDE),
    "cohere": Case("Cohere", _WIDTHS, (("0:8", True),) * 3),
    "cohere2": Case(
        "Cohere2",
        _WIDTHS | {"layer_types": _TYPES, "sliding_window": 8},
        (("0:8", True), None, None),
    ),
    "glm": Case("Glm", _WIDE | {"partial_rotary_factor": 0.5}, (("0:4", True),) * 3),
    "smollm3": Case(
        "SmolLM3", _WIDTHS | {"no_rope_layers": [1, 0, 1]}, (("0:8", False), None, ("0:8", False))
    ),
    "nanochat": Case("NanoChat", _WIDTHS, (("0:8 clockwise", False),) * 3),
    "modernbert": Case(
        "ModernBertDecoder",
        _WIDTHS
        | {"layer_types": _TYPES, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "falcon": Case("Falcon", _WIDTHS, causal="FalconForCausalLM"),
    "gpt_oss": Case("GptOss", _WIDE | _EXPERTS | {"rope_parameters": {"rope_theta": 1e5} | _YARN}),
    "llama4": Case(
        "Llama4Text",
        _WIDE | {"num_local_experts": 2, "no_rope_layers": [1, 1, 0]},
        (("0:8", True), ("0:8", True), None),
        causal="Llama4ForCausalLM",
    ),
    # No rotation at all, and no position either: relative biases of the scores.
    "bloom": Case(
        "Bloom",
        {"vocab_size": VOCABULARY, "hidden_size": 48, "n_layer": 2, "n_head": 6},
        (None,) * 2,
    ),
}
# Those that can be told positions.
PLACED = [name for name in CASES if name != "bloom"]
_LATENT = {
    "num_key_value_heads": 6,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
REFUSED = {
    "gpt2": (Case("GPT2", _GPT, causal="GPT2LMHeadModel"), "values of layer 0 depend"),
    "opt": (Case("OPT", _WIDTHS | {"ffn_dim": 72}), "values of layer 0 depend"),
    "deepseek_v3": (Case("DeepseekV3", _WIDTHS | _LATENT), "values of layer 0 depend"),
    "qwen2_vl": (
        Case(
            "Qwen2VL",
            {
                "text_config": _llama(mrope_section=[1, 1, 2]),
                "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 48, "num_heads": 2},
            },
            causal="Qwen2VLForConditionalGeneration",
        ),
        "several coordinates .mrope.",
    ),
    "hunyuan": (Case("HunYuanDenseV1", _WIDE), "turns the keys of layer 0"),
    "qwen3_next": (Case("Qwen3Next", _WIDE), "holds more than keys and values"),
}


def twin64(model: Any) -> Any:
    """The same weights and tables in float64."""
    return copy.deepcopy(model).double()


def keys_at(model: Any, ids: Tensor, positions: Tensor) -> list[Tensor]:
    """Keys [B, H, T, D] a layer of `ids` [B, T], prefilled alone at `positions` [B, T]."""
    cache = transformers.DynamicCache()
    with torch.no_grad():
        model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
    return [layer.keys for layer in cache.layers]


def moved_and_fresh(
    model: Any, rotation: Any, ids: Tensor, old: Tensor, new: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Keys cached at positions `old` [B, T] and moved to `new`; keys prefilled at `new`."""
    before = rotation.tables(int(old.max()) + 1)
    cached = keys_at(model, ids, old)
    after = rotation.tables(int(new.max()) + 1)
    fresh = keys_at(model, ids, new)
    turns = rotation.turns(before, after, old, new)
    return [rotation.rotate(keys, layer, turns) for layer, keys in enumerate(cached)], fresh


def inverse_frequencies(case: str, pairs: int, length: int) -> Tensor:
    """Frequencies in float64, from the papers' formulas: the oracle of what models hold."""
    exponent = torch.arange(pairs, dtype=torch.float64) / pairs
    plain = THETA**-exponent
    if case == "linear":
        return plain / 4
    if case == "dynamic":
        stretch = 4 * max(length, LONGEST) / LONGEST - 3
        return (THETA * stretch ** (pairs / (pairs - 1))) ** -exponent
    if case in ("longrope", "phi3"):
        return plain / torch.tensor(LONG if length > 32 else SHORT, dtype=torch.float64)
    if case == "llama3":
        turns = LONGEST * plain / (2 * math.pi)
        blend = ((turns - 1.0) / (4.0 - 1.0)).clamp(0, 1)
        return blend * plain + (1 - blend) * plain / 8
    if case == "yarn":
        bounds = [pairs * math.log(LONGEST / (n * 2 * math.pi)) / math.log(THETA) for n in (32, 1)]
        low, high = max(math.floor(bounds[0]), 0), min(math.ceil(bounds[1]), 2 * pairs - 1)
        ramp = ((torch.arange(pairs) - low) / max(high - low, 1e-3)).clamp(0, 1).double()
        return (1 - ramp) * plain + ramp * plain / 4
    return plain
