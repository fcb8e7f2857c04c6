"""Rules that decide whether a shape is computed as a cascade: ours, and those of others.

The others count in units of their own systems (batches of requests with one prefix, trees), and are
applied here to one request and its branches. A rule says the name of a strategy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from torch_cascade.benchmarks.grid import Shape
from torch_cascade.benchmarks.strategies import (
    JOIN_ROOT,
    JOIN_SUFFIX,
    LEVELS,
    NAIVE,
    is_shared,
    is_view,
)
from torch_cascade.compiler.decide import Facts, cheapest_of, priced
from torch_cascade.compiler.device import Device
from torch_cascade.compiler.work import KeyRun, Work

Rule = Callable[[Shape, Device], str]

DTYPES = {2: "bfloat16", 4: "float32"}


def work_of(shape: Shape, kind: str) -> Work:
    """What the compiler's passes would tell the cost model of a shape."""
    heads = shape.heads
    runs = [KeyRun(1, shape.root)] if shape.root else []
    runs.append(KeyRun(shape.requests, shape.prefix))
    if shape.suffix:
        runs.append(KeyRun(shape.batch, shape.suffix))
    return Work(
        batch=shape.batch,
        heads=heads.query,
        q_len=shape.queries,
        kv_heads=heads.kv,
        naive_heads=heads.kv,
        d_k=heads.dim,
        d_v=heads.dim,
        q_bytes=heads.element,
        kv_bytes=heads.element,
        dtype=DTYPES[heads.element],
        copied=not is_view(shape),
        device=torch.device(kind),
        runs=tuple(runs),
    )


def facts_of(shape: Shape, device: Device) -> Facts:
    """Both ways of a shape priced by the cost model, all levels of its own."""
    return priced(work_of(shape, device.kind), device)


def ways_of(shape: Shape, device: Device) -> dict[str, Work]:
    """Every cascade of a shape that the compiler chooses from, by the strategy's name."""
    work = work_of(shape, device.kind)
    ways = {LEVELS: work}
    if device.kind != "cpu" and shape.root and shape.suffix:
        root, prefix, suffix = work.runs
        lower = KeyRun(suffix.rows, prefix.length + suffix.length, joined=True)
        upper = KeyRun(prefix.rows, root.length + prefix.length, joined=True)
        ways[JOIN_SUFFIX] = replace(work, runs=(root, lower), own=work.own_tokens)
        ways[JOIN_ROOT] = replace(work, runs=(upper, suffix), own=work.own_tokens)
    return ways


def model(shape: Shape, device: Device) -> str:
    """`decide=auto`."""
    ways = ways_of(shape, device)
    names, works = list(ways), list(ways.values())
    chosen = cheapest_of(works, device)
    return names[chosen] if priced(works[chosen], device).pays else NAIVE


def always(shape: Shape, device: Device) -> bool:
    """`decide=always`."""
    return is_shared(shape)


def never(shape: Shape, device: Device) -> bool:
    """`decide=never`, which is plain Inductor."""
    return False


def vllm(shape: Shape, device: Device) -> bool:
    """`use_cascade_attention` of vLLM's flash_attn backend (v1), one request's branches as batch.

    From 256 keys and 8 sequences on, and then by waves of programs, in which the length of the
    prefix all but cancels.
    """
    batch, prefix = shape.branches, shape.root + shape.prefix
    if prefix < 256 or batch < 8:
        return False
    group = shape.heads.query // shape.heads.kv
    if group == 1 or shape.queries != 1:
        return True
    processors, tiles = int(device["processors"]), -(-prefix // 128)
    shared = -(-shape.heads.query * -(-batch // 128) // processors) * tiles
    decoding = -(-batch * shape.heads.kv * -(-group // 128) * tiles // processors)
    return shared < decoding


def pat(shape: Shape, device: Device) -> bool:
    """PAT (`prefix_tree.h`): keys go down to a child unless a partial costs more than 4 keys."""
    tile = _query_tile(shape)

    def goes_down(parent: int, child: int) -> bool:
        saved = -(-parent // tile) - -(-(parent - child) // tile) - -(-child // tile)
        return saved * shape.prefix + 4 * child >= 0

    return is_shared(shape) and _stays(shape, goes_down)


def fasttree(shape: Shape, device: Device) -> bool:
    """FastTree (`schedule.py`): padding of query and key tiles against one more partial."""
    alpha, beta, gamma, keys_tile = 0.66, 0.33, 0.1, 32
    group = shape.heads.query // shape.heads.kv
    tile = _query_tile(shape)

    def padding(queries: int, keys: int) -> float:
        rows = tile - ((queries - 1) % tile + 1) if queries else 0
        more = max(0, keys_tile - keys)
        return alpha * rows * group * keys + beta * more * queries * group

    def goes_down(parent: int, child: int) -> bool:
        down = padding(parent - child, shape.prefix) + padding(child, shape.suffix + shape.prefix)
        kept = padding(parent, shape.prefix) + padding(child, shape.suffix) + gamma * child
        return kept > down

    return is_shared(shape) and _stays(shape, goes_down)


def _query_tile(shape: Shape) -> int:
    """Queries of a tile of 64 rows, in which all heads of a group are packed."""
    return max(1, 64 * shape.heads.kv // shape.heads.query)


def _stays(shape: Shape, goes_down: Callable[[int, int], bool]) -> bool:
    """Whether a prefix stays a level of its own: keys go down to one branch after the other.

    Above the requests' own prefixes a root stays where it is.
    """
    parent, child = shape.branches * shape.queries, shape.queries
    while parent > child and goes_down(parent, child):
        parent -= child
    return parent > child or shape.root > 0


def _choosing(whether: Callable[[Shape, Device], bool]) -> Rule:
    """A rule that only says whether, as one that names the strategy: all levels, or none."""
    return lambda shape, device: LEVELS if whether(shape, device) else NAIVE


RULES: dict[str, Rule] = {
    "model": model,
    "always": _choosing(always),
    "never": _choosing(never),
    "vLLM": _choosing(vllm),
    "PAT": _choosing(pat),
    "FastTree": _choosing(fasttree),
}
