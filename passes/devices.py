"""Devices on which attention with a log-sum-exp can be computed."""

from __future__ import annotations

from functools import cache

import torch
from torch.utils._triton import has_triton_package

SUPPORTED_DEVICES = frozenset({"cpu", "cuda"})

# The kernels multiply bfloat16 tiles, which older devices cannot.
_LEAST_CAPABILITY = (8, 0)
# Triton converts float8_e4m3fn from here on.
_FP8_CAPABILITY = (8, 9)


def no_kernel(device: torch.device) -> str:
    """Why a device has no kernel for a partial attention; "" if it has."""
    if device.type not in SUPPORTED_DEVICES:
        return f"no attention with log-sum-exp for device {device}"
    return _no_triton_kernel(device) if device.type == "cuda" else ""


def reads_fp8(device: torch.device) -> bool:
    """Whether the kernels of a device read float8_e4m3fn; where not, it is converted before."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY


@cache
def _no_triton_kernel(device: torch.device) -> str:
    """A machine without a GPU compiles for one it does not have (tests, fake tensors): no limit."""
    if not has_triton_package():
        return "Triton is not installed"
    if torch.version.hip is not None:
        return f"the kernels are not tested on ROCm ({device})"
    if not torch.cuda.is_available():
        return ""
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        least = ".".join(map(str, _LEAST_CAPABILITY))
        return f"{device} has compute capability {capability[0]}.{capability[1]}, below {least}"
    return ""
