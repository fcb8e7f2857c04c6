"""Inputs of the extended forms of `attend`: lengths, pages, fp8 and ALiBi over a `Case`.

What must not be read is hostile: decisive keys with large values, or NaN, wherever a length or a
page table says that no key is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .attend_cases import BASE, Case

FP8 = torch.float8_e4m3fn
NEEDLE, NAN = "needle", "nan"
TWELVE = BASE.but(keys=12)


@dataclass(frozen=True)
class Extended:
    """A case with options.

    Attributes:
        case: sizes, masks and positions; its keys are a multiple of `page`.
        lens: kv_lens, one for each KV row.
        page: the page size; 0 for no pages.
        by_position: pools are views of [blocks, page_size, Hkv, D].
        fp8: k and v in fp8.
        scales: k_scale and v_scale are given.
        alibi: slopes are given.
        integers: dtype of lengths and tables.
        hostile: what stands where nothing may be read.
    """

    case: Case = TWELVE
    lens: tuple[int, ...] = ()
    page: int = 0
    by_position: bool = False
    fp8: bool = False
    scales: bool = False
    alibi: bool = False
    integers: torch.dtype = torch.int64
    hostile: str = NEEDLE

    def __str__(self) -> str:
        own = {k: v for k, v in vars(self).items() if k != "case" and v != getattr(PLAIN, k)}
        case = str(self.case.but(keys=Case().keys))
        return "-".join([*(f"{k}={v}".replace("torch.", "") for k, v in own.items()), case])

    def but(self, **changes: Any) -> Extended:
        """This with some attributes changed; those of the case, too."""
        own = {k: v for k, v in changes.items() if k in vars(self)}
        case = {k: v for k, v in changes.items() if k not in own}
        return replace(self, **{"case": replace(self.case, **case), **own})

    def arguments(self) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor | None], dict[str, Any]]:
        """Positional and keyword arguments of `attend`."""
        (q, k, v, mask), options = self.case.arguments()
        self._plant(q.float(), k, v)
        if self.fp8:
            k, v = k.to(FP8), v.to(FP8)
        if self.lens:
            options["kv_lens"] = torch.tensor(self.lens, dtype=self.integers)
        if self.page:
            k, v, options["page_table"] = self._paged(k, v)
        if self.scales:
            heads = self.case.kv_heads
            options["k_scale"] = torch.rand(heads) + 0.3
            options["v_scale"] = torch.rand(heads) + 0.3
        if self.alibi:
            options["alibi_slopes"] = torch.rand(q.size(1)) - 0.3
        return (q, k, v, mask), options

    def held(self, row: int) -> int:
        """How many keys the row has."""
        keys = self.case.keys
        return min(max(self.lens[row], 0), keys) if self.lens else keys

    def _plant(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """The last key of a row decides for some queries; those past it would decide for all."""
        case = self.case
        for row in range(case.rows):
            target = q[row * case.branches, :: case.group, -1]
            needle = 4 * torch.nn.functional.normalize(target, dim=-1)
            end = self.held(row)
            if end:
                k[row, :, end - 1], v[row, :, end - 1] = needle.to(k.dtype), 10.0
            loud = math.nan if self.hostile == NAN else 8 * needle[:, None]
            k[row, :, end:] = loud if isinstance(loud, float) else loud.to(k.dtype)
            v[row, :, end:] = math.nan if self.hostile == NAN else -200.0

    def _paged(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pools in which the pages lie in random order among unused ones, and their table."""
        case, pages = self.case, self.case.keys // self.page
        assert pages * self.page == case.keys
        blocks = case.rows * pages + 2
        table = torch.randperm(blocks)[: case.rows * pages].view(case.rows, pages)
        pools = [self._pool(x, blocks, table) for x in (k, v)]
        for row in range(case.rows):
            table[row, -(-self.held(row) // self.page) :] = -1 if row % 2 else 10**6
        return pools[0], pools[1], table.to(self.integers)

    def _pool(self, x: Tensor, blocks: int, table: Tensor) -> Tensor:
        case = self.case
        pool = torch.full((blocks, case.kv_heads, self.page, x.size(3)), math.nan).to(x.dtype)
        if self.by_position:
            pool = pool.transpose(1, 2).contiguous().transpose(1, 2)
        for row in range(case.rows):
            for page in range(table.size(1)):
                start = page * self.page
                pool[table[row, page]] = x[row, :, start : start + self.page]
        return pool


PLAIN = Extended()
LENS = (9, 5)
ALL = Extended(
    case=BASE.but(
        keys=12,
        mask="N1ML",
        additive=True,
        hidden_rows=True,
        positions="NM",
        kv_start=3,
        window=9,
        softcap=6.0,
        scale=0.3,
    ),
    lens=LENS,
    page=4,
    by_position=True,
    fp8=True,
    scales=True,
    alibi=True,
)
EXTENDED = [
    *(PLAIN.but(lens=lens, hostile=h) for lens in (LENS, (0, 12), (1, 99)) for h in (NEEDLE, NAN)),
    PLAIN.but(lens=(-3, 0), hostile=NAN),
    *(PLAIN.but(lens=LENS, integers=torch.int32, branches=t, queries=1) for t in (1, 3)),
    PLAIN.but(lens=LENS, dv=24, hostile=NAN),
    PLAIN.but(lens=LENS, mask="N1ML", hidden_rows=True, hostile=NAN),
    PLAIN.but(lens=LENS, mask="1HML", additive=True, hostile=NAN),
    PLAIN.but(lens=LENS, mask="L", branches=1),
    PLAIN.but(lens=LENS, positions="NM", window=4, hostile=NAN),
    PLAIN.but(lens=LENS, softcap=2.0, q_factor=8.0, hostile=NAN),
    *(PLAIN.but(lens=LENS, dtype=d) for d in (torch.bfloat16, torch.float16, torch.float64)),
    *(PLAIN.but(page=p, by_position=b) for p in (1, 4, 12) for b in (False, True)),
    *(PLAIN.but(page=p, lens=LENS, hostile=NAN) for p in (1, 3, 4, 6)),
    PLAIN.but(page=4, lens=(0, 8), integers=torch.int32, hostile=NAN),
    PLAIN.but(page=4, lens=(0, 0), dv=24, hostile=NAN),
    PLAIN.but(page=4, lens=(12, 20), branches=1, group=1, by_position=True),
    PLAIN.but(page=4, lens=LENS, kv_heads=1, dtype=torch.bfloat16, by_position=True, hostile=NAN),
    PLAIN.but(page=4, mask="NHML", positions="NM", window=5),
    *(
        PLAIN.but(fp8=True, dtype=d, scales=s)
        for d in (torch.float32, torch.bfloat16, torch.float16)
        for s in (False, True)
    ),
    PLAIN.but(fp8=True, scales=True, page=4, lens=LENS, dtype=torch.bfloat16, hostile=NAN),
    PLAIN.but(fp8=True, scales=True, dv=24, branches=1, softcap=3.0),
    *(
        PLAIN.but(alibi=True, positions=p, kv_start=4, branches=t)
        for p in "M 1M N1 NM 1".split()
        for t in (1, 3)
    ),
    PLAIN.but(alibi=True, positions="NM", dtype=torch.float64, window=3),
    PLAIN.but(alibi=True, positions="NM", mask="11ML", hidden_rows=True),
    PLAIN.but(alibi=True, positions="1M", mask="NH1L", additive=True, dtype=torch.bfloat16),
    PLAIN.but(alibi=True, positions="NM", softcap=2.0, lens=LENS, hostile=NAN),
    PLAIN.but(alibi=True, positions="NM", keys=0),
    ALL,
    ALL.but(hostile=NAN, dtype=torch.bfloat16),
    ALL.but(branches=1, mask="N1ML", additive=False, by_position=False, dv=24),
]
