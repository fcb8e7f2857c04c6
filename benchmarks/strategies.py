"""Ways to compute one attention over shared prefixes, as functions that can be timed.

On a GPU they are what compiled code launches: Inductor's copy of the expanded keys and values (one
kernel each, `expand_kernel.py`) and torch's attention, or our kernels. Compiling every shape would
take an hour; `compiled` is there to check a few. On a CPU, where half of the time of a small shape
is in the code around the kernels, everything is compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_cascade.benchmarks.grid import Shape

Call = Callable[[], Tensor]

NAIVE = "naive"
LEVELS = "cascade"
JOIN_ROOT = "cascade, root joined to the prefix"
JOIN_SUFFIX = "cascade, prefix joined to the suffix"
STRATEGIES = (NAIVE, LEVELS, JOIN_ROOT, JOIN_SUFFIX)
# Parts of strategies, timed for the sake of the model.
COPY = "part: copy of the expanded keys"
SDPA = "part: attention over expanded keys"
_BLOCK = 1024


@dataclass(frozen=True)
class Inputs:
    """Axes as in `grid.Shape`; keys and values alike.

    Attributes:
        shape: the sizes.
        q: [N, Hq, S, D], a transposed view of [N, S, Hq, D].
        root: K and V [1, Hkv, R, D].
        prefix: K and V [B, Hkv, L, D].
        suffix: K and V [N, Hkv, X, D].
    """

    shape: Shape
    q: Tensor
    root: tuple[Tensor, Tensor]
    prefix: tuple[Tensor, Tensor]
    suffix: tuple[Tensor, Tensor]


def draw(shape: Shape, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Normal numbers."""
    generator = torch.Generator(device).manual_seed(shape.keys)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=device, generator=generator).to(dtype)

    def pair(rows: int, keys: int) -> tuple[Tensor, Tensor]:
        sizes = (rows, shape.heads.kv, keys, shape.heads.dim)
        return normal(*sizes), normal(*sizes)

    q = normal(shape.batch, shape.queries, shape.heads.query, shape.heads.dim).transpose(1, 2)
    return Inputs(
        shape,
        q,
        pair(1, shape.root),
        pair(shape.requests, shape.prefix),
        pair(shape.batch, shape.suffix),
    )


def is_view(shape: Shape) -> bool:
    """True where a program expands without a copy: one prefix for all, and nothing beside it."""
    return shape.requests == 1 and not shape.suffix and not shape.root


def expanded(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """K and V [N, Hkv, R + L + X, D]; a view where `is_view`."""
    k, v = (
        _expanded(*kinds) for kinds in zip(inputs.root, inputs.prefix, inputs.suffix, strict=True)
    )
    return k, v


def _expanded(root: Tensor, prefix: Tensor, suffix: Tensor) -> Tensor:
    batch, requests = suffix.shape[0], prefix.shape[0]
    if requests == 1 and not suffix.shape[2] and not root.shape[2]:
        return prefix.expand(batch, -1, -1, -1)
    return torch.cat(_pieces(root, prefix, suffix), 2)


def _pieces(root: Tensor, prefix: Tensor, suffix: Tensor) -> list[Tensor]:
    batch, requests = suffix.shape[0], prefix.shape[0]
    pieces = [root.expand(batch, -1, -1, -1)] if root.shape[2] else []
    pieces.append(prefix.repeat_interleave(batch // requests, 0))
    return [*pieces, suffix] if suffix.shape[2] else pieces


def program(q: Tensor, *keys: Tensor) -> Tensor:
    """What a user writes; keys and values of root, prefix and suffix in turn."""
    k, v = _expanded(*keys[0::2]), _expanded(*keys[1::2])
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def arguments(inputs: Inputs) -> tuple[Tensor, ...]:
    """The arguments of `program`."""
    return (inputs.q, *inputs.root, *inputs.prefix, *inputs.suffix)


def compiled(inputs: Inputs, backend: str, options: dict[str, Any] | None = None) -> Call:
    """`program` compiled for these sizes."""
    from torch_cascade.compiler.backend import cascade_backend

    # Not by its name, which only an installed package has.
    chosen: Any = cascade_backend if backend == "cascade" else backend
    made = torch.compile(program, backend=chosen, dynamic=False, options=options)
    values = arguments(inputs)
    return lambda: made(*values)


def gpu_calls(inputs: Inputs) -> dict[str, Call]:
    """Every strategy, and parts of them, on a CUDA device."""
    shape = inputs.shape
    if is_view(shape):
        k, v = expanded(inputs)
        return {
            NAIVE: _sdpa(inputs, k, v),
            LEVELS: _attend(inputs, [_level(inputs.prefix, shape.batch)]),
        }
    calls = {NAIVE: lambda: _sdpa(inputs, *_copied(inputs))()}
    if is_shared(shape):
        calls[LEVELS] = _levels(inputs)
    calls[COPY] = lambda: _copied(inputs)[0]
    k, v = _copied(inputs)
    calls[SDPA] = _sdpa(inputs, k, v)
    if shape.root:
        calls[JOIN_ROOT] = functools.partial(_with_root_joined, inputs)
        calls[JOIN_SUFFIX] = functools.partial(_with_suffix_joined, inputs)
    return calls


def is_shared(shape: Shape) -> bool:
    """One branch of each request and no root: there is nothing that a cascade could share."""
    return shape.branches > 1 or shape.root > 0


def cpu_calls(inputs: Inputs) -> dict[str, Call]:
    """Every strategy on a CPU, compiled."""
    calls = {NAIVE: compiled(inputs, "inductor")}
    if is_shared(inputs.shape):
        calls[LEVELS] = compiled(inputs, "cascade", {"decide": "always", "strict": True})
    return calls


def _sdpa(inputs: Inputs, k: Tensor, v: Tensor) -> Call:
    return lambda: F.scaled_dot_product_attention(inputs.q, k, v, enable_gqa=True)


def _level(kv: tuple[Tensor, Tensor], branches: int) -> Any:
    from torch_cascade.kernels.triton_call import KeyPart

    return KeyPart(*kv, branches=branches)


def _attend(inputs: Inputs, parts: list[Any]) -> Call:
    from torch_cascade.kernels.triton_launch import attend_merge

    # Strides of SDPA's output for these inputs: those of q.
    options: dict[str, Any] = {"out_dtype": inputs.q.dtype, "out_order": (0, 2, 1, 3)}
    return lambda: attend_merge(inputs.q, parts, **options)[0]


def _levels(inputs: Inputs) -> Call:
    shape = inputs.shape
    parts = [_level(inputs.root, shape.batch)] if shape.root else []
    parts.append(_level(inputs.prefix, shape.branches))
    if shape.suffix:
        parts.append(_level(inputs.suffix, 1))
    return _attend(inputs, parts)


def _with_root_joined(inputs: Inputs) -> Tensor:
    shape, none = inputs.shape, inputs.suffix
    joined = tuple(
        join(root, prefix, empty[:, :, :0], shape.requests, shape.requests, 1)
        for root, prefix, empty in zip(inputs.root, inputs.prefix, none, strict=True)
    )
    parts = [_level((joined[0], joined[1]), shape.branches), _level(inputs.suffix, 1)]
    return _attend(inputs, parts)()


def _with_suffix_joined(inputs: Inputs) -> Tensor:
    shape = inputs.shape
    joined = tuple(
        join(root[:, :, :0], prefix, suffix, shape.batch, 1, shape.branches)
        for root, prefix, suffix in zip(inputs.root, inputs.prefix, inputs.suffix, strict=True)
    )
    parts = [_level(inputs.root, shape.batch), _level((joined[0], joined[1]), 1)]
    return _attend(inputs, parts)()


def _copied(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """K and V expanded as compiled code does it: one kernel each."""
    shape = inputs.shape
    if is_view(shape):
        return expanded(inputs)
    k, v = (
        join(root, prefix, suffix, shape.batch, shape.batch, shape.branches)
        for root, prefix, suffix in zip(inputs.root, inputs.prefix, inputs.suffix, strict=True)
    )
    return k, v


def join(a: Tensor, b: Tensor, c: Tensor, rows: int, div_a: int, div_b: int) -> Tensor:
    """[rows, H, La + Lb + Lc, D] of rows n // div_a of a, n // div_b of b, and n of c."""
    heads, width = a.shape[1], a.shape[3]
    lengths = (a.shape[2], b.shape[2], c.shape[2])
    out = a.new_empty(rows, heads, sum(lengths), width)
    blocks = -(-sum(lengths) * width // _BLOCK)
    sizes = (heads, *lengths, div_a, div_b, blocks)
    _kernel()[(rows * heads * blocks,)](a, b, c, out, *sizes, WIDTH=width, BLOCK=_BLOCK)
    return out


@functools.cache
def _kernel() -> Any:
    """Triton is imported only here."""
    from torch_cascade.benchmarks.expand_kernel import expand_join

    return expand_join
