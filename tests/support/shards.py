"""A model whose heads are spread over ranks; each rank runs in a process of its own, by gloo."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from support.backend import eager_cascade, last_compilation
from support.blend_plain import WIDTH, inputs
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional_collectives
from torch.nn.functional import scaled_dot_product_attention as sdpa

from torch_cascade import reuse_kv

HEADS, TOKENS, LAYERS, RANKS = 4, 14, 3, 2
Reduce = Callable[[Tensor], Tensor]


class Sharded(nn.Module):
    """Layers with some of the heads; what they add to a token is summed over ranks."""

    def __init__(self, heads: slice = slice(0, HEADS), reduce: Reduce = lambda x: x) -> None:
        super().__init__()
        torch.manual_seed(13)
        self.reduce = reduce
        size = WIDTH // HEADS
        for name in ("qkv", "out"):
            setattr(self, name, nn.ParameterList())
        for _ in range(LAYERS):
            qkv = torch.randn(3, HEADS, size, WIDTH) / WIDTH**0.5
            self.qkv.append(nn.Parameter(qkv[:, heads]))
            self.out.append(nn.Parameter((torch.randn(HEADS, size, WIDTH) / 5)[heads]))

    def forward(self, x: Tensor, cached: list[tuple[Tensor, Tensor]], fresh: Tensor) -> Tensor:
        for qkv, out, pair in zip(self.qkv, self.out, cached, strict=True):
            q, k, v = torch.einsum("ntw,chdw->cnhtd", x, qkv).unbind(0)
            k, v = reuse_kv(k, v, *pair, fresh)
            o = sdpa(q, k, v, is_causal=True)
            x = x + self.reduce(torch.einsum("nhtd,hdw->ntw", o, out).contiguous())
        return x[:, -1:]


def prompt(heads: slice = slice(0, HEADS)) -> tuple[Any, ...]:
    """The same on all ranks, but for the heads of what is cached."""
    torch.manual_seed(17)
    x, cached, fresh = inputs(2, LAYERS, TOKENS)
    return x, [(k[:, heads], v[:, heads]) for k, v in cached], fresh


def blend(model: nn.Module, args: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[Any, Any]:
    """The result, and the record of the blend."""
    torch._dynamo.reset()
    backend = eager_cascade(**{"decide": "always"} | options)
    with torch.no_grad():
        got = torch.compile(model, backend=backend, fullgraph=True)(*args)
    return got, last_compilation().blend


def on_ranks(runs: Sequence[Mapping[str, Any]]) -> list[list[tuple[Tensor, str]]]:
    """For each rank what it computes with some options each, and why it did not blend."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(n, folder, runs)) for n in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        return [pickle.loads(Path(folder, f"{n}").read_bytes()) for n in range(RANKS)]


def _rank(number: int, folder: str, runs: Sequence[Mapping[str, Any]]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=number, world_size=RANKS)
    group = dist.group.WORLD
    own = slice(number * HEADS // RANKS, (number + 1) * HEADS // RANKS)
    model = Sharded(own, lambda x: functional_collectives.all_reduce(x, "sum", group))
    found = []
    for options in runs:
        got, record = blend(model, prompt(own), options)
        found.append((got, str(record.declined or "")))
    Path(folder, f"{number}").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()
