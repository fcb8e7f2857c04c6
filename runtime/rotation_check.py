"""Which rotation each layer's keys had, proved on keys that the model itself computes.

Every embedding found in the model is tried with every pairing on every layer's keys, and one must
take the keys at each position to those at the next within the rounding of the model's dtype, pair
by pair. A model for which none does is refused with the error found.

What a wrong variant leaves, as a relative error of the pairs it concerns: 0.2 and more, at
distances that go beyond the model's longest sequence. The largest error that rounding can make:

    a rotated element is `fl(fl(x c) - fl(y s))`, with c and s rounded to the model's dtype: three
    roundings of each term, u = eps / 2 each, and |x c| + |y s| <= |(x, y)|; two elements a pair,
    two keys: 6 sqrt(2) u. Sine and cosine in float32 err by up to 4 ulp: below 8 eps(float32) more.

Attention sinks are the one thing that lets rounding into the hidden states of a lone token, and a
router of experts can make much of it. The values, which no one rotates, show how much: the quarter
of the tokens whose values moved least is compared, their keys may have moved as much, and what has
lost half of its digits proves nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torch_cascade.runtime.positions import RopeTable, RotatedSlice, rotate_keys, turn
from torch_cascade.runtime.rotary_modules import Rotary, preserved
from torch_cascade.runtime.rotation_probes import (
    NEAR,
    Probe,
    RotationError,
    far_positions,
    run_probes,
    takes_positions,
)

# More noise than this could hide a wrong rotation.
_NOISE = 1 / 16
_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class LayerRotation:
    """What is done to the keys of one layer.

    Attributes:
        rotary: index of its embedding; None for a layer without one, whose keys stay as they are.
        where: the features that are rotated; None for none.
        error: the largest relative error of a pair in the proof.
        bound: what rounding explains, in the rotations and before them.
    """

    rotary: int | None
    where: RotatedSlice | None
    error: float
    bound: float


@dataclass(frozen=True, eq=False)
class _Step:
    """Keys of one layer at two positions, float64 [tokens, H, 1, D], and the tables at each."""

    positions: tuple[int, int]
    keys: tuple[Tensor, Tensor]
    tables: tuple[tuple[RopeTable, ...], tuple[RopeTable, ...]]


def prove_layers(model: nn.Module, rotaries: Sequence[Rotary]) -> tuple[LayerRotation, ...]:
    """Find each layer's rotation, or refuse the model; its rotary modules stay as they were.

    Raises:
        RotationError: no embedding of the model with any pairing explains a layer's keys; or the
            hidden states depend on the position, as with learned positions.
    """
    eager = torch.compiler.set_stance("force_eager")
    with preserved(rotaries), torch.no_grad(), eager:
        probes = run_probes(model, rotaries, NEAR)
        _calm(0, probes)  # learned positions have no far ones
        if takes_positions(model):
            probes += run_probes(model, rotaries, far_positions(model, rotaries))
        return tuple(_prove_layer(layer, probes, rotaries) for layer in range(len(probes[0].keys)))


def _prove_layer(layer: int, probes: Sequence[Probe], rotaries: Sequence[Rotary]) -> LayerRotation:
    calm, noise = _calm(layer, probes)
    steps = [
        _Step(
            (a.position, b.position),
            (a.keys[layer][calm], b.keys[layer][calm]),
            (a.tables, b.tables),
        )
        for a, b in itertools.pairwise(probes)
    ]
    keys = steps[0].keys[0]
    if not bool(keys.any()):
        raise RotationError(
            f"the keys of layer {layer} are all zero: nothing can be proved on them"
        )
    tried = [
        (max(_error(step, index, where) for step in steps), index, where)
        for index, where in _candidates([t.pairs for t in probes[0].tables], keys.shape[3])
    ]
    error, index, where = min(tried, key=lambda candidate: candidate[0])
    rounding = 3 * math.sqrt(2) * torch.finfo(probes[0].dtype).eps
    bound = rounding + 8 * torch.finfo(torch.float32).eps + noise
    if error <= bound:
        return LayerRotation(index, where, error, bound)
    name = "unrotated keys" if index is None else f"{rotaries[index].name} with {where}"
    raise RotationError(
        f"no rotary embedding found in the model turns the keys of layer {layer} into those at "
        f"another position; nearest: {name}, relative error {error:.2g}, allowed {bound:.2g}"
    )


def _calm(layer: int, probes: Sequence[Probe]) -> tuple[Tensor, float]:
    """The quarter of the tokens whose values depend on the position least, int64, and how much.

    Raises:
        RotationError: it is no noise. In layer 0, which nothing precedes, there is none.
    """
    first = probes[0].values[layer]
    size = first.flatten(1).norm(dim=1).clamp_min(_TINY)
    moved = torch.stack([(p.values[layer] - first).flatten(1).norm(dim=1) for p in probes])
    drift = moved.amax(0) / size
    calm = drift.argsort()[: len(drift) // 4]
    eps = torch.finfo(probes[0].dtype).eps
    if layer == 0 and bool((drift <= eps).all()):
        return calm, 0.0
    noise = float(drift[calm].max())
    if layer > 0 and noise <= min(math.sqrt(eps), _NOISE):
        return calm, noise
    why = (
        "learned positions, or a latent cache (MLA) that keeps rotated keys as values"
        if layer == 0
        else "too much rounding before it (attention sinks, a router) to prove its rotation"
    )
    raise RotationError(
        f"the values of layer {layer} depend on the position, relative change "
        f"{float(drift.max()):.2g}: {why}"
    )


def _candidates(
    pairs: Sequence[int], features: int
) -> list[tuple[int | None, RotatedSlice | None]]:
    found: list[tuple[int | None, RotatedSlice | None]] = [(None, None)]
    for index, count in enumerate(pairs):
        starts = sorted({0, features - 2 * count}) if 2 * count <= features else []
        found += [
            (index, RotatedSlice(count, start, interleaved, clockwise))
            for start in starts
            for interleaved in (False, True)
            for clockwise in (False, True)
        ]
    return found


def _error(step: _Step, index: int | None, where: RotatedSlice | None) -> float:
    """The largest relative error of a pair that this candidate leaves; infinity for none."""
    keys, wanted = step.keys
    if index is not None and where is not None:
        old, new = (torch.tensor([p], device=keys.device) for p in step.positions)
        tables = [tables[index] for tables in step.tables]
        by = turn(tables[0], tables[1], old, new, dtype=torch.float64)
        keys = rotate_keys(keys, by, where)
    size, error = _by_pair(wanted, where), _by_pair(keys - wanted, where)
    relative = error / size.clamp_min(_TINY)
    return float(relative.nan_to_num(nan=math.inf).max())


def _by_pair(x: Tensor, where: RotatedSlice | None) -> Tensor:
    """Norms over tokens, heads and, in the slice, the features of a pair."""
    squares = x.square().sum((0, 1, 2))
    if where is None:
        return squares.sqrt()
    part = squares[where.start : where.end]
    shape = (where.pairs, 2) if where.interleaved else (2, where.pairs)
    pairs = part.view(shape).sum(1 if where.interleaved else 0)
    return torch.cat([squares[: where.start], pairs, squares[where.end :]]).sqrt()
