"""Figures of devices with their sources, and generic devices that say that they are.

A calibration of this machine (`compiler/calibration.py`) beats the table. What our kernels and
torch's reach of a peak is a figure, too, with the measurement that it is from.
"""

from __future__ import annotations

import platform
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torch_cascade.compiler.device import Device, Figure

_MEASURED = "measured on one H200, benchmarks/results"
_READ = 0.93
_COPIED = 0.57
_GUIDE = "CUDA C++ Programming Guide, technical specifications by compute capability"
_REACHED = {
    "attend": Figure(0.52, _MEASURED),
    "attend.read": Figure(0.8, _MEASURED),
    "step": Figure(0.6e-6, _MEASURED),
    "library": Figure(0.54, _MEASURED),
    "library.step": Figure(0.71e-6, _MEASURED),
}
_LAUNCH = Figure(1.8e-6, f"a copy after another kernel of a CUDA graph: {_MEASURED}")


def _gpu(
    name: str,
    read: float,
    half: float,
    single: float,
    processors: int,
    cache_mib: int,
    shared_kib: int,
    source: str,
    chip: str = "",
    cache_source: str = "",
) -> Device:
    """A GPU of the table; `chip` is the source of what `source` does not say of it."""
    figures = {
        "read": Figure(_READ * read, f"{_READ:g} of the peak: {_MEASURED}; peak: {source}"),
        "copy": Figure(_COPIED * read, f"{_COPIED:g} of the peak: {_MEASURED}; peak: {source}"),
        "processors": Figure(processors, chip or source),
        "cache": Figure(cache_mib * 2**20, cache_source or chip or source),
        "launch": _LAUNCH,
        "matmul.float32": Figure(single, source),
        "matmul.bfloat16": Figure(half, source),
        "matmul.float16": Figure(half, source),
        "shared": Figure(shared_kib * 2**10, _GUIDE),
        **_REACHED,
    }
    return Device(name, "cuda", figures)


_HOPPER = "NVIDIA H100 Tensor Core GPU Architecture (whitepaper V1.04)"
_ADA = "NVIDIA Ada GPU Architecture (whitepaper V2.1), appendix"

# Rates are dense: without the sparsity that datasheets like to count. float32 is that of the
# ordinary cores, as our kernels compute it.
GPUS: dict[str, Device] = {
    "A100": _gpu(
        "NVIDIA A100 80GB SXM", 2.039e12, 312e12, 19.5e12, 108, 40, 163,
        "NVIDIA A100 Tensor Core GPU datasheet (80 GB SXM)",
        "NVIDIA A100 Tensor Core GPU Architecture (whitepaper V1.0)",
    ),
    "H100": _gpu(
        "NVIDIA H100 SXM", 3.35e12, 989e12, 67e12, 132, 50, 227,
        "NVIDIA H100 Tensor Core GPU datasheet (SXM)", _HOPPER,
    ),
    "H200": _gpu(
        "NVIDIA H200 SXM", 4.8e12, 989e12, 67e12, 132, 50, 227,
        "NVIDIA H200 Tensor Core GPU datasheet (SXM)", _HOPPER,
    ),
    "B200": _gpu(
        "NVIDIA B200", 8.0e12, 2250e12, 80e12, 148, 126, 227,
        "NVIDIA Blackwell Architecture Technical Brief (HGX B200, for one GPU)",
        "Chips and Cheese, Nvidia's B200: Keeping the CUDA Juggernaut Rolling",
    ),
    "L40S": _gpu(
        "NVIDIA L40S", 864e9, 362.05e12, 91.6e12, 142, 48, 99, "NVIDIA L40S datasheet",
        "NVIDIA L40S datasheet (568 tensor cores, four a multiprocessor)",
        "TechPowerUp GPU database, L40S",
    ),
    "RTX 4090": _gpu(
        "NVIDIA GeForce RTX 4090", 1.008e12, 165.2e12, 82.6e12, 128, 72, 99, _ADA,
    ),
}  # fmt: skip

GENERIC_GPU = replace(
    GPUS["A100"].with_values(
        {name: figure.value for name, figure in GPUS["A100"].figures.items()},
        "generic: figures of an A100, nothing is known of this device",
    ),
    name="generic GPU",
    is_generic=True,
)


class _Chip(NamedTuple):
    """A family of CPUs: bytes a second of a socket, float32 operations a cycle of a core, clock."""

    pattern: str
    name: str
    socket: float
    cycle: int
    clock: float
    cache_mib: int
    source: str


# Sockets: channels x 8 bytes x transfers a second. Operations: vector width x FMA units x 2.
CHIPS = (
    _Chip(r"EPYC 9\d\d4", "AMD EPYC 9004", 460.8e9, 32, 3.1e9, 32,
          "AMD EPYC 9004 datasheet: 12 x DDR5-4800; Zen 4 core: 2 x 256-bit FMA; L3 of one CCD"),
    _Chip(r"EPYC 9\d\d5", "AMD EPYC 9005", 576e9, 64, 3.3e9, 32,
          "AMD EPYC 9005 datasheet: 12 x DDR5-6000; Zen 5 core: 2 x 512-bit FMA; L3 of one CCD"),
    _Chip(r"EPYC 7\d\d3", "AMD EPYC 7003", 204.8e9, 32, 3.0e9, 32,
          "AMD EPYC 7003 datasheet: 8 x DDR4-3200; Zen 3 core: 2 x 256-bit FMA; L3 of one CCD"),
    _Chip(r"Xeon.*(8[45]|6[45]|5[45]|4[45])\d\d", "Intel Xeon, 4th and 5th generation", 307.2e9,
          64, 2.8e9, 105,
          "Intel ARK, Xeon Platinum 8480+: 8 x DDR5-4800, 105 MB; 2 x 512-bit FMA"),
    _Chip(r"Xeon.*(83|63|53|43)\d\d", "Intel Xeon, 3rd generation", 204.8e9, 64, 2.6e9, 54,
          "Intel ARK, Xeon Platinum 8368: 8 x DDR4-3200, 57 MB; 2 x 512-bit FMA"),
    _Chip(r"Ryzen [3579] [79]\d\d\d", "AMD Ryzen 7000 and 9000", 83.2e9, 32, 4.5e9, 32,
          "AMD Ryzen 9 7950X specifications: 2 x DDR5-5200; 2 x 256-bit FMA; L3 of one CCD"),
    _Chip(r"1[234]th Gen Intel.*Core|Core.*i[3579]-1[234]\d\d\d", "Intel Core, 12th to 14th",
          89.6e9, 32, 4.5e9, 30,
          "Intel ARK, Core i9-13900K: 2 x DDR5-5600, 36 MB; 2 x 256-bit FMA"),
    _Chip(r"Neoverse-V1|Graviton3", "AWS Graviton3", 307.2e9, 32, 2.6e9, 32,
          "AWS re:Invent 2021, CMP: 8 x DDR5-4800; Neoverse V1: 2 x 256-bit SVE FMA"),
)  # fmt: skip

# What one thread gets of a socket's memory, which is shared: measured on EPYC machines.
_THREAD_READ = 12e9
# What torch's kernels reach: fitted to benchmarks/results/regret-cpu.json, one thread of a Zen 4.
_CPU_COPY = 0.9
_CPU_MERGE = 0.8
_FRESH = 8e9
_STREAM = 50e9
_ATTEND = 0.6
_CPU_LAUNCH = Figure(15e-6, "an op of torch 2.13 with cold caches, fitted on a Zen 4")
_GENERIC_CHIP = _Chip(
    "", "generic CPU", 100e9, 32, 3.0e9, 32, "generic: nothing is known of this device"
)


def _cpu(chip: _Chip, threads: int) -> Device:
    read = min(chip.socket, threads * _THREAD_READ)
    flops = threads * chip.cycle * chip.clock
    said = f"{chip.source}; at most {_THREAD_READ / 1e9:.0f} GB/s a thread"
    reached = "fitted on a Zen 4"
    figures = {
        "read": Figure(read, said),
        "copy": Figure(_CPU_COPY * read, f"{_CPU_COPY:g} of read: {reached}"),
        "fresh": Figure(_FRESH, "4 KiB pages at 0.5 us each"),
        "stream": Figure(_STREAM * threads, f"{_STREAM / 1e9:.0f} GB/s a thread: {reached}"),
        "merge": Figure(_CPU_MERGE * read, f"{_CPU_MERGE:g} of read: {reached}"),
        "attend": Figure(_ATTEND * flops, f"{_ATTEND:g} of matmul: {reached}"),
        "processors": Figure(threads, "torch.get_num_threads()"),
        "cache": Figure(chip.cache_mib * 2**20, chip.source),
        "launch": _CPU_LAUNCH,
        "matmul.float32": Figure(flops, chip.source),
    }
    return Device(chip.name, "cpu", figures, is_generic=chip is _GENERIC_CHIP)


def cpu_device(model: str, threads: int) -> Device:
    """The table's figures for a CPU with that model name and number of threads."""
    for chip in CHIPS:
        if re.search(chip.pattern, model):
            return _cpu(chip, threads)
    return _cpu(_GENERIC_CHIP, threads)


def gpu_device(model: str) -> Device:
    """The table's figures for a GPU with that name; the generic device for one it lacks.

    Example:
        >>> gpu_device("NVIDIA H200").name, gpu_device("NVIDIA T4").is_generic
        ('NVIDIA H200 SXM', True)
    """
    for key, device in GPUS.items():
        if re.search(rf"\b{key}\b", model):
            return device
    return GENERIC_GPU


def from_table(device: torch.device) -> Device:
    """The table's figures for a device of this machine, with what its driver says of it.

    A CUDA device where there is none (code is generated for it elsewhere) is an H200, as in
    `kernels/triton_launch.py`.
    """
    if device.type == "cpu":
        return cpu_device(model_name(device), torch.get_num_threads())
    if not torch.cuda.is_available():
        return GPUS["H200"]
    properties: Any = torch.cuda.get_device_properties(device)
    said = {
        "processors": float(properties.multi_processor_count),
        "cache": float(properties.L2_cache_size),
        "shared": float(properties.shared_memory_per_block_optin),
    }
    return gpu_device(properties.name).with_values(said, "the device's driver")


def model_name(device: torch.device) -> str:
    """What the machine calls a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device) if torch.cuda.is_available() else "NVIDIA H200"
    return _cpu_name()


@cache
def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()
