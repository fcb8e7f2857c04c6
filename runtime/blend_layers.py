"""One layer of a `BlendCache`: cached keys and values beside the prompt's own, then these grow.

Shapes by axis names: N rows, H key/value heads, L tokens of the prompt, D features, F fresh tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from torch_cascade.kernels.ops import reuse_kv
from torch_cascade.runtime.positions import RotatedSlice, Turn, rotate_keys
from torch_cascade.runtime.take_kv import Pending

KeyValue: TypeAlias = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Reuse:
    """What all layers of a blended prompt have in common.

    Attributes:
        turns: how each rotary embedding moves the keys, of rows N or 1; () for a model without any.
        fresh_rows: int64 [N, F], the tokens that have no cached copy.
        chunks: int64 [N, L], the number of the cached chunk that a token is from; -1 for none.
    """

    turns: tuple[Turn, ...]
    fresh_rows: Tensor
    chunks: Tensor


class GrowingLayer(DynamicLayer):
    """A layer whose keys and values are of the dtypes that the model computes.

    transformers 5.17 joins both to an empty tensor of the keys' dtype. Under autocast, where a
    rotation makes keys float32 and values stay bfloat16, the values became float32, too.
    """

    values: Tensor

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Begin, before the first states [N, H, M, D], [N, H, M, Dv]."""
        super().lazy_initialization(key_states, value_states)
        self.values = self.values.to(value_states.dtype)


class BlendLayer(GrowingLayer):
    """Keys and values of one layer: until the prompt comes, the cached ones; afterwards its own.

    The whole sequence is kept, sliding window or not, and the mask hides what is out of the
    window: what transformers does with a `DynamicCache()` without config.
    """

    is_sliding: ClassVar[bool] = False

    def __init__(
        self,
        cached: KeyValue | Pending | None = None,
        reuse: Reuse | None = None,
        where: RotatedSlice | None = None,
        rotary: int | None = None,
    ) -> None:
        """Hold what the chunks' prefills left, at the places of the new prompt.

        Args:
            cached: keys [N, H, L, D], rotated for the chunks' own positions, and values
                [N, H, L, Dv]; anything finite at the fresh tokens. Read only. Or what will give
                them, to a compiled prefill. None for none: an ordinary layer.
            reuse: shared by all layers; None with `cached`.
            where: the features that are rotated; None for none.
            rotary: which of `reuse.turns` rotates them.
        """
        super().__init__()
        self.cached = cached
        self.reuse = reuse
        self.where = where
        self.rotary = rotary

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> KeyValue:
        """Add states [N, H, M, D], [N, H, M, Dv]; return all keys and values.

        Raises:
            TypeError: the first states have another dtype than the cached ones.
            ValueError: they are not the whole prompt.
        """
        if self.cached is None or self.reuse is None:
            grown: KeyValue = super().update(key_states, value_states)
            return grown
        self._check((key_states, value_states), self.cached, self.reuse)
        trains = torch.is_grad_enabled() and key_states.requires_grad
        if trains or not torch.compiler.is_compiling():
            # The marker's meaning: the prompt is computed in full.
            self._release()
            kept: KeyValue = super().update(key_states, value_states)
            return kept
        keys, values, reuse = self._for_rows(key_states.shape[0])
        # Under autocast the rotation makes keys float32, and values stay what they are.
        wide = torch.promote_types(key_states.dtype, value_states.dtype)
        key_states, value_states = key_states.to(wide), value_states.to(wide)
        keys, values = keys.to(wide), values.to(wide)
        self.keys, self.values = reuse_kv(
            key_states, value_states, keys, values, reuse.fresh_rows, chunks=reuse.chunks
        )
        self.device = key_states.device
        self.is_initialized = True
        self._release()
        return self.keys, self.values

    def _release(self) -> None:
        """Forget the cached keys and values: from here on an ordinary growing layer."""
        self.cached = self.reuse = None

    def reset(self) -> None:
        """Refused: what was cached is no longer here."""
        raise ValueError(
            "a blended prompt can be prefilled once: blend it again instead of reset()"
        )

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Continue every row `repeats` times; before the prefill, simply call it with such rows."""
        self._check_prefilled("batch_repeat_interleave")
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep rows `indices`, int64 [N'] or bool [N], in order; refused before the prefill."""
        self._check_prefilled("batch_select_indices")
        super().batch_select_indices(indices)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row n continue row `beam_idx[n]`; refused before the prefill."""
        self._check_prefilled("reorder_cache")
        super().reorder_cache(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens; refused before the prefill."""
        self._check_prefilled("crop")
        super().crop(tokens_to_remove)

    def _check_prefilled(self, name: str) -> None:
        if self.cached is not None:
            raise ValueError(f"{name} before the prefill of a blended prompt: blend other parts")

    def _for_rows(self, rows: int) -> tuple[Tensor, Tensor, Reuse]:
        """Rotated keys, values and the rest for a batch that `generate` has expanded, or not."""
        assert self.cached is not None and self.reuse is not None
        own_rows, tokens = self.reuse.chunks.shape
        held = self.cached
        pair = held.take(own_rows, tokens) if isinstance(held, Pending) else held
        keys, values = self.rotate(pair)
        if own_rows == rows:
            return keys, values, self.reuse
        repeats = rows // own_rows
        expanded = keys.repeat_interleave(repeats, 0), values.repeat_interleave(repeats, 0)
        return *expanded, repeated(self.reuse, repeats)

    def rotate(self, cached: KeyValue) -> KeyValue:
        """The cached keys at their new positions, and the values."""
        keys, values = cached
        if self.where is None or self.rotary is None or self.reuse is None:
            return keys, values
        return rotate_keys(keys, self.reuse.turns[self.rotary], self.where), values

    def _check(self, states: KeyValue, cached: KeyValue | Pending, reuse: Reuse) -> None:
        fresh, likes = states[0], cached.like if isinstance(cached, Pending) else cached
        rows, tokens = reuse.chunks.shape
        for name, computed, like in zip(("keys", "values"), states, likes, strict=True):
            if computed.dtype != like.dtype:
                raise TypeError(
                    f"the chunks were cached with {name} of {like.dtype}, and this forward "
                    f"computes {computed.dtype}: add and use chunks under the same autocast"
                )
        if fresh.shape[2] != tokens:
            raise ValueError(
                f"a blended prompt comes whole and at once: expected {tokens} tokens, got "
                f"{fresh.shape[2]} (pass all of input_ids, and no prefill_chunk_size)"
            )
        if fresh.shape[0] % rows != 0:
            raise ValueError(f"expected {rows} rows or a multiple, got {fresh.shape[0]}")


def repeated(reuse: Reuse, repeats: int) -> Reuse:
    """The same for a batch whose rows are each repeated."""
    turns = tuple(_repeated_turn(turn, repeats) for turn in reuse.turns)
    fresh_rows = reuse.fresh_rows.repeat_interleave(repeats, 0)
    return Reuse(turns, fresh_rows, reuse.chunks.repeat_interleave(repeats, 0))


def _repeated_turn(turn: Turn, repeats: int) -> Turn:
    if turn.cos.shape[0] == 1:
        return turn
    return Turn(turn.cos.repeat_interleave(repeats, 0), turn.sin.repeat_interleave(repeats, 0))
