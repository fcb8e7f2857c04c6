"""Random inputs like those a graph was compiled for: same sizes, strides, dtypes and devices.

A dumped graph cannot hold a user's data, only what is needed for numbers that make sense: of floats
the mean and the spread (weights of random size would make every softmax one-hot, and rounding
errors chaotic), of integers the smallest and the largest, and how they are ordered. So an index
stays within what it indexes, an increasing list of positions stays one, a padding mask stays one.
What is not kept is which token stands where. A description prints as the Python that makes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

Order: TypeAlias = Literal["", "rising", "increasing", "distinct"]

_SAMPLE = 2**16  # elements that are looked at for the mean and the spread
_WIDE = 2**24  # in a longer list, or among more integers than that, no order is kept


@dataclass(frozen=True)
class Normal:
    """Floats from a normal distribution."""

    mean: float = 0.0
    std: float = 1.0


@dataclass(frozen=True)
class Choice:
    """Floats that have one or two values only, such as an additive mask."""

    values: tuple[float, ...]


@dataclass(frozen=True)
class Whole:
    """Integers or booleans.

    Attributes:
        low, high: the smallest and the largest, both included.
        order: along the last dim: "increasing" strictly, "rising", "distinct", or "".
    """

    low: int = 0
    high: int = 0
    order: Order = ""


Values: TypeAlias = "Normal | Choice | Whole"


@dataclass(frozen=True)
class Strided:
    """A tensor input.

    Attributes:
        shape, stride: as it was in the call that was compiled.
        dtype, device: likewise.
        values: what its numbers are like.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    values: Values


def describe(x: Any) -> Values | None:
    """What the numbers of an input are like; None for what holds no data (fakes, subclasses)."""
    if type(x) not in (Tensor, torch.nn.Parameter) or x.device.type == "meta":
        return None
    if x.layout is not torch.strided or x.is_quantized or x.dtype.is_complex or x.numel() == 0:
        return None
    x = x.detach()
    return _floats(x) if x.dtype.is_floating_point else _integers(x)


def default_values(dtype: torch.dtype) -> Values:
    """Where nothing is known: a standard normal distribution, zeros for integers."""
    return Normal() if dtype.is_floating_point or dtype.is_complex else Whole()


def random_inputs(described: Sequence[Strided | int | float | bool], seed: int = 0) -> list[Any]:
    """The arguments of a dumped graph, the same for the same seed.

    Example:
        >>> import torch
        >>> x = Strided((2, 3), (3, 1), torch.int64, "cpu", Whole(5, 9, "increasing"))
        >>> made, size = random_inputs([x, 7])
        >>> bool((made[:, 1:] > made[:, :-1]).all()), size
        (True, 7)
    """
    generator = torch.Generator().manual_seed(seed)
    return [_tensor(x, generator) if isinstance(x, Strided) else x for x in described]


def _tensor(x: Strided, generator: torch.Generator) -> Tensor:
    """Elements that share memory (stride 0) are made once."""
    once = tuple(1 if stride == 0 else size for size, stride in zip(x.shape, x.stride, strict=True))
    made = _values(x, once, generator)
    span = sum((size - 1) * stride for size, stride in zip(once, x.stride, strict=True))
    memory = torch.empty(1 + span if made.numel() else 0, dtype=x.dtype, device=x.device)
    memory.as_strided(once, x.stride).copy_(made)
    return memory.as_strided(x.shape, x.stride)


def _values(x: Strided, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    values = x.values
    if isinstance(values, Normal):
        dtype = torch.complex64 if x.dtype.is_complex else torch.float32
        made = torch.randn(shape, dtype=dtype, generator=generator)
        return made * values.std + values.mean
    if isinstance(values, Choice):
        which = torch.randint(len(values.values), shape, generator=generator)
        return torch.tensor(values.values, dtype=torch.float64)[which]
    return _whole(values, shape, generator)


def _whole(values: Whole, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if values.order in ("increasing", "distinct") and shape:
        drawn = [_drawn(values, shape[-1], generator) for _ in range(math.prod(shape[:-1]))]
        made = torch.stack(drawn).reshape(shape) if drawn else torch.empty(shape)
        return made.sort(-1).values if values.order == "increasing" else made
    made = torch.randint(values.low, values.high + 1, shape, generator=generator)
    return made.sort(-1).values if values.order == "rising" and shape else made


def _drawn(values: Whole, count: int, generator: torch.Generator) -> Tensor:
    """Different numbers of the range."""
    return values.low + torch.randperm(values.high - values.low + 1, generator=generator)[:count]


def _floats(x: Tensor) -> Values:
    """From a sample that is spread over the tensor; infinities and NaNs do not count.

    Where there are two values at most, they are kept: masks of 0 and -inf, weights of ones.
    """
    flat = x.reshape(-1) if x.is_contiguous() else x[tuple(slice(0, 64) for _ in x.shape)].flatten()
    sample = flat[:: max(1, flat.numel() // _SAMPLE)].double()
    numbers = sample[~sample.isnan()]
    if numbers.numel():
        low, high = numbers.min(), numbers.max()
        if bool(((numbers == low) | (numbers == high)).all()):
            return Choice((low.item(), high.item()) if low < high else (low.item(),))
    finite = sample[torch.isfinite(sample)]
    if finite.numel() < 2:
        return Normal()
    return Normal(float(f"{finite.mean().item():.4g}"), float(f"{finite.std().item():.4g}"))


def _integers(x: Tensor) -> Values:
    x = x.to(torch.int64)
    low, high = int(x.min()), int(x.max())
    return Whole(low, high, _order(x) if low < high <= low + _WIDE else "")


def _order(x: Tensor) -> Order:
    if not x.dim() or x.shape[-1] < 2 or x.numel() > _WIDE:
        return ""
    steps = x.diff(dim=-1)
    if bool((steps > 0).all()):
        return "increasing"
    if bool((steps >= 0).all()):
        return "rising"
    return "distinct" if bool((x.sort(-1).values.diff(dim=-1) > 0).all()) else ""
