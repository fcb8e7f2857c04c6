"""The command line of the demonstration: `python -m torch_cascade demo`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torch_cascade.demo.errors import DemoError

NEEDED = ("transformers", "safetensors", "rich")
NEEDED_TO_UNPACK = ("accelerate", "gguf")  # only for the packaged model
BRANCHES = 8
BACKEND = "cascade"
STOCK_BACKEND = "inductor"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the demonstration."""
    count = _at_least(1)
    parser.add_argument("--model", metavar="DIR", help="a transformers causal language model")
    parser.add_argument(
        "--new-tokens",
        metavar="N",
        type=_at_least(8),
        default=32,
        help="tokens to add, at least 8 (default: 32)",
    )
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="default: float32 on a CPU, bfloat16 elsewhere"
    )
    parser.add_argument(
        "--layers", metavar="N", type=count, help="keep only the first layers: a quick run"
    )
    parser.add_argument(
        "--html", metavar="FILE", help="with --rag: write the text there, recomputed tokens marked"
    )
    parser.add_argument("--json", metavar="FILE", help="write the numbers there, too")
    one = parser.add_argument_group("continuations of one prompt, side by side (default)")
    one.add_argument(
        "--branches", metavar="N", type=count, help=f"continuations (default: {BRANCHES})"
    )
    one.add_argument("--prompt-file", metavar="FILE", help="prompt to use instead of ours")
    one.add_argument(
        "--prompt-tokens", metavar="N", type=_at_least(2), help="cut or repeat it to so many"
    )
    rag = parser.add_argument_group("a question about cached documents, read in full and blended")
    rag.add_argument("--rag", action="store_true", help="do this instead")
    rag.add_argument(
        "--ratio", metavar="R", help="share of their tokens to recompute, 0 to 1 (default: 0.15)"
    )


def _at_least(least: int) -> Any:
    def count(text: str) -> int:
        if (number := int(text)) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}")
        return number

    return count


def run(arguments: argparse.Namespace) -> int:
    """Run the demonstration.

    Returns:
        The exit status: 0, or 2 after one line that says what the user can do.
    """
    try:
        _check_installed(NEEDED if arguments.model else NEEDED + NEEDED_TO_UNPACK)
        _check_together(arguments)
        (_run_rag if arguments.rag else _run)(arguments)
    except DemoError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _check_installed(names: Sequence[str]) -> None:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoError(f"the demo needs {', '.join(missing)}: pip install {' '.join(missing)}")


def _check_together(arguments: argparse.Namespace) -> None:
    """Options that say nothing in the mode that was asked for are mistakes."""
    given = {
        "--branches": arguments.rag and arguments.branches is not None,
        "--prompt-file": arguments.rag and arguments.prompt_file is not None,
        "--prompt-tokens": arguments.rag and arguments.prompt_tokens is not None,
        "--ratio": not arguments.rag and arguments.ratio is not None,
        "--html": not arguments.rag and arguments.html is not None,
    }
    for name in (name for name, wrong in given.items() if wrong):
        raise DemoError(f"{name} {'goes not with' if arguments.rag else 'needs'} --rag")


def _check_length(config: Any, length: int) -> None:
    limit = getattr(config.get_text_config(), "max_position_embeddings", length)
    if length > limit:
        raise DemoError(f"prompt and new tokens are {length}, the model takes {limit}")


def _load(console: Any, arguments: argparse.Namespace) -> tuple[Any, Any, str]:
    """Model, tokenizer, and a line about them."""
    from torch_cascade.demo import model

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = DTYPES[arguments.dtype or ("float32" if device == "cpu" else "bfloat16")]
    with console.status("loading the model (the first time it is unpacked: half a minute)"):
        folder = Path(arguments.model) if arguments.model else model.default_folder()
        lm, tokenizer = model.load(folder, dtype, device, arguments.layers)
    about = f"{folder.name}: {lm.config.num_hidden_layers} layers, {str(dtype)[6:]} on {device}"
    return lm, tokenizer, about


def _run_rag(arguments: argparse.Namespace) -> None:
    from rich.console import Console

    from torch_cascade.compiler.options import Options
    from torch_cascade.demo import rag, rag_report

    console = Console()
    ratio = arguments.ratio or "0.15"
    try:
        Options.resolve({"recompute_ratio": ratio})
    except ValueError as error:
        raise DemoError(f"--ratio: {error}") from error
    lm, tokenizer, about = _load(console, arguments)
    prompt = rag.parts(tokenizer)
    cached = sum(len(part) for part in prompt[:-1])
    _check_length(lm.config, cached + len(prompt[-1]) + arguments.new_tokens)
    console.print(
        f"{about}; {len(prompt) - 2} documents and an instruction of {cached} tokens, cached; "
        f"{len(prompt[-1])} tokens of a question; blend computes {ratio} of the cached again",
        highlight=False,
    )
    with console.status("reading the documents, each alone") as status:
        running = rag.ways(lm, prompt, ratio, (STOCK_BACKEND, BACKEND))
        ends = {tokenizer.eos_token_id}
        rag.read(lm, running, ends, arguments.new_tokens, status.update)
    rag_report.show(console, running, tokenizer)
    if arguments.html:
        with console.status("which tokens blend computes again: compiling once more"):
            text = rag.chosen(running[-1]).html(tokenizer)
        Path(arguments.html).write_text(text, encoding="utf-8")
    if arguments.json:
        setup = {"cached_tokens": cached, "torch": torch.__version__, "ratio": ratio}
        content = setup | {"arguments": vars(arguments), "ways": rag.measure(running)}
        Path(arguments.json).write_text(json.dumps(content, default=str, indent=1) + "\n")


def _run(arguments: argparse.Namespace) -> None:
    from rich.console import Console

    from torch_cascade.demo import engines, prompt, report
    from torch_cascade.runtime.prefix_cache import cache_argument

    console = Console()
    arguments.branches = arguments.branches or BRANCHES
    lm, tokenizer, about = _load(console, arguments)
    with console.status("reading the prompt"):
        ids = prompt.build(tokenizer, arguments.prompt_file, arguments.prompt_tokens).to(lm.device)
        _check_length(lm.config, ids.shape[1] + arguments.new_tokens)
        running = engines.build(lm, ids, arguments.branches, arguments.new_tokens)
    console.print(
        f"{about}; "
        f"{ids.shape[1]} prompt tokens, {arguments.branches} branches, "
        f"{arguments.new_tokens} new tokens each",
        highlight=False,
    )
    argument = cache_argument(lm)
    _decode(console, lm, argument, ids, arguments, running)
    report.show(console, running, tokenizer, arguments.branches)
    with console.status("what the compiler did"):
        fed = ids[:, -1:].expand(arguments.branches, 1).contiguous()
        text = report.report_text(running[0], argument, fed)
    console.print("\n[bold]What the compiler did[/]")
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    if arguments.json:
        setup = {"prompt_tokens": ids.shape[1], "torch": torch.__version__}
        content = setup | {"arguments": vars(arguments), "engines": report.measure(running)}
        Path(arguments.json).write_text(json.dumps(content, default=str, indent=1) + "\n")


def _decode(
    console: Any,
    lm: Any,
    argument: str,
    ids: torch.Tensor,
    arguments: argparse.Namespace,
    running: list[Any],
) -> None:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from torch_cascade.demo.decode import decode

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, refresh_per_second=2) as bar:
        task = bar.add_task("", total=arguments.new_tokens * len(running))

        def progress(step: int, engine: Any) -> None:
            verb = "decode" if engine.seconds[2:] else "compile"
            bar.update(task, advance=1, description=f"step {step}, {verb}: {engine.name}")

        decode(
            running,
            argument,
            ids,
            arguments.branches,
            lm.config.get_text_config().vocab_size,
            arguments.new_tokens,
            progress,
        )
