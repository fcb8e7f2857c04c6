"""Dynamic NTK in one graph, and blends of models whose frequencies follow the length."""

import copy
import inspect
import pickle

import pytest
import torch
from support.backend import eager_cascade, last_compilation
from support.blend_models import Prompt, expected
from support.rotary_models import CASES, LONGEST, VOCABULARY, twin64
from support.tolerance import assert_close_to_reference, max_error
from transformers import modeling_rope_utils

from torch_cascade import ChunkStore
from torch_cascade.runtime.branchless_rotary import without_branches

# Before, at and after the limit; after a longer one; back below; and out again.
LENGTHS = (7, LONGEST, LONGEST + 1, 200, 100, LONGEST, LONGEST - 1, 300, 5)
# transformers 5.17 branches on the length for long-rope, too; 5.24 does not.
BRANCHES = "torch.where" not in inspect.getsource(modeling_rope_utils.dynamic_rope_update)


def tokens(count, seed=9):
    generator = torch.Generator().manual_seed(seed + count)
    return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()


def test_it_is_the_same_and_one_graph():
    usual = CASES["dynamic"].model()
    changed = copy.deepcopy(usual)
    assert without_branches(changed) == ("model.rotary_emb",)
    forward = torch.compile(changed, backend="eager", fullgraph=True, dynamic=True)
    tables = []
    for length in LENGTHS:
        ids = torch.tensor([tokens(length)])
        with torch.no_grad():
            assert torch.equal(forward(ids).logits, usual(ids).logits)
        one, other = usual.model.rotary_emb, changed.model.rotary_emb
        assert one.max_seq_len_cached == other.max_seq_len_cached
        assert torch.equal(one.inv_freq, other.inv_freq)
        tables.append(other.inv_freq.clone())
    assert torch.equal(tables[3], tables[4]) and not torch.equal(tables[3], tables[6])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("made", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_has_a_length_of_its_own(made):
    model = CASES["dynamic"].model()
    without_branches(model)
    other = made(model)
    with torch.no_grad():
        other(torch.tensor([tokens(200)]))
    assert other.model.rotary_emb.max_seq_len_cached == 200
    assert model.model.rotary_emb.max_seq_len_cached == LONGEST


@pytest.mark.parametrize("name", ["default", "linear", "longrope", "phi3", "yarn", "gptj"])
def test_others_stay_as_they_are(name):
    model = CASES[name].model()
    states = [dict(vars(module)) for module in model.modules()]
    assert without_branches(model) == ()
    assert [dict(vars(module)) for module in model.modules()] == states


def test_a_module_that_does_something_else_stays():
    model = CASES["dynamic"].model()
    kind = type(model.model.rotary_emb)

    class Other(kind):
        def forward(self, x, position_ids):
            return kind.forward(self, x, position_ids // 2)

    model.model.rotary_emb.__class__ = Other
    assert without_branches(model) == ()
    assert "forward" not in vars(model.model.rotary_emb)


# The lengths of the chunks and of the question: the limit is 64 for dynamic NTK, 32 for the others.
PARTS = {"below": (7, 9, 5), "across": (27, 39, 6), "above": (67, 71, 6)}


@pytest.mark.parametrize("where", PARTS)
@pytest.mark.parametrize("name", ["dynamic", "longrope", "phi3"])
def test_a_blend(name, where):
    """Chunks cached under the table of their own length, in a prompt under that of its length."""
    if name != "dynamic" and BRANCHES:
        pytest.skip("this transformers chooses long-rope's table by a branch: several graphs")
    model = CASES[name].model()
    twins = copy.deepcopy(model), twin64(model)
    store, parts = ChunkStore(model), [tokens(n) for n in PARTS[where]]
    for part in parts[:-1]:
        store.add(part)
    blended = store.blend([parts[1], parts[0], parts[2]])
    ids, cache = blended["input_ids"], blended.past_key_values
    reuse = cache.layers[0].reuse
    cached = tuple(cache.rotated(layer) for layer in range(3))
    prompt = Prompt(ids, reuse.fresh_rows, reuse.chunks, cached)
    stages = {1: "0.15"}
    eager, rows = expected(twins[0], prompt, stages)
    exact, same = expected(twins[1], prompt.to(torch.float64), stages)
    assert rows == same and rows[0] != list(range(ids.shape[1]))
    backend = eager_cascade(decide="always", strict=True, verify=True)
    with torch.no_grad():
        logits = torch.compile(model, backend=backend)(**blended, logits_to_keep=1).logits
    assert last_compilation().blend.layers == ("computed", "checked", "reused")
    assert_close_to_reference(logits, eager.logits, exact.logits)
    fresh, _ = expected(copy.deepcopy(twins[1]), prompt.to(torch.float64), {1: 1})
    assert max_error(fresh.logits, exact.logits) > 100 * max_error(logits, exact.logits)


def test_a_second_store_leaves_the_length():
    """Proving the rotation runs long sequences; the state is in a tensor, written in place."""
    model = CASES["dynamic"].model()
    ChunkStore(model)
    with torch.no_grad():
        model(torch.tensor([tokens(100)]))
    before = model.model.rotary_emb.inv_freq.clone()
    ChunkStore(model)
    assert model.model.rotary_emb.max_seq_len_cached == 100
    assert torch.equal(model.model.rotary_emb.inv_freq, before)


def used_in_inference_mode(model):
    with torch.inference_mode():
        model(torch.tensor([tokens(150)]))
    return model


def used_long_and_short(model):
    with torch.no_grad():
        model(torch.tensor([tokens(150)]))
        model(torch.tensor([tokens(5)]))
    return model


BEFORE = {
    "nothing": lambda model: model,
    "another dtype": lambda model: model.to(torch.bfloat16),
    "inference mode": used_in_inference_mode,
    "one tensor for both": used_long_and_short,
}
AFTER = {
    "nothing": lambda model: model,
    "another dtype": lambda model: model.to(torch.bfloat16),
    "inference mode": used_in_inference_mode,
    "a copy": copy.deepcopy,
}


@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("before", BEFORE)
def test_the_model_goes_on_as_without_a_store(before, after):
    """transformers keeps float32 frequencies whatever dtype the model has had since."""
    usual = BEFORE[before](CASES["dynamic"].model())
    changed = copy.deepcopy(usual)
    ChunkStore(changed)
    assert "forward" in vars(changed.model.rotary_emb)
    usual, changed = AFTER[after](usual), AFTER[after](changed)
    for length in LENGTHS:
        ids = torch.tensor([tokens(length)])
        with torch.no_grad():
            assert torch.equal(changed(ids).logits, usual(ids).logits), length


def test_another_dtype_compiles_into_one_graph():
    usual = CASES["dynamic"].model()
    changed = copy.deepcopy(usual)
    without_branches(changed)
    usual, changed = usual.to(torch.bfloat16), changed.to(torch.bfloat16)
    forward = torch.compile(changed, backend="eager", fullgraph=True, dynamic=True)
    for number, length in enumerate(LENGTHS):
        ids = torch.tensor([tokens(length)])
        with torch.inference_mode(number % 2 == 0), torch.no_grad():
            assert torch.equal(forward(ids).logits, usual(ids).logits), length


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_a_store_in_or_after_inference_mode(name):
    model = used_in_inference_mode(CASES[name].model())
    usual = copy.deepcopy(model)
    ChunkStore(model)
    with torch.inference_mode():
        ChunkStore(model)
    for length in LENGTHS:
        ids = torch.tensor([tokens(length)])
        with torch.no_grad():
            assert torch.equal(model(ids).logits, usual(ids).logits), length
