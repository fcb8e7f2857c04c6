"""Inputs of `cascade::attend`: a grid of its features, with keys planted where they matter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torch_cascade.kernels.reference import attend_reference

from .tolerance import assert_close_to_reference


@dataclass(frozen=True)
class Case:
    """Sizes and features of one call; the sizes differ from one another wherever they can.

    Attributes:
        rows, branches, kv_heads, group, queries, keys, dk, dv: R, T, Hkv, G, M, L, Dk, Dv.
        mask: one letter for each dim of the mask: its axis N, H, M, L, or 1; "" for no mask.
        additive: a floating mask, else a bool one.
        hidden_rows: some rows of the mask hide every key.
        positions: "" or one letter a dim, as for the mask.
    """

    rows: int = 2
    branches: int = 3
    kv_heads: int = 2
    group: int = 3
    queries: int = 5
    keys: int = 7
    dk: int = 16
    dv: int = 16
    dtype: torch.dtype = torch.float32
    mask: str = ""
    additive: bool = False
    hidden_rows: bool = False
    positions: str = ""
    kv_start: int = 0
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    q_factor: float = 1.0

    def __str__(self) -> str:
        changed = {k: v for k, v in vars(self).items() if v != getattr(Case(), k)}
        return "-".join(f"{k}={v}".replace("torch.", "") for k, v in changed.items()) or "default"

    def but(self, **changes: Any) -> Case:
        """This case with some attributes changed."""
        return replace(self, **changes)

    def size(self, letter: str) -> int:
        """Size of an axis of the scores."""
        n, heads = self.rows * self.branches, self.kv_heads * self.group
        return {"N": n, "H": heads, "M": self.queries, "L": self.keys, "1": 1}[letter]

    def arguments(self) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor | None], dict[str, Any]]:
        """Positional and keyword arguments of `attend`."""
        q = torch.randn(self.size("N"), self.size("H"), self.queries, self.dk) * self.q_factor
        k = torch.randn(self.rows, self.kv_heads, self.keys, self.dk)
        v = torch.randn(self.rows, self.kv_heads, self.keys, self.dv)
        plant_needles(q, k, v, self.branches)
        options = {
            "branches": self.branches,
            "scale": self.scale,
            "q_positions": self._positions(),
            "kv_start": self.kv_start,
            "window": self.window,
            "softcap": self.softcap,
        }
        return (q.to(self.dtype), k.to(self.dtype), v.to(self.dtype), self._mask()), options

    def _mask(self) -> Tensor | None:
        if not self.mask:
            return None
        shape = [self.size(letter) for letter in self.mask]
        visible = torch.rand(shape) > 0.4
        if self.hidden_rows:
            visible[torch.rand(shape[:-1]) > 0.6] = False
        if not self.additive:
            return visible
        bias = torch.where(visible, torch.randn(shape), -torch.inf)
        return bias.to(self.dtype)

    def _positions(self) -> Tensor | None:
        if not self.positions:
            return None
        shape = [self.size(letter) for letter in self.positions]
        return torch.randint(self.kv_start - 2, self.kv_start + self.keys + 2, shape)


def plant_needles(q: Tensor, k: Tensor, v: Tensor, branches: int = 1) -> None:
    """Make the last key decisive for one query of each KV head, and its value large; in place."""
    if k.size(2) == 0 or q.size(2) == 0:
        return
    group = q.size(1) // k.size(1)
    target = q[::branches, ::group, -1]
    width = min(q.size(3), k.size(3))
    k[:, :, -1, :width] = 4 * torch.nn.functional.normalize(target[..., :width], dim=-1)
    v[:, :, -1] = 10.0


def assert_attends(result: tuple[Tensor, Tensor], args: Any, options: dict[str, Any]) -> None:
    """Assert the whole contract of `attend` for a result: values, shapes, dtypes, layout."""
    o, lse = result
    acc = torch.float64 if args[0].dtype == torch.float64 else torch.float32
    assert (o.dtype, lse.dtype) == (acc, acc)
    # Strict: also where a size of 1 makes the stride arbitrary.
    assert o.stride() == torch.empty(o.shape).stride()
    assert lse.stride() == torch.empty(lse.shape).stride()
    wanted = attend_reference(*args, **options)
    eager = attend_reference(*args, **options, dtype=acc)
    finite = wanted[1][torch.isfinite(wanted[1])]
    large = finite.numel() > 0 and finite.abs().max() > 88  # beyond what exp can take
    assert_close_to_reference(o, eager[0], wanted[0], merged_lse=wanted[1] if large else None)
    assert_close_to_reference(lse, eager[1], wanted[1])


BASE = Case()
MASKS = ["L", "ML", "1ML", "11ML", "N1ML", "1HML", "NHML", "111L", "N11L", "1H1L", "NH1L", "NHM1"]
GRID = [
    BASE,
    *(BASE.but(group=g) for g in (1, 7)),
    BASE.but(kv_heads=1, group=6),
    *(BASE.but(dk=d, dv=d) for d in (1, 32, 72, 80, 96, 160, 256)),
    *(BASE.but(dk=a, dv=b) for a, b in ((24, 16), (16, 24), (192, 128), (576, 512))),
    *(BASE.but(queries=m) for m in (1, 2, 31, 33, 200)),
    *(BASE.but(keys=n) for n in (0, 1, 129)),
    BASE.but(keys=0, mask="N1ML"),
    BASE.but(queries=0),
    BASE.but(keys=600, queries=3, mask="N1ML", hidden_rows=True),
    *(BASE.but(branches=t) for t in (1, 2, 9)),
    BASE.but(rows=1, branches=9, queries=1),
    *(BASE.but(dtype=d) for d in (torch.bfloat16, torch.float16, torch.float64)),
    *(
        BASE.but(dtype=d, mask="N1ML", additive=True, hidden_rows=True)
        for d in (torch.bfloat16, torch.float16, torch.float64)
    ),
    *(BASE.but(scale=s) for s in (1.0, -0.3, 0.0)),
    *(
        BASE.but(mask=mask, additive=additive, hidden_rows=True, branches=t)
        for mask in MASKS
        for additive in (False, True)
        for t in (1, 3)
    ),
    *(
        BASE.but(positions=p, kv_start=4, branches=t)
        for p in ("M", "1M", "N1", "NM", "1")
        for t in (1, 3)
    ),
    *(BASE.but(positions="NM", window=w, kv_start=4, branches=t) for w in (1, 3) for t in (1, 3)),
    BASE.but(positions="NM", mask="1HML", kv_start=9),
    BASE.but(positions="1M", mask="NH1L", additive=True, window=4, hidden_rows=True),
    BASE.but(positions="NM", keys=0, window=4),
    BASE.but(softcap=2.0, q_factor=8.0),
    BASE.but(softcap=30.0, mask="N1ML", additive=True, positions="NM", window=5, scale=0.2),
    *(BASE.but(q_factor=f) for f in (20.0, 200.0, 1e4)),
    BASE.but(dk=24, mask="NHML", additive=True, hidden_rows=True, q_factor=200.0),
    BASE.but(dk=24, queries=1, group=1, positions="N1", kv_start=3, window=2),
]
