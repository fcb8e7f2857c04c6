"""How often a small model follows variables through chunks that were cached alone.

The model is trained first, some minutes on a CPU; `--save` keeps it for `--model`.

Example: `python -m torch_cascade.benchmarks.chains --steps 3000 --prompts 500`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_cascade.benchmarks import arms, bootstrap, chain_model, chain_task, record
from torch_cascade.benchmarks.blended import CODES, Blender
from torch_cascade.benchmarks.command import at_least_one
from torch_cascade.benchmarks.quality import ratio

RATIOS = tuple(Fraction(x) for x in ("0.1", "0.15", "0.2", "0.3", "0.5"))
BATCH = 50

ASKED = 3
"""Questions of a prompt that are asked. A blend computes at least as many rows as it gives logits
of, so more of them would be a larger budget than the smallest ratio says."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser("chains", description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--steps", type=at_least_one, default=3000, help="of training (3000)")
    made.add_argument("--batch", type=at_least_one, default=128, help="prompts a step (128)")
    made.add_argument("--seed", type=int, default=0, help="of weights and training data")
    made.add_argument("--save", type=Path, metavar="DIR", help="keep the trained model there")
    made.add_argument("--model", type=Path, metavar="DIR", help="use one that was kept")
    made.add_argument("--prompts", type=at_least_one, default=500, help="to ask (500)")
    made.add_argument("--arms", nargs="+", choices=arms.NAMES, default=arms.NAMES, metavar="ARM")
    made.add_argument("--ratios", nargs="+", type=ratio, default=RATIOS, metavar="R")
    made.add_argument("--device", default="cpu", help="to train and ask on (cpu)")
    made.add_argument("--code", choices=CODES, default=CODES[0])
    made.add_argument("--json", type=Path, metavar="FILE", help="default: benchmarks/results/")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, ask, print; the exit status is 0."""
    from rich.console import Console

    options = parser().parse_args(arguments)
    console = Console(width=max(120, Console().width))
    say = lambda text: console.print(text, markup=False, highlight=False)  # noqa: E731
    if options.model is None:
        model = chain_model.train(options.seed, options.steps, options.batch, options.device, say)
    else:
        model = load(options.model).to(options.device)
    if options.save is not None:
        model.save_pretrained(options.save)
    asked = chain_task.draw(
        options.prompts, torch.Generator().manual_seed(options.seed + 1_000_003)
    )
    blender = Blender(model, options.code)
    path = options.json or record.default_path("chains", torch.device(options.device))
    lines: list[dict[str, Any]] = []
    eager = blender.eager(asked.ids[:, : chain_task.CACHED + ASKED].to(options.device), ASKED)
    chosen = arms.all_arms(options.arms, options.ratios, chain_model.LAYERS)
    _tell(lines, "eager", "1", {}, eager.cpu(), asked, say)
    for arm in chosen:
        arms.check_budget(arm, chain_task.CACHED, ASKED)
        logits = blender.compiled(arm)
        rows = torch.arange(options.prompts).split(BATCH)
        got = [logits([_parts(asked, int(i)) for i in x], ASKED) for x in rows]
        _tell(lines, arm.name, str(arm.ratio), arm.options, torch.cat(got).cpu(), asked, say)
        _write(path, options, lines)
    say(f"written: {path}")
    return 0


def _parts(asked: chain_task.Chains, row: int) -> list[Tensor]:
    *chunks, questions = asked.parts(row)
    return [*chunks, questions[:ASKED]]


def load(folder: Path) -> Any:
    """A model that `--save` kept, in evaluation mode."""
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(folder)
    return model.eval().requires_grad_(False)


def _tell(
    lines: list[dict[str, Any]],
    name: str,
    share: str,
    options: dict[str, Any],
    logits: Tensor,
    asked: chain_task.Chains,
    say: Any,
) -> None:
    """Add a line: accuracy by hops, with intervals over questions."""
    answers = asked.answers[:, chain_task.CACHED : chain_task.CACHED + ASKED]
    right = (logits[..., : chain_task.VALUES].argmax(-1) == answers).double()
    figures = {}
    for hop in range(1, chain_task.CHUNKS + 1):
        samples = right[asked.hops[:, :ASKED] == hop].tolist()
        figures[str(hop)] = asdict(bootstrap.mean(samples)) if samples else None
    lines.append({"arm": name, "ratio": share, "options": options, "accuracy_by_hops": figures})
    said = " ".join(f"{x['value']:.3f}" if x else "-" for x in figures.values())
    say(f"{name} {float(Fraction(share)):g}: {said}")


def _write(path: Path, options: argparse.Namespace, lines: Sequence[dict[str, Any]]) -> None:
    content = {
        "schema": 1,
        "benchmark": "chains",
        "device": record.describe(torch.device(options.device)),
        "date": datetime.now(timezone.utc).isoformat("T", "seconds"),
        "versions": record.versions(),
        "settings": {x: getattr(options, x) for x in ("steps", "batch", "seed", "prompts", "code")},
        "chance": 1 / chain_task.VALUES,
        "dependent_share_of_cached_tokens": chain_task.POINTING
        * (chain_task.CHUNKS - 1)
        / chain_task.CACHED,
        "lines": lines,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(content, indent=1, default=str) + "\n")
    os.replace(draft, path)


if __name__ == "__main__":
    sys.exit(main())
