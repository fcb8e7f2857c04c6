"""Prompts made of cached chunks, blended by the pass, and by an oracle that shares no code with it.

The cached keys and values of a chunk come from a run of that chunk alone, at the positions it has
in the prompt: so they need no rotation, and differ from fresh ones by what the chunk did not see.

The oracle runs the model eagerly for all tokens; each layer's cache hands the attention fresh keys
and values for the chosen rows and cached ones for the others. Rows that were not chosen compute
something meaningless, which no chosen row can read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch
from support.backend import eager_cascade, last_compilation
from support.hf_models import EXPERTS, VOCABULARY, tiny_model
from support.reuse_models import MarkedLayer
from torch import Tensor
from transformers import Cache, DynamicCache

from torch_cascade.compiler.record import BlendRecord
from torch_cascade.kernels.ops import reuse_kv

LAYERS = 3
Pairs = tuple[tuple[Tensor, Tensor], ...]
_LAYER_TYPES = {
    "Gemma3Text": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
}


def model_of(family: str, dtype: torch.dtype = torch.float32, layers: int = LAYERS) -> Any:
    """A tiny model, the same for every dtype."""
    torch.manual_seed(11)
    changes = _LAYER_TYPES.get(family, {})
    count = {"GPTJ": "n_layer", "GPT2": "n_layer"}.get(family, "num_hidden_layers")
    changes = {**changes, count: layers, "num_hidden_layers": layers}
    model = tiny_model(family, torch.float32, **changes).to(dtype)
    model.set_attn_implementation("sdpa")
    if family in EXPERTS:
        model.set_experts_implementation("batched_mm")
    return model


@dataclass(frozen=True)
class Prompt:
    """Token ids and what is cached of them.

    Attributes:
        ids: [N, L].
        fresh_rows: [N, F].
        chunks: [N, L].
        cached: keys and values a layer, [N, H, L, D]; large numbers where nothing is cached.
        mask: [N, L], 0 for padding; None for no padding.
    """

    ids: Tensor
    fresh_rows: Tensor
    chunks: Tensor
    cached: Pairs
    mask: Tensor | None = None

    def to(self, dtype: torch.dtype) -> Prompt:
        """With keys and values of a dtype."""
        return replace(self, cached=tuple((k.to(dtype), v.to(dtype)) for k, v in self.cached))

    def row(self, row: int) -> Prompt:
        """One row of the batch."""
        pick = slice(row, row + 1)
        return Prompt(
            self.ids[pick],
            self.fresh_rows[pick],
            self.chunks[pick],
            tuple((k[pick], v[pick]) for k, v in self.cached),
            None if self.mask is None else self.mask[pick],
        )

    @property
    def length(self) -> int:
        """L."""
        return self.ids.shape[1]


def prompt_of(
    model: Any, rows: Sequence[Sequence[int]], padding: Sequence[int] = (), seed: int = 3
) -> Prompt:
    """A prompt whose rows are chunks of the given lengths, the last of them the question.

    Args:
        model: computes the cached keys and values, in its dtype.
        rows: for each batch row the lengths of its parts; negative ones are gaps, not cached.
        padding: how many padding tokens stand before each row.
        seed: of the tokens.
    """
    padding = padding or [0] * len(rows)
    length = max(p + sum(map(abs, parts)) for p, parts in zip(padding, rows, strict=True))
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (len(rows), length), generator=generator)
    chunks = torch.full_like(ids, -1)
    mask = torch.ones_like(ids)
    cached: list[list[Pairs]] = []
    for n, (start, parts) in enumerate(zip(padding, rows, strict=True)):
        mask[n, :start] = 0
        cached.append(_row(model, ids[n], chunks[n], start, parts))
    found = [_fresh(chunks[n], mask[n]) for n in range(len(rows))]
    width = max(len(fresh) for fresh, _ in found)
    fresh = torch.tensor([(fresh + fill)[:width] for fresh, fill in found])
    pairs = tuple(
        (torch.cat([row[i][0] for row in cached]), torch.cat([row[i][1] for row in cached]))
        for i in range(len(cached[0]))
    )
    return Prompt(ids, fresh, chunks, pairs, mask if any(padding) else None)


def _fresh(chunks: Tensor, mask: Tensor) -> tuple[list[int], list[int]]:
    """The tokens without a cached copy, and what a row is filled up with: padding, then others."""
    own = [j for j in range(len(chunks)) if chunks[j] < 0 and mask[j]]
    padding = [j for j in range(len(chunks)) if not mask[j]]
    cached = [j for j in range(len(chunks)) if chunks[j] >= 0]
    return own, padding + cached[::-1]


def _row(model: Any, ids: Tensor, chunks: Tensor, start: int, parts: Sequence[int]) -> list[Any]:
    """Cached keys and values of one row; `chunks` is filled in. Positions begin after padding."""
    whole: list[Any] = []
    offset = start
    for number, part in enumerate(parts[:-1]):
        stop = offset + abs(part)
        with torch.no_grad():
            cache = DynamicCache()
            positions = torch.arange(offset - start, stop - start)[None]
            model(ids[None, offset:stop], position_ids=positions, past_key_values=cache)
        if not whole:
            whole = [_unset(layer, len(ids)) for layer in cache.layers]
        if part > 0:
            chunks[offset:stop] = number
            for (k, v), layer in zip(whole, cache.layers, strict=True):
                k[:, :, offset:stop], v[:, :, offset:stop] = layer.keys, layer.values
        offset = stop
    return whole


def _unset(layer: Any, length: int) -> tuple[Tensor, Tensor]:
    """What no blend may read."""
    sizes = [(x.shape[0], x.shape[1], length, x.shape[3]) for x in (layer.keys, layer.values)]
    kind = layer.keys.dtype
    return torch.full(sizes[0], 97.0, dtype=kind), torch.full(sizes[1], 89.0, dtype=kind)


@dataclass(frozen=True)
class Result:
    """Logits of the last tokens, every layer's keys and values, and what the pass said."""

    logits: Tensor
    caches: Pairs
    record: BlendRecord | None = None


def prefill_of(model: Any, **call: Any) -> Callable[..., tuple[Tensor, Any]]:
    """A function that prefills through marked layers; tensors are its arguments."""

    def fn(
        ids: Tensor, fresh: Tensor, chunks: Tensor | None, mask: Tensor | None, cached: Pairs
    ) -> tuple[Tensor, Any]:
        cache = Cache(layers=[_Marked(k, v, fresh, chunks) for k, v in cached])
        options = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1} | call
        if mask is not None:
            options["attention_mask"] = mask
            options["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        out = model(ids, **options)
        return out.logits, [(layer.keys, layer.values) for layer in cache.layers]

    return fn


class _Marked(MarkedLayer):
    def __init__(self, k: Tensor, v: Tensor, fresh: Tensor, chunks: Tensor | None) -> None:
        super().__init__(k, v, fresh)
        self.chunks = chunks

    def update(self, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys, self.values = reuse_kv(k, v, *self.cached, self.chunks)
        return self.keys, self.values


def arguments(prompt: Prompt) -> tuple[Any, ...]:
    """Of the function that `prefill_of` gives."""
    return prompt.ids, prompt.fresh_rows, prompt.chunks, prompt.mask, prompt.cached


def blended(model: Any, prompt: Prompt, call: Mapping[str, Any] = {}, **options: Any) -> Result:
    """The prompt through the whole pipeline, without code generation."""
    torch._dynamo.reset()
    backend = eager_cascade(**{"decide": "always", "strict": True, "verify": True} | options)
    with torch.no_grad():
        fn = torch.compile(prefill_of(model, **call), backend=backend)
        logits, caches = fn(*arguments(prompt))
    return Result(logits, tuple(caches), last_compilation().blend)


def full(model: Any, prompt: Prompt, call: Mapping[str, Any] = {}) -> Result:
    """Every token computed, eagerly: the meaning of the markers."""
    with torch.no_grad():
        logits, caches = prefill_of(model, **call)(*arguments(prompt))
    return Result(logits, tuple(caches))


Metric = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def by_values(k: Tensor, v: Tensor, k_cached: Tensor, v_cached: Tensor) -> Tensor:
    """[L] from one row's [H, L, D]."""
    return ((v - v_cached) ** 2).sum((0, 2))


def by_keys(k: Tensor, v: Tensor, k_cached: Tensor, v_cached: Tensor) -> Tensor:
    """[L] from one row's [H, L, D]."""
    return ((k - k_cached) ** 2).sum((0, 2))


@dataclass
class _Oracle:
    prompt: Prompt
    stages: Mapping[int, Fraction]
    metric: Metric
    exits: int
    kept: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kept = [list(range(self.prompt.length)) for _ in self.prompt.ids]
        if -1 in self.stages:
            self.choose(self.stages[-1], None)

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k_cached, v_cached = self.prompt.cached[layer]
        fused_k, fused_v = k_cached.clone(), v_cached.clone()
        for n, rows in enumerate(self.kept):
            fused_k[n, :, rows], fused_v[n, :, rows] = k[n, :, rows], v[n, :, rows]
        if layer in self.stages:
            self.choose(self.stages[layer], (k, v, k_cached, v_cached))
        return fused_k, fused_v

    def choose(self, ratio: Fraction, seen: Sequence[Tensor] | None) -> None:
        prompt = self.prompt
        free = math.ceil(ratio * (prompt.length - prompt.fresh_rows.shape[1]))
        count = prompt.fresh_rows.shape[1] + max(free, self.exits - 1)
        for n, rows in enumerate(self.kept):
            forced = set(prompt.fresh_rows[n].tolist())
            forced |= set(range(prompt.length - self.exits, prompt.length))
            score = [0.0] * prompt.length
            if seen is not None:
                score = self.metric(*(x[n] for x in seen)).tolist()
            real = [j for j in rows if prompt.chunks[n, j] >= 0 and j not in forced]
            padding = [j for j in rows if prompt.chunks[n, j] < 0 and j not in forced]
            order = sorted(real, key=lambda j: (-score[j], j)) + padding
            self.kept[n] = sorted([*forced, *order[: count - len(forced)]])


class _OracleLayer(MarkedLayer):
    def __init__(self, oracle: _Oracle, number: int) -> None:
        super().__init__(*oracle.prompt.cached[number], oracle.prompt.fresh_rows)
        self.oracle, self.number = oracle, number

    def update(self, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys, self.values = self.oracle.update(self.number, k, v)
        return self.keys, self.values


def expected(
    model: Any,
    prompt: Prompt,
    stages: Mapping[int, str | Fraction],
    *,
    metric: Metric = by_values,
    call: Mapping[str, Any] = {},
) -> tuple[Result, list[list[int]]]:
    """What a blend must give, and the rows it computes last."""
    exits = call.get("logits_to_keep", 1)
    ratios = {layer: Fraction(ratio) for layer, ratio in stages.items()}
    oracle = _Oracle(prompt, ratios, metric, exits)
    options = {"use_cache": True, "logits_to_keep": 1, **call}
    if prompt.mask is not None:
        options["attention_mask"] = prompt.mask
        options["position_ids"] = (prompt.mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        cache = Cache(layers=[_OracleLayer(oracle, i) for i in range(len(prompt.cached))])
        out = model(prompt.ids, past_key_values=cache, **options)
    pairs = tuple((layer.keys, layer.values) for layer in cache.layers)
    return Result(out.logits, pairs), oracle.kept
