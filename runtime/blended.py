"""`Blended`: what `ChunkStore.blend` gives, ready for `model.generate(**blended)`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from torch_cascade.runtime.blend_cache import BlendCache
from torch_cascade.runtime.chunk_report import BlendReport

_OLD_NAME = "past_key_values"


class Blended(Mapping[str, Any]):
    """The inputs of one prefill: `input_ids`, the cache, and what padded prompts need besides.

    A mapping: `model.generate(**blended, max_new_tokens=20)`, `model(**blended, logits_to_keep=1)`.
    The cache stands under the name that the model's forward has for it, which is `cache` from some
    version of transformers on; `blended["past_key_values"]` and `.past_key_values` always work.

    Attributes:
        input_ids: int64 [N, L], on the model's device.
        past_key_values: the `BlendCache`; good for one prefill.
        report: what is reused, and from where it comes.
        attention_mask: int64 [N, L], 0 at padding; None where there is none.
        position_ids: int64 [N, L], not counting padding; None without padding.
    """

    def __init__(
        self,
        input_ids: Tensor,
        past_key_values: BlendCache,
        report: BlendReport,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache_name: str = _OLD_NAME,
    ) -> None:
        """Collect them; `cache_name` is what the model's forward calls its cache."""
        self.input_ids = input_ids
        self.past_key_values = past_key_values
        self.report = report
        self.attention_mask = attention_mask
        self.position_ids = position_ids
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            cache_name: past_key_values,
        }
        self._inputs = {name: value for name, value in inputs.items() if value is not None}

    def __getitem__(self, name: str) -> Any:
        """The input of that name."""
        return self.past_key_values if name == _OLD_NAME else self._inputs[name]

    def __iter__(self) -> Iterator[str]:
        """The names of the inputs."""
        return iter(self._inputs)

    def __len__(self) -> int:
        """How many inputs."""
        return len(self._inputs)
