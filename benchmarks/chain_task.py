"""Variable chains across chunks: prompts in which a few statements need an earlier chunk.

A statement is one token, "name is value" or "name is name". In chunk 0 all statements give values.
In a later chunk `POINTING` of them point at a statement of the chunk before (at one that points, if
there is one), the rest give values: these are the control, since no other chunk is needed. A
question is one token, a name; its answer is the value at the end of the chain.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNKS = 4
STATEMENTS = 8
POINTING = 2
VALUES = 12
NAMES = 40
SEPARATOR = NAMES + VALUES  # right side of the token that starts a chunk
ASKING = SEPARATOR + 1  # right side of a question
RIGHT = ASKING + 1
CHUNK_TOKENS = 1 + STATEMENTS
CACHED = CHUNKS * CHUNK_TOKENS
QUESTIONS = POINTING * (CHUNKS - 1) + 2
TOKENS = CACHED + QUESTIONS
VOCABULARY = VALUES + NAMES * RIGHT
"""Ids below `VALUES` are answers; id `VALUES + left * RIGHT + right` is a statement or question."""


@dataclass(frozen=True)
class Chains:
    """N prompts.

    Attributes:
        ids: int64 [N, TOKENS]: chunks of `CHUNK_TOKENS`, then `QUESTIONS` questions.
        answers: int64 [N, TOKENS]: the value of each statement and question, -1 at separators.
        hops: int64 [N, QUESTIONS]: statements on the way to the answer; 1 for the control, which
            stands in chunk 1 or later.
    """

    ids: Tensor
    answers: Tensor
    hops: Tensor

    def to(self, device: str) -> Chains:
        """The same prompts on a device."""
        return Chains(self.ids.to(device), self.answers.to(device), self.hops.to(device))

    def parts(self, row: int) -> list[Tensor]:
        """The chunks of a prompt and its questions."""
        return list(self.ids[row].split([CHUNK_TOKENS] * CHUNKS + [QUESTIONS]))


def draw(count: int, generator: torch.Generator) -> Chains:
    """Random prompts; all names of a prompt are distinct.

    Args:
        count: N.
        generator: on the CPU.
    """
    shape = (count, CHUNKS, STATEMENTS)
    names = torch.rand(count, NAMES, generator=generator).argsort(1)
    left = names[:, : CHUNKS * STATEMENTS].view(shape)
    values = torch.randint(VALUES, shape, generator=generator)
    right = NAMES + values
    places = torch.rand(shape, generator=generator).argsort(2)[..., :POINTING]
    rows = torch.arange(count)[:, None]
    for chunk in range(1, CHUNKS):
        here, there = places[:, chunk], places[:, chunk - 1]
        there = there.gather(1, torch.rand(count, POINTING, generator=generator).argsort(1))
        right[rows, chunk, here] = left[rows, chunk - 1, there]
        values[rows, chunk, here] = values[rows, chunk - 1, there]
    asked, hops = _questions(count, places, generator)
    flat_left, flat_values = left.flatten(1), values.flatten(1)
    zeros = torch.zeros(count, CHUNKS, 1, dtype=torch.int64)
    token = torch.cat([zeros + SEPARATOR, left * RIGHT + right], 2).flatten(1)
    answer = torch.cat([zeros - 1, values], 2).flatten(1)
    question = flat_left.gather(1, asked) * RIGHT + ASKING
    ids = VALUES + torch.cat([token, question], 1)
    return Chains(ids, torch.cat([answer, flat_values.gather(1, asked)], 1), hops)


def _questions(count: int, places: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Statements asked for, by number in the prompt, and their hops; int64 [N, QUESTIONS] both.

    Every statement that points, and `QUESTIONS` less those that do not, of chunk 1 and later.
    """
    chunk = torch.arange(1, CHUNKS)
    pointing = (places[:, 1:] + chunk[:, None] * STATEMENTS).flatten(1)
    free = torch.rand(count, CHUNKS * STATEMENTS, generator=generator)
    free[:, :STATEMENTS] = -1
    free.scatter_(1, pointing, -1.0)
    local = free.topk(QUESTIONS - pointing.shape[1], 1).indices
    asked = torch.cat([pointing, local], 1)
    hops = torch.cat([(chunk + 1).repeat_interleave(POINTING), torch.ones(local.shape[1])])
    order = torch.rand(asked.shape, generator=generator).argsort(1)
    return asked.gather(1, order), hops.long().expand_as(asked).gather(1, order)


def sides(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Left and right side of tokens that are no answers."""
    return (ids - VALUES) // RIGHT, (ids - VALUES) % RIGHT
