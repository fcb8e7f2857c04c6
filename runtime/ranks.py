"""Ranks that hold some heads each, and have to choose the same rows."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor, distributed


@dataclass(frozen=True)
class Ranks:
    """A process group.

    Attributes:
        group: its name, as graphs have it.
        size: how many ranks.
    """

    group: str
    size: int

    def gathered(self, x: Tensor) -> Tensor:
        """Of all ranks, [size, ..]: the same numbers on each."""
        ops = torch.ops._c10d_functional
        whole = ops.all_gather_into_tensor(x.contiguous(), self.size, self.group)
        return cast("Tensor", ops.wait_tensor(whole).view(self.size, *x.shape))

    def summed(self, x: Tensor) -> Tensor:
        """The sum over ranks; in the order of the ranks, so that it is the same on each."""
        return self.gathered(x).sum(0)

    def averaged(self, x: Tensor) -> Tensor:
        """The mean over ranks, likewise."""
        return self.gathered(x).mean(0)


def size_of(group: str) -> int:
    """How many ranks a process group of this process has."""
    groups: Any = import_module("torch.distributed.distributed_c10d")
    return int(groups._resolve_process_group(group).size())


def group_sizes() -> tuple[tuple[str, int], ...]:
    """Names and sizes of all process groups, for cache keys: a graph names a group only."""
    if not distributed.is_available() or not distributed.is_initialized():
        return ()
    groups: Any = import_module("torch.distributed.distributed_c10d")
    names: dict[Any, str] = groups._world.pg_names
    return tuple(sorted((name, group.size()) for group, name in names.items()))
