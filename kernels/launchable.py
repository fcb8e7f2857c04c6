"""How a Triton kernel of this package is called."""

from __future__ import annotations

from typing import Any

import triton
from torch.library import wrap_triton


def called(kernel: Any) -> Any:
    """A Triton kernel that a trace can record; interpreted kernels are called as they are."""
    return wrap_triton(kernel) if isinstance(kernel, triton.JITFunction) else kernel
