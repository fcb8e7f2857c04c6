"""Dynamic NTK without branches: what a rotary embedding does by the length, in one graph.

transformers' module asks whether this sequence is longer than any before, which is data: a compiled
forward breaks there, and what is behind a break cannot be blended. Here the same frequencies are
chosen by `torch.where`, as transformers itself does for long-rope. That they are the same, bit for
bit, and the state that is left, too, is tried out on copies before a module is changed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from torch_cascade.runtime.rotary_modules import detached

CosSin = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Stretch:
    """The formula of dynamic NTK.

    Attributes:
        theta: the base of short sequences.
        factor: by which a sequence may be longer.
        positions: the length up to which nothing is stretched.
        features: of a head that are rotated.
    """

    theta: float
    factor: float
    positions: int
    features: int

    def frequencies(self, length: Tensor) -> Tensor:
        """Of a sequence of `length` tokens: float32 [features / 2]."""
        device = length.device
        longest = torch.maximum(length, torch.tensor(self.positions, device=device))
        stretched = (self.factor * longest / self.positions) - (self.factor - 1)
        base = self.theta * stretched ** (self.features / (self.features - 2))
        exponents = torch.arange(0, self.features, 2, dtype=torch.int64, device=device)
        return 1.0 / (base ** (exponents.float() / self.features))


def without_branches(model: nn.Module) -> tuple[str, ...]:
    """Give the dynamic NTK embeddings of a model a forward that compiles into one graph.

    It computes what the module's own does and keeps the same state, so nothing else changes; a
    module of which that is not so stays as it is.

    Returns:
        The names of the modules that have such a forward now.

    Source:
        transformers, `modeling_rope_utils.dynamic_rope_update`.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=9, hidden_size=32, intermediate_size=8,
        ...     num_hidden_layers=1, num_attention_heads=4, rope_parameters=rope))
        >>> without_branches(model)
        ('model.rotary_emb',)
    """
    changed = []
    for name, module in model.named_modules():
        stretch = _stretch_of(module)
        if stretch is not None and _same(module, stretch):
            module.forward = functools.partial(_forward, module, stretch)
            _remember(module)
            changed.append(name)
    return tuple(changed)


def _remember(module: Any) -> None:
    """The state as tensors of its own, as it is written in place: compiled code keeps it there.

    The longest length so far, int64 [], and the frequencies, which transformers may have left as
    a tensor of inference mode, or as the very tensor of those of short sequences.
    """
    device = module.inv_freq.device
    with torch.inference_mode(False):
        longest = torch.as_tensor(module.max_seq_len_cached, device=device)
        module.max_seq_len_cached = longest.clone()
        module.inv_freq = module.inv_freq.to(torch.float32, copy=True)


def _stretch_of(module: nn.Module) -> Stretch | None:
    """The numbers of a module whose frequencies follow the length; None for any other."""
    if getattr(module, "rope_type", None) != "dynamic" or "forward" in vars(module):
        return None
    parameters = list(inspect.signature(module.forward).parameters)
    buffers = module._buffers  # by all names: one tensor may have two
    if parameters != ["x", "position_ids"] or not {"inv_freq", "original_inv_freq"} <= set(buffers):
        return None
    config: Any = module.config
    rope = config.rope_parameters
    features = 2 * cast("Tensor", buffers["inv_freq"]).shape[0]
    return Stretch(rope["rope_theta"], rope["factor"], config.max_position_embeddings, features)


def _forward(module: Any, stretch: Stretch, x: Tensor, position_ids: Tensor) -> CosSin:
    """Cosines and sines [N, T, D] of positions [N, T], in the dtype of x."""
    with torch.no_grad():
        _update(module, stretch, position_ids.max() + 1)
        return cast("CosSin", _undecorated(type(module).forward)(module, x, position_ids))


def _update(module: Any, stretch: Stretch, length: Tensor) -> None:
    """Longer than any before: stretched; short, after a long one: as at first; else as it was."""
    if module.inv_freq.dtype != torch.float32:  # since `model.to(dtype)`; the formula's are float32
        with torch.inference_mode(False):
            module.inv_freq = module.inv_freq.to(torch.float32, copy=True)
    longest, first = module.max_seq_len_cached, module.original_max_seq_len
    grows = length > longest
    shrinks = (length < first) & (longest > first)
    stretched = torch.where(grows, stretch.frequencies(length), module.inv_freq)
    frequencies = torch.where(shrinks, module.original_inv_freq, stretched)
    most = torch.where(shrinks, first, torch.where(grows, length, longest))
    # In place, as CUDA graphs replay from the addresses.
    module.inv_freq.copy_(frequencies)
    longest.copy_(most)


def _undecorated(forward: Any) -> Callable[..., Any]:
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    return cast("Callable[..., Any]", forward)


def _same(module: nn.Module, stretch: Stretch) -> bool:
    """Whether both forwards give the same and leave the same, for sequences long and short."""
    usual, branchless = detached(module), detached(module)
    _remember(branchless)
    device = next(module.buffers(recurse=False)).device
    x, limit = torch.zeros(1, 2, 1, device=device), stretch.positions
    for length in (1, limit, limit + 1, 3 * limit, 2 * limit, limit, limit - 1, 5 * limit, 2):
        ends = torch.tensor([[0, length - 1]], device=device)
        with torch.no_grad():
            wanted = type(module).forward(usual, x, ends)
        got = _forward(branchless, stretch, x, ends)
        tables = (cast("Tensor", each.inv_freq).float() for each in (usual, branchless))
        pairs = [*zip(wanted, got, strict=True), tuple(tables)]
        longest = branchless.max_seq_len_cached  # a number if some other code has set it
        same = isinstance(longest, Tensor) and bool(longest == usual.max_seq_len_cached)
        if not same or not all(torch.equal(a, b) for a, b in pairs):
            return False
    return True
