"""Models whose keys no rotation explains, and rotations that are not theirs: refused, all."""

from dataclasses import replace

import pytest
import torch
import transformers
from support.rotary_models import CASES, PLACED, REFUSED

from torch_cascade.runtime import rotation_check
from torch_cascade.runtime.positions import Frequencies, SinCosTable
from torch_cascade.runtime.rotary_modules import FrequencyModule, TableModule
from torch_cascade.runtime.rotation import RotationError, verify_rotation
from torch_cascade.runtime.rotation_probes import run_probes


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_does_not_rotate_is_refused(name, dtype):
    case, words = REFUSED[name]
    with pytest.raises(RotationError, match=words):
        verify_rotation(case.model(dtype))


def test_the_smallest_learned_positions_are_refused():
    """No noise is allowed where nothing precedes: a thousandth of a token's embedding shows."""
    model = REFUSED["gpt2"][0].model()
    model.transformer.wpe.weight.data.mul_(1e-4)
    with pytest.raises(RotationError, match="values of layer 0 depend"):
        verify_rotation(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_and_routers_make_noise(dtype, monkeypatch):
    """Values move with the position by rounding; the wrong pairing is refused all the same."""
    torch.manual_seed(3)  # a model whose deep layers rotate right only if noise is allowed
    case = CASES["gpt_oss"]
    model = replace(case, config=case.config | {"num_hidden_layers": 24}).model(dtype)
    rotation = verify_rotation(model)
    right, candidates = rotation.layers[0].where, rotation_check._candidates
    assert {layer.where for layer in rotation.layers} == {right}
    monkeypatch.setattr(
        rotation_check, "_candidates", lambda *a: [c for c in candidates(*a) if c[1] != right]
    )
    with torch.no_grad():
        probes = run_probes(model, rotation.rotaries, (0, 17, 4096))
    for layer in range(24):
        first, last = probes[0].values[layer], probes[2].values[layer]
        assert torch.equal(first, last) == (layer == 0)
        with pytest.raises(RotationError, match=f"keys of layer {layer} into"):
            rotation_check._prove_layer(layer, probes, rotation.rotaries)


def test_other_things_are_refused():
    with pytest.raises(TypeError, match="got Linear"):
        verify_rotation(torch.nn.Linear(2, 2))
    with pytest.raises(RotationError, match=r"model.eval\(\)"):
        verify_rotation(CASES["default"].model().train())
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=9, **sizes))
    with pytest.raises(RotationError, match="only decoders"):
        verify_rotation(t5.eval())
    model = CASES["default"].model()
    projection = model.model.layers[1].self_attn.k_proj.weight
    projection.data[0, 0] = torch.nan
    with pytest.raises(RotationError, match=r"keys of layer 1 into.*error inf"):
        verify_rotation(model)
    torch.nn.init.zeros_(projection)
    with pytest.raises(RotationError, match="layer 1 are all zero"):
        verify_rotation(model)


def _theta(theta):
    return lambda table: Frequencies(theta ** -(torch.arange(4) / 4), table.factor)


WRONG_TABLES = {
    # Variants that public reports name: scaling ignored, another theta, frequencies in bfloat16.
    ("llama3", "unscaled"): _theta(10_000.0),
    ("linear", "unscaled"): _theta(10_000.0),
    ("yarn", "unscaled"): _theta(10_000.0),
    ("default", "another theta"): _theta(11_000.0),
    ("default", "a pair is still"): lambda t: Frequencies(t.inv_freq * torch.tensor([1, 1, 1, 0])),
    ("default", "in another order"): lambda t: Frequencies(t.inv_freq.flip(0)),
    ("default", "bfloat16"): lambda t: Frequencies(t.inv_freq.bfloat16()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "fault"), WRONG_TABLES)
def test_no_wrong_table_passes(name, fault, dtype, monkeypatch):
    model = CASES[name].model()
    with torch.no_grad():  # parameters only, as from_pretrained: tables stay in float32
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    verify_rotation(model)
    right = FrequencyModule.table
    wrong = WRONG_TABLES[name, fault]
    monkeypatch.setattr(FrequencyModule, "table", lambda self, n: wrong(right(self, n)))
    with pytest.raises(RotationError, match="relative error"):
        verify_rotation(model)


@pytest.mark.parametrize("name", ["dynamic", "longrope", "phimoe"])
def test_the_table_of_another_length_does_not_pass(name, monkeypatch):
    model, right = CASES[name].model(), FrequencyModule.table
    monkeypatch.setattr(FrequencyModule, "table", lambda self, n: right(self, min(n, 32)))
    with pytest.raises(RotationError, match="relative error"):
        verify_rotation(model)


@pytest.mark.parametrize("name", ["gptj", "codegen"])
def test_a_table_with_pairs_in_another_order_does_not_pass(name, monkeypatch):
    model, right = CASES[name].model(), TableModule.table

    def swapped(self, length):
        return SinCosTable(right(self, length).sin_cos[:, [1, 0, 3, 2]])

    monkeypatch.setattr(TableModule, "table", swapped)
    with pytest.raises(RotationError, match="relative error"):
        verify_rotation(model)


@pytest.mark.parametrize("name", [n for n in PLACED if n != "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_wrong_pairing_passes(name, dtype, monkeypatch):
    if (name, dtype) == ("phimoe", torch.bfloat16):
        pytest.skip("refused in any pairing")
    model = CASES[name].model(dtype)
    right = verify_rotation(model).layers[0].where
    candidates = rotation_check._candidates

    def others(pairs, features):
        found = candidates(pairs, features)
        shifted = replace(right, start=right.start + 1)
        more = [(i, shifted) for i in range(len(pairs)) if shifted.end <= features]
        return [c for c in found if c[1] != right] + more

    monkeypatch.setattr(rotation_check, "_candidates", others)
    with pytest.raises(RotationError, match="layer 0"):
        verify_rotation(model)


def test_frequencies_cast_behind_a_models_back_are_refused():
    with pytest.raises(RotationError, match="turns the keys of layer 0"):
        verify_rotation(CASES["phimoe"].model(torch.bfloat16))
