"""Machines for the cost model: tests decide alike wherever they run."""

from __future__ import annotations

from pathlib import Path

import torch

from torch_cascade.compiler.device import Device
from torch_cascade.compiler.device_table import GPUS, cpu_device

CPU = cpu_device("", threads=1)
"""The generic CPU with one thread."""

FREE_LAUNCHES = CPU.with_values({"launch": 1e-15}, "a test")
"""A CPU on which calling an op costs nothing.

On a real one the tiny tensors of most tests are not worth a second op, and every test of what is
said of a rewrite would need tensors of megabytes.
"""

FREE_GPU = GPUS["H200"].with_values({"launch": 1e-15, "step": 1e-15}, "a test")
"""A GPU likewise, on which the cascade's kernels wait for nothing."""


def fixed(device: torch.device, threads: int) -> Device:
    """Stands in for the table's entry of this machine."""
    return FREE_LAUNCHES if device.type == "cpu" else FREE_GPU


def uncalibrated(device: torch.device) -> Path:
    """Stands in for the place of this machine's calibration: there is none."""
    return Path("no", "calibration", device.type)
