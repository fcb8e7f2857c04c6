"""Cached keys at new positions: rotary embeddings undone and done again, in plain torch.

A rotary embedding takes the features of a key in pairs, reads each pair as a complex number, and
multiplies it by `c(p) = factor * e^(i * angle(p))`. The same key at another position, perhaps under
another table of frequencies (dynamic NTK, long-rope), is therefore

    k_new = c_new(p_new) / c_old(p_old) * k_old,

whatever scaling made the tables, and an attention factor that is in both cancels. Angles are
products in float32 of a position and a frequency, as models compute them, not of the difference of
two positions: a model's own rounding of large angles is then in both terms, and the result is as
near to a freshly computed key at position 131,072 as at position 1. Positions are int64; the
quotient is computed in float64, the rotation in float32 at least. Values are never rotated.

Always rotate the original copy: the rounding of each rotation to the dtype of the keys adds up.

Nothing here knows a model: `rotary_modules` reads tables from one, `rotation_check` proves which
pairs of which layer they rotate. All functions can be traced: no control flow depends on data.

Shapes by axis names: R rows, H key heads, T tokens, D features of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

_KEY_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, eq=False)
class Frequencies:
    """A rotary embedding for positions without limit.

    Attributes:
        inv_freq: [pairs], radians a token; any floating dtype, used as float32.
        factor: what sine and cosine are multiplied by (the attention factor of yarn, long-rope).

    Example:
        >>> cos, sin = Frequencies(torch.tensor([1.0, 0.5])).cos_sin(torch.tensor([0, 2]))
        >>> cos
        tensor([[ 1.0000,  1.0000],
                [-0.4161,  0.5403]])
    """

    inv_freq: Tensor
    factor: float = 1.0

    @property
    def pairs(self) -> int:
        """How many pairs of features it rotates."""
        return self.inv_freq.shape[-1]

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines times `factor`, float32 [..., pairs], of int64 positions [...]."""
        rates = self.inv_freq.to(positions.device, torch.float32, non_blocking=positions.is_cuda)
        angles = positions[..., None].float() * rates
        return angles.cos() * self.factor, angles.sin() * self.factor


@dataclass(frozen=True, eq=False)
class SinCosTable:
    """A rotary embedding given as a table of its values (GPT-J, CodeGen).

    Attributes:
        sin_cos: [positions, 2 * pairs]: at each position the sines of all pairs, then the cosines.

    Example:
        >>> table = SinCosTable(torch.tensor([[0.0, 1.0], [0.6, 0.8]]))
        >>> table.cos_sin(torch.tensor([1]))
        (tensor([[0.8000]]), tensor([[0.6000]]))
    """

    sin_cos: Tensor

    @property
    def pairs(self) -> int:
        """How many pairs of features it rotates."""
        return self.sin_cos.shape[-1] // 2

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, float32 [..., pairs], of int64 positions [...].

        Raises:
            ValueError: on a CPU in eager mode, a position outside the table (elsewhere an error of
                the lookup: it never wraps round).
        """
        self._check_range(positions)
        rows = F.embedding(positions, self.sin_cos.to(positions.device).float())
        return rows[..., self.pairs :], rows[..., : self.pairs]

    def _check_range(self, positions: Tensor) -> None:
        if torch.compiler.is_compiling() or positions.device.type != "cpu" or not positions.numel():
            return
        first, last = int(positions.min()), int(positions.max())
        if first < 0 or last >= self.sin_cos.shape[0]:
            raise ValueError(
                f"positions must be from 0 to {self.sin_cos.shape[0] - 1}, where the model's table "
                f"of sines and cosines ends, got {first} to {last}"
            )


RopeTable: TypeAlias = Frequencies | SinCosTable


@dataclass(frozen=True)
class RotatedSlice:
    """Which features of a key head are rotated, and how they pair up.

    Attributes:
        pairs: how many pairs; 2 * pairs features from `start` on are rotated, all others are not.
        start: the first rotated feature.
        interleaved: neighbours are a pair (GPT-J, Cohere); else feature i of the slice and feature
            i + pairs are (Llama, GPT-NeoX).
        clockwise: the model turns by minus the angle (nanochat).
    """

    pairs: int
    start: int = 0
    interleaved: bool = False
    clockwise: bool = False

    @property
    def end(self) -> int:
        """The first feature after the slice."""
        return self.start + 2 * self.pairs

    def __str__(self) -> str:
        pairing = "neighbouring" if self.interleaved else "half-rotated"
        direction = " clockwise" if self.clockwise else ""
        return f"{pairing} pairs in features {self.start}:{self.end}{direction}"


@dataclass(frozen=True, eq=False)
class Turn:
    """What each pair of features is multiplied by, `cos + i * sin`; one serves all layers.

    Attributes:
        cos: [R or 1, 1, T, pairs], float32 or float64.
        sin: likewise.
    """

    cos: Tensor
    sin: Tensor


def turn(
    old: RopeTable,
    new: RopeTable,
    old_positions: Tensor,
    new_positions: Tensor,
    dtype: torch.dtype = torch.float32,
) -> Turn:
    """From positions under the table that keys were computed with, to positions under another.

    Compute it once and use it for every layer that has these tables.

    Args:
        old: the table that the cached keys were rotated with.
        new: the table of the forward that they are to be used in; mostly the same.
        old_positions: int64 [T] or [R, T]; tokens without a cached key may have any valid one.
        new_positions: int64 [T] or [R, T].
        dtype: of the result; float64 only makes sense for float64 keys.

    Returns:
        Fresh tensors. For equal tables and positions exactly 1 and 0.

    Raises:
        TypeError: positions are not int64.
        ValueError: positions of more than two dimensions (such as the three coordinates of mrope),
            sizes that do not broadcast, or tables of different sizes.

    Source:
        RoFormer (arXiv 2104.09864); CacheBlend's positional recovery (arXiv 2405.16444, 4.2).

    Example:
        >>> table = Frequencies(torch.tensor([1.0, 0.01]))
        >>> here, there = torch.arange(4), torch.arange(4) + 100_000
        >>> tuple(turn(table, table, here, there).cos.shape)
        (1, 1, 4, 2)
    """
    _check_positions("old_positions", old_positions)
    _check_positions("new_positions", new_positions)
    if old.pairs != new.pairs:
        raise ValueError(f"tables of one rotary embedding, got {old.pairs} and {new.pairs} pairs")
    if old_positions.shape[-1] != new_positions.shape[-1]:
        raise ValueError(
            f"old_positions {list(old_positions.shape)} and new_positions "
            f"{list(new_positions.shape)} must name the same tokens"
        )
    cos_old, sin_old = (x.double() for x in old.cos_sin(old_positions))
    cos_new, sin_new = (x.double() for x in new.cos_sin(new_positions))
    square = cos_old * cos_old + sin_old * sin_old
    cos = (cos_new * cos_old + sin_new * sin_old) / square
    sin = (sin_new * cos_old - cos_new * sin_old) / square
    if cos.dim() == 2:
        cos, sin = cos[None], sin[None]
    return Turn(cos[:, None].to(dtype), sin[:, None].to(dtype))


def join(turns: Sequence[Turn], *, rows: bool = False) -> Turn:
    """Turns of several chunks side by side: cached under different tables, or by different rows.

    Args:
        turns: one or more, each of the same number of rows (or with `rows`, of tokens).
        rows: join along the rows; else along the tokens.

    Returns:
        A turn of all rows and tokens.

    Raises:
        ValueError: no turns.

    Example:
        >>> table, here = Frequencies(torch.ones(2)), torch.arange(4)
        >>> parts = [turn(table, table, here, here + shift) for shift in (10, 20)]
        >>> tuple(join(parts).cos.shape), tuple(join(parts, rows=True).cos.shape)
        ((1, 1, 8, 2), (2, 1, 4, 2))
    """
    if not turns:
        raise ValueError("turns must hold at least one")
    axis = 0 if rows else 2
    return Turn(torch.cat([t.cos for t in turns], axis), torch.cat([t.sin for t in turns], axis))


def rotate_keys(keys: Tensor, by: Turn, where: RotatedSlice) -> Tensor:
    """Keys as if they had been computed at other positions.

    Args:
        keys: [R, H, T, D], rotated for their old positions; float32, bfloat16, float16 or float64.
            Dequantize fp8 and int8 keys first.
        by: the rotation, from `turn`.
        where: the features that are rotated, as `verify_rotation` proved.

    Returns:
        A new tensor, shape and dtype of `keys`; features outside the slice are bit for bit the
        same. Computed in float32 (float64 for float64) and rounded once.

    Raises:
        TypeError: keys of another dtype.
        ValueError: keys that are not [R, H, T, D], or whose T, R or D does not fit.

    Example:
        Keys at positions 0 to 4, moved by 7, equal keys computed there:

        >>> table, where = Frequencies(torch.tensor([1.0, 0.1])), RotatedSlice(pairs=2)
        >>> raw, here = torch.randn(1, 2, 5, 4), torch.arange(5)
        >>> start = torch.zeros(5, dtype=torch.int64)
        >>> cached = rotate_keys(raw, turn(table, table, start, here), where)
        >>> fresh = rotate_keys(raw, turn(table, table, start, here + 7), where)
        >>> moved = rotate_keys(cached, turn(table, table, here, here + 7), where)
        >>> torch.allclose(moved, fresh, atol=1e-6)
        True
    """
    _check_keys(keys, by, where)
    compute = torch.float64 if keys.dtype == torch.float64 else torch.float32
    cos, sin = by.cos.to(compute), (-by.sin if where.clockwise else by.sin).to(compute)
    part = keys[..., where.start : where.end].to(compute)
    if where.interleaved:
        real, imaginary = part[..., 0::2], part[..., 1::2]
    else:
        real, imaginary = part[..., : where.pairs], part[..., where.pairs :]
    turned = (real * cos - imaginary * sin, imaginary * cos + real * sin)
    joined = torch.stack(turned, -1).flatten(-2) if where.interleaved else torch.cat(turned, -1)
    outside = keys[..., : where.start], keys[..., where.end :]
    return torch.cat([outside[0], joined.to(keys.dtype), outside[1]], -1)


def _check_positions(name: str, positions: Tensor) -> None:
    if positions.dtype != torch.int64:
        raise TypeError(f"{name} must be int64, got {positions.dtype}")
    if positions.dim() == 3:
        raise ValueError(
            f"{name} must be [tokens] or [rows, tokens], got {list(positions.shape)}: positions "
            "with several coordinates (mrope) are not supported"
        )
    if positions.dim() not in (1, 2):
        raise ValueError(f"{name} must be [tokens] or [rows, tokens], got {list(positions.shape)}")


def _check_keys(keys: Tensor, by: Turn, where: RotatedSlice) -> None:
    if keys.dtype not in _KEY_DTYPES:
        allowed = ", ".join(str(dtype) for dtype in _KEY_DTYPES)
        raise TypeError(f"keys must be one of {allowed} (dequantize others), got {keys.dtype}")
    if keys.dim() != 4:
        raise ValueError(f"keys must be [rows, heads, tokens, features], got {list(keys.shape)}")
    rows, _, tokens, pairs = by.cos.shape
    if keys.shape[2] != tokens or (rows != 1 and keys.shape[0] != rows):
        raise ValueError(
            f"keys {list(keys.shape)} must have the {tokens} tokens and {rows} row(s) of the turn"
        )
    if pairs != where.pairs or where.start < 0 or where.end > keys.shape[3]:
        raise ValueError(
            f"{where}, keys of {keys.shape[3]} features and a turn of {pairs} pairs do not fit"
        )
