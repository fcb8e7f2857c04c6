"""Device memory: what is free, what somebody takes at most."""

from __future__ import annotations

import gc

import torch


class Peak:
    """Bytes allocated at most since it was made, above what was allocated then."""

    def __init__(self, device: torch.device) -> None:
        """Start counting."""
        self._device = device
        self._before = 0
        if device.type == "cuda":
            release()
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)

    def above(self) -> int | None:
        """None where the device does not count."""
        if self._device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self._device) - self._before


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated; None where the device does not say."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + unused


def forget_compiled() -> None:
    """Drop compiled code and the memory that its CUDA graphs hold."""
    torch._dynamo.reset()
    if torch.cuda.is_available():
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        reset_cudagraph_trees()
    release()


def release() -> None:
    """Give back what nobody holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
