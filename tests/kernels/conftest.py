"""The device of the tests of Triton kernels."""

import pytest
import torch
from support.interpreter import interpreted


@pytest.fixture
def device():
    """ "cuda" if there is one; else "cpu", where the kernels are interpreted."""
    if torch.cuda.is_available():
        yield "cuda"
        return
    with interpreted():
        yield "cpu"
