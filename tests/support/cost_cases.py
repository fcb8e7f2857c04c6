"""Attentions for the cost model, as numbers."""

from __future__ import annotations

import torch

from torch_cascade.compiler.device import Device
from torch_cascade.compiler.device_table import GPUS, cpu_device
from torch_cascade.compiler.work import KeyRun, Work

DEVICES: dict[str, Device] = {
    **GPUS,
    "generic CPU": cpu_device("", 1),
    "EPYC, 16 threads": cpu_device("AMD EPYC 9654 96-Core Processor", 16),
}


def work(
    kind: str,
    *,
    requests: int = 2,
    branches: int = 4,
    root: int = 0,
    prefix: int = 1000,
    suffix: int = 5,
    queries: int = 1,
    heads: int = 8,
    kv_heads: int = 2,
    width: int = 64,
    element: int | None = None,
    copied: bool = True,
) -> Work:
    """One attention with levels root (if any), prefix and suffix."""
    element = element or (2 if kind == "cuda" else 4)
    runs = [KeyRun(1, root)] if root else []
    runs += [KeyRun(requests, prefix), KeyRun(requests * branches, suffix)]
    return Work(
        batch=requests * branches,
        heads=heads,
        q_len=queries,
        kv_heads=kv_heads,
        naive_heads=kv_heads,
        d_k=width,
        d_v=width,
        q_bytes=element,
        kv_bytes=element,
        dtype={2: "bfloat16", 4: "float32"}[element],
        copied=copied,
        device=torch.device(kind),
        runs=tuple(runs),
    )


# Different in every size, from tiny to large, decode and verification, MQA to MHA.
SCENES: list[dict[str, int]] = [
    {},
    {"requests": 1, "branches": 8, "prefix": 32, "suffix": 3},
    {"requests": 3, "branches": 2, "prefix": 17, "suffix": 256, "queries": 4},
    {"requests": 5, "branches": 16, "prefix": 4096, "suffix": 64, "heads": 32, "kv_heads": 8},
    {"requests": 1, "branches": 64, "prefix": 300, "suffix": 7, "heads": 9, "kv_heads": 3},
    {"requests": 4, "branches": 3, "root": 128, "prefix": 60, "suffix": 11, "width": 128},
    {"requests": 2, "branches": 5, "prefix": 700, "heads": 16, "kv_heads": 16, "width": 256},
    {"requests": 1, "branches": 2, "prefix": 9, "suffix": 1, "heads": 32, "kv_heads": 1},
]
