"""`chosen_tokens`: which tokens a compiled blend computes again, by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from torch_cascade.compiler.backend import CascadeError, compile_graph
from torch_cascade.compiler.journal import Journal
from torch_cascade.compiler.options import Options
from torch_cascade.compiler.pass_base import STAGE
from torch_cascade.compiler.target import Target
from torch_cascade.runtime.blend_layers import Reuse
from torch_cascade.runtime.blended import Blended


@dataclass(frozen=True)
class Stage:
    """What was chosen at one check layer.

    Attributes:
        layer: from this one on only these tokens are computed; -1 before all layers.
        rows: int64 [N, K], which ones, ascending; those without a cached copy are among them.
    """

    layer: int
    rows: Tensor


@dataclass(frozen=True)
class Part:
    """A part of a prompt: a cached chunk, or what has no cached copy.

    Attributes:
        start, end: its tokens.
        reused: how many of them have a cached copy: the first ones.
    """

    start: int
    end: int
    reused: int


@dataclass(frozen=True)
class ChosenTokens:
    """What a compiled blend chose in one prompt.

    `print` it for numbers; `html` shows the text with the tokens marked.

    Attributes:
        ids: int64 [N, L], the prompt.
        parts: of each batch row, in order, without padding.
        stages: by check layer; gradual filtering has several, each chosen among the last one's.
    """

    ids: Tensor
    parts: tuple[tuple[Part, ...], ...]
    stages: tuple[Stage, ...]

    def counts(self) -> list[list[list[int]]]:
        """For each stage and batch row, how many tokens of each part are computed."""
        return [
            [
                [int(((kept >= part.start) & (kept < part.end)).sum()) for part in parts]
                for kept, parts in zip(stage.rows, self.parts, strict=True)
            ]
            for stage in self.stages
        ]

    def html(self, tokenizer: Any = None) -> str:
        """The prompt with the tokens marked, as one HTML file that loads nothing.

        Args:
            tokenizer: of transformers, to show text; token ids are shown without.
        """
        from torch_cascade.compiler.page_tokens import tokens_page

        return tokens_page(self, tokenizer)

    def __str__(self) -> str:
        """A line for each check layer, then one for each part of each prompt."""
        lines = []
        for stage, rows in zip(self.stages, self.counts(), strict=True):
            where = "before all layers" if stage.layer < 0 else f"from layer {stage.layer} on"
            lines.append(f"{where}: {stage.rows.shape[1]} of {self.ids.shape[1]} tokens")
            for row, counts in enumerate(rows):
                for n, (part, count) in enumerate(zip(self.parts[row], counts, strict=True)):
                    size = part.end - part.start
                    cached = f", {part.reused} of them cached" if part.reused else ", not cached"
                    lines.append(f"  prompt {row}, part {n}: {count} of {size} tokens{cached}")
        return "\n".join(lines)


def chosen_tokens(fn: Callable[..., Any], blended: Blended, /, **kwargs: Any) -> ChosenTokens:
    """Prefill a blended prompt once, and say which tokens were computed again.

    The model is compiled once more, with code generation and the options that it has, but for one
    thing: what is chosen is a result, too. So these are the rows that the compiled graph itself
    chooses, and not those of other kernels, which may round otherwise. This takes the time of a
    compilation.

    Args:
        fn: the model; or what `torch.compile` returned, then with the options it was given.
        blended: what `ChunkStore.blend` returned; used up, as by any prefill.
        kwargs: further arguments of the model; `logits_to_keep=1` is needed as for any blend.

    Returns:
        The chosen tokens of each check layer.

    Raises:
        ValueError: the prompt was prefilled before, nothing of it is cached, or the graph does not
            blend (the message says why not).
        CascadeError: results of tokens that a blend does not compute.

    Example:
        >>> import torch, torch_cascade
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=64,
        ...     num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
        >>> model = LlamaForCausalLM(config).eval()
        >>> store = torch_cascade.ChunkStore(model)
        >>> name = store.add([5, 6, 7, 8])
        >>> options = {"recompute_ratio": "0.25", "decide": "always"}
        >>> compiled = torch.compile(model, backend="cascade", options=options)
        >>> blended = store.blend([[9, 10], [5, 6, 7, 8], [11]])
        >>> chosen = torch_cascade.chosen_tokens(compiled, blended, logits_to_keep=1)
        >>> chosen.stages[0].layer, chosen.stages[0].rows.shape
        (1, torch.Size([1, 4]))
        >>> chosen.counts()  # of the parts; 2 and 1 tokens have no cached copy
        [[[2, 1, 1]]]
    """
    _reuse(blended)
    target = Target.of(fn)
    options, patches = Options.resolve(target.options, target.mode)
    options = replace(options, strict=False)
    patches["force_disable_caches"] = True
    journal, seen = Journal(), _Seen({})

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compiler = seen.compile
        return compile_graph(gm, inputs, options, patches, inner_compile=compiler, journal=journal)

    ids, parts = blended.input_ids.cpu(), _parts(blended)
    with torch.no_grad():
        target.call(backend, (), {**blended, **kwargs})
    if not seen.rows:
        raise _why_not([r.blend for r in journal.records if r.blend is not None])
    stages = tuple(Stage(layer, rows) for layer, rows in sorted(seen.rows.items()))
    return ChosenTokens(ids, parts, stages)


def _reuse(blended: Blended) -> Reuse:
    """What of a prompt is cached.

    Raises:
        TypeError: it is no blended prompt.
        ValueError: it was prefilled, or nothing is.
    """
    if not isinstance(blended, Blended):
        got = type(blended).__name__
        raise TypeError(f"blended: expected what ChunkStore.blend returned, got {got}")
    reuse = blended.past_key_values.layers[0].reuse
    if reuse is None:
        raise ValueError("blended: expected cached tokens before their prefill, got none: blend")
    return reuse


def _parts(blended: Blended) -> tuple[tuple[Part, ...], ...]:
    rows, mask = blended.input_ids.shape[0], blended.attention_mask
    made: list[tuple[Part, ...]] = []
    for row in range(rows):
        told = [part for part in blended.report.parts if part.prompt == row]
        # Padding stands in front or behind.
        start = 0 if mask is None else int(mask[row].argmax())
        parts = []
        for part in told:
            parts.append(Part(start, start + part.tokens, part.reused))
            start += part.tokens
        made.append(tuple(parts))
    return tuple(made)


def _why_not(blends: Sequence[Any]) -> Exception:
    declined = [blend.declined for blend in blends if blend.declined is not None]
    if not declined:
        return ValueError(
            "fn: expected a model whose prefill blends, got no graph with cached keys"
        )
    said = f"fn: nothing was chosen, as the graph does not blend: {declined[0]}"
    asks = declined[0].reason.value == "all-tokens"
    return CascadeError(said) if asks else ValueError(said)


@dataclass(frozen=True)
class _Seen:
    """Compiles graphs as Inductor does, with what they choose as further results.

    Attributes:
        rows: by check layer, once the graph has run.
    """

    rows: dict[int, Tensor]

    def compile(self, gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        """Stands in for `compile_fx_inner`."""
        from torch._inductor.compile_fx import compile_fx_inner

        found = [node for node in gm.graph.nodes if STAGE in node.meta]
        layers = [node.meta[STAGE] for node in found]
        (output,) = (node for node in gm.graph.nodes if node.op == "output")
        results: Any = output.args[0]
        output.args = ((*results, *found),)
        gm.recompile()
        compiled: Any = compile_fx_inner(gm, inputs, **options)
        if not found:
            return compiled

        def run(args: list[Any]) -> Any:
            made = compiled(args)
            rows = [tensor.cpu().clone() for tensor in made[len(results) :]]
            self.rows.update(zip(layers, rows, strict=True))
            return made[: len(results)]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run
