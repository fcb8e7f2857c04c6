"""The op that hands a layer's cached keys and values to a graph once they are loaded.

A compiled forward is one graph for all layers, and no Python of a cache's `update` runs in it. So
the wait for a layer's data is an op of that graph: `take_kv` gives the keys and values of one layer
and waits for these only. It is functional: what it gives belongs to the caller and aliases nothing,
and it depends on no tensor that the model computes. Where a compiler puts it decides how much of
the loading is hidden behind computing, never what is computed.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor


class Giver(Protocol):
    """Who has the keys and values."""

    def take(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys [N, H, L, D] and values [N, H, L, Dv], once."""


_givers: weakref.WeakValueDictionary[int, Giver] = weakref.WeakValueDictionary()
_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class Pending:
    """One layer's keys and values that are not there yet.

    Attributes:
        handle: int64 [] on the CPU, says who gives them. A tensor, so that compiled code takes it
            as an input and serves every prompt.
        like: empty tensors of the dtypes of keys and values, on their device.
        layer: the layer's index.
        heads: H.
        key_features: D.
        value_features: Dv.
    """

    handle: Tensor
    like: tuple[Tensor, Tensor]
    layer: int
    heads: int
    key_features: int
    value_features: int

    def take(self, rows: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys [rows, H, tokens, D] and values [rows, H, tokens, Dv], once they are there.

        Raises:
            RuntimeError: taken before, or whoever has them is gone.
        """
        sizes = (self.layer, rows, self.heads, tokens, self.key_features, self.value_features)
        pair = torch.ops.cascade_store.take_kv(self.handle, *self.like, *sizes)
        return cast("tuple[Tensor, Tensor]", pair)


def register(giver: Giver) -> Tensor:
    """A handle by which graphs reach `giver`, as long as someone else holds it."""
    number = next(_numbers)
    _givers[number] = giver
    return torch.tensor(number)


def _take(
    handle: Tensor,
    like_keys: Tensor,
    like_values: Tensor,
    layer: int,
    rows: int,
    heads: int,
    tokens: int,
    key_features: int,
    value_features: int,
) -> tuple[Tensor, Tensor]:
    giver = _givers.get(int(handle))
    if giver is None:
        raise RuntimeError("the cache of this blended prompt is gone, and with it what it loaded")
    keys, values = giver.take(layer)
    wanted = (rows, heads, tokens, key_features)
    if tuple(keys.shape) != wanted or values.shape[3] != value_features:
        raise RuntimeError(f"loaded keys {list(keys.shape)}, expected {list(wanted)}")
    return keys, values


def _take_fake(
    handle: Tensor,
    like_keys: Tensor,
    like_values: Tensor,
    layer: int,
    rows: int,
    heads: int,
    tokens: int,
    key_features: int,
    value_features: int,
) -> tuple[Tensor, Tensor]:
    shape = (rows, heads, tokens)
    keys = like_keys.new_empty((*shape, key_features))
    return keys, like_values.new_empty((*shape, value_features))


_library: Any = cast("Callable[..., Any]", torch.library.Library)("cascade_store", "DEF")
_library.define(
    "take_kv(Tensor handle, Tensor like_keys, Tensor like_values, int layer, SymInt rows, "
    "int heads, SymInt tokens, int key_features, int value_features) -> (Tensor keys, "
    "Tensor values)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe),
)
_library.impl("take_kv", _take, "CompositeExplicitAutograd")
torch.library.register_fake("cascade_store::take_kv", _take_fake, lib=_library)
