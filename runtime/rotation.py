"""`verify_rotation(model)`: how a transformers model's cached keys are moved to other positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from torch_cascade.runtime.positions import RopeTable, Turn, rotate_keys, turn
from torch_cascade.runtime.rotary_modules import Rotary, find_rotaries
from torch_cascade.runtime.rotation_check import LayerRotation, prove_layers
from torch_cascade.runtime.rotation_probes import RotationError, check_model

__all__ = ["LayerRotation", "ModelRotation", "RotationError", "verify_rotation"]


@dataclass(frozen=True, eq=False)
class ModelRotation:
    """The proved rotations of a model's layers.

    Attributes:
        rotaries: the embeddings that some layer uses.
        layers: one a layer of the cache; `rotary` is an index into `rotaries`.
    """

    rotaries: tuple[Rotary, ...]
    layers: tuple[LayerRotation, ...]

    def tables(self, length: int) -> tuple[RopeTable, ...]:
        """What the model's next forward uses if it ends at `length` tokens, a table an embedding.

        Keep them beside the keys that the forward computes. With dynamic NTK they depend on the
        longest sequence that the model has seen: ask right before or right after that forward.

        Raises:
            ValueError: a length below 1, or beyond the end of the model's table.
        """
        if length < 1:
            raise ValueError(f"length must be at least 1, got {length}")
        for rotary in self.rotaries:
            if rotary.limit is not None and length > rotary.limit:
                raise ValueError(f"{rotary.name} has {rotary.limit} positions, not {length}")
        return tuple(rotary.table(length) for rotary in self.rotaries)

    def turns(
        self,
        old: Sequence[RopeTable],
        new: Sequence[RopeTable],
        old_positions: Tensor,
        new_positions: Tensor,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Turn, ...]:
        """`positions.turn` for each embedding: all that the layers need, computed once.

        Args:
            old: `tables` of the forward that computed the keys.
            new: `tables` of the forward that is to use them.
            old_positions: int64 [T] or [R, T].
            new_positions: int64 [T] or [R, T].
            dtype: of the turns.

        Raises:
            TypeError: positions are not int64.
            ValueError: another number of tables, or what `turn` refuses.
        """
        if not len(old) == len(new) == len(self.rotaries):
            raise ValueError(
                f"expected {len(self.rotaries)} tables, one an embedding, got {len(old)} old and "
                f"{len(new)} new ones"
            )
        tables = zip(old, new, strict=True)
        return tuple(turn(a, b, old_positions, new_positions, dtype) for a, b in tables)

    def rotate(self, keys: Tensor, layer: int, turns: Sequence[Turn]) -> Tensor:
        """Keys [R, H, T, D] of a layer at their new positions.

        Returns:
            A new tensor; for a layer without rotary embedding `keys` itself.

        Raises:
            TypeError: keys of a dtype that `rotate_keys` refuses.
            ValueError: shapes that do not fit.
        """
        rotation = self.layers[layer]
        if rotation.rotary is None or rotation.where is None:
            return keys
        return rotate_keys(keys, turns[rotation.rotary], rotation.where)


def verify_rotation(model: nn.Module) -> ModelRotation:
    """Prove how a model rotates its keys, by comparing keys that it computes itself.

    Runs the model on a few lone tokens at six positions, up to twice its longest sequence; its
    rotary modules keep their state. Needs no knowledge of the family: what is rotated, by which of
    the model's tables and in which pairs is found out for every layer, in the model's own dtype.

    Args:
        model: a transformers decoder (`...ForCausalLM`) in evaluation mode.

    Returns:
        What moves cached keys to other positions.

    Raises:
        TypeError: no transformers decoder.
        RotationError: the keys depend on the position in a way that no rotary embedding of the
            model explains (learned positions, a latent cache, a norm after the rotation), with the
            error found.

    Example:
        A chunk prefilled alone, moved 100 tokens on, has the keys of a prefill there:

        >>> import torch
        >>> from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=99, hidden_size=32,
        ...     intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)).eval()
        >>> rotation = verify_rotation(model)
        >>> print(rotation.layers[0].where)
        half-rotated pairs in features 0:8
        >>> ids, here, there = torch.arange(5)[None], torch.arange(5), torch.arange(100, 105)
        >>> cached, fresh = DynamicCache(), DynamicCache()
        >>> with torch.no_grad():
        ...     old = rotation.tables(5)
        ...     _ = model(ids, past_key_values=cached)
        ...     new = rotation.tables(105)
        ...     _ = model(ids, position_ids=there[None], past_key_values=fresh)
        >>> turns = rotation.turns(old, new, here, there)
        >>> moved = [rotation.rotate(cached.layers[i].keys, i, turns) for i in range(2)]
        >>> all(torch.allclose(moved[i], fresh.layers[i].keys, atol=1e-6) for i in range(2))
        True
    """
    model = getattr(model, "_orig_mod", model)
    check_model(model)
    rotaries = find_rotaries(model)
    layers = prove_layers(model, rotaries)
    used = sorted({layer.rotary for layer in layers if layer.rotary is not None})
    renumbered = tuple(
        layer if layer.rotary is None else replace(layer, rotary=used.index(layer.rotary))
        for layer in layers
    )
    return ModelRotation(tuple(rotaries[index] for index in used), renumbered)
