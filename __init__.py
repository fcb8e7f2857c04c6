"""torch_cascade: shared-prefix cascade attention for `torch.compile(model, backend="cascade")`.

Nothing is imported before it is asked for: the backend needs no import at all, and the names below
load what they need on first use.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_cascade.compiler.chosen import chosen_tokens
    from torch_cascade.compiler.explain import explain, last_report
    from torch_cascade.compiler.options import Options
    from torch_cascade.compiler.pass_base import Pass
    from torch_cascade.compiler.pass_registry import register_pass
    from torch_cascade.compiler.summary import Report
    from torch_cascade.kernels.ops import reuse_kv
    from torch_cascade.runtime.blend_cache import BlendCache
    from torch_cascade.runtime.chunk_store import ChunkStore
    from torch_cascade.runtime.paged import PagePool
    from torch_cascade.runtime.paged_branches import PagedBranches
    from torch_cascade.runtime.prefix_cache import SharedPrefixCache

    __version__: str

__all__ = [
    "BlendCache",
    "ChunkStore",
    "Options",
    "PagePool",
    "PagedBranches",
    "Pass",
    "Report",
    "SharedPrefixCache",
    "chosen_tokens",
    "explain",
    "last_report",
    "register_pass",
    "reuse_kv",
]

_HOMES = {
    "chosen_tokens": "compiler.chosen",
    "explain": "compiler.explain",
    "last_report": "compiler.explain",
    "BlendCache": "runtime.blend_cache",
    "ChunkStore": "runtime.chunk_store",
    "Options": "compiler.options",
    "Pass": "compiler.pass_base",
    "register_pass": "compiler.pass_registry",
    "reuse_kv": "kernels.ops",
    "PagePool": "runtime.paged",
    "PagedBranches": "runtime.paged_branches",
    "Report": "compiler.summary",
    "SharedPrefixCache": "runtime.prefix_cache",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use."""
    if name == "__version__":
        return metadata.version("torch-cascade")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "transformers":
            raise
        raise ImportError(f"{name} needs transformers: pip install 'torch-cascade[hf]'") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
