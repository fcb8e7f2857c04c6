"""What identifies a model's weights: cached keys and values are of use to no other."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

# Says who wrote the file, or steers generation; no key depends on it.
_WITHOUT_MEANING = ("transformers_version", "use_cache", "architectures", "dtype", "torch_dtype")


def fingerprint(model: nn.Module) -> str:
    """A hash of a transformers model's configuration and of all its parameters and buffers.

    Every element counts, see `checksum`: integers are summed, so every device gives the same. One
    pass over the weights.

    Raises:
        ValueError: weights that are not there (on the meta device), or not plain tensors.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=9, hidden_size=32, intermediate_size=8,
        ...     num_hidden_layers=1, num_attention_heads=4))
        >>> before = fingerprint(model)
        >>> with torch.no_grad():
        ...     _ = model.model.norm.weight[3].add_(1e-6)
        >>> fingerprint(model) == before
        False
    """
    config: Any = model.config
    meaning = json.dumps(_meaningful(config.to_dict()), sort_keys=True, default=str)
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    parts = [type(model).__qualname__, meaning, _content(tensors)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def trace(model: nn.Module) -> tuple[int, ...]:
    """A number for every parameter, which a write to it changes; one pass, one wait.

    For the same process and a look at each new chunk: cheaper than `fingerprint`, and blind to an
    exchange of numbers that stand within 4 KiB. Not of buffers: some rotary embeddings write
    theirs.
    """
    return tuple(torch.stack([_trace(p) for p in model.parameters()]).tolist())


def _trace(tensor: Tensor) -> Tensor:
    sums, rest = _block_sums(tensor)
    return (sums * torch.arange(1, len(sums) + 1, device=sums.device)).sum() - rest.sum()


def _content(tensors: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        if tensor.device.type == "meta" or type(tensor.data) is not Tensor:
            kind = type(tensor.data).__name__
            raise ValueError(f"{name} must be a plain tensor with content, got a {kind}")
        digest.update(checksum(tensor).encode())
    return digest.hexdigest()


def versions(model: nn.Module) -> tuple[tuple[int, int, int], ...]:
    """Changes when a parameter is replaced, moved or written in place: cheap enough for every call.

    Parameters made under `torch.inference_mode()` do not say that they were written.
    """
    parameters = (p for p in _parameters(model) if p is not None)
    return tuple([(id(p), p.data_ptr(), 0 if p.is_inference() else p._version) for p in parameters])


def _parameters(model: nn.Module) -> list[nn.Parameter | None]:
    """As `model.parameters()`, without names and several times as fast: every prompt asks."""
    modules: list[nn.Module | None] = [model]
    found: list[nn.Parameter | None] = []
    while modules:
        module = modules.pop()
        if module is not None:
            found += module._parameters.values()
            modules += module._modules.values()
    return found


def _meaningful(config: Any) -> Any:
    if isinstance(config, dict):
        return {
            str(key): _meaningful(value)
            for key, value in config.items()
            if not str(key).startswith("_")
            and not str(key).endswith("_token_id")
            and key not in _WITHOUT_MEANING
        }
    return config


def checksum(tensor: Tensor) -> str:
    """A hash of a tensor's bits: 4 KiB at a time are summed as integers, and the sums hashed.

    Finds what storage does to files (flipped bits, lost and exchanged blocks) at the speed of
    memory; it is no defence against an adversary.
    """
    sums = torch.cat(_block_sums(tensor))
    return hashlib.sha256(sums.cpu().numpy().tobytes()).hexdigest()[:32]


def _block_sums(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """int64: the sum of each 4 KiB, and what is left of less than that, word by word."""
    words = _words(tensor)
    whole = len(words) // 1024 * 1024
    return words[:whole].view(-1, 1024).sum(1, dtype=torch.int64), words[whole:].to(torch.int64)


def _words(tensor: Tensor) -> Tensor:
    """The bits of a tensor as integers [words]: int32, or int16 or uint8 where it is too short."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.dtype == torch.bool:
        return flat.to(torch.uint8)
    octets = flat.view(torch.uint8)
    width = next(w for w in (4, 2, 1) if len(octets) % w == 0)
    return octets.view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[width])
