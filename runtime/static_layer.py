"""A layer of a `SharedPrefixCache` whose suffix is a buffer of fixed size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_cascade.runtime.prefix_layers import SharedPrefixLayer, empty, expanded


class StaticLayer(SharedPrefixLayer):
    """A suffix buffer of fixed size written in place: one compilation serves every step.

    The number of tokens written is a 0-d tensor, so that no step changes a Python value that
    compiled code would guard on.
    """

    is_compileable = True

    def __init__(
        self, prefix_keys: Tensor, prefix_values: Tensor, branches: int, max_suffix: int
    ) -> None:
        """A zeroed buffer of `max_suffix` tokens after the prefix; see `SharedPrefixLayer`."""
        super().__init__(prefix_keys, prefix_values, branches)
        self.max_suffix = max_suffix
        self.written = torch.zeros((), dtype=torch.int64, device=prefix_keys.device)
        torch._dynamo.mark_static_address(self.written, guard=False)
        self._use(
            empty(prefix_keys, self.batch_size, max_suffix).zero_(),
            empty(prefix_values, self.batch_size, max_suffix).zero_(),
        )

    def _use(self, keys: Tensor, values: Tensor) -> None:
        # CUDA graphs write only to inputs marked so; unguarded, because a guard on the address
        # would compile the model again for every new cache.
        torch._dynamo.mark_static_address(keys, guard=False)
        torch._dynamo.mark_static_address(values, guard=False)
        self.suffix_keys, self.suffix_values = keys, values

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write states [N, H, M, D], [N, H, M, Dv]; return prefix and whole buffer, P + max_suffix.

        Slots not yet written are later than every query: the causal mask hides them.

        Raises:
            ValueError: the batch is not R*T rows; on a CPU in eager mode, the buffer is full
                (elsewhere an index outside the buffer is a device-side assertion).
        """
        self._check_rows(key_states)
        length = key_states.shape[-2]
        if self.written.device.type == "cpu":
            self._check_room(length)
        positions = torch.arange(length, device=self.written.device) + self.written
        self.written.add_(length)
        self.suffix_keys.index_copy_(2, positions, key_states)
        self.suffix_values.index_copy_(2, positions, value_states)
        return (
            expanded(self.prefix_keys, self.branches, self.suffix_keys),
            expanded(self.prefix_values, self.branches, self.suffix_values),
        )

    def get_seq_length(self) -> Tensor:
        """P + S, int64 [] on the cache's device.

        The clamp changes nothing: it tells the compiler that S >= 0, hence that every query stands
        after the whole prefix.
        """
        return self.prefix_length + self.written.clamp_min(0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Key length (always P + max_suffix) and offset of the next mask.

        Raises:
            ValueError: outside compiled code, the buffer has no room for `query_length` tokens.
        """
        self._check_room(query_length)
        return self.get_max_length(), 0

    def get_max_length(self) -> int:
        """P + max_suffix."""
        return self.prefix_length + self.max_suffix

    def suffix_length(self) -> int:
        """S, read from the device."""
        return int(self.written)

    def suffix(self) -> tuple[Tensor, Tensor]:
        """The written part: views [N, H, S, D] and [N, H, S, Dv] of the buffers."""
        written = self.suffix_length()
        return self.suffix_keys[..., :written, :], self.suffix_values[..., :written, :]

    def rewrite_suffix(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace the buffers' content by `change` of them; in place while the batch stays."""
        keys, values = change(self.suffix_keys), change(self.suffix_values)
        if keys.shape != self.suffix_keys.shape:
            self._use(keys, values)
            return
        self.suffix_keys.copy_(keys)
        self.suffix_values.copy_(values)

    def drop_suffix(self, tokens: int) -> None:
        """Forget the last `tokens`: their slots stay as they are, hidden until written again."""
        self.written.sub_(tokens)

    def reset(self) -> None:
        """Forget the suffix: the state right after the prefill, ready for new branches."""
        self.written.zero_()
        self.suffix_keys.zero_()
        self.suffix_values.zero_()

    def _check_room(self, length: int) -> None:
        if torch.compiler.is_compiling():
            return
        written = self.suffix_length()
        if written + length > self.max_suffix:
            raise ValueError(
                f"the static suffix holds max_suffix={self.max_suffix} tokens: {written} are "
                f"written, {length} more do not fit (reset() forgets them all)"
            )
