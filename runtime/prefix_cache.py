"""`SharedPrefixCache`: the KV of a prompt once, whatever the number of branches decoded from it.

A transformers `Cache` for best-of-n sampling, beam search, rollouts and tree verification. Its
eager meaning is the naive one, the prefix repeated for every branch, so it is right with any
backend; `torch.compile(model, backend="cascade")` recognises the repetition and removes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    StaticSlidingWindowLayer,
)
from transformers.cache_utils import StaticLayer as HFStaticLayer

from torch_cascade.runtime.blend_layers import BlendLayer
from torch_cascade.runtime.prefix_layers import GrowingLayer, SharedPrefixLayer
from torch_cascade.runtime.static_layer import StaticLayer

KeyValue: TypeAlias = tuple[Tensor, Tensor]

_require: Callable[[bool], None] = torch._check  # torch leaves it untyped

# Exactly these: subclasses (quantised, indexed) keep their tokens in some other form.
_READABLE = (
    BlendLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    HFStaticLayer,
    StaticSlidingWindowLayer,
)


class SharedPrefixCache(Cache):
    """A KV cache of B prefilled prompts, each continued by `branches` sequences.

    The model is called with N = B * branches rows; row n continues prompt n // branches, the order
    in which `generate` repeats its inputs for `num_return_sequences` and `num_beams`. The prefill
    cache's tensors are viewed, never copied or written, so several caches may share them.

    The suffix of the branches grows by concatenation, or with `max_suffix` is written into a
    buffer of that many tokens: a compiled forward then serves all steps. For this package's rewrite
    under `generate` set `model.forward = torch.compile(model.forward, backend="cascade")`: what
    `generate` compiles by itself, where it does, is Inductor's. A token too many is a ValueError
    before anything is written: in eager mode, and in `generate`, compiled or not. Any other
    compiled forward stops with Inductor's index error (on CUDA a device-side assertion), never
    wraps round.

    Layers with a sliding window keep the whole prefix, and the mask hides what is out of the
    window: prefill such models with a `DynamicCache()` without config, as `prefill` does.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=64,
        ...     num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
        >>> model = LlamaForCausalLM(config).eval()
        >>> prompt = torch.arange(1, 21)[None]
        >>> cache = SharedPrefixCache.prefill(model, prompt, branches=3)
        >>> cache
        SharedPrefixCache(layers=2, requests=1, branches=3, prefix=19, max_suffix=None)
        >>> tokens = model.generate(prompt, past_key_values=cache, num_return_sequences=3,
        ...     do_sample=True, max_new_tokens=4, min_new_tokens=4)
        >>> tokens.shape
        torch.Size([3, 24])
    """

    layers: list[SharedPrefixLayer]

    def __init__(
        self,
        prefill_cache: Cache | Iterable[KeyValue],
        branches: int,
        max_suffix: int | None = None,
    ) -> None:
        """Share what a prefill left behind.

        Args:
            prefill_cache: a DynamicCache, StaticCache or BlendCache holding at least one token a
                layer, or its content: a pair of keys [B, H, P, D] and values [B, H, P, Dv] a layer.
            branches: sequences that continue each of the B prompts.
            max_suffix: tokens a branch may add (the first uncached prompt token included); None
                for a suffix that grows without limit.

        Raises:
            TypeError: a cache whose prefix cannot be viewed: encoder-decoder, offloaded, quantised,
                linear attention; or a size that is no integer.
            ValueError: tokens were dropped by a sliding window, layers disagree, or there are none.
        """
        _check_count("branches", branches)
        if max_suffix is not None:
            _check_count("max_suffix", max_suffix)
        is_cache = isinstance(prefill_cache, Cache)
        pairs = _cached_pairs(prefill_cache) if is_cache else list(prefill_cache)
        _check_pairs(pairs)
        if max_suffix is None:
            layers: list[SharedPrefixLayer] = [GrowingLayer(k, v, branches) for k, v in pairs]
        else:
            layers = [StaticLayer(k, v, branches, max_suffix) for k, v in pairs]
        super().__init__(layers=layers)
        self.max_suffix = max_suffix

    @classmethod
    def prefill(
        cls,
        model: nn.Module,
        input_ids: Tensor,
        branches: int,
        attention_mask: Tensor | None = None,
        max_suffix: int | None = None,
    ) -> SharedPrefixCache:
        """Run a prompt once and share it: all tokens but the last, which decoding starts from.

        Args:
            model: a transformers decoder (`...ForCausalLM`).
            input_ids: int64 [B, L], L >= 2; prompts of different lengths are padded on the left.
            branches: sequences that continue each prompt.
            attention_mask: [B, L], 0 at padding; give `generate` the same mask. Positions count
                from the first token that is no padding, as in `generate`. A `forward` of your own
                has to say so too: with a mask and `position_ids=mask.sum(-1, keepdim=True) - 1`
                for one new token; without them transformers counts the padding as well, and
                rotated keys do not fit the queries.
            max_suffix: see `SharedPrefixCache`; `generate` needs max_new_tokens of it.

        Returns:
            The cache to pass on with the whole `input_ids`, to `generate` for instance.

        Raises:
            ValueError: `input_ids` without the axes [B, L], or fewer than two tokens.
        """
        if input_ids.dim() != 2:
            raise ValueError(f"input_ids must be [prompts, tokens], got {list(input_ids.shape)}")
        if input_ids.shape[1] < 2:
            raise ValueError("a prompt of one token has no prefix: one token must stay uncached")
        cache = DynamicCache()
        accepted = inspect.signature(model.forward).parameters
        inputs: dict[str, Any] = {cache_argument(model): cache, "use_cache": True}
        if attention_mask is not None:
            attention_mask = attention_mask[:, :-1]
            inputs["attention_mask"] = attention_mask
        if attention_mask is not None and "position_ids" in accepted:
            positions = attention_mask.long().cumsum(-1) - 1
            inputs["position_ids"] = positions.masked_fill(attention_mask == 0, 0)
        if "logits_to_keep" in accepted:
            inputs["logits_to_keep"] = 1
        with torch.no_grad():
            model(input_ids=input_ids[:, :-1], **inputs)
        return cls(cache, branches, max_suffix)

    @property
    def branches(self) -> int:
        """Sequences that continue each prompt."""
        return self.layers[0].branches

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> KeyValue:
        """Add states [N, H, M, D], [N, H, M, Dv] to a layer; return all its keys and values.

        Returns:
            New tensors [N, H, L, D] and [N, H, L, Dv]: the prefix repeated for each branch, then
            the suffix (of a static one, the whole buffer).
        """
        if torch.compiler.is_compiling():
            _tie_sizes(self.layers[0], self.layers[layer_idx], key_states.shape[-2])
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys, values

    def __repr__(self) -> str:
        """Sizes of the cache in one line."""
        requests, _, prefix, _ = self.layers[0].prefix_keys.shape
        return (
            f"{type(self).__name__}(layers={len(self)}, requests={requests}, "
            f"branches={self.branches}, prefix={prefix}, max_suffix={self.max_suffix})"
        )


def cache_argument(model: nn.Module) -> str:
    """The name under which a transformers model's forward takes its cache.

    Transformers 5.17 says `past_key_values`, later versions are renaming it to `cache`.
    """
    accepted = inspect.signature(model.forward).parameters
    return "cache" if "cache" in accepted else "past_key_values"


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def _cached_pairs(cache: Cache) -> list[KeyValue]:
    """Views of the filled part of every layer of a prefill cache."""
    if isinstance(cache, EncoderDecoderCache):
        raise TypeError("SharedPrefixCache holds decoder-only caches, not an EncoderDecoderCache")
    if cache.offloading:
        raise TypeError("SharedPrefixCache cannot view an offloaded cache: prefill without it")
    return [_cached_pair(index, layer) for index, layer in enumerate(cache.layers)]


def _cached_pair(index: int, layer: Any) -> KeyValue:
    if type(layer) not in _READABLE:
        raise TypeError(f"SharedPrefixCache cannot view layer {index}, a {type(layer).__name__}")
    if not layer.is_initialized:
        raise ValueError(f"layer {index} of the prefill cache is empty")
    length, stored = int(layer.get_seq_length()), layer.keys.shape[-2]
    if length > stored:
        raise ValueError(
            f"layer {index} saw {length} tokens and its sliding window kept {stored}: "
            "prefill with DynamicCache() without config, which drops none"
        )
    return layer.keys[..., :length, :], layer.values[..., :length, :]


def _check_pairs(pairs: list[KeyValue]) -> None:
    if not pairs:
        raise ValueError("the prefill cache has no layers: run the prompt first")
    (rows, _, length, _) = pairs[0][0].shape
    if length == 0:
        raise ValueError("the prefill cache is empty: run the prompt first")
    for index, (keys, values) in enumerate(pairs):
        for name, tensor in (("keys", keys), ("values", values)):
            if (tensor.shape[0], tensor.shape[-2]) != (rows, length):
                raise ValueError(
                    f"layer {index}: {name} hold {tensor.shape[-2]} tokens of {tensor.shape[0]} "
                    f"prompts, layer 0's keys {length} of {rows}"
                )


def _tie_sizes(first: SharedPrefixLayer, layer: SharedPrefixLayer, queries: int) -> None:
    """Tell the compiler that all layers hold the same prefix and suffix lengths.

    Without it every layer's keys and values get symbols of their own under dynamic shapes, and
    nothing compiled for one layer can be shared with another. Layer 0 already has this step's
    `queries` tokens when another layer is updated.
    """
    for prefix in (layer.prefix_keys, layer.prefix_values):
        _require(prefix.shape[0] == first.prefix_keys.shape[0])
        _require(prefix.shape[-2] == first.prefix_keys.shape[-2])
    if not isinstance(layer, GrowingLayer) or not isinstance(first, GrowingLayer):
        return
    if layer.suffix_keys is None or layer.suffix_values is None or first.suffix_keys is None:
        return
    before = first.suffix_keys.shape[-2] - (0 if layer is first else queries)
    _require(layer.suffix_keys.shape[-2] == before)
    _require(layer.suffix_values.shape[-2] == before)
