"""Every spelling of hand-written attention is read as what it computes."""

import pytest
import torch
from support import spellings_matmuls, spellings_scores
from support.site_check import check_sites
from support.spellings import SPELLINGS, D

from torch_cascade.passes.site import AttentionSite

assert spellings_scores and spellings_matmuls and len(SPELLINGS) == 47


def summary(site) -> str:
    """Axes of q, k, v, scale, what a blind row yields, mask kinds from the last applied."""
    axes = ["".join(operand.axes) for operand in (site.q, site.k, site.v)]
    scale = D**-0.5 if site.scale is None else round(site.scale, 12)
    fills = ("" if m.fill is None else f"<{m.fill}" for m in site.masks)
    masks = [m.kind + fill for m, fill in zip(site.masks, fills, strict=True)]
    out = [] if site.axes is None else ["->", "".join(site.axes)]
    return " ".join([*axes, str(scale), site.fully_masked, *masks, *out])


@pytest.mark.parametrize("name", SPELLINGS)
def test_static_float32(name):
    spelling = SPELLINGS[name]
    (site,) = check_sites(spelling.fn, *spelling.inputs(torch.float32), dynamic=False)
    assert isinstance(site, AttentionSite), str(site)
    assert summary(site) == spelling.site
    assert site.form == "eager" and not site.is_causal


@pytest.mark.parametrize("index, name", enumerate(SPELLINGS))
def test_symbolic_sizes_and_other_dtypes(index, name):
    """One dtype a spelling, in turn; eager code rounds as it likes, the site is the same."""
    spelling = SPELLINGS[name]
    dtype = (torch.bfloat16, torch.float16, torch.float64)[index % 3]
    found = check_sites(spelling.fn, *spelling.inputs(dtype), dynamic=True)
    assert [summary(site) for site in found if site] == [spelling.site]
