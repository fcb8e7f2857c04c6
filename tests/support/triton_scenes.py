"""Calls of `attend_merge`: queries over one key segment or more, and what they must give.

A scene is as small as it can be while tiles of 16 rows and 16 keys still come in several, the last
one ragged. Keys that decide are planted where a mistake would be made: as the last key of a segment
(seen), past a length, in a sibling's suffix (not seen, with a value of the other sign).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from torch_cascade.kernels.launch_config import LaunchConfig, SlotConfig
from torch_cascade.kernels.reference import attend_reference, merge_reference
from torch_cascade.kernels.triton_call import KeyPart
from torch_cascade.kernels.triton_launch import attend_merge

from .tolerance import assert_close_to_reference

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Segment:
    """A key segment.

    Attributes:
        branches: query rows that share one of its KV rows.
        keys: L.
        mask: one letter a dim, N, H, M, L or 1; "" for no mask.
        additive: a floating mask, else a bool one; rows of either may hide every key.
        positions: one letter a dim; "" for none.
        kv_start: as the op's argument.
        window: likewise.
        lens: kv_lens as fractions of L, one after another over the KV rows; () for none.
        page: page size; 0 for no pages. Pools are views of [blocks, page, heads, size].
        nan: what may not be read is NaN, else decisive keys.
        fp8: K and V in fp8, with scales.
    """

    branches: int = 1
    keys: int = 5
    mask: str = ""
    additive: bool = False
    positions: str = ""
    kv_start: int = 0
    window: int | None = None
    lens: tuple[float, ...] = ()
    page: int = 0
    nan: bool = False
    fp8: bool = False

    def but(self, **changes: Any) -> Segment:
        """This with some attributes changed."""
        return replace(self, **changes)


PREFIX = Segment(branches=3, keys=37)
SUFFIX = Segment(keys=5)


@dataclass(frozen=True)
class Scene:
    """One call; N = 6 query rows, and M * T * G rows of a shared KV row are more than a tile.

    Attributes:
        n, kv_heads, group, queries, dk, dv: N, Hkv, G, M, Dk, Dv.
        sinks: one letter a dim, N, H, M or 1; "" for none.
        layout: of q, k and v: "dense", "by_token" (heads after tokens) or "spread" (last stride 2).
    """

    parts: tuple[Segment, ...] = (PREFIX, SUFFIX)
    n: int = 6
    kv_heads: int = 1
    group: int = 2
    queries: int = 3
    dk: int = 16
    dv: int = 16
    dtype: torch.dtype = torch.float32
    scale: float | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: str = ""
    layout: str = "dense"
    q_factor: float = 1.0

    def but(self, **changes: Any) -> Scene:
        """This with some attributes changed; `prefix` and `suffix` are changes of the parts."""
        first, last = changes.pop("prefix", {}), changes.pop("suffix", {})
        parts = changes.pop("parts", self.parts)
        parts = (parts[0].but(**first), *parts[1:-1], parts[-1].but(**last))[: len(parts)]
        return replace(self, parts=parts, **changes)

    @property
    def heads(self) -> int:
        """Hq."""
        return self.kv_heads * self.group

    def options(self) -> dict[str, Any]:
        """The options of the call that all parts share."""
        slopes = torch.rand(self.heads) - 0.3 if self.alibi else None
        return {"scale": self.scale, "softcap": self.softcap, "alibi_slopes": slopes}

    def call(self) -> Call:
        """The arguments of the call."""
        q = torch.randn(self.n, self.heads, self.queries, self.dk) * self.q_factor
        parts = [self._part(segment, q) for segment in self.parts]
        sinks = None
        if self.sinks:
            sinks = torch.randn([self._size(x, 0) for x in self.sinks]) + 1.0
        return Call(self._laid_out(q.to(self.dtype)), parts, sinks, self.options())

    def _size(self, letter: str, keys: int) -> int:
        return {"N": self.n, "H": self.heads, "M": self.queries, "L": keys, "1": 1}[letter]

    def _laid_out(self, x: Tensor) -> Tensor:
        if self.layout == "by_token":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if self.layout == "spread":
            wide = torch.full((*x.shape[:-1], 2 * x.size(-1)), math.nan).to(x.dtype)
            wide[..., ::2] = x
            return wide[..., ::2]
        return x

    def _part(self, segment: Segment, q: Tensor) -> KeyPart:
        rows = self.n // segment.branches
        k = torch.randn(rows, self.kv_heads, segment.keys, self.dk)
        v = torch.randn(rows, self.kv_heads, segment.keys, self.dv)
        held = _held(segment, rows)
        for row in range(rows):
            _plant(q, k, v, row, held[row], segment)
        stored = FP8 if segment.fp8 else self.dtype
        k, v, table = self._stored(k.to(stored), v.to(stored), held, segment)
        return KeyPart(
            k,
            v,
            mask=self._mask(segment),
            branches=segment.branches,
            q_positions=self._positions(segment),
            kv_start=segment.kv_start,
            window=segment.window,
            kv_lens=torch.tensor(held) if segment.lens else None,
            page_table=table,
            k_scale=torch.rand(self.kv_heads) + 0.3 if segment.fp8 else None,
            v_scale=torch.rand(self.kv_heads) + 0.3 if segment.fp8 else None,
        )

    def _stored(
        self, k: Tensor, v: Tensor, held: list[int], segment: Segment
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """K, V and page table."""
        if not segment.page:
            return self._laid_out(k), self._laid_out(v), None
        rows, pages = k.size(0), segment.keys // segment.page
        assert pages * segment.page == segment.keys
        blocks = rows * pages + 2
        table = torch.randperm(blocks)[: rows * pages].view(rows, pages)
        pools = []
        for x in (k, v):
            pool = torch.full((blocks, segment.page, self.kv_heads, x.size(3)), math.nan)
            pool = pool.to(x.dtype).transpose(1, 2)
            pool[table] = x.unflatten(2, (pages, segment.page)).transpose(1, 2)
            pools.append(pool)
        for row in range(rows):  # entries past the length: never read
            table[row, -(-held[row] // segment.page) :] = -1 if row % 2 else 10**6
        return pools[0], pools[1], table.int() if rows % 2 else table

    def _mask(self, segment: Segment) -> Tensor | None:
        if not segment.mask:
            return None
        shape = [self._size(letter, segment.keys) for letter in segment.mask]
        visible = torch.rand(shape) > 0.4
        if len(shape) > 1:
            visible[torch.rand(shape[:-1]) > 0.7] = False
        if not segment.additive:
            return visible
        return torch.where(visible, torch.randn(shape), -torch.inf).to(self.dtype)

    def _positions(self, segment: Segment) -> Tensor | None:
        if not segment.positions:
            return None
        shape = [self._size(letter, 0) for letter in segment.positions]
        start = segment.kv_start
        return torch.randint(start - 2, start + segment.keys + 2, shape)


def _held(segment: Segment, rows: int) -> list[int]:
    """How many keys each KV row has."""
    fractions = segment.lens or (1.0,)
    return [int(fractions[row % len(fractions)] * segment.keys) for row in range(rows)]  # any > L


def _plant(q: Tensor, k: Tensor, v: Tensor, row: int, held: int, segment: Segment) -> None:
    """Decisive keys of one KV row: its last one, a sibling's, and those past its length."""
    if q.size(2) == 0:
        return
    group, branches, held = q.size(1) // k.size(1), segment.branches, min(held, segment.keys)

    def towards(query_row: int, strength: float) -> Tensor:
        return strength * normalize(q[query_row, ::group, -1], dim=-1)

    if held > 1 and branches == 1:
        k[row, :, 0], v[row, :, 0] = towards((row + 1) % q.size(0), 5.0), -20.0
    if held:
        k[row, :, held - 1], v[row, :, held - 1] = towards(row * branches, 4.0), 10.0
    if held < segment.keys:
        loud = towards(row * branches, 8.0)[:, None]
        k[row, :, held:] = torch.full_like(loud, math.nan) if segment.nan else loud
        v[row, :, held:] = math.nan if segment.nan else -99.0


# One KV head, and tiles of the prefix with few rows beyond a full one.
SMALL = Scene(n=4, queries=3, group=3, parts=(PREFIX.but(branches=2, keys=21), SUFFIX))


@dataclass(frozen=True)
class Call:
    """Arguments of `attend_merge`."""

    q: Tensor
    parts: list[KeyPart]
    sinks: Tensor | None
    options: dict[str, Any]

    def but(self, **changes: Any) -> Call:
        """This with some arguments changed."""
        return replace(self, **changes)

    def __call__(self, device: str = "cpu", **more: Any) -> tuple[Tensor, Tensor]:
        """The result, on the CPU."""

        def there(x: Any) -> Any:
            return x.to(device) if isinstance(x, Tensor) else x

        parts = [KeyPart(*(there(x) for x in part)) for part in self.parts]
        options = {name: there(x) for name, x in self.options.items()}
        o, lse = attend_merge(there(self.q), parts, there(self.sinks), **options, **more)
        return o.cpu(), lse.cpu()

    def oracle(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """The result in the most obvious code, computed in `dtype`."""
        results = [self._attend(part, dtype) for part in self.parts]
        o, lse = zip(*results, strict=True)
        return merge_reference(o, lse, sinks=self.sinks, dtype=dtype)

    def eager(self) -> tuple[Tensor, Tensor]:
        """Straightforward code: in float32, but the weights in the dtype of q where they meet V."""
        if self.q.dtype == torch.float32:
            return self.oracle(torch.float32)
        pairs = [(self._rounded(part), self._attend(part, torch.float32)[1]) for part in self.parts]
        o, lse = zip(*pairs, strict=True)
        return merge_reference(o, lse, sinks=self.sinks, dtype=torch.float32)

    def _attend(self, part: KeyPart, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        named = part._asdict()
        k, v, mask = (named.pop(name) for name in ("k", "v", "mask"))
        return attend_reference(self.q, k, v, mask, **named, **self.options, dtype=dtype)

    def _rounded(self, part: KeyPart) -> Tensor:
        """The output of a part, its weights rounded to the dtype of q."""
        keys = int(part.kv_len)
        one_hot = torch.eye(keys).expand(part.kv_rows, part.k.size(1), keys, keys)
        if part.page_table is None:
            columns = one_hot
        else:  # a pool in which page p of row r holds the one-hot rows of its keys
            size = part.k.size(2)
            columns = torch.zeros(*part.k.shape[:3], keys)
            for row, page in torch.cartesian_prod(
                torch.arange(part.kv_rows), torch.arange(keys // size)
            ):
                block = int(part.page_table[row, page])
                if 0 <= block < len(columns):
                    start = int(page) * size
                    columns[block] = one_hot[row, :, start : start + size]
        weights, _ = self._attend(part._replace(v=columns, v_scale=None), torch.float64)
        values, _ = _values(part)
        group = self.q.size(1) // part.k.size(1)
        values = values.repeat_interleave(part.branches, 0).repeat_interleave(group, 1)
        return (weights.to(self.q.dtype).double() @ values).float()


def _values(part: KeyPart) -> tuple[Tensor, Tensor]:
    """V as [R, Hkv, L, Dv] in float64, zeros where no key is: the oracle's, one key at a time."""
    rows, keys = int(part.kv_rows), int(part.kv_len)
    values = torch.zeros(rows, part.v.size(1), keys, part.v.size(3), dtype=torch.float64)
    count = torch.zeros(rows)
    for row in range(rows):
        held = keys if part.kv_lens is None else min(keys, int(part.kv_lens[row]))
        for j in range(held):
            block, slot = row, j
            if part.page_table is not None:
                block, slot = int(part.page_table[row, j // part.v.size(2)]), j % part.v.size(2)
            values[row, :, j] = part.v[block, :, slot].double()
        count[row] = held
    if part.v_scale is not None:
        values *= part.v_scale.double()[:, None, None]
    return values, count


def assert_right(result: tuple[Tensor, Tensor], call: Call, *, quick: bool = False) -> None:
    """A result is as close to the float64 oracle as straightforward code is.

    With `quick`, or within what any code may be wrong by that rounds every weight to the dtype of q
    once: where one key takes all, its weight is 1 in eager code, which no rounding changes, while
    there it is a power of two with some fraction.
    """
    o, lse = result
    assert (o.dtype, lse.dtype) == (torch.float32, torch.float32)
    wanted, eager = call.oracle(), call.eager()
    finite = wanted[1][torch.isfinite(wanted[1])]
    large = finite.numel() > 0 and finite.abs().max() > 88  # beyond what exp can take
    if quick and call.q.dtype != torch.float32:
        rounded = (o - wanted[0]).abs() <= _rounding_of_weights(call)
        o = torch.where(rounded, wanted[0].float(), o)
    assert_close_to_reference(o, eager[0], wanted[0], merged_lse=wanted[1] if large else None)
    assert_close_to_reference(lse, eager[1], wanted[1])


def _rounding_of_weights(call: Call) -> Tensor:
    """What rounding each weight to the dtype of q can change the result by."""
    positive = [part._replace(v=part.v.abs()) for part in call.parts]
    return torch.finfo(call.q.dtype).eps / 2 * call.but(parts=positive).oracle()[0]


def launch(*splits: int, tile: tuple[int, int] = (16, 16), **how: bool) -> LaunchConfig:
    """A configuration with one number of splits a slot."""
    slots = tuple(SlotConfig(*tile, 2, number) for number in splits)
    return LaunchConfig(slots, **how)


ONE_SEGMENT = {
    "direct": launch(1, direct=True),
    "splits-1": launch(1),
    "splits-3": launch(3),
    "quick": launch(2, quick=True),
}
TWO_SEGMENTS = {
    "splits-1-1": launch(1, 1),
    "splits-3-2": launch(3, 2),
    "direct-tail": launch(1, 1, direct=True, tail=True),
    "splits-2-tail": launch(2, 1, tail=True),
    "quick": launch(2, 1, quick=True),
    "quick-tail": launch(1, 1, direct=True, tail=True, quick=True),
}


def configs_of(parts: Sequence[Any], mode: LaunchConfig) -> list[LaunchConfig]:
    """Configurations for any number of parts; a direct `mode` is for one launch only."""
    assert len(parts) <= len(mode.slots) or not mode.direct
    odd = [launch(2)] if len(parts) % 2 else []
    pairs = [mode if len(mode.slots) == 2 else launch(2, 1)] * (len(parts) // 2)
    return [mode] if len(parts) == 1 else [*odd, *pairs]


one_way = pytest.mark.parametrize("mode", ONE_SEGMENT.values(), ids=ONE_SEGMENT)
each_way = pytest.mark.parametrize("mode", TWO_SEGMENTS.values(), ids=TWO_SEGMENTS)
# Suffixes as programs of their own, and as a tail of the prefix.
both_ways = pytest.mark.parametrize(
    "mode", [launch(1, 1), launch(1, 1, direct=True, tail=True)], ids=["own", "tail"]
)


def scenes(*changes: dict[str, Any], of: Scene = SMALL) -> pytest.MarkDecorator:
    """A parameter `scene` for each change of a scene."""
    named = {
        "-".join(f"{k}={v}".replace("torch.", "") for k, v in change.items()): of.but(**change)
        for change in changes
    }
    assert len(named) == len(changes)
    return pytest.mark.parametrize("scene", named.values(), ids=named)


def check(scene: Scene, mode: LaunchConfig, device: str, **more: Any) -> None:
    """Assert that a scene's call is right."""
    call = scene.call()
    result = call(device, configs=configs_of(scene.parts, mode), **more)
    assert_right(result, call, quick=mode.quick)
