"""The rotary embeddings of a transformers model, and the tables they use at a given length.

Read from the model's own modules, so that whatever scaling a configuration asks for (linear,
llama3, yarn, dynamic NTK, long-rope, a theta for each type of layer) is in them already. What is
read here is a claim; `rotation_check` proves it against the keys that the model computes.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from torch_cascade.runtime.positions import Frequencies, RopeTable, SinCosTable

_TABLE = "embed_positions"
# Lengths at which two embeddings must agree to be one: before and after any scaling sets in.
_LENGTHS = (1, 1 << 20)


class Rotary(Protocol):
    """One rotary embedding of a model."""

    @property
    def name(self) -> str:
        """Where it is in the model, for messages."""

    @property
    def module(self) -> nn.Module:
        """The module that holds it."""

    @property
    def limit(self) -> int | None:
        """The number of positions that it has; None for any number."""

    def table(self, length: int) -> RopeTable:
        """What a forward would use now whose last token is at position `length - 1`."""


@dataclass(frozen=True, eq=False)
class FrequencyModule:
    """A module that holds frequencies in a buffer `inv_freq`, perhaps one for each type of layer.

    Attributes:
        path: the module's name in the model.
        module: the module.
        layer_type: which of its embeddings, None if it has one.
        original: the frequencies before any update for long sequences: PhiMoE, for one, keeps
            others in its buffer and computes with these.
        limit: None, any number of positions.
    """

    path: str
    module: nn.Module
    layer_type: str | None = None
    original: bool = False
    limit: int | None = None

    @property
    def name(self) -> str:
        """Path, the type of layers where there are several, and the buffer if it is another."""
        path = self.path if self.layer_type is None else f"{self.path}[{self.layer_type}]"
        return f"{path}.original_inv_freq" if self.original else path

    def table(self, length: int) -> Frequencies:
        """The frequencies of a forward of `length` tokens: a copy, independent of later forwards.

        Long-rope and dynamic NTK choose by the length, and the latter also by the longest sequence
        seen before: ask right before or right after the forward that is meant. The module itself
        stays as it is.
        """
        clone = detached(self.module)
        buffer = next(iter(clone.buffers(recurse=False)))
        ends = torch.tensor([[0, length - 1]]).to(buffer.device, non_blocking=True)
        x = torch.zeros(1, 2, 1, dtype=torch.float32, device=buffer.device)
        inputs: dict[str, Any] = {} if self.layer_type is None else {"layer_type": self.layer_type}
        with torch.no_grad():
            # The class's own forward: hooks of an instance would lead back to the original.
            out = type(self.module).forward(clone, x, ends, **inputs)
        prefix = "" if self.layer_type is None else f"{self.layer_type}_"
        buffers = f"{prefix}inv_freq", f"{prefix}original_inv_freq"
        frequencies: Tensor = getattr(clone, buffers[self.original])
        return Frequencies(frequencies.detach().float().clone(), _factor(out))


@dataclass(frozen=True, eq=False)
class TableModule:
    """A module that holds sines and cosines of a fixed number of positions (GPT-J, CodeGen).

    Attributes:
        name: the module's name in the model.
        module: the module.
    """

    name: str
    module: nn.Module

    @property
    def limit(self) -> int:
        """The number of positions in the table."""
        sin_cos: Tensor = getattr(self.module, _TABLE)
        return sin_cos.shape[0]

    def table(self, length: int) -> SinCosTable:
        """The table, a view of the module's; the same for all lengths."""
        return SinCosTable(getattr(self.module, _TABLE).detach())


def find_rotaries(model: nn.Module) -> tuple[Rotary, ...]:
    """The different rotary embeddings of a model's text decoder; () where it has none.

    Modules with equal tables count once: older models have one a layer.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=9, hidden_size=32, intermediate_size=8,
        ...     num_hidden_layers=1, num_attention_heads=4))
        >>> [rotary.name for rotary in find_rotaries(model)]
        ['rotary_emb']
    """
    get_decoder = getattr(model, "get_decoder", None)
    decoder = get_decoder() if get_decoder is not None else None
    # What a model calls its decoder may be the head that decodes, as in ModernBERT.
    return (_find(decoder) if decoder is not None else ()) or _find(model)


def _find(root: nn.Module) -> tuple[Rotary, ...]:
    found: list[Rotary] = []
    for path, module in root.named_modules():
        for rotary in _of_module(path, module):
            if not any(_equal(rotary, other) for other in found):
                found.append(rotary)
    return tuple(found)


@contextmanager
def preserved(rotaries: Sequence[Rotary]) -> Iterator[None]:
    """Give the rotary modules back the state that they have now: dynamic NTK remembers lengths."""
    modules = {id(rotary.module): rotary.module for rotary in rotaries}.values()
    states = [(module, dict(module.__dict__), dict(module._buffers)) for module in modules]
    contents = [
        (buffer, buffer.clone())
        for _, attributes, buffers in states
        for buffer in (*attributes.values(), *buffers.values())
        if isinstance(buffer, Tensor)
    ]
    try:
        yield
    finally:
        for module, attributes, buffers in states:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
        for buffer, content in contents:
            # A tensor of inference mode cannot be written outside it, nor has it been.
            if torch.is_inference_mode_enabled() or not buffer.is_inference():
                buffer.copy_(content)


def _of_module(path: str, module: nn.Module) -> list[Rotary]:
    table = getattr(module, _TABLE, None)
    if isinstance(table, Tensor) and table.dim() == 2:
        return [TableModule(path, module)]
    parameters = list(inspect.signature(module.forward).parameters)
    if parameters[:2] != ["x", "position_ids"]:
        return []
    names = [name for name, _ in module.named_buffers(recurse=False) if name.endswith("inv_freq")]
    kinds = [name.removesuffix("inv_freq").removesuffix("_") for name in names]
    types = [kind or None for kind in kinds if not kind.endswith(("original", "long"))]
    current = [FrequencyModule(path, module, kind) for kind in types]
    original = [
        FrequencyModule(path, module, kind or None, original=True)
        for kind in (k.removesuffix("original").removesuffix("_") for k in kinds if "original" in k)
    ]
    return [*current, *original]


def detached(module: nn.Module) -> nn.Module:
    """A copy with buffers of its own: what its forward changes, it changes for itself only."""
    clone = copy.copy(module)
    buffers = {name: None if b is None else b.clone() for name, b in module._buffers.items()}
    clone.__dict__["_buffers"] = buffers
    clone.__dict__["_non_persistent_buffers_set"] = set(module._non_persistent_buffers_set)
    return clone


def _factor(out: Any) -> float:
    """The attention factor, from an embedding's values at position 0, whose angle is 0."""
    cosines = out[0] if isinstance(out, tuple) else out.abs()
    return float(cosines[0, 0, 0])


def _equal(one: Rotary, other: Rotary) -> bool:
    if type(one) is not type(other):
        return False
    return all(_same(one.table(length), other.table(length)) for length in _LENGTHS)


def _same(one: RopeTable, other: RopeTable) -> bool:
    if isinstance(one, Frequencies) and isinstance(other, Frequencies):
        return one.factor == other.factor and torch.equal(one.inv_freq, other.inv_freq)
    if isinstance(one, SinCosTable) and isinstance(other, SinCosTable):
        return torch.equal(one.sin_cos, other.sin_cos)
    return False
