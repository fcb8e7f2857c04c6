"""`find_attention`: calls of `cascade::sdpa`, symbolic scales, the order of what is found."""

import math

import pytest
import torch
import torch.nn.functional as F
from support.site_check import check_sites, run
from support.spellings import D, E, H, L, M, N, keep, qkv

from torch_cascade.compiler.report import Declined, Reason
from torch_cascade.kernels import ops

sdpa = torch.ops.cascade.sdpa
assert ops


def only(found):
    (site,) = found
    return site


@pytest.mark.parametrize("dynamic", [False, True])
def test_sdpa_with_positional_arguments(dynamic):
    q, k, v = qkv(torch.float32)
    bias = torch.randn(N, 1, M, L)
    fn = lambda q, k, v, bias: sdpa(q, k, v, bias, False, scale=0.3)  # noqa: E731
    site = only(check_sites(fn, q, k, v, bias, dynamic=dynamic))
    assert (site.form, site.scale, site.fully_masked) == ("sdpa", 0.3, "zero")
    assert site.q.axes == ("n", "h", "q", "d") and site.k.axes == site.v.axes
    assert [mask.kind for mask in site.masks] == ["add"]


def test_sdpa_with_keyword_arguments():
    q, k, v = qkv(torch.float32)
    mask = keep(M, L)
    mask[1] = False
    fn = lambda q, k, v, mask: sdpa(attn_mask=mask, v=v, k=k, q=q)  # noqa: E731
    site = only(check_sites(fn, q, k, v, mask))
    assert site.scale is None and [mask.kind for mask in site.masks] == ["keep"]


def test_sdpa_is_causal_from_the_top_left():
    q, k, v = qkv(torch.float32)
    site = only(check_sites(lambda q, k, v: sdpa(q, k, v, None, True), q, k, v))
    assert site.is_causal and site.masks == ()


def test_sdpa_with_fewer_kv_heads():
    q, (_, k, v) = torch.randn(N, 3 * H, M, D), qkv(torch.float32)
    site = only(check_sites(lambda q, k, v: sdpa(q, k, v, enable_gqa=True), q, k, v))
    assert site.k.axes == ("n", "h", "k", "d")


def test_sdpa_of_three_dims():
    q, k, v = (x[0] for x in qkv(torch.float32))
    mask = keep(H, M, L)
    site = only(check_sites(lambda q, k, v, mask: sdpa(q, k, v, mask), q, k, v, mask))
    assert site.q.axes == ("n", "q", "d") and site.k.axes == ("n", "k", "d")


@pytest.mark.parametrize("rank", [2, 5])
def test_sdpa_of_other_ranks_is_declined(rank):
    q, k, v = (x[0, 0] if rank == 2 else x[None] for x in qkv(torch.float32))
    declined = only(check_sites(lambda q, k, v: sdpa(q, k, v), q, k, v))
    assert isinstance(declined, Declined) and declined.reason is Reason.RANK


def test_sdpa_with_one_query_row_for_many_keys_is_declined():
    q, k, v = qkv(torch.float32)
    declined = only(check_sites(lambda q, k, v: sdpa(q, k, v), q[:1].clone(), k, v))
    assert isinstance(declined, Declined) and declined.reason is Reason.RANK


def test_everything_is_found_in_graph_order():
    def fn(q, k, v):
        a = sdpa(q, k, v[..., :D])
        weights = torch.softmax(a @ k.mT * 0.25, -1)
        b = weights @ v
        c = torch.softmax(q @ k.mT * 0.5, -1) @ v
        return sdpa(a, k, v[..., :D]), b, weights, c

    q, k, _ = qkv(torch.float32)
    found = check_sites(fn, q, k, torch.randn(N, H, L, D + 3))
    kinds = [getattr(site, "form", "declined") for site in found]
    assert sorted(kinds) == ["declined", "eager", "sdpa", "sdpa"]
    nodes = run(fn, q, k, torch.randn(N, H, L, D + 3)).module.graph.nodes
    order = [node.name for node in nodes]
    places = [order.index(s.node if isinstance(s, Declined) else s.node.name) for s in found]
    assert places == sorted(places)


@pytest.mark.parametrize("where", ["scores", "q", "k"])
def test_a_python_float_that_became_symbolic_is_the_scale(where):
    def fn(q, k, v, scale):
        if where == "q":
            return torch.softmax((q * scale) @ k.mT, -1) @ v
        if where == "k":
            return torch.softmax(q @ (k * scale).mT, -1) @ v
        return torch.softmax((q @ k.mT) * scale, -1) @ v

    site = only(check_sites(fn, *qkv(torch.float32), 0.3, dynamic=True))
    assert isinstance(site.scale, torch.fx.Node)
    assert site.scale.meta["val"].ndim == 0


def test_division_by_a_symbolic_float_is_declined():
    fn = lambda q, k, v, scale: torch.softmax((q @ k.mT) / scale, -1) @ v  # noqa: E731
    declined = only(check_sites(fn, *qkv(torch.float32), 0.3, dynamic=True))
    assert isinstance(declined, Declined) and declined.reason is Reason.TENSOR_SCALE


@pytest.mark.parametrize(
    "scale",
    [
        lambda q: 1 / math.sqrt(q.shape[-1]),
        lambda q: q.shape[-1] ** -0.5,
        lambda q: 1 / q.size(-1) ** 0.5,
    ],
    ids=["sqrt", "power", "inverse"],
)
def test_a_scale_of_the_symbolic_width_is_the_default(scale):
    fn = lambda q, k, v: torch.softmax(q @ k.mT * scale(q), -1) @ v  # noqa: E731
    site = only(check_sites(fn, *qkv(torch.float32), dynamic=True))
    assert site.scale is None


def test_a_scale_of_another_size_is_declined():
    fn = lambda q, k, v: torch.softmax(q @ k.mT * k.shape[2] ** -0.5, -1) @ v  # noqa: E731
    declined = only(check_sites(fn, *qkv(torch.float32), dynamic=True))
    assert isinstance(declined, Declined) and declined.reason is Reason.TENSOR_SCALE


def test_sizes_asked_of_the_scores_are_no_use_of_them():
    def fn(q, k, v):
        weights = torch.softmax(q @ k.mT * 0.25, -1)
        return (weights @ v).view(weights.shape[0], -1), v.new_zeros(weights.shape[-1])

    assert only(check_sites(fn, *qkv(torch.float32), dynamic=True))


def test_values_expanded_to_the_sizes_of_the_scores():
    """Under dynamic=True V's batched shape is often written with sizes asked of the scores."""

    def fn(q, k, v):
        scores = q @ k.mT * 0.25
        k, v = (x.expand(scores.shape[0], -1, -1, -1) for x in (k, v))
        return torch.softmax(scores, -1) @ v

    q, k, v = qkv(torch.float32)
    assert only(check_sites(fn, q, k, v[:1].clone(), dynamic=True))


def test_expanded_prefix_and_transposed_inputs():
    """A batch expanded with sizes of the graph, heads from transposed projections."""

    def fn(q, prefix, k, v):
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        k = torch.cat([prefix.expand(q.shape[0], -1, -1, -1), k], 2)
        scores = (q * D**-0.5) @ k.transpose(-1, -2)
        return torch.softmax(scores, -1) @ v

    inputs = (
        torch.randn(N, M, H, D),
        torch.randn(1, H, L, D),
        torch.randn(N, 4, H, D),
        torch.randn(N, H, L + 4, E),
    )
    for dynamic in (False, True):
        site = only(check_sites(fn, *inputs, dynamic=dynamic))
        assert "permute" in site.k.node.name and site.k.axes == ("n", "h", "d", "k")


def test_a_mask_of_another_dtype():
    fn = lambda q, k, v, m: torch.softmax(q @ k.mT * 0.25 + m, -1).to(q.dtype) @ v  # noqa: E731
    site = only(check_sites(fn, *qkv(torch.float32), torch.randn(M, L, dtype=torch.float64)))
    assert site.node.meta["val"].dtype == torch.float32


def test_multi_head_attention():
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(24, 3, batch_first=True)

        def forward(self, x, y, hidden, padded):
            return self.attention(x, y, y, attn_mask=hidden, key_padding_mask=padded)[0]

    inputs = (torch.randn(N, M, 24), torch.randn(N, L, 24), ~keep(M, L), torch.zeros(N, L).bool())
    site = only(check_sites(Module().eval(), *inputs))
    assert site.q.axes == ("n", "q", "d") and [m.kind for m in site.masks] == ["add"]


def test_a_real_attention_is_left_to_torch():
    """What was not raised is torch's own operator, not ours."""
    q, k, _ = qkv(torch.float32)
    assert check_sites(F.scaled_dot_product_attention, q, k, torch.randn(N, H, L, D)) == []
