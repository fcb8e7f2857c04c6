"""What a prefill computes and moves: in full, and where cached chunks are blended in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch_cascade.benchmarks.rows import Ceilings, Floor


@dataclass(frozen=True)
class Shapes:
    """What of a decoder decides the work of a prefill.

    Attributes:
        layers: how many.
        weights: elements of one layer's matrices.
        kv_weights: those of them that make keys and values.
        table: elements of the output layer.
        heads, kv_heads, dim: of attention.
        element: bytes of one number.
    """

    layers: int
    weights: int
    kv_weights: int
    table: int
    heads: int
    kv_heads: int
    dim: int
    element: int

    @classmethod
    def of(cls, model: Any) -> Shapes:
        """Of a transformers decoder whose layers are alike."""
        config = model.config.get_text_config()
        heads, hidden = config.num_attention_heads, config.hidden_size
        dim = getattr(config, "head_dim", None) or hidden // heads
        layer = model.get_decoder().layers[0]
        return cls(
            layers=config.num_hidden_layers,
            weights=sum(p.numel() for p in layer.parameters() if p.dim() == 2),
            kv_weights=2 * hidden * config.num_key_value_heads * dim,
            table=model.get_output_embeddings().weight.numel(),
            heads=heads,
            kv_heads=config.num_key_value_heads,
            dim=dim,
            element=next(model.parameters()).element_size(),
        )

    def kv_bytes(self, tokens: int) -> int:
        """Keys and values of so many tokens in all layers."""
        return 2 * self.layers * self.kv_heads * self.dim * self.element * tokens


@dataclass(frozen=True)
class Rows:
    """How many tokens are computed, of a prompt of which some have cached copies.

    Attributes:
        tokens: of the prompt.
        fresh: those without a cached copy.
        ratio: of the others, how many are computed anew below the check layer.
        check: the check layer; -1 computes the fresh ones alone, in every layer.
        ahead: the fresh ones run through the layers below the check layer once before.
    """

    tokens: int
    fresh: int
    ratio: Fraction
    check: int
    ahead: bool = False

    @property
    def kept(self) -> int:
        """Tokens that are computed below the check layer."""
        return self.fresh + math.ceil(self.ratio * (self.tokens - self.fresh))


def full_work(shapes: Shapes, tokens: int, ceilings: Ceilings) -> Floor:
    """All tokens in all layers, causally; the output layer for the last one."""
    return blend_work(shapes, Rows(tokens, tokens, Fraction(0), -1), ceilings)


def blend_work(shapes: Shapes, rows: Rows, ceilings: Ceilings) -> Floor:
    """Layers above the check layer in full, of that one the keys and values, then some rows.

    A row's attention reads the keys before it. The question stands last; of the tokens before it,
    those that are chosen are taken to lie evenly.
    """
    whole = max(rows.check, 0)
    below = shapes.layers - whole
    checked = 2 * shapes.kv_weights * (rows.tokens - rows.kept) if rows.check >= 0 else 0
    linear = 2 * shapes.weights * (whole * rows.tokens + below * rows.kept) + checked
    cached = rows.tokens - rows.fresh
    every = rows.tokens * (rows.tokens + 1) / 2
    question = every - cached * (cached + 1) / 2
    pairs = whole * every + below * ((rows.kept - rows.fresh) * (cached + 1) / 2 + question)
    attention = 4 * shapes.heads * shapes.dim * pairs
    ahead = max(below - 1, 0) if rows.ahead else 0
    linear += 2 * shapes.weights * ahead * rows.fresh
    attention += 4 * shapes.heads * shapes.dim * ahead * question
    weights = ((shapes.layers + ahead) * shapes.weights + shapes.table) * shapes.element
    moved = weights + shapes.kv_bytes(cached) + shapes.kv_bytes(rows.tokens)
    return Floor.of(moved, linear + attention + 2 * shapes.table, ceilings)
