"""`BlendCache`: a transformers cache that brings cached chunks' keys and values to a prefill.

On the prefill every layer rotates the cached keys to their new positions and hands them, beside the
keys and values that the model computes, to `reuse_kv`. In eager mode that is nothing: the prompt is
computed in full. `torch.compile(model, backend="cascade")` may reuse them (CacheBlend, arXiv
2405.16444). Afterwards it is an ordinary growing cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_cascade.runtime.blend_layers import BlendLayer, KeyValue, Reuse
from torch_cascade.runtime.rotation_check import LayerRotation

from transformers.cache_utils import Cache  # isort: skip  (blend_layers says what to install)


class BlendCache(Cache):
    """The cache of a prompt of which some tokens have cached keys and values; made by `ChunkStore`.

    Before the prefill its length is 0. The prefill is one forward of the whole prompt, with the
    positions and the mask that `ChunkStore.blend` gives; it may have every row repeated, as
    `generate` does for `num_return_sequences`. Then the cache holds every token, in every layer
    (sliding ones included), can be decoded with, cropped, reordered, and given to
    `SharedPrefixCache(cache, branches)`. The cached tensors are read only, and released by the
    prefill: a second prompt is blended anew.

    Raises:
        ValueError: no layers, or another number of them than of rotations.
    """

    layers: list[BlendLayer]

    def __init__(
        self,
        rotations: Sequence[LayerRotation],
        cached: Sequence[KeyValue] | None = None,
        reuse: Reuse | None = None,
    ) -> None:
        """Hold what the chunks' prefills left.

        Args:
            rotations: of each layer's keys, `ModelRotation.layers`.
            cached: keys [N, H, L, D] and values [N, H, L, Dv], one pair a layer; None where no
                token is cached.
            reuse: the rest, the same for all layers; None with `cached`.
        """
        if (cached is None) != (reuse is None):
            raise ValueError("cached and reuse come together, or neither does")
        pairs: Sequence[KeyValue | None] = [None] * len(rotations) if cached is None else cached
        if not rotations or len(pairs) != len(rotations):
            raise ValueError(f"{len(rotations)} layers have rotations, {len(pairs)} cached keys")
        layers = [
            BlendLayer(pair, reuse, rotation.where, rotation.rotary)
            for pair, rotation in zip(pairs, rotations, strict=True)
        ]
        super().__init__(layers=layers)

    @property
    def prefilled(self) -> bool:
        """Whether the prompt has been computed."""
        return bool(self.layers[-1].is_initialized)

    def rotated(self, layer: int) -> KeyValue:
        """A layer's cached keys at their new positions and its values, before the prefill.

        Raises:
            ValueError: after the prefill.
        """
        return self.layers[layer].rotated()

    def __repr__(self) -> str:
        """Sizes of the cache in one line."""
        first = self.layers[0]
        if first.cached is None or first.reuse is None:
            return f"{type(self).__name__}(layers={len(self)}, tokens={self.get_seq_length()})"
        rows, _, tokens, _ = first.cached[0].shape
        fresh = first.reuse.fresh_rows.shape[1]
        sizes = f"rows={rows}, tokens={tokens}, fresh={fresh}"
        return f"{type(self).__name__}(layers={len(self)}, {sizes}, not yet prefilled)"
