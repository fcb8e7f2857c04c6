"""One layer of a `BlendCache`: cached keys and values beside the prompt's own, then a growing cache.

Shapes by axis names: N rows, H key/value heads, L tokens of the prompt, D features, F fresh tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from torch_cascade.kernels.ops import reuse_kv
from torch_cascade.runtime.positions import RotatedSlice, Turn, rotate_keys

try:
    from transformers.cache_utils import DynamicLayer
except ImportError as error:
    raise ImportError("BlendCache needs transformers: pip install 'torch-cascade[hf]'") from error

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


class BlendLayer(DynamicLayer):
    """Keys and values of one layer: until the prompt comes, the cached ones; afterwards its own.

    The whole sequence is kept, sliding window or not, and the mask hides what is out of the
    window: what transformers does with a `DynamicCache()` without config.
    """

    is_sliding: ClassVar[bool] = False

    def __init__(
        self,
        cached: KeyValue | None = None,
        reuse: Reuse | None = None,
        where: RotatedSlice | None = None,
        rotary: int | None = None,
    ) -> None:
        """Hold what the chunks' prefills left, at the places of the new prompt.

        Args:
            cached: keys [N, H, L, D], rotated for the chunks' own positions, and values
                [N, H, L, Dv]; anything finite at the fresh tokens. Read only. None for none: an
                ordinary layer.
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
        self._check(key_states, self.cached[0])
        if not torch.compiler.is_compiling():
            # The marker's meaning: the prompt is computed in full.
            self.release()
            kept: KeyValue = super().update(key_states, value_states)
            return kept
        keys, values, reuse = self._for_rows(key_states.shape[0])
        self.keys, self.values = reuse_kv(key_states, value_states, keys, values, reuse.fresh_rows)
        self.device = key_states.device
        self.is_initialized = True
        self.release()
        return self.keys, self.values

    def rotated(self) -> KeyValue:
        """The cached keys at their new positions, and the values: [N, H, L, D], [N, H, L, Dv].

        Raises:
            ValueError: after the prefill, when they are released.
        """
        if self.cached is None or self.reuse is None:
            raise ValueError("the cached keys and values were released by the prefill")
        keys, values = self.cached
        if self.where is None or self.rotary is None:
            return keys, values
        return rotate_keys(keys, self.reuse.turns[self.rotary], self.where), values

    def release(self) -> None:
        """Forget the cached keys and values: from here on an ordinary growing layer."""
        self.cached = self.reuse = None

    def reset(self) -> None:
        """Refused: what was cached is no longer here."""
        raise ValueError(
            "a blended prompt can be prefilled once: blend it again instead of reset()"
        )

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Continue every row `repeats` times."""
        if self.cached is None or self.reuse is None:
            super().batch_repeat_interleave(repeats)
            return
        keys, values = self.cached
        self.cached = keys.repeat_interleave(repeats, 0), values.repeat_interleave(repeats, 0)
        self.reuse = repeated(self.reuse, repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep rows `indices` (int64 [N'] or bool [N]), in that order; refused before the prefill."""
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
        assert self.reuse is not None
        keys, values = self.rotated()
        if keys.shape[0] == rows:
            return keys, values, self.reuse
        repeats = rows // keys.shape[0]
        expanded = keys.repeat_interleave(repeats, 0), values.repeat_interleave(repeats, 0)
        return *expanded, repeated(self.reuse, repeats)

    def _check(self, fresh: Tensor, cached: Tensor) -> None:
        if fresh.dtype != cached.dtype:
            raise TypeError(
                f"the chunks were cached in {cached.dtype} and this forward computes keys in "
                f"{fresh.dtype}: add chunks under the same autocast, from the same weights"
            )
        if fresh.shape[2] != cached.shape[2]:
            raise ValueError(
                f"a blended prompt comes whole and at once: expected {cached.shape[2]} tokens, got "
                f"{fresh.shape[2]} (pass all of input_ids, and no prefill_chunk_size)"
            )
        if fresh.shape[0] % cached.shape[0] != 0:
            raise ValueError(f"expected {cached.shape[0]} rows or a multiple, got {fresh.shape[0]}")


def repeated(reuse: Reuse, repeats: int) -> Reuse:
    """The same for a batch whose rows are each repeated."""
    turns = tuple(_repeated_turn(turn, repeats) for turn in reuse.turns)
    fresh_rows = reuse.fresh_rows.repeat_interleave(repeats, 0)
    return Reuse(turns, fresh_rows, reuse.chunks.repeat_interleave(repeats, 0))


def _repeated_turn(turn: Turn, repeats: int) -> Turn:
    if turn.cos.shape[0] == 1:
        return turn
    return Turn(turn.cos.repeat_interleave(repeats, 0), turn.sin.repeat_interleave(repeats, 0))
