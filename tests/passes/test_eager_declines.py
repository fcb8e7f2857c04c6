"""What looks like attention is declined with its reason, or not reported at all."""

import pytest
import torch
from support import lookalikes_sinks
from support.lookalikes import LOOKALIKES
from support.site_check import check_sites

assert lookalikes_sinks


@pytest.mark.parametrize("name", LOOKALIKES)
def test_is_no_site(name):
    fn, inputs, reason = LOOKALIKES[name]
    found = check_sites(fn, *inputs(torch.float32), dynamic=False)
    assert [getattr(d, "reason", "a site") for d in found] == ([] if reason is None else [reason])
