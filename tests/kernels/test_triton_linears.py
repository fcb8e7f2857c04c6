"""The kernel of `cascade::linears`, interpreted or on a GPU, and its launch configurations."""

from __future__ import annotations

import pytest
import torch
from support.cross_compile import H200, compiled, launches
from torch import Tensor

from torch_cascade.kernels.linears import linears_torch
from torch_cascade.kernels.linears_config import MOST_ROWS, LinearsConfig, linears_config, takes
from torch_cascade.kernels.linears_launch import linears_triton

F = 192


def rows_of(rows: int, features: int, dtype: torch.dtype, device: str) -> Tensor:
    """Rows whose first and last features stand out: a step of the sum that is left out shows."""
    x = torch.randn(rows, features)
    x[:, 0], x[:, -1] = 5.0, -7.0
    return x.to(dtype).to(device)


def weights_of(columns, features, dtype, device):
    return [torch.randn(n, features).to(dtype).to(device) for n in columns]


def assert_right(outs, x, weights, biases=None):
    """Within the error that rounding the exact result and the sums may make, column by column."""
    exact = linears_torch(x.double(), [w.double() for w in weights], doubled(biases))
    sizes = linears_torch(x.double().abs(), [w.double().abs() for w in weights], absolute(biases))
    eps = torch.finfo(x.dtype).eps
    for out, want, size in zip(outs, exact, sizes, strict=True):
        assert out.dtype == x.dtype and out.is_contiguous() and out.shape == want.shape
        bound = eps * want.abs() + 2**-20 * size  # a rounding; a float32 sum of some hundred terms
        assert ((out.double() - want).abs() <= bound).all()


def doubled(biases):
    return None if biases is None else [b.double() for b in biases]


def absolute(biases):
    return None if biases is None else [b.double().abs() for b in biases]


@pytest.mark.parametrize("rows", [1, 5, 16, 17, 33, 64])
@pytest.mark.parametrize("columns", [(96,), (96, 32), (96, 32, 48)], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biased"])
def test_products(rows, columns, bias, device):
    x = rows_of(rows, F, torch.bfloat16, device)
    weights = weights_of(columns, F, torch.bfloat16, device)
    biases = [torch.randn(n).to(x) for n in columns] if bias else None
    assert_right(linears_triton(x, weights, biases), x, weights, biases)


@pytest.mark.parametrize("features", [64, 128, 512, 576])
def test_float16_and_other_numbers_of_features(features, device):
    x = rows_of(7, features, torch.float16, device)
    weights = weights_of((64, 64), features, torch.float16, device)
    assert_right(linears_triton(x, weights), x, weights)


def test_rows_and_weights_that_are_parts_of_larger_ones(device):
    x = rows_of(9, 3 * F, torch.bfloat16, device)[2:8, F : 2 * F]
    whole = weights_of((160,), 2 * F, torch.bfloat16, device)[0]
    weights = [whole[:96, :F], whole[96:, F:]]
    assert not x.is_contiguous() and not weights[0].is_contiguous()
    assert_right(linears_triton(x, weights), x, weights)


def test_a_product_is_the_same_whatever_stands_beside_it(device):
    x = rows_of(6, F, torch.bfloat16, device)
    weights = weights_of((96, 32, 48), F, torch.bfloat16, device)
    config = LinearsConfig(block_m=16, block_n=16, block_k=64, stages=3, warps=2)
    together = linears_triton(x, weights, config=config)
    for weight, out in zip(weights, together, strict=True):
        assert torch.equal(linears_triton(x, [weight], config=config)[0], out)


def test_rows_that_are_infinite_or_nan_stay_alone(device):
    x = rows_of(5, F, torch.bfloat16, device)
    x[1], x[3] = torch.nan, torch.inf
    weights = weights_of((64,), F, torch.bfloat16, device)
    (out,) = linears_triton(x, weights)
    kept = [0, 2, 4]
    assert out[1].isnan().all() and not out[3].isfinite().any()
    assert_right([out[kept]], x[kept], weights)


@pytest.mark.parametrize(
    ("rows", "features", "columns", "taken"),
    [
        (1, 64, (16,), True),
        (MOST_ROWS, 64, (16, 32, 48), True),
        (MOST_ROWS + 1, 64, (16,), False),
        (0, 64, (16,), False),
        (5, 0, (16,), False),
        (5, 96, (16,), False),
        (5, 64, (16, 0), False),
        (5, 64, (16, 40), False),
        (5, 64, (16, 16, 16, 16), False),
    ],
)
def test_what_it_takes(rows, features, columns, taken):
    x = torch.zeros(rows, features, dtype=torch.float16)
    assert takes(x, [x.new_zeros(n, features) for n in columns]) == taken


# --- launch configurations ------------------------------------------------------------------------

SHAPES = {
    "llama 8b q k v": (4096, (4096, 1024, 1024)),
    "llama 8b gate up": (4096, (14336, 14336)),
    "llama 8b down": (14336, (4096,)),
    "llama 8b o": (4096, (4096,)),
    "llama 1b down": (8192, (2048,)),
    "smollm2 q k v": (576, (576, 192, 192)),
    "odd": (192, (16, 80)),
}
MEASURED = {
    # rows, shape: columns of a tile, features of a step, stages, warps; benchmarks/LOG.md, entry 14
    (16, "llama 8b q k v"): (32, 256, 4, 2),
    (16, "llama 8b gate up"): (64, 128, 3, 2),
    (16, "llama 8b down"): (32, 256, 6, 2),
    (16, "llama 8b o"): (32, 256, 6, 2),
    (16, "llama 1b down"): (16, 512, 4, 2),
    (64, "llama 8b q k v"): (64, 128, 6, 4),
    (64, "llama 8b gate up"): (64, 128, 3, 4),
    (64, "llama 8b down"): (32, 128, 6, 4),
    (64, "llama 8b o"): (32, 128, 6, 4),
}


@pytest.mark.parametrize("case", MEASURED, ids=str)
def test_what_was_measured_is_chosen(case):
    rows, name = case
    features, columns = SHAPES[name]
    config = linears_config(rows, features, columns, processors=132)
    assert (config.block_n, config.block_k, config.stages, config.warps) == MEASURED[case]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("rows", [1, 16, 17, MOST_ROWS])
@pytest.mark.parametrize("processors", [78, 132, 144])
def test_tiles_divide_and_fit(name, rows, processors):
    features, columns = SHAPES[name]
    config = linears_config(rows, features, columns, processors)
    assert config.block_m >= max(rows, 16) and features % config.block_k == 0
    assert not any(n % config.block_n for n in columns)
    stage = (config.block_m + config.block_n) * config.block_k * 2
    assert config.stages * stage <= 227 * 1024


class Products:
    """A call on meta tensors."""

    def __init__(self, rows: int, name: str) -> None:
        self.rows, (self.features, self.columns) = rows, SHAPES[name]

    def call(self) -> None:
        x = torch.empty(self.rows, self.features, dtype=torch.bfloat16, device="meta")
        weights = [x.new_empty(n, self.features) for n in self.columns]
        linears_triton(x, weights, [x.new_empty(n) for n in self.columns])


@pytest.mark.parametrize("rows", [16, MOST_ROWS])
@pytest.mark.parametrize("name", ["llama 8b q k v", "llama 8b gate up", "llama 8b down", "odd"])
def test_it_compiles_without_spills(name, rows):
    """Weights are loaded 16 bytes at a time whichever of them a program reads."""
    (launch,) = launches([Products(rows, name)], H200)
    binary = compiled(launch, H200)
    assert binary.stack == 0 and binary.shared <= H200.limits.shared_memory
    copies = [line for line in binary.ptx.splitlines() if "cp.async.c" in line and "global" in line]
    assert copies and all(", 0x10" in line for line in copies)
