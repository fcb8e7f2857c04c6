"""Every spelling of hand-written attention is read as what it computes."""

import pytest
import torch
from support import spellings_matmuls, spellings_scores, spellings_sinks
from support.site_check import check_sites
from support.spellings import SPELLINGS, D

from torch_cascade.compiler.graph import shape
from torch_cascade.passes.site import AttentionSite

assert spellings_scores and spellings_matmuls and spellings_sinks and len(SPELLINGS) == 66


def summary(site) -> str:
    """Axes of q, k, v, scale, cap, what a blind row yields, masks from the last applied, sinks."""
    axes = ["".join(operand.axes) for operand in (site.q, site.k, site.v)]
    scale = D**-0.5 if site.scale is None else round(site.scale, 12)
    fills = ("" if m.fill is None else f"<{m.fill}" for m in site.masks)
    masks = [m.kind + fill for m, fill in zip(site.masks, fills, strict=True)]
    out = [] if site.axes is None else ["->", "".join(site.axes)]
    cap = [] if site.softcap is None else [f"cap<{round(site.softcap, 6)}"]
    column = [] if site.sinks is None else ["1" if s == 1 else "*" for s in shape(site.sinks)]
    sinks = ["sinks<" + "".join(column)] if column else []
    return " ".join([*axes, str(scale), *cap, site.fully_masked, *masks, *sinks, *out])


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
