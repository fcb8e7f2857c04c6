"""SharedPrefixCache under torch.compile: how often it compiles, and what stays checked.

The backend here only counts and runs the graph as it is; tests/e2e has the real one.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from support.hf_models import VOCABULARY, tiny_model
from transformers import CompileConfig, DynamicCache

from torch_cascade.runtime.prefix_cache import SharedPrefixCache, cache_argument

BRANCHES, PROMPT = 3, 11
STEPS = 23
"""Of a decode loop: many more than torch compiles one function for before it gives up."""

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")


class Counting:
    """A backend that keeps the graphs it is given and runs them eagerly."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return graph


def prompts(length: int = PROMPT) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (2, length))


def decode(forward, model, cache, tokens):
    """Logits of feeding tokens [N, S] one by one."""
    inputs = {cache_argument(model): cache}
    # Copies: a view's offset into `tokens` would be a size of its own under dynamic=True.
    blocks = [token[:, None].clone() for token in tokens.unbind(1)]
    with torch.no_grad():
        steps = [forward(block, **inputs).logits for block in blocks]
    return torch.cat(steps, dim=1)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(("max_suffix", "compiles"), [(None, 3), (STEPS, 1)])
def test_a_decode_loop_compiles_few_times(max_suffix, compiles, dynamic):
    model, ids = tiny_model("Llama"), prompts()
    backend = Counting()
    forward = torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=True)
    make = lambda ids: SharedPrefixCache.prefill(model, ids, BRANCHES, max_suffix=max_suffix)  # noqa: E731
    tokens = torch.randint(3, VOCABULARY, (2 * BRANCHES, STEPS))
    logits = decode(forward, model, make(ids), tokens)
    assert len(backend.graphs) <= compiles
    torch.testing.assert_close(logits, decode(model, model, make(ids), tokens))
    before = len(backend.graphs)
    decode(forward, model, make(ids), tokens)  # another cache of the same sizes
    assert len(backend.graphs) == before
    decode(forward, model, make(prompts(PROMPT - 2)), tokens)
    decode(forward, model, make(prompts(PROMPT - 4)), tokens)  # any further prompt length
    assert len(backend.graphs) <= before + compiles


def test_all_layers_share_one_symbol_a_length():
    model, backend = tiny_model("Llama"), Counting()
    forward = torch.compile(model, backend=backend)
    tokens = torch.randint(3, VOCABULARY, (2 * BRANCHES, 4))
    for length in (PROMPT, PROMPT - 2):
        cache = SharedPrefixCache.prefill(model, prompts(length), BRANCHES)
        decode(forward, model, cache, tokens)
    states = [
        value.shape[-2]
        for node in backend.graphs[-1].graph.find_nodes(op="placeholder")
        if isinstance(value := node.meta.get("example_value"), torch.Tensor) and value.dim() == 4
    ]
    assert len(states) == 2 * 4  # two layers: keys and values, of prefix and suffix
    assert len({str(length) for length in states}) == 2
    assert all(isinstance(length, torch.SymInt) for length in states)


def test_the_clamp_is_in_the_graph():
    """The mask analysis reads it as: queries stand after the whole prefix."""
    model, backend = tiny_model("Llama"), Counting()
    cache = SharedPrefixCache.prefill(model, prompts(), BRANCHES, max_suffix=4)
    tokens = torch.randint(3, VOCABULARY, (2 * BRANCHES, 2))
    decode(torch.compile(model, backend=backend), model, cache, tokens)
    nodes = list(backend.graphs[0].graph.nodes)
    assert any(node.target == "clamp_min" and node.args[1] == 0 for node in nodes)


def test_generate_compiles_with_a_static_suffix():
    model, ids, backend = tiny_model("Llama"), prompts(), Counting()
    options = {"do_sample": True, "num_return_sequences": BRANCHES, "max_new_tokens": 9}
    torch.manual_seed(1)
    expected = model.generate(ids, past_key_values=DynamicCache(), **options)
    cache = SharedPrefixCache.prefill(model, ids, BRANCHES, max_suffix=9)
    # A function: generate copies its configuration, and with it any other object.
    config = CompileConfig(backend=lambda *args: backend(*args), mode=None, fullgraph=True)
    config._compile_all_devices = True
    torch.manual_seed(1)
    tokens = model.generate(ids, past_key_values=cache, compile_config=config, **options)
    assert torch.equal(tokens, expected)
    assert len(backend.graphs) == 1
    with pytest.raises(ValueError, match="max_suffix=9 tokens: 9 are written, 1 more"):
        model.generate(tokens, past_key_values=cache, compile_config=config, max_new_tokens=1)


@pytest.mark.parametrize(("max_suffix", "compiles"), [(None, 3), (9, 1)])
def test_beam_search_over_a_forward_compiled_by_hand(max_suffix, compiles):
    """The only way to compile beam search: generate itself never does."""
    model, ids, backend = tiny_model("Llama"), prompts(), Counting()
    options = {"num_beams": BRANCHES, "max_new_tokens": 9}
    expected = model.generate(ids, past_key_values=DynamicCache(), **options)
    cache = SharedPrefixCache.prefill(model, ids, BRANCHES, max_suffix=max_suffix)
    model.forward = torch.compile(model.forward, backend=backend, fullgraph=True)
    assert torch.equal(model.generate(ids, past_key_values=cache, **options), expected)
    assert 1 <= len(backend.graphs) <= compiles
    SharedPrefixCache.prefill(model, ids, BRANCHES)  # finds the argument names of a wrapper


def attend(queries, keys, values, cache):
    keys, values = cache.update(keys, values, 0)
    return torch.nn.functional.scaled_dot_product_attention(queries, keys, values)


def test_inductor_stops_at_the_end_of_the_buffer():
    prefix = [(torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4, 8))]
    cache = SharedPrefixCache(prefix, BRANCHES, max_suffix=2)
    compiled, states = torch.compile(attend), torch.randn(2 * BRANCHES, 3, 1, 8)
    with torch.no_grad():
        compiled(states, states, states, cache)
        compiled(states, states, 2 * states, cache)
        written = cache.layers[0].suffix_values.clone()
        with pytest.raises(RuntimeError, match="out of bounds"):
            compiled(states, states, states, cache)
    assert torch.equal(cache.layers[0].suffix_values, written)


def test_inductor_stops_a_beam_that_leaves_its_request():
    prefix = [(torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4, 8))]
    cache = SharedPrefixCache(prefix, BRANCHES)
    states = torch.randn(2 * BRANCHES, 3, 2, 8)
    cache.update(states, states, 0)
    reorder = torch.compile(lambda cache, beams: cache.reorder_cache(beams))
    beams = torch.tensor([2, 1, 0, 5, 5, 3])
    reorder(cache, beams)
    assert torch.equal(cache.layers[0].suffix()[0], states[beams])
    with pytest.raises(RuntimeError, match="a beam left its request"):
        reorder(cache, beams.flip(0))


@pytest.mark.parametrize("max_suffix", [4, None])
def test_cuda_graphs_copy_nothing_of_the_cache(max_suffix):
    """What is marked static is read where it is; anything else is copied for each replay."""
    model, backend = tiny_model("Llama"), Counting()
    cache = SharedPrefixCache.prefill(model, prompts(), BRANCHES, max_suffix=max_suffix)
    tokens = torch.randint(3, VOCABULARY, (2 * BRANCHES, 1))
    decode(torch.compile(model, backend=backend), model, cache, tokens)
    nodes = backend.graphs[0].graph.find_nodes(op="placeholder")
    values = {n: n.meta.get("example_value") for n in nodes}
    # Keys and values have 4 dims, a count of written tokens none; no weight has.
    held = [n for n, v in values.items() if isinstance(v, torch.Tensor) and v.dim() in (0, 4)]
    copied = [n.name for n in held if "_dynamo_static_input_type" not in n.meta["tensor_dict"]]
    assert not copied and len(held) == 2 * (2 if max_suffix is None else 5)
