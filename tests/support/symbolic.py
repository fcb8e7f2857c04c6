"""Tracing `attend` on fake tensors, static or symbolic, as the lowering does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._guards import tracing
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from .attend_cases import Case


class SymbolicRows:
    """Fake arguments of `attend` for a case; if symbolic, R, T, M and L are symbols.

    N is the product R * T, as the passes give it: they have proved it on the graph.
    """

    def __init__(self, case: Case, symbolic: bool, fewer_keys: int = 0) -> None:
        """`fewer_keys`: the keys are that many fewer than a symbol."""
        self.case = case
        self.env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.env)
        sizes = (case.rows, case.branches, case.queries, case.keys)
        dims = [DimDynamic.DYNAMIC if symbolic and s > 1 else DimDynamic.STATIC for s in sizes]
        context = StatelessSymbolicContext(dynamic_sizes=dims)
        shape = self.mode.from_tensor(torch.empty(sizes), symbolic_context=context).shape
        r, t, m, n = shape[0], shape[1], shape[2], shape[3] - fewer_keys
        letters = {"N": r * t, "H": case.size("H"), "M": m, "L": n, "1": 1}
        dtype = case.dtype
        with self.mode:
            self.q = torch.empty(r * t, case.size("H"), m, case.dk, dtype=dtype)
            self.k = torch.empty(r, case.kv_heads, n, case.dk, dtype=dtype)
            self.v = torch.empty(r, case.kv_heads, n, case.dv, dtype=dtype)
            mask_dtype = dtype if case.additive else torch.bool
            self.mask = _of(case.mask, letters, mask_dtype)
            self.positions = _of(case.positions, letters, torch.int64)
        self.branches = t
        self.kv_start = n if symbolic and case.kv_start else case.kv_start
        self._guards = len(self.env.guards)

    def new_guards(self) -> list[str]:
        """Guards that were added to the sizes since the arguments were made."""
        return [str(guard.expr) for guard in self.env.guards[self._guards :]]

    def flat(self) -> list[Any]:
        """The arguments of the traced function."""
        tensors = (self.q, self.k, self.v, self.mask, self.positions)
        return [t for t in (*tensors, self.branches, self.kv_start) if t is not None]

    def call(self, attend: Callable[..., Any], flat: tuple[Any, ...]) -> Any:
        """`attend` on arguments laid out as in `flat`."""
        rest = list(flat)
        q, k, v = (rest.pop(0) for _ in range(3))
        mask = rest.pop(0) if self.case.mask else None
        positions = rest.pop(0) if self.case.positions else None
        branches, kv_start = rest
        return attend(
            q,
            k,
            v,
            mask,
            branches=branches,
            scale=self.case.scale,
            q_positions=positions,
            kv_start=kv_start,
            window=self.case.window,
            softcap=self.case.softcap,
        )


def trace(attend: Callable[..., Any], inputs: SymbolicRows) -> fx.Graph:
    """The functional graph of an implementation, as the lowering inlines it."""
    with tracing(None), torch.no_grad():
        module = aot_export_joint_simple(
            lambda *flat: inputs.call(attend, flat),
            inputs.flat(),
            trace_joint=False,
            decompositions=select_decomp_table(),
        )
    return module.graph


def allocations(graph: fx.Graph) -> dict[fx.Node, int]:
    """Number of elements of each value that is not a view of an input or of an earlier value."""
    seen: set[int] = set()
    sizes: dict[fx.Node, int] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            continue
        storage = value.untyped_storage()._cdata
        if node.op != "placeholder" and storage not in seen:
            sizes[node] = _hint(value.numel())
        seen.add(storage)
    return sizes


def _hint(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


def _of(letters: str, sizes: dict[str, Any], dtype: torch.dtype) -> Tensor | None:
    if not letters:
        return None
    return torch.empty([sizes[letter] for letter in letters], dtype=dtype)
