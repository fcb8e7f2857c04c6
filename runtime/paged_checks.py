"""Checks of what users give to the page pools."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, FP8)


def check_count(name: str, value: object, least: int = 1, most: int | None = None) -> None:
    """A size is an integer in range.

    Raises:
        TypeError: it is no integer.
        ValueError: it is out of range.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < least or (most is not None and value > most):
        allowed = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be {allowed}, got {value}")


def check_scale(
    name: str, scale: Tensor | None, heads: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """Scales of fp8 pages on the pool's device.

    Raises:
        ValueError: pages of another dtype, or no float32 vector of one number a head.
    """
    if scale is None:
        return None
    if dtype != FP8:
        raise ValueError(f"{name} is for pages of {FP8}, these are {dtype}")
    if scale.shape != (heads,) or scale.dtype != torch.float32:
        got = f"{scale.dtype} {list(scale.shape)}"
        raise ValueError(f"{name} must be float32 [kv_heads] = [{heads}], got {got}")
    return scale.to(device)
