"""Logits of prompts whose chunks are reused, through the pass of this package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torch_cascade.benchmarks.arms import Arm
from torch_cascade.compiler.backend import compile_graph
from torch_cascade.compiler.options import Options
from torch_cascade.runtime.chunk_store import ChunkStore

CODES = ("interpreted", "inductor")

Prompt = Sequence[Tensor]
"""Token ids of its parts, int64 [T] each."""


class Blender:
    """A model that reads prompts of cached chunks with one arm after the other."""

    def __init__(self, model: Any, code: str = "interpreted") -> None:
        """Make an empty store.

        Args:
            model: a transformers causal language model in evaluation mode.
            code: `inductor` for generated code; `interpreted` runs the graphs that our passes leave
                op by op: the same figures, without minutes of code generation for each arm.
        """
        self.model = model
        self.store = ChunkStore(model)
        self._code = code

    def compiled(self, arm: Arm) -> Callable[[Sequence[Prompt], int], Tensor]:
        """(prompts, n) -> logits of the last n tokens, float32 [N, n, V].

        All parts of a prompt but the last are chunks; they are added if they are missing. Compiled
        functions of earlier arms are dropped.
        """
        torch._dynamo.reset()
        options = {"decide": "always", "min_tokens": 1, "strict": True, **arm.options}
        if self._code == "inductor":
            model = torch.compile(self.model, backend="cascade", options=options)
        else:
            model = torch.compile(self.model, backend=_interpreting(options))

        def logits(prompts: Sequence[Prompt], last: int) -> Tensor:
            for part in (part for parts in prompts for part in parts[:-1]):
                self.store.add(part)
            blended = self.store.blend([[x.tolist() for x in parts] for parts in prompts])
            with torch.no_grad():
                out: Tensor = model(**blended, use_cache=True, logits_to_keep=last).logits
            return out.float()

        return logits

    def eager(self, ids: Tensor, last: int) -> Tensor:
        """Logits [N, n, V] of the last tokens of prompts [N, L], computed in full."""
        with torch.no_grad():
            out: Tensor = self.model(ids, use_cache=False, logits_to_keep=last).logits
        return out.float()


def _interpreting(options: dict[str, object]) -> Callable[..., Any]:
    resolved, patches = Options.resolve(options)

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_graph(gm, inputs, resolved, patches, inner_compile=_op_by_op)

    return backend


def _op_by_op(gm: fx.GraphModule, *_: Any, **__: Any) -> Callable[[list[Any]], Any]:
    def run(arguments: list[Any]) -> Any:
        return gm(*arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
