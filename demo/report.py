"""What the demonstration says in the end: texts, agreement, table, the compiler's report."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

import torch_cascade
from torch_cascade.demo.decode import differences
from torch_cascade.demo.engines import Engine
from torch_cascade.runtime.prefix_cache import SharedPrefixCache


def measure(engines: Sequence[Engine]) -> dict[str, dict[str, Any]]:
    """Numbers of every engine, by name; times are compared within each step, then the median taken.

    `speed` and `memory` are ratios to the fastest stock engine: above 1, faster; below 1, smaller.
    """
    best = best_stock(engines)
    return {
        engine.name: {
            "step_ms": 1e3 * statistics.median(engine.steady()),
            "speed": statistics.median(
                theirs / ours for theirs, ours in zip(best.steady(), engine.steady(), strict=True)
            ),
            "kv_bytes": engine.kv_bytes(),
            "memory": engine.kv_bytes() / best.kv_bytes(),
            "compile_s": engine.compile_seconds(),
            "differences": [vars(d) for d in differences(engine, engines[-1])],
        }
        for engine in engines
    }


def best_stock(engines: Sequence[Engine]) -> Engine:
    """The stock engine with the smallest median step time."""
    return min((e for e in engines if e.stock), key=lambda e: statistics.median(e.steady()))


def table(numbers: dict[str, dict[str, Any]], branches: int) -> Table:
    """Engines as rows."""
    drawn = Table(box=box.SIMPLE_HEAD)
    drawn.add_column("engine", no_wrap=True)
    for column in ("a step", "speed", "KV memory", "ratio", "compile", "agree"):
        drawn.add_column(column, justify="right", no_wrap=True)
    for name, row in numbers.items():
        drawn.add_row(
            name,
            f"{row['step_ms']:.1f} ms",
            f"{row['speed']:.2f} x",
            f"{row['kv_bytes'] / 2**20:.1f} MiB",
            f"{row['memory']:.2f} x",
            f"{row['compile_s']:.0f} s",
            f"{branches - len(row['differences'])}/{branches}",
        )
    return drawn


def texts(engine: Engine, tokenizer: Any) -> list[str]:
    """What the branches say, once each, with the number of branches that say it."""
    ends = {tokenizer.eos_token_id}
    branches = [_until(row, ends) for row in torch.stack(engine.tokens, dim=1).tolist()]
    said = Counter(tokenizer.decode(tokens).strip() for tokens in branches)
    return [
        f"[{count} of {len(branches)}] {' '.join(text.split())}" for text, count in said.items()
    ]


def _until(tokens: list[int], ends: set[int]) -> list[int]:
    stop = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:stop]


def report_text(cascade: Engine, argument: str, fed: Tensor) -> str:
    """What the compiler found and did in this process.

    Args:
        cascade: the engine of this package.
        argument: name under which the model takes its cache.
        fed: tokens to call the model with, int64 [N, 1], where Inductor's cache had the compiled
            code and nothing is left of its cold compilation: the passes then run once more, for
            the report alone.
    """
    report = torch_cascade.last_report()
    if any(record.unknown for record in report.compilations):
        shared = cascade.cache
        prefix = [(layer.prefix_keys, layer.prefix_values) for layer in shared.layers]
        cache = SharedPrefixCache(prefix, shared.branches, shared.max_suffix)
        with torch.no_grad():
            report = torch_cascade.explain(
                cascade.forward, input_ids=fed, use_cache=True, **{argument: cache}
            )
    return str(report)


def show(console: Console, engines: Sequence[Engine], tokenizer: Any, branches: int) -> None:
    """Print texts, table and agreement."""
    numbers = measure(engines)
    console.print("\n[bold]What the branches wrote[/] (cascade)")
    for text in texts(engines[0], tokenizer):
        console.print(f"  {text}", markup=False, highlight=False)
    console.print()
    console.print(table(numbers, branches))
    console.print(
        "dynamic, static: transformers' DynamicCache and StaticCache, expanded once. "
        f"Speed and ratio: against {best_stock(engines).name}, the stock engine with the shortest "
        "median step; speed is the median of the ratios of the same step. "
        f"Agree: branches with the same tokens as {engines[-1].name}.",
        highlight=False,
    )
    for name, row in numbers.items():
        for found in row["differences"]:
            console.print(
                f"{name}: branch {found['branch']} chose another token at step {found['step']}, "
                f"where the best two were {found['margin']:.1e} logits apart",
                highlight=False,
            )
