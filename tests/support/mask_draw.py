"""Random masks as Python text: positions, comparisons, connectives, data, spellings of -inf."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .mask_scenes import Build, Dims

FMIN = torch.finfo(torch.float32).min
FILLS = ("-inf", "-inf", "FMIN", "FMIN", "-1e9", "-1e4", "-1.0", "0.0")


@dataclass(frozen=True)
class Drawn:
    """One random mask: its text and its kind."""

    text: str
    kind: str

    @property
    def build(self) -> Build:
        code = compile(self.text, "<mask>", "eval")

        def run(dims: Dims, data: Mapping[str, Tensor]) -> Tensor:
            sizes = {name: getattr(dims, name) for name in "NHQPSK"}
            names: dict[str, Any] = {"torch": torch, "F": F, "ar": torch.arange, "FMIN": FMIN}
            return eval(code, {**names, "inf": float("inf"), **sizes, **data})

        return run


def draw_data(rng: random.Random, dims: Dims) -> dict[str, Tensor]:
    """Values of the tensors that masks may depend on, mostly adverse."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    low, high = rng.choice([(-20, 20), (0, 4), (-3, 1), (5, 40)])

    def integers(*shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    def bools(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator) < rng.choice([0.1, 0.5, 0.9])

    return {
        "t0": integers(),
        "tn": integers(dims.N),
        "dqs": bools(dims.Q, dims.S),
        "dnk": bools(dims.N, dims.K),
        "dqk": bools(dims.Q, dims.K),
        "dn": bools(dims.N),
    }


def whole(text: str) -> str:
    """An expression expanded to all of its dims."""
    return f"({text}).expand(N, H, Q, K)"


class Draw:
    """Draws expressions that broadcast to [N, H, Q, K]."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def pick(self, *choices: str) -> str:
        return self.rng.choice(choices)

    def mask(self) -> Drawn:
        kind = self.pick("keep", "drop", "add")
        return Drawn(self.mask_of(kind), kind)

    def mask_of(self, kind: str) -> str:
        if kind != "add":
            return self.predicate(3)
        p, fill = self.predicate(2), self.pick(*FILLS)
        return self.pick(
            f"torch.where({p}, 0.0, {fill})",
            f"torch.where({p}, torch.tensor(0.0), torch.tensor({fill}))",
            f"torch.where({p}, {fill}, 0.0)",
            f"torch.zeros(1).masked_fill({p}, {fill})",
            f"(1.0 - ({p}).float()) * FMIN",
            f"(~({p})).float() * -10000.0",
            f"torch.zeros(Q, K).masked_fill(~({p}), {fill}) + torch.where({p}, 0.0, {fill})",
            f"torch.full((Q, K), {fill}).triu({self.constant()})",
            f"torch.full((Q, K), {fill}).triu({self.constant()}) * ({p}).float()",
            f"torch.where({p}, dqk.float(), {fill})",
            f"torch.where({p}, 0.0, torch.where({self.predicate(1)}, {fill}, -inf))",
        )

    def predicate(self, depth: int) -> str:
        if depth == 0 or self.rng.random() < 0.2:
            return self.atom()
        a, b = self.predicate(depth - 1), self.predicate(depth - 1)
        return self.pick(
            f"(({a}) & ({b}))",
            f"(({a}) & ({b}))",
            f"(({a}) | ({b}))",
            f"(~({a}))",
            f"(({a}) ^ ({b}))",
            f"torch.where({a}, {b}, {self.atom()})",
            f"torch.logical_and({a}, {b})",
            f"torch.logical_not({a})",
            f"(({a}) == ({b}))",
            f"(({a}).int() * ({b}).to(torch.int64) > 0)",
            f"(({a}).float() > 0.5)",
            f"{whole(a)}.clone()",
            f"{whole(a)}.reshape(N * H, Q, K).view(N, H, Q, K)",
            f"{whole(a)}.permute(2, 3, 0, 1).permute(2, 3, 0, 1)",
            f"torch.cat([{whole(a)}[..., :P], {whole(b)}[..., P:]], -1)",
            f"{whole(a)}.slice_scatter({whole(b)}[..., P:], -1, P)",
            f"{whole(a)}.select_scatter({whole(b)}[:, :, 0], 2, 0)",
            f"{whole(a)}.flip(-1)",
            f"{whole(a)}.to(torch.float16).masked_fill({b}, 0.0) > 0",
            f"F.pad({whole(a)}[..., P:], (P, 0), value={self.pick('True', 'False')})",
        )

    def atom(self) -> str:
        compare = f"({self.integer(1)} + 0 * ar(K) {self.pick('<=', '<', '>=', '>', '==', '!=')} "
        return self.pick(
            f"{compare}{self.integer(1)})",
            f"{compare}{self.integer(2)})",
            f"({self.key()} <= {self.query()} + P)",
            f"({self.key()} <= {self.query()} + {self.constant()})",
            f"({self.key()} > {self.query()} + P - {self.constant()})",
            f"({self.key()} < {self.constant()})",
            f"torch.ones(Q, K, dtype=torch.bool).tril({self.constant()})",
            f"torch.ones(Q, K).triu({self.constant()}).bool()",
            "torch.cat([torch.ones(Q, P, dtype=torch.bool), dqs], -1)",
            "F.pad(dqs, (P, 0), value=True)",
            f"({self.key()} < P + {self.datum()})",
            "dnk[:, None, None, :]",
            "dqk",
            "torch.ones(1, 1, dtype=torch.bool)",
            "dn[:, None, None, None]",
        )

    def integer(self, depth: int) -> str:
        if depth == 0:
            return self.pick(self.key(), self.query(), self.constant(), self.datum())
        a, b = self.integer(depth - 1), self.integer(depth - 1)
        return self.pick(
            a,
            f"({a} + {b})",
            f"({a} - {b})",
            f"({self.key()} - {self.query()})",
            f"({self.key()} - {self.query()}).abs()",
            f"({self.key()} * 2)",
            f"(-{self.query()})",
            f"({self.key()} - {self.constant()}).clamp(min=0)",
            f"torch.maximum({self.key()}, {self.query()})",
            f"torch.where({self.key()} < P, {a}, {b})",
            f"({self.key()} // 2)",
            f"({self.key()} % 4)",
            f"{self.key()}.to(torch.int32)",
            f"({self.key()}.to(torch.uint8) - 1)",
            "ar(N)[:, None, None, None]",
        )

    def key(self) -> str:
        return self.pick(
            "ar(K)[None, :]",
            "ar(K)[None, :]",
            "ar(K).view(1, -1)",
            "ar(1, K + 1)[None, :] - 1",
            "ar(K).expand(Q, K)",
            "ar(K).repeat(Q, 1)",
            "ar(K + 3)[None, 3:] - 3",
            "ar(0, 2 * K, 2)[None, :] // 2",
        ).join("()")

    def query(self) -> str:
        return self.pick(
            "ar(Q)[:, None]",
            "ar(Q)[:, None]",
            "ar(P, P + Q)[:, None] - P",
            "ar(Q).unsqueeze(-1).expand(Q, K)",
            "ar(Q)[None, :].transpose(0, 1)",
            "ar(K)[:Q, None]",
        ).join("()")

    def constant(self) -> str:
        return self.pick("0", "1", "3", "-2", "P", "P", "P - 1", "P + 1", "S", "K", "Q", "K - 1")

    def datum(self) -> str:
        return self.pick(
            "t0",
            "t0.clamp(min=0)",
            "t0.abs()",
            "t0.clamp(0, 3)",
            "t0.clamp(max=2)",
            "torch.maximum(t0, torch.tensor(1))",
            "torch.minimum(t0.abs(), torch.tensor(2))",
            "tn[:, None, None, None]",
            "tn.clamp(min=1)[:, None, None, None]",
        )
