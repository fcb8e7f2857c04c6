"""Ways to compute one attention over a shared prefix: ours, and what others have.

An engine takes its inputs in the layout it likes best, made before it is timed, and returns the
output as a view [N, Hq, S, D].
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_cascade.benchmarks.inputs import Inputs
from torch_cascade.benchmarks.timing import Output
from torch_cascade.kernels.launch_config import LaunchConfig

Given = TypeVar("Given")
Call = Callable[[], Tensor]

FLASH3 = ("fa3_fwd_interface", "flash_attn_interface")


@dataclass(frozen=True)
class Peer(Generic[Given]):
    """One engine.

    Attributes:
        name: for tables and `--engines`.
        make: from inputs to a function that computes them.
        needs: modules one of which must be there.
        cuda_only: it has no code for other devices.
        ours: it is this package's.
    """

    name: str
    make: Callable[[Given], Callable[[], Output]]
    needs: tuple[str, ...] = ()
    cuda_only: bool = False
    ours: bool = False

    def missing(self, device: torch.device) -> str | None:
        """Why it cannot run here, or None."""
        if self.cuda_only and device.type != "cuda":
            return f"needs a CUDA device, this is {device.type}"
        if self.needs and not any(importlib.util.find_spec(name) for name in self.needs):
            return f"{' or '.join(self.needs)} is not installed"
        return None


def naive(q: Tensor, prefix_k: Tensor, prefix_v: Tensor, suffix_k: Tensor, suffix_v: Tensor) -> Any:
    """What a user writes: the prefix repeated for each branch, then everything at once."""
    branches = q.shape[0] // prefix_k.shape[0]
    k = torch.cat([prefix_k.repeat_interleave(branches, 0), suffix_k], dim=2)
    v = torch.cat([prefix_v.repeat_interleave(branches, 0), suffix_v], dim=2)
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def merged(outputs: list[Tensor], lses: list[Tensor]) -> Tensor:
    """Partial outputs [..., D] with natural log-sum-exps [...], merged in the outputs' dtype."""
    top = functools.reduce(torch.maximum, lses).float()
    weights = [torch.exp(lse.float() - top) for lse in lses]
    total = functools.reduce(torch.add, weights)
    parts = zip(outputs, weights, strict=True)
    shares = [out.float() * (weight / total).unsqueeze(-1) for out, weight in parts]
    return functools.reduce(torch.add, shares).to(outputs[0].dtype)


def kernel(inputs: Inputs, configs: Sequence[LaunchConfig] | None = None) -> Call:
    """Our fused kernel, launched as it chooses or in the configurations given."""
    from torch_cascade.kernels.triton_call import KeyPart
    from torch_cascade.kernels.triton_launch import attend_merge

    parts = [
        KeyPart(inputs.prefix_k, inputs.prefix_v, branches=inputs.row.branches),
        KeyPart(inputs.suffix_k, inputs.suffix_v),
    ]
    dtype = inputs.q.dtype
    # Strides of SDPA's output for these inputs: those of q.
    order = (0, 2, 1, 3)
    return lambda: attend_merge(inputs.q, parts, out_dtype=dtype, out_order=order, configs=configs)[
        0
    ]


@functools.cache
def compiled(
    function: Callable[..., Any], backend: str = "inductor", mode: str | None = None
) -> Callable[..., Any]:
    """The function compiled for fixed sizes, once: a new wrapper would compile again.

    For `cascade` a graph in which nothing is rewritten is an error.
    """
    options: dict[str, Any] | None = {"strict": True} if backend == "cascade" else None
    made: Callable[..., Any] = torch.compile(
        function, backend=backend, mode=mode, dynamic=False, options=options
    )
    return made


def _compiled_naive(backend: str) -> Callable[[Inputs], Call]:
    return lambda inputs: lambda: compiled(naive, backend)(*inputs.tensors())


def _expanded_sdpa(inputs: Inputs) -> Call:
    k, v = inputs.expanded()
    return lambda: F.scaled_dot_product_attention(inputs.q, k, v, enable_gqa=True)


def _flash3() -> Callable[..., Any]:
    name = next(name for name in FLASH3 if importlib.util.find_spec(name))
    function: Callable[..., Any] = importlib.import_module(name).flash_attn_func
    return function


def _tokens_first(kv: Tensor) -> Tensor:
    """[R, H, L, D] as contiguous [R, L, H, D]."""
    return kv.transpose(1, 2).contiguous()


def _expanded_flash3(inputs: Inputs) -> Call:
    attention = _flash3()
    k, v = (_tokens_first(kv) for kv in inputs.expanded())
    q = inputs.q.transpose(1, 2)
    # num_splits=0 lets it choose: its default is 1 in some versions.
    return lambda: first(attention(q, k, v, num_splits=0)).transpose(1, 2)


def first(result: Any) -> Any:
    """The output of a function that returns it alone or first of several."""
    return result[0] if isinstance(result, tuple) else result


def _flash3_cascade(inputs: Inputs) -> Call:
    """Two calls with log-sum-exps and a compiled merge: what SGLang does."""
    attention = _flash3()
    prefix = [_tokens_first(kv) for kv in (inputs.prefix_k, inputs.prefix_v)]
    suffix = [_tokens_first(kv) for kv in (inputs.suffix_k, inputs.suffix_v)]
    q = inputs.q.transpose(1, 2)  # [N, S, Hq, D], contiguous
    batch, queries, heads, dim = q.shape
    requests, branches = inputs.row.requests, inputs.row.branches
    packed = q.view(requests, branches * queries, heads, dim)
    merge = compiled(merged)

    def call() -> Tensor:
        shared, shared_lse = attention(packed, *prefix, num_splits=0, return_attn_probs=True)[:2]
        own, own_lse = attention(q, *suffix, num_splits=0, return_attn_probs=True)[:2]
        shared_lse = shared_lse.view(requests, heads, branches, queries).permute(0, 2, 3, 1)
        lses = [shared_lse.reshape(batch, queries, heads), own_lse.transpose(1, 2)]
        out: Tensor = merge([shared.view_as(q), own], lses)
        return out.transpose(1, 2)

    return call


def flex_cascade(
    q: Tensor, prefix_k: Tensor, prefix_v: Tensor, suffix_k: Tensor, suffix_v: Tensor
) -> Tensor:
    """Two calls of `flex_attention` with log-sum-exps, and their merge; to be compiled."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    batch, heads, queries, dim = q.shape
    requests = prefix_k.shape[0]
    split = (requests, heads, batch // requests, queries)
    packed = q.reshape(requests, batch // requests, heads, queries, dim).transpose(1, 2)
    packed = packed.reshape(requests, heads, -1, dim)
    asked = AuxRequest(lse=True)
    shared, shared_aux = flex_attention(
        packed, prefix_k, prefix_v, enable_gqa=True, return_aux=asked
    )
    own, own_aux = flex_attention(q, suffix_k, suffix_v, enable_gqa=True, return_aux=asked)
    shared = shared.reshape(*split, dim).transpose(1, 2).reshape(q.shape)
    shared_lse, own_lse = cast("Tensor", shared_aux.lse), cast("Tensor", own_aux.lse)
    shared_lse = shared_lse.reshape(split).transpose(1, 2).reshape(batch, heads, queries)
    return merged([shared, own], [shared_lse, own_lse])


def _flex_cascade(inputs: Inputs) -> Call:
    return lambda: compiled(flex_cascade)(*inputs.tensors())


def _flashinfer(inputs: Inputs, backend: str | None = None) -> Call:
    from torch_cascade.benchmarks.flashinfer_peer import make

    return make(inputs, backend)


PEERS: tuple[Peer[Inputs], ...] = (
    Peer("kernel", kernel, cuda_only=True, ours=True),
    Peer("cascade", _compiled_naive("cascade"), ours=True),
    Peer("fa3-cascade", _flash3_cascade, FLASH3, cuda_only=True),
    Peer("flashinfer", _flashinfer, ("flashinfer",), cuda_only=True),
    Peer(
        "flashinfer-fa2",
        functools.partial(_flashinfer, backend="fa2"),
        ("flashinfer",),
        cuda_only=True,
    ),
    Peer("flex-cascade", _flex_cascade, cuda_only=True),
    Peer("fa3-expanded", _expanded_flash3, FLASH3, cuda_only=True),
    Peer("sdpa-expanded", _expanded_sdpa),
    Peer("inductor", _compiled_naive("inductor")),
)
NAMES = tuple(peer.name for peer in PEERS)
