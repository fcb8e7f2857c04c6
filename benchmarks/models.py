"""Models to decode with, and what a prefill would have left behind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_cascade.demo import prompt
from torch_cascade.demo.errors import DemoError
from torch_cascade.demo.model import default_folder

# Published shapes, random weights; `tiny` is for trying the benchmark out.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "smollm2-135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "tie_word_embeddings": True,
    },
    "tiny": {
        "vocab_size": 211,
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "max_position_embeddings": 4096,
    },
}
PACKAGED = "smollm2"

# Keys this much larger than a random model's own make attention far from uniform, as it is in a
# trained one: a wrong key then shows in the logits.
KEY_SCALE = 4.0

KeyValue = tuple[Tensor, Tensor]


class UsageError(Exception):
    """Something that the user can change."""


@dataclass(frozen=True)
class Loaded:
    """A model ready to decode.

    Attributes:
        name: for reports.
        model: a transformers causal language model in evaluation mode.
        tokenizer: None for random weights.
    """

    name: str
    model: Any
    tokenizer: Any = None


def load(name: str, layers: int | None, dtype: torch.dtype, device: torch.device) -> Loaded:
    """A model by the name of its shapes, the packaged SmolLM2, or a checkpoint's folder.

    Raises:
        UsageError: there is no such model, or it cannot be loaded.
    """
    if name in SHAPES:
        return Loaded(name, _random(SHAPES[name], layers, dtype, device))
    from torch_cascade.demo import model as demo_model

    known = ", ".join([*SHAPES, PACKAGED])
    try:
        folder = default_folder() if name == PACKAGED else Path(name)
        if not folder.is_dir():
            raise UsageError(f"--model {name}: no such folder, and none of {known}")
        model, tokenizer = demo_model.load(folder, dtype, str(device), layers)
    except DemoError as error:
        raise UsageError(str(error)) from error
    return Loaded(folder.name, model, tokenizer)


def tokenizer_of(loaded: Loaded) -> Any:
    """The model's tokenizer.

    Raises:
        UsageError: it has none.
    """
    if loaded.tokenizer is None:
        raise UsageError(f"{loaded.name} has no tokenizer: random weights say nothing here")
    return loaded.tokenizer


def _random(
    shapes: dict[str, Any], layers: int | None, dtype: torch.dtype, device: torch.device
) -> Any:
    """Weights are drawn on the device, in the dtype: seconds for eight billion."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{"tie_word_embeddings": False} | shapes)
    config.num_hidden_layers = min(layers or config.num_hidden_layers, config.num_hidden_layers)
    config._attn_implementation = "sdpa"
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


def check_length(model: Any, tokens: int) -> None:
    """Positions of the model.

    Raises:
        UsageError: it has fewer than `tokens`.
    """
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", tokens)
    if tokens > limit:
        raise UsageError(f"prompt and new tokens are {tokens}, the model takes {limit}")


def random_prefix(model: Any, requests: int, length: int, seed: int) -> list[KeyValue]:
    """Keys and values [B, Hkv, L, D] of every layer, drawn instead of computed."""
    config = model.config.get_text_config()
    heads = config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    device, dtype = model.device, model.dtype
    generator = torch.Generator(device).manual_seed(seed)
    shape = (requests, heads, length, dim)

    def normal() -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype, generator=generator)

    return [(normal().mul_(KEY_SCALE), normal()) for _ in range(config.num_hidden_layers)]


def prompt_prefix(loaded: Loaded, requests: int, length: int, seed: int) -> list[KeyValue]:
    """Keys and values of every layer after reading B different prompts of L tokens each.

    Real weights read the demonstration's text, each request from another place of it; random
    weights read random tokens. One request at a time: a prefill needs room.
    """
    from torch_cascade.runtime.prefix_cache import SharedPrefixCache

    model = loaded.model
    prefixes = []
    for request in range(requests):
        ids = _prompt(loaded, length + 1, seed + request).to(model.device)
        cache = SharedPrefixCache.prefill(model, ids.roll(17 * request, 1), branches=1)
        prefixes.append([(layer.prefix_keys, layer.prefix_values) for layer in cache.layers])
    if requests == 1:
        return prefixes[0]
    return [
        (torch.cat([k for k, _ in layer]), torch.cat([v for _, v in layer]))
        for layer in zip(*prefixes, strict=True)
    ]


def _prompt(loaded: Loaded, tokens: int, seed: int) -> Tensor:
    if loaded.tokenizer is not None:
        return prompt.build(loaded.tokenizer, None, tokens)
    vocabulary = loaded.model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (1, tokens), generator=generator)


def weights_read(model: Any) -> tuple[int, int]:
    """Elements and bytes of the weights that a step reads: all but an embedding table of its own.

    Of a table that is not the output layer's, only the rows of the tokens fed are read.
    """
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    read = [p for p in model.parameters() if p is not table or p is head]
    return sum(p.numel() for p in read), sum(p.numel() * p.element_size() for p in read)


def token_bytes(prefix: list[KeyValue]) -> int:
    """Bytes of one token's keys and values in all layers."""
    return sum(t.shape[1] * t.shape[3] * t.element_size() for layer in prefix for t in layer)
