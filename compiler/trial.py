"""`doctor --compile`: the proof that the backend works, on every device."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from torch_cascade.compiler.backend import keeping_all, recent
from torch_cascade.compiler.checks import Check


def trials() -> Iterator[Check]:
    """Compile a small attention over a shared prefix on the CPU and on every GPU."""
    yield _trial(torch.device("cpu"), torch.float32)
    for index in range(torch.cuda.device_count()):
        yield _trial(torch.device("cuda", index), torch.bfloat16)


def _attention(q: Tensor, prefix: Tensor, suffix: Tensor) -> Tensor:
    """Of q [branches, heads, 1, features] over one prefix and each branch's own suffix."""
    keys = torch.cat([prefix.expand(q.shape[0], -1, -1, -1), suffix], 2)
    return scaled_dot_product_attention(q, keys, keys)


def _trial(device: torch.device, dtype: torch.dtype) -> Check:
    from torch._inductor.utils import fresh_cache

    name, begin = f"compiling for {device}", time.perf_counter()
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 2, 1, 32), (1, 2, 19, 32), (6, 2, 5, 32)]
    inputs = [torch.randn(s, generator=generator).to(device, dtype) for s in shapes]
    try:
        # A fresh cache: what another holds says nothing about this machine as it is now.
        with torch.no_grad(), keeping_all(), fresh_cache():
            compiled = torch.compile(_attention, backend="cascade", options={"decide": "always"})
            found, expected = compiled(*inputs), _attention(*inputs)
            sites = [site for record in recent() for site in record.sites]
        torch.testing.assert_close(found, expected)
    except Exception as error:  # whatever it is, it is what the user came to see
        return Check(
            name, "bad", _said(error), "see the other lines; with TORCH_LOGS=dynamo for more"
        )
    seconds = f"the same as eager, {time.perf_counter() - begin:.1f} s"
    done = sum(site.rewritten for site in sites)
    if done:
        return Check(name, "ok", f"{seconds}, {done} of {len(sites)} attention sites rewritten")
    why = "; ".join(str(site.declined) for site in sites) or "no attention was analysed"
    advice = "look at the options above, or unset TORCH_CASCADE_PASSES and TORCH_CASCADE_DISABLE"
    return Check(name, "absent", f"{seconds}, but not rewritten: {why}", advice)


def _said(error: Exception) -> str:
    """Type and first line; Dynamo puts what a backend raised into an error of its own."""
    inner = getattr(error, "inner_exception", error)
    first = str(inner).strip().partition("\n")[0]
    return f"{type(inner).__name__}: {first}"
