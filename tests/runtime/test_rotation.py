"""Rotations found in models move cached keys to where a prefill has them."""

import math

import pytest
import torch
from support.rotary_models import (
    CASES,
    LONGEST,
    PLACED,
    inverse_frequencies,
    keys_at,
    moved_and_fresh,
    twin64,
)
from support.tolerance import assert_close_to_reference, max_error

from torch_cascade.runtime.positions import turn
from torch_cascade.runtime.rotary_modules import find_rotaries
from torch_cascade.runtime.rotation import verify_rotation

TOKENS = 7
FAR = 131_072
# Rows of one batch: short and long ways, forwards and backwards, to the last of all positions.
OLD = torch.tensor([0, 0, 37, 3, 0, FAR - 1, 1000, 62])[:, None]
NEW = torch.tensor([1, 16, 5, 62, FAR - 1, 7, 3000, 63])[:, None]
FORMULAS = ["default", "linear", "dynamic", "llama3", "yarn", "longrope", "phi3"]
EPS32 = torch.finfo(torch.float32).eps


def tokens(rows, count):
    return torch.randint(3, 100, (rows, count))


def span(start, rows=2):
    return (torch.arange(TOKENS) + start).expand(rows, TOKENS)


def rows_within(case):
    """Moves that the model has positions for."""
    kept = (OLD < (case.limit or math.inf)) & (NEW < (case.limit or math.inf))
    return OLD[kept][:, None], NEW[kept][:, None]


@pytest.mark.parametrize("name", CASES)
def test_what_each_layer_rotates(name):
    rotation = verify_rotation(CASES[name].model())
    found = [layer.where for layer in rotation.layers]
    spans = tuple(w and (str(w).split(" features ")[1], w.interleaved) for w in found)
    assert spans == CASES[name].rotated
    assert all(layer.error <= layer.bound < 2e-6 for layer in rotation.layers)
    assert len(rotation.rotaries) == {"gemma3": 2, "modernbert": 2, "bloom": 0}.get(name, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PLACED)
def test_lone_tokens_move_in_all_layers(name, dtype):
    if (name, dtype) == ("phimoe", torch.bfloat16):
        pytest.skip("computes its frequencies anew in every forward: cast buffers are refused")
    case = CASES[name]
    model = case.model(dtype)
    rotation, exact = verify_rotation(model), twin64(model)
    old, new = rows_within(case)
    ids = tokens(len(old), 1)
    moved, fresh = moved_and_fresh(model, rotation, ids, old, new)
    reference = keys_at(exact, ids, new)
    stale = keys_at(exact, ids, old)
    for layer, spans in enumerate(case.rotated):
        assert_close_to_reference(moved[layer], fresh[layer], reference[layer])
        if spans is not None:
            assert max_error(stale[layer], reference[layer]) > 0.1


@pytest.mark.parametrize("name", [name for name in PLACED if not CASES[name].by_length])
def test_chunks_move_in_all_layers(name):
    """Alone in its prompt a chunk has the same keys everywhere, up to their rotation."""
    model = CASES[name].model()
    rotation, exact, ids = verify_rotation(model), twin64(model), tokens(2, TOKENS)
    for old, new in [(0, 1), (0, 16), (37, 5), (3, LONGEST - TOKENS)]:
        moved, fresh = moved_and_fresh(model, rotation, ids, span(old), span(new))
        reference = keys_at(exact, ids, span(new))
        for layer, keys in enumerate(moved):
            assert_close_to_reference(keys, fresh[layer], reference[layer])


@pytest.mark.parametrize("name", FORMULAS)
def test_against_the_formulas(name):
    """Keys and frequencies apart from the model's: complex numbers, tables of the papers."""
    model = CASES[name].model()
    rotation, ids, new_length = verify_rotation(model), tokens(2, 20), 50
    old = torch.arange(20).expand(2, 20)
    before = rotation.tables(20)
    keys = keys_at(model, ids, old)[0]
    after = rotation.tables(new_length)
    moved = rotation.rotate(keys, 0, rotation.turns(before, after, old, old + 30))
    angles = [
        positions[0, :, None].double() * inverse_frequencies(name, 4, length)
        for positions, length in ((old, 20), (old + 30, new_length))
    ]
    z = torch.complex(keys[..., :4].double(), keys[..., 4:].double())
    z = z * torch.polar(torch.ones(()).double(), angles[1] - angles[0])
    # A frequency theta^-x errs by x log(theta) eps / 2 and a few roundings, its angle as much.
    angle_error = (math.log(10_000.0) + 8) * EPS32 * (20 + new_length)
    bound = (angle_error + 8 * EPS32) * z.abs().max().item()
    assert max_error(moved, torch.cat([z.real, z.imag], -1)) <= bound


@pytest.mark.parametrize("name", ["dynamic", "longrope", "phi3", "phimoe"])
@pytest.mark.parametrize(("old", "new"), [(0, LONGEST), (LONGEST, 0), (0, 4096), (100, 300)])
def test_chunks_move_between_tables(name, old, new):
    """Layer 0, which the scores of other tokens do not reach."""
    model = CASES[name].model()
    rotation, exact, ids = verify_rotation(model), twin64(model), tokens(2, TOKENS)
    keys_at(exact, ids, span(old))
    moved, fresh = moved_and_fresh(model, rotation, ids, span(old), span(new))
    assert_close_to_reference(moved[0], fresh[0], keys_at(exact, ids, span(new))[0])


def test_dynamic_tables_remember_the_longest_sequence():
    """What transformers does: after 200 tokens, 100 tokens still have the table of 200."""
    model = CASES["dynamic"].model()
    rotation, ids = verify_rotation(model), tokens(2, TOKENS)
    fresh_100 = rotation.tables(100)[0].inv_freq
    keys_at(model, ids, span(200 - TOKENS))
    grown, after = rotation.tables(200)[0].inv_freq, rotation.tables(100)[0].inv_freq
    assert torch.equal(grown, after) and not torch.equal(after, fresh_100)
    moved, fresh = moved_and_fresh(model, rotation, ids, span(100 - TOKENS), span(LONGEST))
    assert max_error(moved[0], fresh[0].double()) <= 16 * EPS32 * fresh[0].abs().max()


@pytest.mark.parametrize("name", ["dynamic", "longrope", "phimoe", "gemma3", "gptj"])
def test_verifying_changes_nothing(name):
    model = CASES[name].model()
    modules = [m for m in model.modules() if hasattr(m, "inv_freq") or hasattr(m, "rope_type")]
    state = [({**m.__dict__}, [(n, b, b.clone()) for n, b in m.named_buffers()]) for m in modules]
    rotation = verify_rotation(model)
    rotation.tables(50)
    rotation.tables(5_0 if name == "gptj" else 5_000)
    for module, (attributes, buffers) in zip(modules, state, strict=True):
        assert module.__dict__.keys() == attributes.keys()
        assert all(module.__dict__[key] is value for key, value in attributes.items())
        for key, buffer, content in buffers:
            assert module.get_buffer(key) is buffer and torch.equal(buffer, content)


def test_cached_at_zero_elsewhere_or_not_rotated_at_all():
    """Three stores, one result: a chunk of position 0, of position 37, and of no position."""
    model = CASES["yarn"].model()
    rotation, ids, new = verify_rotation(model), tokens(2, TOKENS), span(500)
    moved = [moved_and_fresh(model, rotation, ids, span(old), new)[0][0] for old in (0, 37)]
    unrotated = keys_at(model, ids, torch.zeros_like(new))[0]
    tables = rotation.tables(TOKENS)
    by = turn(tables[0], tables[0], torch.zeros_like(new), new)
    raw = rotation.rotate(unrotated, 0, [by])
    fresh = keys_at(twin64(model), ids, new)[0]
    eager = keys_at(model, ids, new)[0]
    for keys in (*moved, raw):
        assert_close_to_reference(keys, eager, fresh)


def test_equal_embeddings_count_once():
    one, same, other, scaled = (
        CASES[name].model().model.rotary_emb for name in ("default", "default", "linear", "default")
    )
    scaled.attention_scaling = 1.25
    found = find_rotaries(torch.nn.ModuleList([one, same, other, scaled]))
    assert [rotary.name for rotary in found] == ["0", "2", "3"]


def test_bad_lengths_and_tables():
    rotation = verify_rotation(CASES["gptj"].model())
    with pytest.raises(ValueError, match="at least 1, got 0"):
        rotation.tables(0)
    with pytest.raises(ValueError, match=f"{LONGEST} positions, not {LONGEST + 1}"):
        rotation.tables(LONGEST + 1)
    table, here = rotation.tables(5), torch.arange(5)
    with pytest.raises(ValueError, match="expected 1 tables"):
        rotation.turns(table, [], here, here)
    with pytest.raises(ValueError, match="mrope"):
        rotation.turns(table, table, here, here.expand(3, 1, 5))


def test_layers_without_rotation_keep_their_keys():
    rotation = verify_rotation(CASES["smollm3"].model())
    table, here, keys = rotation.tables(5), torch.arange(5), torch.randn(1, 3, 5, 8)
    turns = rotation.turns(table, table, here, here + 7)
    assert rotation.rotate(keys, 1, turns) is keys
    assert not torch.equal(rotation.rotate(keys, 2, turns), keys)


def test_nothing_is_compiled():
    model = CASES["default"].model()
    compiled = torch.compile(model, backend="eager")
    assert verify_rotation(compiled).layers == verify_rotation(model).layers
    model.forward = torch.compile(model.forward, backend="eager")
    verify_rotation(model)
    assert not torch._dynamo.utils.counters["stats"]


@pytest.mark.parametrize("name", ["gemma3", "smollm3", "dynamic", "gptj"])
def test_all_layers_in_one_graph(name):
    rotation = verify_rotation(CASES[name].model())
    tables, here = rotation.tables(20), torch.arange(TOKENS)

    def layers(keys, old, new):
        turns = rotation.turns(tables, tables, old, new)
        return [rotation.rotate(k, layer, turns) for layer, k in enumerate(keys)]

    inputs = [torch.randn(2, 3, TOKENS, 8) for _ in rotation.layers], here, here + OLD[:2] + 9
    compiled = torch.compile(layers, backend="aot_eager", fullgraph=True, dynamic=True)
    for got, wanted in zip(compiled(*inputs), layers(*inputs), strict=True):
        assert torch.equal(got, wanted)
