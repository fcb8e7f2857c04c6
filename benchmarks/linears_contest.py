"""Engines and launch configurations of products with several weights, and what judges them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import linear

from torch_cascade.benchmarks import check, peers
from torch_cascade.benchmarks.linears_work import Inputs, Row
from torch_cascade.kernels.launch_config import padded
from torch_cascade.kernels.linears import linears_torch
from torch_cascade.kernels.linears_config import LinearsConfig

Call = Callable[[], Sequence[Tensor]]

BLOCK_N = (16, 32, 64)
BLOCK_K = (64, 128, 256, 512)
STAGES = range(2, 9)
WARPS = (1, 2, 4)


class Case:
    """Inputs with what the results are judged by: float64, and eager code in the same dtype."""

    def __init__(self, given: Inputs) -> None:
        """Compute both references."""
        exact = given.double()
        self.inputs = given
        self.reference = _columns(linears_torch(exact.x, exact.weights, exact.biases))
        self.eager = _columns(linears_torch(given.x, given.weights, given.biases))

    def judge(self, result: Sequence[Tensor]) -> check.Verdict:
        """An engine's outputs [M, Ni]."""
        return check.judge(_columns(result), self.eager, self.reference)


def _columns(outs: Sequence[Tensor]) -> Tensor:
    """Outputs [M, Ni] as [sum of Ni, M].

    The check looks at vectors of the last axis: one wrong column, or one wrong element of it, is
    lost among the thousands of columns of a row, but not among a column's few rows.
    """
    return torch.cat([out.mT for out in outs])


def kernel(given: Inputs, config: LinearsConfig | None = None) -> Call:
    """Our kernel: one launch, as it chooses or in the configuration given."""
    from torch_cascade.kernels.linears_launch import linears_triton

    return lambda: linears_triton(given.x, given.weights, given.biases, config=config)


def _cublas(given: Inputs) -> Call:
    return lambda: linears_torch(given.x, given.weights, given.biases)


def _cublas_joined(given: Inputs) -> Call:
    """What an engine that owns the weights does: they are joined before."""
    weight = torch.cat(given.weights)
    bias = None if given.biases is None else torch.cat(given.biases)
    columns = [each.shape[0] for each in given.weights]
    return lambda: linear(given.x, weight, bias).split(columns, -1)


def _inductor(given: Inputs) -> Call:
    products = peers.compiled(linears_torch, mode="max-autotune-no-cudagraphs")
    return lambda: products(given.x, given.weights, given.biases)


PEERS: tuple[peers.Peer[Inputs], ...] = (
    peers.Peer("kernel", kernel, cuda_only=True, ours=True),
    peers.Peer("cublas", _cublas),
    peers.Peer("cublas-joined", _cublas_joined),
    peers.Peer("inductor", _inductor),
)
NAMES = tuple(peer.name for peer in PEERS)
DEFAULT = NAMES[:3]  # autotuning takes a minute a row


def candidates(row: Row) -> list[LinearsConfig]:
    """Every configuration that divides the sizes, whether it fits the device or not."""
    block_m = padded(row.rows)
    return [
        LinearsConfig(block_m, block_n, block_k, stages, warps)
        for block_n, block_k, stages, warps in product(BLOCK_N, BLOCK_K, STAGES, WARPS)
        if row.features % block_k == 0 and not any(n % block_n for n in row.columns)
    ]


def fits(config: LinearsConfig, element: int, shared_memory: int) -> bool:
    """Have the tiles of all stages, of rows and of a weight, room in shared memory?"""
    stage = (config.block_m + config.block_n) * config.block_k * element
    return stage * config.stages <= shared_memory


def name(config: LinearsConfig) -> str:
    """In words: columns x features x stages, and warps; the rows are those of the line."""
    return f"{config.block_n}x{config.block_k}x{config.stages}, warps {config.warps}"
