"""The oracle itself: against torch where torch has the function, against hand-made numbers else."""

import math

import pytest
import torch
import torch.nn.functional as F

from torch_cascade.kernels.reference import (
    attend_reference,
    merge_reference,
    positions_visible,
    sdpa_reference,
)

INF = math.inf


def inputs(group=1, keys=7, dv=16):
    q = torch.randn(3, 2 * group, 5, 16, dtype=torch.float64)
    return q, torch.randn(3, 2, keys, 16).double(), torch.randn(3, 2, keys, dv).double()


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("dv", [16, 24])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_is_torchs_attention(group, dv, scale):
    q, k, v = inputs(group, dv=dv)
    options = {"scale": scale, "enable_gqa": True}
    mask, bias = torch.rand(3, 1, 5, 7) > 0.4, torch.randn(5, 7).double()
    for args in ((None,), (mask,), (bias,), (None, True)):
        expected = F.scaled_dot_product_attention(q, k, v, args[0], 0.0, *args[1:], **options)
        torch.testing.assert_close(sdpa_reference(q, k, v, *args, scale=scale), expected)


def test_the_lse_is_a_natural_logarithm_of_scaled_scores():
    q, k, v = inputs()
    _, lse = attend_reference(q, k, v)
    torch.testing.assert_close(lse, torch.logsumexp(q @ k.transpose(-1, -2) / 4, -1))
    one = torch.ones(1, 1, 1, 1)
    assert attend_reference(one, one, one)[1].item() == 1.0
    assert attend_reference(one, torch.zeros(1, 1, 8, 1), torch.ones(1, 1, 8, 1))[
        1
    ].item() == pytest.approx(math.log(8))


def test_branches_share_a_row_of_keys():
    q, k, v = inputs()
    o, lse = attend_reference(torch.cat([q, q]), k, v, branches=2)
    for n in range(6):
        row = attend_reference(q[n % 3 : n % 3 + 1], k[n // 2 : n // 2 + 1], v[n // 2 : n // 2 + 1])
        torch.testing.assert_close((o[n], lse[n]), (row[0][0], row[1][0]))


def test_rows_without_a_key():
    q, k, v = inputs()
    mask = torch.arange(5)[:, None] != 2
    o, lse = attend_reference(q, k, v, mask)
    assert (lse[:, :, 2] == -INF).all()
    assert (o[:, :, 2] == 0).all()
    assert torch.isfinite(lse[:, :, [0, 1, 3, 4]]).all()
    o, lse = attend_reference(q, k[:, :, :0], v[:, :, :0])
    assert (lse == -INF).all()
    assert (o == 0).all()


def test_positions_by_hand():
    visible = positions_visible(torch.tensor([3, 4, 6, 9]), 4, kv_start=4, window=3)
    assert visible.int().tolist() == [
        [0, 0, 0, 0],  # position 3: before every key
        [1, 0, 0, 0],  # 4: itself
        [1, 1, 1, 0],  # 6: 4, 5, 6
        [0, 0, 0, 1],  # 9: 7, 8 and itself, of which 7 is here
    ]


def test_positions_are_causal_masks():
    q, k, v = inputs(keys=5)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    got, _ = attend_reference(q, k, v, q_positions=torch.arange(5))
    torch.testing.assert_close(got, expected)


def test_softcap_comes_before_the_mask():
    q, k, v = inputs()
    bias = torch.randn(5, 7).double()
    scores = 2 * torch.tanh(q @ k.transpose(-1, -2) / 4 / 2) + bias
    o, lse = attend_reference(q, k, v, bias, softcap=2.0)
    torch.testing.assert_close(o, scores.softmax(-1) @ v)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_merge_by_hand():
    """Weights 1/4 and 3/4."""
    o = [torch.tensor([[0.0, 4.0]]), torch.tensor([[8.0, 0.0]])]
    out, lse = merge_reference(o, [torch.tensor([0.0]), torch.tensor([math.log(3.0)])])
    torch.testing.assert_close(out, torch.tensor([[6.0, 1.0]]).double())
    torch.testing.assert_close(lse, torch.tensor([math.log(4.0)]).double())
    empty = torch.tensor([-INF])
    out, lse = merge_reference([torch.zeros(1, 2)] * 2, [empty, empty])
    assert (out.tolist(), lse.tolist()) == ([[0.0, 0.0]], [-INF])


def test_float32_is_the_same_formula():
    q, k, v = inputs()
    for a, b in zip(
        attend_reference(q, k, v, dtype=torch.float32), attend_reference(q, k, v), strict=True
    ):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-5)
