"""A question about documents whose keys and values are cached: full, reuse and blend."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torch_cascade.compiler.chosen import ChosenTokens, chosen_tokens
from torch_cascade.demo.documents import DOCUMENTS, FORM, INSTRUCTION, QUESTION
from torch_cascade.runtime.chunk_store import ChunkStore
from torch_cascade.runtime.prefix_cache import cache_argument

REPEAT = 5
_HERE = "<documents>"


@dataclass
class Way:
    """One way to read the prompt, and what it did.

    Attributes:
        name: for tables.
        inputs: makes the prefill's arguments; its time counts, too.
        forward: the compiled model.
        compile_seconds: of the first prefill.
        seconds: of later prefills, to the first token.
        logits: of the first token, float32 [V].
        tokens: the answer's.
    """

    name: str
    inputs: Callable[[], Any]
    forward: Callable[..., Any]
    compile_seconds: float = 0.0
    seconds: list[float] = field(default_factory=list)
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    tokens: list[int] = field(default_factory=list)

    def prefill(self) -> tuple[float, Any, Tensor]:
        """Read the prompt once: seconds, the cache, logits of the last token [V]."""
        begin = time.perf_counter()
        inputs = dict(self.inputs())
        with torch.no_grad():
            logits = self.forward(**inputs, use_cache=True, logits_to_keep=1).logits[0, -1]
        if logits.device.type == "cuda":
            torch.cuda.synchronize(logits.device)
        (cache,) = (x for x in inputs.values() if not isinstance(x, Tensor))
        return time.perf_counter() - begin, cache, logits.float()


def parts(tokenizer: Any, documents: Sequence[str] = DOCUMENTS) -> list[Tensor]:
    """Token ids of instruction, documents and question, int64 [T] each; the last is never cached.

    Each is tokenized by itself, so that a document has the same tokens in every prompt.
    """
    text = f"{INSTRUCTION}\n\n{_HERE}\nQuestion: {QUESTION} {FORM}"
    if tokenizer.chat_template is not None:
        message = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    head, _, tail = text.partition(_HERE)
    texts = [head, *documents, tail]
    return [torch.tensor(tokenizer(x, add_special_tokens=False)["input_ids"]) for x in texts]


def ways(model: Any, prompt: Sequence[Tensor], ratio: str, engines: tuple[str, str]) -> list[Way]:
    """Full, reuse and blend; the instruction and every document are cached first.

    Args:
        model: a transformers causal language model.
        prompt: see `parts`.
        ratio: of the cached tokens that blend computes again.
        engines: backends of `torch.compile`: stock, and ours.
    """
    from transformers import DynamicCache

    store = ChunkStore(model)
    for part in prompt[:-1]:
        store.add(part)
    ids = torch.cat(list(prompt))[None].to(model.device)
    stock, ours = engines
    argument = cache_argument(model)

    def plain() -> dict[str, Any]:
        return {"input_ids": ids, argument: DynamicCache(config=model.config)}

    def blended() -> Any:
        return store.blend([part.tolist() for part in prompt])

    def compiled(share: str) -> Any:
        options: dict[str, Any] = {"recompute_ratio": share, "decide": "always", "strict": True}
        return torch.compile(model, backend=ours, dynamic=False, options=options)

    return [
        Way("full", plain, torch.compile(model, backend=stock, dynamic=False)),
        Way("reuse", blended, compiled("0")),
        Way("blend", blended, compiled(ratio)),
    ]


def read(
    model: Any, running: Sequence[Way], ends: set[int], new: int, said: Callable[[str], None]
) -> None:
    """Compile, time and answer with every way; what they find lands in them.

    Prefills of different ways take turns. Answers are greedy, decoded by the eager model from the
    cache that each way's own prefill filled.

    Args:
        model: uncompiled.
        running: see `ways`.
        ends: tokens that end an answer.
        new: tokens of an answer at most.
        said: told what is going on.
    """
    for way in running:
        said(f"compile: {way.name}")
        seconds, cache, way.logits = way.prefill()
        way.compile_seconds = seconds
        way.tokens = answer(model, cache, way.logits, ends, new)
    for turn in range(REPEAT):
        for way in running:
            said(f"prefill {turn + 1} of {REPEAT}: {way.name}")
            way.seconds.append(way.prefill()[0])


def chosen(blend: Way) -> ChosenTokens:
    """Which tokens a compiled way computes again."""
    return chosen_tokens(blend.forward, blend.inputs(), use_cache=True, logits_to_keep=1)


def answer(model: Any, cache: Any, logits: Tensor, ends: set[int], new: int) -> list[int]:
    """Tokens that follow greedily, without the end."""
    argument = cache_argument(model)
    tokens: list[int] = []
    while len(tokens) < new and (token := int(logits.argmax())) not in ends:
        tokens.append(token)
        fed = torch.tensor([[token]], device=model.device)
        with torch.no_grad():
            logits = model(input_ids=fed, use_cache=True, **{argument: cache}).logits[0, -1]
    return tokens


def measure(running: Sequence[Way]) -> dict[str, dict[str, Any]]:
    """Numbers of every way, by name; the first is what the others are compared with."""
    full = running[0].logits.double().log_softmax(-1)
    said = {}
    for way in running:
        ours = way.logits.double().log_softmax(-1)
        pairs = zip(running[0].seconds, way.seconds, strict=True)
        said[way.name] = {
            "first_token_ms": 1e3 * statistics.median(way.seconds),
            "speed": statistics.median(theirs / mine for theirs, mine in pairs),
            "kl": float((full.exp() * (full - ours)).sum()),
            "compile_s": max(0.0, way.compile_seconds - statistics.median(way.seconds)),
        }
    return said
