"""What CacheBlend rests on: few tokens deviate much, and the same ones in neighbouring layers.

Example: `python -m torch_cascade.benchmarks.deviations --text debian-faq.en.txt.gz --windows 8`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import Tensor

from torch_cascade.benchmarks import bootstrap, models, record, windows

SHARE = 0.15


def top_share(x: Tensor, share: float = SHARE) -> float:
    """How much of the sum of x [L] its largest elements have, `share` of all, rounded up.

    Example:
        >>> top_share(torch.tensor([1.0, 6.0, 2.0, 1.0]), 0.25)
        0.6
    """
    count = -int(-share * len(x) // 1)
    return float(x.double().topk(count).values.sum() / x.double().sum())


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Spearman's, of two vectors [L] without ties.

    Example:
        >>> rank_correlation(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([2.0, 3.0, 4.0]))
        1.0
    """
    ranks = torch.stack([v.argsort().argsort().double() for v in (x, y)])
    return round(float(torch.corrcoef(ranks)[0, 1]), 6)


def deviations(model: Any, window: windows.Window) -> tuple[Tensor, Tensor]:
    """Squared L2 deviations of keys and of values, float32 [layers, L] each, computed in full.

    Keys are compared before the rotation: it moves both alike, so this is the distance after it.
    The chunks that have something before them count, so L is their number of tokens.
    """
    whole = _unrotated(model, window.ids)
    found: list[Tensor] = []
    for kind in range(2):
        alone = [_unrotated(model, chunk[None])[kind] for chunk in window.chunks]
        cached = torch.cat(alone, 1)
        moved = (whole[kind][:, : cached.shape[1]] - cached).float().square().sum(-1)
        found.append(moved[:, len(window.chunks[0]) :])
    return found[0], found[1]


def _unrotated(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [layers, T, H * D] of the projections to keys and to values."""
    kept: dict[str, list[Tensor]] = {"k_proj": [], "v_proj": []}
    hooks = [
        module.register_forward_hook(lambda _m, _i, out, to=kept[name]: to.append(out[0]))
        for path, module in model.named_modules()
        if (name := path.rpartition(".")[2]) in kept
    ]
    try:
        with torch.no_grad():
            model(ids, use_cache=False, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    if not kept["k_proj"]:
        raise models.UsageError("the model has no layers k_proj and v_proj to look at")
    return torch.stack(kept["k_proj"]), torch.stack(kept["v_proj"])


def measure(model: Any, found: Sequence[windows.Window]) -> list[dict[str, Any]]:
    """For each layer from 1 on: shares and correlations, with intervals over windows."""
    pairs = [deviations(model, window) for window in found]
    seen = [_attention(model, window) for window in found]
    lines = []
    for layer in range(1, len(pairs[0][0])):
        samples: dict[str, list[float]] = {
            "top_k": [top_share(k[layer]) for k, _ in pairs],
            "top_v": [top_share(v[layer]) for _, v in pairs],
            "top_attention": [top_share(x[layer]) for x in seen],
            "rank_k": [rank_correlation(k[layer], k[layer - 1]) for k, _ in pairs if layer > 1],
            "rank_v": [rank_correlation(v[layer], v[layer - 1]) for _, v in pairs if layer > 1],
            "rank_v_to_layer_1": [rank_correlation(v[layer], v[1]) for _, v in pairs],
        }
        figures = {name: asdict(bootstrap.mean(x)) for name, x in samples.items() if x}
        lines.append({"layer": layer} | figures)
    return lines


def _attention(model: Any, window: windows.Window) -> Tensor:
    """Mean probability that the fresh tokens give each key, over heads, float32 [layers, L]."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            out = model(window.ids, use_cache=False, output_attentions=True, logits_to_keep=1)
    finally:
        model.set_attn_implementation(before)
    fresh = len(window.fresh)
    return torch.stack([x[0, :, -fresh:, :-fresh].float().mean((0, 1)) for x in out.attentions])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; the exit status is 0, or 2 where the user can change something."""
    made = argparse.ArgumentParser("deviations", description=(__doc__ or "").partition("\n")[0])
    windows.add_options(made, count=8)
    made.add_argument("--json", type=Path, metavar="FILE", help="default: benchmarks/results/")
    options = made.parse_args(arguments)
    try:
        _run(options)
    except models.UsageError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _run(options: argparse.Namespace) -> None:
    from rich.console import Console

    device = torch.device("cpu")
    loaded = models.load(options.model, None, torch.float32, device)
    cut = windows.Cut(options.chunks, options.tokens, options.fresh)
    text = windows.read_tokens(options.text, models.tokenizer_of(loaded))
    found = windows.cut_windows(text, cut, options.windows, 0)[windows.COHERENT]
    lines = measure(loaded.model, found)
    settings = {x: getattr(options, x) for x in ("model", "windows", "chunks", "tokens", "fresh")}
    content = {"schema": 1, "benchmark": "deviations", "device": record.describe(device)}
    content |= {"date": datetime.now(timezone.utc).isoformat("T", "seconds"), "share": SHARE}
    content |= {"versions": record.versions(), "text": options.text.name}
    path = options.json or record.default_path("deviations", device)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content | {"settings": settings, "lines": lines}, indent=1) + "\n")
    Console().print(_table(lines))
    print(f"written: {path}")


def _table(lines: Sequence[dict[str, Any]]) -> Table:
    drawn = Table(box=box.SIMPLE_HEAD)
    names = [name for name in lines[-1] if name != "layer"]
    for name in ("layer", *names):
        drawn.add_column(name, justify="right")
    for line in lines:
        cells = [f"{line[name]['value']:.2f}" if name in line else "" for name in names]
        drawn.add_row(str(line["layer"]), *cells)
    return drawn


if __name__ == "__main__":
    sys.exit(main())
