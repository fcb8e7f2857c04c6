"""What a run of `quality` leaves behind: samples of every arm, a table, a picture."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from fractions import Fraction
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from torch_cascade.benchmarks import bootstrap, record
from torch_cascade.benchmarks.arms import FULL, REUSE
from torch_cascade.benchmarks.bootstrap import Interval


def compare(logits: Tensor, full: Tensor, fresh: Tensor) -> dict[str, float]:
    """How far logits are from those of the same tokens computed in full, float32 [n, V] both.

    Args:
        logits: after each fresh token.
        full: likewise.
        fresh: int64 [n]; each but the first is what the logits before it should say.

    Returns:
        `kl`: mean over tokens of KL(full || logits), nats. `nll`: how much more the text's own
        tokens cost, nats a token. `top1`: share of tokens whose likeliest successor is the same.
    """
    ours, theirs = logits.double().log_softmax(-1), full.double().log_softmax(-1)
    kl = (theirs.exp() * (theirs - ours)).sum(-1).mean()
    targets = fresh[1:].to(ours.device)
    nll = functional.nll_loss(ours[:-1], targets) - functional.nll_loss(theirs[:-1], targets)
    same = (ours.argmax(-1) == theirs.argmax(-1)).double().mean()
    return {"kl": float(kl), "nll": float(nll), "top1": float(same)}


@dataclass(frozen=True)
class Line:
    """One arm on all windows of one kind: a sample a window for every figure of `compare`."""

    kind: str
    arm: str
    ratio: str
    options: dict[str, Any]
    samples: dict[str, list[float]]

    @property
    def label(self) -> str:
        """Arm and ratio."""
        return f"{self.arm} {float(Fraction(self.ratio)):g}"

    @property
    def kl(self) -> list[float]:
        """KL a window."""
        return self.samples["kl"]


@dataclass
class Quality:
    """Everything that a run measured."""

    settings: dict[str, Any]
    device: str
    lines: list[Line] = field(default_factory=list)
    date: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat("T", "seconds"))

    def of(self, kind: str, arm: str, ratio: str | None = None) -> Line | None:
        """The line of an arm, None if it was not measured."""
        named = (x for x in self.lines if (x.kind, x.arm) == (kind, arm))
        return next((x for x in named if ratio in (None, x.ratio)), None)

    def write(self, path: Path) -> None:
        """Write the file whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        content = {"schema": 1, "benchmark": "quality"} | asdict(self)
        content["versions"] = record.versions()
        content["command"] = shlex.join(["quality", *sys.argv[1:]])
        content["summary"] = [summary(self, line) for line in self.lines]
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".part")
        draft.write_text(json.dumps(content, indent=1, default=str) + "\n")
        os.replace(draft, path)


def summary(made: Quality, line: Line) -> dict[str, Any]:
    """Means with their intervals, the share of reuse's KL that is removed, and the lead on `v`."""
    said: dict[str, Any] = {"kind": line.kind, "arm": line.arm, "ratio": line.ratio}
    said |= {name: asdict(bootstrap.mean(x)) for name, x in line.samples.items()}
    if reuse := made.of(line.kind, REUSE):
        said["removed"] = asdict(bootstrap.removed(line.kl, reuse.kl))
    if plain := made.of(line.kind, "v", line.ratio):
        said["kl_minus_v"] = asdict(bootstrap.difference(line.kl, plain.kl))
    return said


def table(made: Quality, kind: str) -> Table:
    """Arms as rows: figures with 95 % intervals."""
    drawn = Table(title=f"{kind}: against full recompute", box=box.SIMPLE_HEAD)
    columns = ("arm", "KL, nats", "removed, %", "KL - KL of v", "NLL more", "same top 1")
    for index, name in enumerate(columns):
        drawn.add_column(name, justify="right" if index else "left", no_wrap=True)
    for line in (x for x in made.lines if x.kind == kind):
        said = summary(made, line)
        drawn.add_row(
            line.label,
            _told(said["kl"], ".4f"),
            _told(said.get("removed"), ".1f", 100),
            _told(said.get("kl_minus_v"), "+.4f"),
            _told(said["nll"], "+.3f"),
            _told(said["top1"], ".3f"),
        )
    return drawn


def _told(figure: dict[str, float] | None, form: str, factor: float = 1) -> str:
    if figure is None:
        return ""
    x = Interval(*(factor * figure[name] for name in ("value", "low", "high")))
    return f"{x.value:{form}} ({x.low:{form}} to {x.high:{form}})"


def plot(made: Quality, path: Path) -> None:
    """Draw KL over the share of rows computed, a panel for each kind; the suffix says the format.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(line.kind for line in made.lines))
    figure = Figure(figsize=(5 * len(kinds), 4), layout="constrained")
    FigureCanvasAgg(figure)
    for index, kind in enumerate(kinds):
        axes = figure.add_subplot(1, len(kinds), index + 1)
        _panel(axes, made, kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _panel(axes: Any, made: Quality, kind: str) -> None:
    lines = [x for x in made.lines if x.kind == kind]
    names = [x for x in dict.fromkeys(y.arm for y in lines) if x not in (REUSE, FULL)]
    for index, name in enumerate(names):
        mine = sorted((x for x in lines if x.arm == name), key=lambda x: Fraction(x.ratio))
        points = [(float(Fraction(x.ratio)), bootstrap.mean(x.kl)) for x in mine]
        at = [ratio for ratio, _ in points]
        middle = [x.value for _, x in points]
        spread = [[x.value - x.low for _, x in points], [x.high - x.value for _, x in points]]
        axes.errorbar(at, middle, spread, marker="osD^v<>PX*"[index % 10], capsize=2, label=name)
    if reuse := made.of(kind, REUSE):
        axes.axhline(bootstrap.mean(reuse.kl).value, color="gray", linewidth=1, label=REUSE)
    axes.set_xlabel("cached rows computed again, a layer")
    axes.set_ylabel("KL to full recompute, nats a token")
    axes.set_ylim(bottom=0)
    axes.set_title(kind, fontsize=10)
    axes.grid(alpha=0.2)
    axes.legend(fontsize=7)
