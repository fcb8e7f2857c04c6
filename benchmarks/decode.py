"""Ways to decode, one token a branch and step, all fed the same tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torch_cascade.benchmarks.models import KeyValue
from torch_cascade.runtime.prefix_cache import SharedPrefixCache, cache_argument

# Steps in which something still compiles, warms up or is recorded: CUDA graphs need three.
WARM_UP = 4


@dataclass(frozen=True)
class Way:
    """One way to decode.

    Attributes:
        name: for tables and `--engines`.
        cache: `shared` (SharedPrefixCache), `dynamic` or `static` (transformers', expanded once).
        backend: of torch.compile; None for eager.
        mode: of torch.compile.
        ours: it is this package's.
    """

    name: str
    cache: str
    backend: str | None = None
    mode: str | None = None
    ours: bool = False

    @property
    def stock(self) -> bool:
        """It can be had without this package."""
        return self.cache != "shared"

    def forward(self, model: Any) -> Callable[..., Any]:
        """The model, compiled or not; `cascade` refuses a model in which nothing is rewritten."""
        forward: Callable[..., Any] = model
        if self.backend is None:
            return forward
        if self.backend != "cascade":
            forward = torch.compile(model, backend=self.backend, mode=self.mode, dynamic=False)
            return forward
        options: dict[str, Any] = {"strict": True}
        if self.mode is not None:
            options["mode"] = self.mode
        forward = torch.compile(model, backend="cascade", options=options, dynamic=False)
        return forward


GRAPHS = "reduce-overhead"
WAYS = (
    Way("cascade", "shared", "cascade", GRAPHS, ours=True),
    Way("cascade-default", "shared", "cascade", ours=True),
    Way("inductor-shared", "shared", "inductor", GRAPHS),
    Way("static-graphs", "static", "inductor", GRAPHS),
    Way("static", "static", "inductor"),
    Way("eager-static", "static"),
    Way("eager-dynamic", "dynamic"),
)
NAMES = tuple(way.name for way in WAYS)
DEFAULT = tuple(name for name in NAMES if name != "cascade-default")


def make_cache(
    kind: str, model: Any, prefix: Sequence[KeyValue], branches: int, suffix: int
) -> Any:
    """A cache of the prefix with room for `suffix` tokens a branch."""
    if kind == "shared":
        return SharedPrefixCache(prefix, branches, max_suffix=suffix)
    from transformers import DynamicCache, StaticCache

    if kind == "dynamic":
        cache: Any = DynamicCache(config=model.config)
    else:
        length = prefix[0][0].shape[-2] + suffix
        cache = StaticCache(config=model.config, max_cache_len=length)
    for index, layer in enumerate(prefix):
        cache.update(*(states.repeat_interleave(branches, 0) for states in layer), index)
    return cache


def cache_bytes(kind: str, rows: int, branches: int, length: int, suffix: int, token: int) -> int:
    """Bytes that such a cache allocates; the shared prefix is the caller's."""
    expanded = 0 if kind == "shared" else length
    return rows * branches * (expanded + suffix) * token


@dataclass
class Running:
    """A way at work.

    Attributes:
        way: which.
        forward: the model.
        argument: name under which it takes its cache.
        cache: its keys and values.
        watched: rows whose logits are kept, int64 [W].
        seconds: time of every step.
        choices: the most likely token of every row, int64 [N] a step.
        logits: of the watched rows, [W, V] a step.
    """

    way: Way
    forward: Callable[..., Any]
    argument: str
    cache: Any
    watched: Tensor
    seconds: list[float] = field(default_factory=list)
    choices: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        way: Way,
        model: Any,
        prefix: Sequence[KeyValue],
        branches: int,
        suffix: int,
        watched: Tensor,
    ) -> Running:
        """Make the cache; nothing is compiled before the first step."""
        cache = make_cache(way.cache, model, prefix, branches, suffix)
        return cls(way, way.forward(model), cache_argument(model), cache, watched)

    def step(self, fed: Tensor) -> None:
        """Feed one token a branch, int64 [N, 1], and keep what came of it."""
        wait(fed.device)
        begin = time.perf_counter()
        logits = self._call(fed)
        wait(fed.device)
        self.seconds.append(time.perf_counter() - begin)
        # Copies: the next replay of a CUDA graph writes over its outputs.
        self.choices.append(logits[:, -1].argmax(-1))
        self.logits.append(logits[self.watched, -1].clone())

    def burst(self, fed: Sequence[Tensor]) -> float:
        """Seconds a step of several that nobody waits for in between, as a decoding loop runs."""
        wait(fed[0].device)
        begin = time.perf_counter()
        for tokens in fed:
            self._call(tokens)
        wait(fed[0].device)
        return (time.perf_counter() - begin) / len(fed)

    def _call(self, fed: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        inputs = {self.argument: self.cache}
        logits: Tensor = self.forward(input_ids=fed, use_cache=True, **inputs).logits
        return logits


def wait(device: torch.device) -> None:
    """Until the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def tokens_to_feed(steps: int, batch: int, vocabulary: int, device: torch.device) -> list[Tensor]:
    """Random tokens, the same for every engine: int64 [N, 1] a step."""
    generator = torch.Generator().manual_seed(steps * batch)
    drawn = torch.randint(vocabulary, (steps, batch, 1), generator=generator)
    return list(drawn.to(device))
