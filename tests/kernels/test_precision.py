"""float32 products are exact unless the user allows tf32, by whichever of torch's settings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from torch_cascade.kernels import triton_call

matmul = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = matmul.fp32_precision
    yield
    matmul.fp32_precision = before


def test_exact_by_default():
    assert triton_call._precision(torch.float32) == "ieee"


@pytest.mark.parametrize(
    "setting", ["set_float32_matmul_precision", "allow_tf32", "fp32_precision"]
)
def test_each_setting_allows_tf32(setting):
    if setting == "set_float32_matmul_precision":
        torch.set_float32_matmul_precision("high")
    else:
        setattr(matmul, setting, True if setting == "allow_tf32" else "tf32")
    assert triton_call._precision(torch.float32) == "tf32"
    assert triton_call._precision(torch.bfloat16) == "ieee"
