"""`BlendCache`: a transformers cache that brings cached chunks' keys and values to a prefill.

On the prefill every layer rotates the cached keys to their new positions and hands them, beside the
keys and values that the model computes, to `reuse_kv`. In eager mode that is nothing: the prompt is
computed in full. `torch.compile(model, backend="cascade")` may reuse them (CacheBlend, arXiv
2405.16444). Afterwards it is an ordinary growing cache.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from torch_cascade.runtime.blend_layers import BlendLayer, KeyValue, Reuse
from torch_cascade.runtime.rotation_check import LayerRotation
from torch_cascade.runtime.take_kv import Pending


class Loading(Protocol):
    """What brings the cached keys and values of a cache that was made before they were there."""

    def wait(self, layer: int) -> KeyValue:
        """A layer's keys [N, H, L, D] and values, once they are there."""

    def cancel(self) -> None:
        """Stop: they are not needed."""


class BlendCache(Cache):
    """The cache of a prompt of which some tokens have cached keys and values; made by `ChunkStore`.

    Before the prefill its length is 0. The prefill is one forward of the whole prompt, with the
    positions and the mask that `ChunkStore.blend` gives; it may have every row repeated, as
    `generate` does for `num_return_sequences`. Then the cache holds every token, in every layer
    (sliding ones included), can be decoded with, cropped, reordered, and given to
    `SharedPrefixCache(cache, branches)`. The cached tensors are read only, and released by the
    prefill: a second prompt is blended anew.

    Example:
        >>> import torch
        >>> from torch_cascade import ChunkStore, SharedPrefixCache
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=64,
        ...     num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
        >>> model = LlamaForCausalLM(config).eval()
        >>> store = ChunkStore(model)
        >>> name = store.add([5, 6, 7, 8])
        >>> blended = store.blend([[9, 10], [5, 6, 7, 8], [11]])
        >>> blended.past_key_values
        BlendCache(layers=2, rows=1, tokens=7, fresh=3, not yet prefilled)
        >>> with torch.no_grad():
        ...     logits = model(**blended, logits_to_keep=1).logits
        >>> SharedPrefixCache(blended.past_key_values, branches=3)
        SharedPrefixCache(layers=2, requests=1, branches=3, prefix=7, max_suffix=None)
    """

    layers: list[BlendLayer]

    def __init__(
        self,
        rotations: Sequence[LayerRotation],
        cached: Sequence[KeyValue] | Sequence[Pending] | None = None,
        reuse: Reuse | None = None,
        loading: Loading | None = None,
    ) -> None:
        """Hold what the chunks' prefills left.

        Args:
            rotations: of each layer's keys, `ModelRotation.layers`.
            cached: keys [N, H, L, D] and values [N, H, L, Dv], one pair a layer, or what
                will give them; None where no token is cached.
            reuse: the rest, the same for all layers; None with `cached`.
            loading: what gives them, held as long as the cache and told when nobody needs it.

        Raises:
            ValueError: no layers, or another number of them than of rotations.
        """
        if (cached is None) != (reuse is None):
            raise ValueError("cached and reuse come together, or neither does")
        none: list[None] = [None] * len(rotations)
        pairs: Sequence[KeyValue | Pending | None] = none if cached is None else cached
        if not rotations or len(pairs) != len(rotations):
            raise ValueError(f"{len(rotations)} layers have rotations, {len(pairs)} cached keys")
        layers = [
            BlendLayer(pair, reuse, rotation.where, rotation.rotary)
            for pair, rotation in zip(pairs, rotations, strict=True)
        ]
        super().__init__(layers=layers)

        self._loading = loading
        if loading is not None:
            weakref.finalize(self, loading.cancel)

    @property
    def prefilled(self) -> bool:
        """Whether the prompt has been computed."""
        return bool(self.layers[-1].is_initialized)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> KeyValue:
        """Add states [N, H, M, D], [N, H, M, Dv] to a layer; return all its keys and values.

        Raises:
            TypeError: the prompt's states have another dtype than the cached ones.
            ValueError: they are not of the whole prompt.
        """
        pair: KeyValue = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if not torch.compiler.is_compiling() and self._loading is not None:
            self._loading.cancel()  # eager: nothing is reused
        return pair

    def rotated(self, layer: int) -> KeyValue:
        """A layer's cached keys at their new positions and its values, before the prefill.

        Returns:
            [N, H, L, D] and [N, H, L, Dv], waited for; not to be written.

        Raises:
            ValueError: after the prefill, when they are released; or nothing is cached.
        """
        held = self.layers[layer].cached
        if held is None:
            raise ValueError("no cached keys and values: none were, or the prefill released them")
        if isinstance(held, Pending):
            assert self._loading is not None
            held = self._loading.wait(layer)
        return self.layers[layer].rotate(held)

    def __repr__(self) -> str:
        """Sizes of the cache in one line."""
        name, reuse = type(self).__name__, self.layers[0].reuse
        if reuse is None:
            return f"{name}(layers={len(self)}, tokens={self.get_seq_length()})"
        rows, tokens = reuse.chunks.shape
        sizes = f"rows={rows}, tokens={tokens}, fresh={reuse.fresh_rows.shape[1]}"
        return f"{name}(layers={len(self)}, {sizes}, not yet prefilled)"
