"""The eager attention of transformers' models: every layer is one site, proved by its values."""

import pytest
import torch
from support.site_check import check_sites

from torch_cascade.compiler.report import Reason

transformers = pytest.importorskip("transformers")

WIDTHS = {
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "num_hidden_layers": 1,
    "head_dim": 8,
}
GPT = {"n_embd": 48, "n_layer": 1, "n_head": 6, "n_positions": 64}
PLAIN = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 6}
SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention"], "query_pre_attn_scalar": 8}
FAMILIES = {
    "Llama": (WIDTHS, "LlamaForCausalLM"),
    "GPT2": (GPT, "GPT2LMHeadModel"),
    "GPTNeoX": (PLAIN | {"intermediate_size": 72}, "GPTNeoXForCausalLM"),
    "GPTJ": (GPT | {"rotary_dim": 4}, "GPTJForCausalLM"),
    "Gemma3Text": (WIDTHS | SLIDING, "Gemma3ForCausalLM"),
    "Falcon": (PLAIN, "FalconForCausalLM"),
    "Bloom": ({"hidden_size": 48, "n_layer": 1, "n_head": 6}, "BloomForCausalLM"),
}


def model(family, **changes):
    extras, name = FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(
        vocab_size=101, initializer_range=0.1, bos_token_id=1, eos_token_id=2, **extras, **changes
    )
    config._attn_implementation = "eager"
    return getattr(transformers, name)(config).eval()


def find(tiny, padded):
    ids, mask = torch.randint(3, 101, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0  # the second prompt is padded on the left
    options = {"attention_mask": mask} if padded else {}
    return check_sites(lambda ids: tiny(ids, use_cache=False, **options).logits, ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_is_a_site(family):
    (site,) = find(model(family), padded=family != "Bloom")
    assert site, str(site)
    batch = ("n", "h")
    assert site.q.axes == (*batch, "q", "d") and site.v.axes == (*batch, "k", "d")
    assert sorted(site.k.axes) == sorted((*batch, "k", "d"))
    assert site.scale == pytest.approx(8**-0.5)
    kinds = ["add", "add"] if family == "Bloom" else ["add"]  # Bloom also adds ALiBi
    assert [mask.kind for mask in site.masks] == kinds


def test_bloom_padded():
    """Its ALiBi is then [n, h, k] in memory, which broadcasts to no scores."""
    (site,) = find(model("Bloom"), padded=True)
    assert site.reason is Reason.MASK_SHAPE


def test_attention_weights_that_are_returned():
    attention = model("Llama").model.layers[0].self_attn
    hidden, angles = torch.randn(2, 9, 48), torch.randn(2, 2, 9, 8)
    (site,) = check_sites(
        lambda x, angles: attention(x, (angles[0], angles[1]), None), hidden, angles
    )
    assert site.reason is Reason.SCORES_USED
