"""Prompts cut out of a text: chunks that are cached alone, and tokens that follow them."""

from __future__ import annotations

import argparse
import gzip
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_cascade.benchmarks.command import at_least_one
from torch_cascade.benchmarks.models import PACKAGED, UsageError

COHERENT = "coherent"
UNRELATED = "unrelated"
KINDS = (COHERENT, UNRELATED)
_TEXT = (
    "a text file, .gz or not; the published figures used /usr/share/doc/debian/FAQ/"
    "debian-faq.en.txt.gz of Debian's package debian-faq"
)


def add_options(made: argparse.ArgumentParser, count: int) -> None:
    """The options that say what is read and how it is cut; `count` windows by default."""
    made.add_argument("--text", type=Path, required=True, metavar="FILE", help=_TEXT)
    made.add_argument("--model", default=PACKAGED, help="smollm2, or a checkpoint's folder")
    made.add_argument("--windows", type=at_least_one, default=count, help=f"of a kind ({count})")
    made.add_argument("--chunks", type=at_least_one, default=4, help="of each window (4)")
    made.add_argument("--tokens", type=at_least_one, default=192, help="of each chunk (192)")
    made.add_argument("--fresh", type=at_least_one, default=64, help="tokens after them (64)")


@dataclass(frozen=True)
class Window:
    """One prompt: token ids of the chunks, and of what follows and is always computed."""

    chunks: tuple[Tensor, ...]
    fresh: Tensor

    @property
    def parts(self) -> list[Tensor]:
        """Chunks, then the fresh tokens; int64 [T] each."""
        return [*self.chunks, self.fresh]

    @property
    def ids(self) -> Tensor:
        """All of it, int64 [1, L]."""
        return torch.cat(self.parts)[None]


@dataclass(frozen=True)
class Cut:
    """How windows are cut: so many chunks of so many tokens, then `fresh` tokens."""

    chunks: int
    tokens: int
    fresh: int

    @property
    def cached(self) -> int:
        """Tokens of a window that have cached copies."""
        return self.chunks * self.tokens


def read_tokens(path: Path, tokenizer: Any) -> Tensor:
    """The tokens of a text file, of a gzipped one where its name ends in `.gz`; int64 [T].

    Raises:
        UsageError: it cannot be read as UTF-8 text.
    """
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UsageError(f"--text {path}: {error}") from error
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def cut_windows(ids: Tensor, cut: Cut, count: int, seed: int) -> dict[str, list[Window]]:
    """Windows that do not overlap, in random order; by kind, the same places in both.

    A coherent window is one run of text. An unrelated one has that run's last chunk and fresh
    tokens, behind chunks of other windows: what it loses by reuse is no meaning.

    Args:
        ids: int64 [T], the text.
        cut: sizes.
        count: how many of each kind.
        seed: of the order.

    Raises:
        UsageError: the text is too short for so many.
    """
    size = cut.cached + cut.fresh
    places = len(ids) // size
    if places < max(count, 2):
        raise UsageError(f"the text has {places} windows of {size} tokens, {count} were asked for")
    order = torch.randperm(places, generator=torch.Generator().manual_seed(seed)).tolist()
    runs = [_run(ids[i * size : (i + 1) * size], cut) for i in order]
    return {COHERENT: runs[:count], UNRELATED: [_mixed(runs, i) for i in range(count)]}


def _run(ids: Tensor, cut: Cut) -> Window:
    sizes = [cut.tokens] * cut.chunks + [cut.fresh]
    *chunks, fresh = ids.split(sizes)
    return Window(tuple(chunks), fresh)


def _mixed(runs: list[Window], index: int) -> Window:
    """Chunk c is the window's that is c + 1 further on; the last one is its own."""
    own = runs[index]
    others = [runs[(index + 1 + c) % len(runs)].chunks[c] for c in range(len(own.chunks) - 1)]
    return Window((*others, own.chunks[-1]), own.fresh)
