"""Ten model families decode through SharedPrefixCache and the cascade pass as eager does."""

from __future__ import annotations

import pytest
import torch
from support.backend import eager_cascade, last_compilation
from support.hf_models import FAMILIES, VOCABULARY, tiny_model
from support.tolerance import assert_close_to_reference
from transformers import DynamicCache

from torch_cascade.runtime.prefix_cache import SharedPrefixCache

P, T = 13, 3
STEPS = 23
"""Of a decode loop: many more than torch compiles one function for before it gives up."""


def decode(model, forward, ids, steps, **options) -> torch.Tensor:
    """Logits of a few decoding steps on branches of one prompt, the first of several tokens."""
    prefill = DynamicCache()
    model(ids[:, :P], use_cache=True, past_key_values=prefill)
    cache = SharedPrefixCache(prefill, branches=T, **options)
    return torch.cat([forward(x, past_key_values=cache).logits for x in steps], 1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("attention", "max_suffix"), [("sdpa", None), ("eager", 11)])
def test_families(family: str, attention: str, max_suffix: int | None) -> None:
    """Every layer is rewritten, and the logits are as right as eager's."""
    torch.manual_seed(0)
    try:
        model = tiny_model(family, torch.float32, attn_implementation=attention)
    except ValueError as refusal:  # GPT-J had no SDPA before transformers 5.20
        pytest.skip(str(refusal).partition(". ")[0])
    if family == "Mixtral":
        model.set_experts_implementation("batched_mm")  # the eager one breaks the graph
    ids = torch.randint(3, VOCABULARY, (1, P))
    steps = [torch.randint(3, VOCABULARY, (T, n)) for n in (4, 1, 1)]
    run = torch.compile(model, backend=eager_cascade(decide="always", verify=True))
    with torch.no_grad():
        actual = decode(model, run, ids, steps, max_suffix=max_suffix)
        layers = last_compilation().sites
        eager = decode(model, model, ids, steps, max_suffix=max_suffix)
        double = model.double()
        reference = decode(double, double, ids, steps, max_suffix=max_suffix)
    assert [s.rewritten for s in layers] == [True, True], [str(s.declined) for s in layers]
    assert_close_to_reference(actual, eager, reference)


def decode_compiles(model, cache_of, backend, steps: int) -> int:
    """How often a decode loop of one token a step compiles."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    run = torch.compile(model, backend=counter)
    cache = cache_of()
    for _ in range(steps):
        run(torch.randint(3, VOCABULARY, (T, 1)), past_key_values=cache)
    return counter.frame_count


@pytest.mark.parametrize("shared", [False, True])
def test_a_decode_loop_compiles_no_more_often_than_under_inductor(shared: bool) -> None:
    """With the stock cache (expanded once, nothing to rewrite) and with the shared one."""
    model = tiny_model("Llama", torch.float32)
    ids = torch.randint(3, VOCABULARY, (1, P))

    def cache_of():
        prefill = DynamicCache()
        model(ids, use_cache=True, past_key_values=prefill)
        if shared:
            return SharedPrefixCache(prefill, branches=T)
        prefill.batch_repeat_interleave(T)
        return prefill

    with torch.no_grad():
        stock = decode_compiles(model, cache_of, "aot_eager", steps=STEPS)
        ours = decode_compiles(model, cache_of, eager_cascade(decide="always"), steps=STEPS)
    assert ours <= stock, (ours, stock)
