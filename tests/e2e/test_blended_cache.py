"""`BlendCache` and the blend pass together, on a tiny Llama whose graphs are interpreted."""

import pytest
import torch

pytest.importorskip("transformers")

from support.backend import eager_cascade, last_compilation
from support.blending import full_prefill, twin
from support.hf_models import tiny_model
from support.tolerance import assert_close_to_reference

from torch_cascade import ChunkStore

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
PARTS = [[*range(5, 18)], [*range(30, 39)], [*range(50, 57)]]
ROW = [token for part in PARTS for token in part]


def blended(model):
    store = ChunkStore(model)
    for chunk in PARTS[:2]:
        store.add(chunk)
    return store.blend(PARTS)


def prefilled(model, repeats, **options):
    """Logits of a compiled prefill whose row is repeated, as `generate` does it."""
    inputs = dict(blended(model))
    inputs["input_ids"] = inputs["input_ids"].repeat_interleave(repeats, 0)
    backend = eager_cascade(min_tokens=0, strict=True, **options)
    with torch.no_grad():
        return torch.compile(model, backend=backend)(**inputs, logits_to_keep=1).logits


def test_repeated_rows_reuse_as_one_does():
    """Every layer repeats what is reused for itself: other nodes of the graph, equal values."""
    model = tiny_model("Llama", torch.float32)
    alone = prefilled(model, 1)
    torch._dynamo.reset()
    together = prefilled(model, 3)
    assert last_compilation().blend.declined is None
    torch._dynamo.reset()
    exact = prefilled(twin(model), 1)
    assert not torch.allclose(alone[0], full_prefill(model, ROW)[0][-1:])
    for row in together:
        assert_close_to_reference(row, alone[0], exact[0])


def test_a_graph_with_gradients_computes_in_full():
    """As eager code does, and as the backend does with any graph that trains."""
    model = tiny_model("Llama", torch.float32)
    inputs = blended(model)
    compiled = torch.compile(model, backend=eager_cascade(min_tokens=0, recompute_ratio=0))
    logits = compiled(**inputs, logits_to_keep=1).logits
    assert logits.requires_grad
    exact, _ = full_prefill(twin(model), ROW)
    usual, _ = full_prefill(model, ROW)
    assert_close_to_reference(logits[0].detach(), usual[-1:], exact[-1:])
