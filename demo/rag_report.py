"""What the demonstration `--rag` says in the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from torch_cascade.demo.documents import QUESTION
from torch_cascade.demo.rag import Way, measure


def show(console: Console, running: Sequence[Way], tokenizer: Any) -> None:
    """Print question, answers and times side by side."""
    numbers = measure(running)
    drawn = Table(box=box.SIMPLE_HEAD)
    for column in ("", *numbers):
        drawn.add_column(column)
    texts = (" ".join(tokenizer.decode(way.tokens).split()) for way in running)
    drawn.add_row("answer", *texts)
    rows = (
        ("first token after", "first_token_ms", "{:.0f} ms"),
        ("speed", "speed", "{:.2f} x"),
        ("KL to full", "kl", "{:.4f}"),
        ("compile", "compile_s", "{:.0f} s"),
    )
    for title, name, form in rows:
        drawn.add_row(title, *(form.format(row[name]) for row in numbers.values()))
    console.print(f"\n[bold]{QUESTION}[/]", highlight=False)
    console.print(drawn)
    console.print(
        "full: every token computed, stock Inductor. reuse: documents' keys and values as they "
        "were computed alone, moved to their places. blend: some of their tokens computed again. "
        "Speed: median of the ratios of the same turn. KL: of the first token, in nats.",
        highlight=False,
    )
