"""A transformers model with SharedPrefixCache on a GPU, compiled and as a CUDA graph."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from support.hf_models import VOCABULARY, tiny_model
from support.tolerance import assert_close_to_reference
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from torch_cascade.compiler.backend import recent
from torch_cascade.runtime.prefix_cache import SharedPrefixCache, cache_argument

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated"),
]

P, T, LAYERS, STEPS = 61, 4, 2, 7
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ALWAYS = {"decide": "always", "strict": True}


def model_of(dtype: torch.dtype, family: str = "Llama", **changes: Any) -> Any:
    torch.manual_seed(0)
    return tiny_model(family, dtype, **changes).cuda()


def prompt() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (1, P), device="cuda")


def tokens() -> list[torch.Tensor]:
    """What is fed: a block of four tokens, then one at a time."""
    sizes = [4] + [1] * (STEPS - 1)
    return [torch.randint(3, VOCABULARY, (T, size), device="cuda") for size in sizes]


def decode(forward: Callable, model: Any, cache: Any, steps: list[torch.Tensor]) -> torch.Tensor:
    """Logits [T, all tokens, vocabulary]."""
    argument = cache_argument(model)
    return torch.cat([forward(x, **{argument: cache}).logits.clone() for x in steps], 1)


def check(actual: torch.Tensor, model: Any, ids: torch.Tensor, steps: list[torch.Tensor]) -> None:
    """As close to float64 as eager is; the model is float64 afterwards."""
    caches = lambda m: SharedPrefixCache.prefill(m, ids, T)  # noqa: E731
    eager = decode(model, model, caches(model), steps)
    double = model.double()
    assert_close_to_reference(actual, eager, decode(double, double, caches(double), steps))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("max_suffix", [None, 11])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_decoding(dtype, max_suffix, attention):
    model, ids, steps = model_of(dtype, attn_implementation=attention), prompt(), tokens()
    run = torch.compile(model, backend="cascade", options=ALWAYS)
    with torch.no_grad():
        cache = SharedPrefixCache.prefill(model, ids, T, max_suffix=max_suffix)
        actual = decode(run, model, cache, steps)
        assert [s.rewritten for s in recent()[-1].sites] == [True] * LAYERS
        check(actual, model, ids, steps)


@pytest.mark.parametrize("family", ["Mistral", "Gemma3Text", "GPTNeoX", "GPT2"])
def test_families(family):
    model, ids, steps = model_of(torch.float32, family), prompt(), tokens()[:3]
    if family == "GPT2":  # 64 positions
        ids = ids[:, :40]
    run = torch.compile(model, backend="cascade", options=ALWAYS)
    with torch.no_grad():
        actual = decode(run, model, SharedPrefixCache.prefill(model, ids, T), steps)
        assert [s.rewritten for s in recent()[-1].sites] == [True] * LAYERS
        check(actual, model, ids, steps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce_overhead(dtype):
    """One CUDA graph a step: nothing skipped, and only the tokens are copied into it."""
    model, ids = model_of(dtype), prompt()
    run = torch.compile(model, backend="cascade", mode="reduce-overhead", dynamic=False)
    with torch.no_grad():
        cache = SharedPrefixCache.prefill(model, ids, T, max_suffix=32)
        steps = [torch.randint(3, VOCABULARY, (T, 1), device="cuda") for _ in range(12)]
        actual = decode(run, model, cache, steps)
        assert [s.rewritten for s in recent()[-1].sites] == [True] * LAYERS
        assert counters["inductor"]["cudagraph_skips"] == 0
        # Counted when a graph is recorded: once, for one input that is not where it was.
        assert counters["inductor"]["cudagraph_recorded_non_static_inputs"] == 1
        cache.reset()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            again = decode(run, model, cache, steps)
        torch.cuda.current_stream().wait_stream(side)
        assert torch.equal(again, actual)  # and so deterministic
        assert counters["inductor"]["cudagraph_recorded_non_static_inputs"] == 1
        check(actual, model, ids, steps)


def test_the_cache_is_written_where_it_is():
    """No layer copies its suffix buffer, expands its prefix, or calls another attention."""
    model, ids, slots = model_of(torch.bfloat16), prompt(), 500
    run = torch.compile(model, backend="cascade", mode="reduce-overhead", dynamic=False)
    step = torch.randint(3, VOCABULARY, (T, 1), device="cuda")
    with torch.no_grad():
        cache = SharedPrefixCache.prefill(model, ids, T, max_suffix=slots)
        call = {cache_argument(model): cache}
        _, (code,) = run_and_get_code(lambda: run(step, **call))
    assert [s.rewritten for s in recent()[-1].sites] == [True] * LAYERS
    shapes = re.findall(r"empty_strided_cuda\(\(([^)]*)\)", code)
    sizes = [math.prod(int(s) for s in shape.split(",") if s.strip()) for shape in shapes]
    assert sizes and max(sizes) < cache.layers[0].suffix_keys.numel()
    assert "attend_parts" in code and "aten._scaled_dot_product" not in code


def test_replays_allocate_nothing():
    """Neither weights nor caches are copied: a replay leaves the allocator as it was."""
    model, ids = model_of(torch.bfloat16), prompt()
    run = torch.compile(model, backend="cascade", mode="reduce-overhead", dynamic=False)
    step = torch.randint(3, VOCABULARY, (T, 1), device="cuda")
    argument = cache_argument(model)
    with torch.no_grad():
        cache = SharedPrefixCache.prefill(model, ids, T, max_suffix=32)
        for _ in range(4):
            run(step, **{argument: cache})
        torch.cuda.synchronize()
        key = "allocation.all.allocated"
        before = torch.cuda.memory_stats()[key]
        for _ in range(5):
            run(step, **{argument: cache})
        torch.cuda.synchronize()
        allocated = torch.cuda.memory_stats()[key] - before
    # The views that the caller gets are of the graph's own memory.
    assert allocated == 0, f"{allocated} allocations in 5 replays"


def test_another_cache_of_the_same_sizes():
    """Its addresses are others: recorded again, and computed from its own keys."""
    model = model_of(torch.float32)
    run = torch.compile(model, backend="cascade", mode="reduce-overhead", dynamic=False)
    steps = [torch.randint(3, VOCABULARY, (T, 1), device="cuda") for _ in range(4)]
    with torch.no_grad():
        for _ in range(3):
            ids = prompt()
            cache = SharedPrefixCache.prefill(model, ids, T, max_suffix=9)
            actual = decode(run, model, cache, steps)
            expected = decode(model, model, SharedPrefixCache.prefill(model, ids, T), steps)
            torch.testing.assert_close(actual, expected)
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_generate_chooses_the_same_tokens():
    model, ids = model_of(torch.float32), prompt()
    options = {"max_new_tokens": 9, "num_beams": T, "do_sample": False}
    expected = model.generate(ids, **options)
    cache = SharedPrefixCache.prefill(model, ids, T)
    model.forward = torch.compile(model.forward, backend="cascade", options=ALWAYS)
    assert torch.equal(model.generate(ids, past_key_values=cache, **options), expected)


@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_linear_layers_are_joined(family, dtype):
    """q, k and v (with biases in Qwen2); gate and up; the others alone; all in one CUDA graph."""
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4}
    model, ids = model_of(dtype, family, num_key_value_heads=2, head_dim=32, **sizes), prompt()
    steps = [torch.randint(3, VOCABULARY, (T, 1), device="cuda") for _ in range(STEPS)]
    options = ALWAYS | {"mode": "reduce-overhead"}
    run = torch.compile(model, backend="cascade", dynamic=False, options=options)
    with torch.no_grad():
        cache = SharedPrefixCache.prefill(model, ids, T, max_suffix=11)
        actual = decode(run, model, cache, steps)
        if torch.cuda.get_device_capability()[0] == 9:
            joined = recent()[-1].linears
            assert joined is not None and joined.launches >= 2 * LAYERS
            assert joined.joined >= 5 * LAYERS
        check(actual, model, ids, steps)
