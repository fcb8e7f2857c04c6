"""The inputs of a program: random values with needles planted where a fault would show.

Random keys under a long prefix prove little: the softmax averages a fault away. So a few keys of
every segment (the first, the last, a random one) point along one query and carry values of +-10;
a quarter of them along the query of any row, which may be one that must not see them. All values
are representable in bfloat16, so casts between the stored and the program's dtype are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from .program_source import Input, emit
from .program_spec import Program, Segment, Sizes

Arguments: TypeAlias = "list[torch.Tensor | int]"

JUNK = 50.0  # what stands in the parts of larger tensors that no program reads


class Values:
    """The logical tensors of one call: q [N, Hq, M, D]; k and v a segment, [R, Hkv, L, D]."""

    def __init__(self, program: Program, sizes: Sizes, seed: int) -> None:
        self.program, self.sizes = program, sizes
        self.random = torch.Generator().manual_seed(seed)
        d, dv, heads = sizes.features, sizes.value_features, sizes.kv_heads
        self.q = self.normal(sizes.rows, sizes.heads, sizes.queries, d)
        self.k, self.v = [], []
        for segment, length in zip(program.segments, sizes.keys, strict=True):
            rows = sizes.base_rows(segment.rows)
            self.k.append(self.normal(rows, heads, length, d))
            self.v.append(self.normal(rows, heads, length, dv))
        for index in range(len(program.segments)):
            self._plant(index)

    def normal(self, *shape: int) -> torch.Tensor:
        """Normal float64 values on the bfloat16 grid."""
        return _grid(torch.randn(*shape, generator=self.random, dtype=torch.float64))

    def integer(self, low: int, high: int) -> int:
        """A random integer in [low, high]."""
        return int(torch.randint(low, high + 1, (), generator=self.random))

    def uniform(self, *shape: int) -> torch.Tensor:
        """Uniform values in [0, 1)."""
        return torch.rand(*shape, generator=self.random, dtype=torch.float64)

    def _plant(self, index: int) -> None:
        keys, values, sizes = self.k[index], self.v[index], self.sizes
        length = keys.shape[2]
        for position in {0, length - 1, self.integer(0, max(length - 1, 0))}:
            if length == 0:
                return
            row, head = self.integer(0, keys.shape[0] - 1), self.integer(0, sizes.kv_heads - 1)
            query_head = head * sizes.group + self.integer(0, sizes.group - 1)
            reader = self.integer(0, sizes.rows - 1)
            if self.integer(0, 3):
                reader = self._reader(index, row)
            query = self.q[reader, query_head, self.integer(0, sizes.queries - 1)]
            score = (2.0, 6.0, 20.0)[self.integer(0, 2)]
            norm = query.square().sum().clamp(min=0.25) * self.program.scale_value()
            keys[row, head, position] = _grid(query * score / norm)
            values[row, head, position] = 10.0 * (1 - 2 * self.integer(0, 1))

    def _reader(self, index: int, row: int) -> int:
        """A row of the batch that reads a row of a segment's base."""
        segment = self.program.segments[index]
        base = self.sizes.base_rows(segment.rows)
        group = self.sizes.rows // base
        other = self.integer(0, group - 1)
        return other * base + row if segment.rows == "modulo" else row * group + other


def arguments(program: Program, call: int) -> Arguments:
    """The inputs of one call, fresh tensors each time, in the order `fn` takes them."""
    sizes = program.calls[call]
    values = Values(program, sizes, program.seed * 8 + call)
    result: Arguments = [_BUILD[i.role](values, i) for i in emit(program, sizes).inputs]
    if program.dims == "argument":
        result += [sizes.requests, sizes.mid, sizes.branches]
    return result


def widened(inputs: Arguments) -> Arguments:
    """The same inputs with floating tensors in float64."""
    return [
        x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs
    ]


def _grid(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).to(torch.float64)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _sliced(x: torch.Tensor) -> torch.Tensor:
    """The same values as a view into a larger buffer: an offset and gaps in every dim."""
    buffer = torch.full([s + 2 for s in x.shape], JUNK).to(x.dtype)
    view = buffer[tuple(slice(1, 1 + s) for s in x.shape)]
    return view.copy_(x)


def _query(values: Values, _: Input) -> torch.Tensor:
    q = values.q.to(_dtype(values.program.dtype))
    layout = values.program.q_layout
    if layout == "bmhd":
        return q.transpose(1, 2).contiguous()
    if layout == "flat":
        return q.transpose(1, 2).flatten(2).contiguous()
    if layout == "merged":
        return q.flatten(0, 1)
    return _sliced(q) if layout == "sliced" else q


def _padded(x: torch.Tensor, dim: int, before: int, after: int) -> torch.Tensor:
    def junk(length: int) -> torch.Tensor:
        shape = [length if d == dim else s for d, s in enumerate(x.shape)]
        return torch.full(shape, JUNK, dtype=x.dtype)

    return torch.cat([junk(before), x, junk(after)], dim)


_STORE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bhld": lambda x: x,
    "blhd": lambda x: x.transpose(1, 2).contiguous(),
    "permute": lambda x: x.transpose(1, 2).contiguous(),
    "bhdl": lambda x: x.transpose(2, 3).contiguous(),
    "merged": lambda x: x.flatten(0, 1),
    "flat": lambda x: x.transpose(1, 2).flatten(2).contiguous(),
    "slice": lambda x: _padded(x, 2, 2, 1),
    "narrow": lambda x: _padded(x, 2, 2, 1),
    "rows": lambda x: _padded(x, 0, 1, 0),
}


def _finished(values: Values, segment: Segment, x: torch.Tensor) -> torch.Tensor:
    x = x.to(_dtype(segment.stored or values.program.dtype))
    if segment.strides == "sliced":
        x = _sliced(x)
    if segment.spelling == "outside":
        x = x.expand(values.sizes.rows, *x.shape[1:])
    return x


def _keys(values: Values, i: Input) -> torch.Tensor:
    segment = values.program.segments[i.segment]
    source = values.k if i.role == "k" else values.v
    return _finished(values, segment, _STORE[segment.storage](source[i.segment]))


def _joint(values: Values, i: Input) -> torch.Tensor:
    segment = values.program.segments[i.segment]
    both = [values.k[i.segment], values.v[i.segment]]
    x = torch.cat(both, -1) if segment.storage == "fused" else torch.stack(both)
    return _finished(values, segment, x)


def _written(values: Values, i: Input) -> int:
    """How many keys a write into a buffer brings: a function of its length."""
    return min(values.sizes.keys[i.segment], 2)


def _new(values: Values, i: Input) -> torch.Tensor:
    sizes = values.sizes
    d = sizes.features if i.role == "new_k" else sizes.value_features
    new = values.normal(sizes.rows, sizes.kv_heads, _written(values, i), d)
    return new.to(_dtype(values.program.dtype))


def _at(values: Values, i: Input) -> torch.Tensor:
    count = _written(values, i)
    start = values.integer(0, values.sizes.keys[i.segment] - count)
    return torch.arange(start, start + count)


def _mask_shape(values: Values, keys: int) -> tuple[int, ...]:
    sizes = values.sizes
    n, h, m = sizes.rows, sizes.heads, sizes.queries
    return {
        "11mk": (1, 1, m, keys),
        "n1mk": (n, 1, m, keys),
        "nhmk": (n, h, m, keys),
        "mk": (m, keys),
        "n11k": (n, 1, 1, keys),
        "1hmk": (1, h, m, keys),
        "strided": (n, 1, m, keys),
    }[values.program.mask.shape]


def _visible(values: Values) -> torch.Tensor:
    """A random bool mask; "some" leaves every row a key, "rows" hides a third of the rows."""
    mask, keys = values.program.mask, values.sizes.total - values.program.crop
    shape = _mask_shape(values, keys)
    if mask.hidden == "none":
        return torch.ones(shape, dtype=torch.bool)
    visible = values.uniform(*shape) < 0.7
    chosen = (values.uniform(*shape[:-1], 1) * keys).long()
    visible.scatter_(-1, chosen, True)
    if mask.hidden == "rows":
        visible &= values.uniform(*shape[:-1], 1) < 0.67
    return visible


def _bool_mask(values: Values, _: Input) -> torch.Tensor:
    visible = _visible(values)
    return _sliced(visible) if values.program.mask.shape == "strided" else visible


def _additive_mask(values: Values, _: Input) -> torch.Tensor:
    mask, visible = values.program.mask, _visible(values)
    dtype = torch.float32 if mask.wide else _dtype(values.program.dtype)
    fill = float("-inf") if mask.fill == "inf" else torch.finfo(_dtype(values.program.dtype)).min
    bias = torch.zeros(visible.shape, dtype=dtype)
    if mask.additive == "bias":
        bias = values.normal(*visible.shape).to(dtype)
    bias = bias.masked_fill(~visible, fill)
    return _sliced(bias) if mask.shape == "strided" else bias


def _tree(values: Values, _: Input) -> torch.Tensor:
    """Random ancestors; every query sees the key of its own token."""
    m, keys = values.sizes.queries, values.sizes.keys[-1]
    tree = values.uniform(*_mask_shape(values, keys)) < 0.4
    own = torch.arange(keys)[None, :] == torch.arange(m)[:, None] + (keys - m)
    return tree | own


def _lengths(values: Values, _: Input) -> torch.Tensor:
    first = values.sizes.keys[0]
    return torch.tensor([values.integer(0, first) for _ in range(values.sizes.requests)])


def _attention_mask(values: Values, _: Input) -> torch.Tensor:
    sizes = values.sizes
    keys = torch.arange(sizes.total - values.program.crop)
    hidden = [values.integer(0, max(sizes.keys[0] - 1, 0)) for _ in range(sizes.rows)]
    return (keys[None, :] >= torch.tensor(hidden)[:, None]).long()


def _positions(values: Values, _: Input) -> torch.Tensor:
    keys = values.sizes.total - values.program.crop
    return torch.arange(values.sizes.queries) + (keys - values.sizes.queries)


def _row_positions(values: Values, i: Input) -> torch.Tensor:
    back = (values.uniform(values.sizes.rows, 1) * 3).long()
    return _positions(values, i)[None, :] - back


def _sees(values: Values, _: Input) -> torch.Tensor:
    return values.uniform(values.sizes.rows, len(values.program.segments)) < 0.67


def _slopes(values: Values, _: Input) -> torch.Tensor:
    return 0.5 ** torch.arange(1, values.sizes.heads + 1, dtype=torch.float32)


_BUILD: dict[str, Callable[[Values, Input], torch.Tensor]] = {
    "q": _query,
    "k": _keys,
    "v": _keys,
    "kv": _joint,
    "new_k": _new,
    "new_v": _new,
    "at": _at,
    "bool_mask": _bool_mask,
    "additive_mask": _additive_mask,
    "tree": _tree,
    "lengths": _lengths,
    "attention_mask": _attention_mask,
    "positions": _positions,
    "row_positions": _row_positions,
    "sees": _sees,
    "slopes": _slopes,
}
