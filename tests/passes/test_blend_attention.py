"""Attention of chosen rows: with what stands in the cache already, by hand, on a GPU, sharded."""

from fractions import Fraction
from unittest import mock

import pytest
import torch
import transformers
from support.blend_models import arguments, blended, full, model_of, prefill_of, prompt_of
from support.capture import joint_graph
from support.lowering import lowered_for_cuda
from support.tolerance import assert_close_to_reference
from torch import fx

from torch_cascade.compiler.capture import capture
from torch_cascade.compiler.graph import Sizes, tensor, value
from torch_cascade.compiler.options import Options
from torch_cascade.compiler.pass_base import PassContext
from torch_cascade.compiler.record import Compilation
from torch_cascade.compiler.report import Reason
from torch_cascade.passes import token_attention
from torch_cascade.passes.blend import BlendPass
from torch_cascade.passes.verify import check_graph


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
@pytest.mark.parametrize("batch", [1, 2])
def test_on_a_gpu_no_mask_is_read(family, batch):
    """All attentions of a full reuse: `attend` by positions, with the window where there is one."""
    model = model_of(family)
    prompt = prompt_of(model, [[7, 9, 5], [5, 4, 7, 5]][:batch])
    gm = joint_graph(prefill_of(model), *arguments(prompt), prepare=capture)
    graph = gm.graph
    options = Options(decide="always", strict=True, recompute_ratio=Fraction(0))
    context = PassContext(Sizes.of(graph), options, Compilation())
    with mock.patch.object(token_attention, "reads_positions", lambda device: True):
        BlendPass().apply(graph, context)  # on fakes of a GPU, torch without CUDA traces nothing
    check_graph(graph, after="blend")
    attends = graph.find_nodes(op="call_function", target=torch.ops.cascade.attend.default)
    assert len(attends) == 3
    for node in attends:
        assert node.args[3] is None and node.kwargs["q_positions"] is not None
        heads = [tensor(given).shape[1] for given in node.args[:3]]
        assert heads == [6, 3, 3]  # a group reads one head of keys: no copies for each of its heads
        assert node.kwargs.get("window") == (8 if family == "Mistral" else None)
    lowered = lowered_for_cuda(gm, context)
    kernels = [n for n in lowered.nodes if "triton_kernel_wrapper" in str(n.target)]
    assert len(kernels) >= 3
    for kernel in kernels:
        read = [x for x in kernel.kwargs["kwargs"].values() if isinstance(x, fx.Node)]
        tensors = [x for x in read if isinstance(value(x), torch.Tensor)]
        assert len(set(tensors)) == len(tensors), "what is given twice may be written twice"


def test_attention_written_by_hand():
    """No SDPA to be found: matrix products and a softmax, of which rows are made like of others."""
    model = model_of("Llama")
    model.set_attn_implementation("eager")
    prompt = prompt_of(model, [[7, 9, 5]])
    got = blended(model, prompt, recompute_ratio=1)
    assert got.record.layers == ("computed", "checked", "reused")
    exact = model_of("Llama", torch.float64)
    assert_close_to_reference(
        got.logits, full(model, prompt).logits, full(exact, prompt.to(torch.float64)).logits
    )


def latent_model(dtype=torch.float32):
    """Tiny DeepSeek: latent attention, whose keys and values differ in size, and routed experts."""
    torch.manual_seed(11)
    config = transformers.DeepseekV3Config(
        vocab_size=101,
        hidden_size=48,
        intermediate_size=72,
        moe_intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=6,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        q_lora_rank=20,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=10,
        v_head_dim=14,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        initializer_range=0.1,
    )
    model = transformers.DeepseekV3ForCausalLM(config).eval().to(dtype)
    model.set_experts_implementation("batched_mm")
    return model


def test_latent_attention_is_declined_by_name():
    """The groups of its router are chosen by an op that has no rule; all tokens are computed."""
    model = latent_model()
    prompt = prompt_of(model, [[7, 9, 5]])
    got = blended(model, prompt, strict=False)
    assert got.record.declined.reason in (Reason.NO_TOKEN_RULE, Reason.TOKENS_MIXED)
    assert got.record.declined.node and got.record.declined.detail
    exact = full(latent_model(torch.float64), prompt.to(torch.float64))
    assert_close_to_reference(got.logits, full(model, prompt).logits, exact.logits)
