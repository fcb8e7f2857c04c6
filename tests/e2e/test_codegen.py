"""What Inductor generates: nothing new where nothing is rewritten, no expanded KV where it is."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.utils import run_and_get_code

from torch_cascade.compiler.backend import recent

B, T, H, G, P, S, M, D = 2, 3, 5, 2, 61, 7, 4, 16
N = B * T


def generated(fn: Callable, values: Sequence[torch.Tensor], backend: str, **options: object):
    """(result, generated source) of one compilation."""
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(fn, backend=backend, **options)
        result, (code,) = run_and_get_code(compiled, *values)
    return result, code


def normalised(code: str) -> str:
    """Generated source without comments, kernel names and the paths of the kernels' own files."""
    code = re.sub(r"#.*|//.*", "", code)
    code = re.sub(r"cpp_fused_\w+|/tmp/\S+|c\w{50,}", "NAME", code)
    return re.sub(r"\n\s*\n+", "\n", code)


def plain(q, k, v):
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def masked(q, k, v):
    mask = torch.arange(k.shape[2])[None] <= torch.arange(q.shape[2])[:, None] + 3
    return F.scaled_dot_product_attention(q, k, v, mask)


def hand_written(q, k, v):
    scores = q @ k.transpose(-1, -2) * 0.3
    return (torch.softmax(scores, -1, dtype=torch.float32) @ v).transpose(1, 2).flatten(2)


def causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2)


@pytest.mark.parametrize("fn", [plain, masked, hand_written, causal])
@pytest.mark.parametrize("dynamic", [False, True])
def test_nothing_to_rewrite_generates_inductors_own_code(fn: Callable, dynamic: bool) -> None:
    q, k, v = torch.randn(N, H, M, D), torch.randn(N, H, P, D), torch.randn(N, H, P, D)
    expected, theirs = generated(fn, (q, k, v), "inductor", dynamic=dynamic)
    actual, ours = generated(fn, (q, k, v), "cascade", dynamic=dynamic)
    assert recent()[-1].sites and not any(s.rewritten for s in recent()[-1].sites)
    assert torch.equal(actual, expected)
    assert normalised(ours) == normalised(theirs)


def inputs(prefix: int = P) -> list[torch.Tensor]:
    keys = [torch.randn(B, H, prefix, D) for _ in range(2)]
    return [torch.randn(N, H * G, M, D), *keys, torch.randn(N, H, S, D), torch.randn(N, H, S, D)]


def shared(q, prefix_k, prefix_v, suffix_k, suffix_v):
    times = q.shape[0] // prefix_k.shape[0]
    k = torch.cat([prefix_k.repeat_interleave(times, 0), suffix_k], 2)
    v = torch.cat([prefix_v.repeat_interleave(times, 0), suffix_v], 2)
    k, v = (x[:, :, None].expand(-1, -1, G, -1, -1).flatten(1, 2) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v)


def allocated(code: str) -> list[int]:
    """Elements of every buffer the generated code allocates."""
    shapes = re.findall(r"empty_strided_\w+\(\(([^)]*)\)", code)
    return [
        int(torch.Size([int(s) for s in shape.split(",") if s.strip()]).numel()) for shape in shapes
    ]


def test_expanded_keys_are_not_materialised() -> None:
    values = inputs()
    expanded = N * H * P * D
    _, naive = generated(shared, values, "inductor", dynamic=False)
    assert max(allocated(naive)) >= expanded  # the assertion below can fail
    result, code = generated(shared, values, "cascade", dynamic=False, options={"decide": "always"})
    assert [s.rewritten for s in recent()[-1].sites] == [True]
    assert max(allocated(code)) < expanded
    assert torch.allclose(result, shared(*values), atol=1e-5)


def test_merge_is_generated_code() -> None:
    """The merge and the output layout are pointwise kernels, not calls of an op."""
    _, code = generated(shared, inputs(), "cascade", dynamic=False, options={"decide": "always"})
    assert "torch.ops.cascade" not in code
    assert code.count("_scaled_dot_product_flash_attention_for_cpu") >= 2


def test_dynamic_prefix_with_generated_code() -> None:
    torch._dynamo.reset()
    run = torch.compile(shared, backend="cascade", dynamic=True, options={"decide": "always"})
    with torch.no_grad():
        for prefix in (P, P + 9, 2 * P):
            values = inputs(prefix)
            assert torch.allclose(run(*values), shared(*values), atol=1e-5)
