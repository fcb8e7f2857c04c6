"""One layer of a `SharedPrefixCache`: a prefix each request owns once, a suffix each branch owns.

Shapes by axis names: R requests (prefix rows), T branches a request, N = R*T rows, H key/value
heads, P prefix tokens, S suffix tokens, D features. Row n reads prefix row n // T.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin


class SharedPrefixLayer(CacheLayerMixin):
    """Keys and values of one layer whose prefix is shared by the branches of each request.

    The prefix tensors are the caller's own: read, viewed, never copied or written. Subclasses say
    how the suffix is stored.

    Attributes:
        prefix_keys: [R, H, P, D].
        prefix_values: [R, H, P, Dv].
        branches: T.
    """

    is_sliding: ClassVar[bool] = False
    is_croppable = True

    def __init__(self, prefix_keys: Tensor, prefix_values: Tensor, branches: int) -> None:
        """An empty suffix after `prefix_keys` [R, H, P, D] and `prefix_values` [R, H, P, Dv]."""
        self._hold(prefix_keys, prefix_values)
        self.branches = branches
        self.is_initialized = True

    @property
    def batch_size(self) -> int:
        """N, the rows of the queries."""
        return self.prefix_keys.shape[0] * self.branches

    @property
    def prefix_length(self) -> int:
        """P."""
        return self.prefix_keys.shape[-2]

    @property
    def keys(self) -> Tensor:
        """All keys of every row, [N, H, P + S, D], expanded: a new tensor at each read."""
        return expanded(self.prefix_keys, self.branches, self.suffix()[0])

    @property
    def values(self) -> Tensor:
        """All values of every row, [N, H, P + S, Dv], expanded: a new tensor at each read."""
        return expanded(self.prefix_values, self.branches, self.suffix()[1])

    def suffix(self) -> tuple[Tensor, Tensor]:
        """The written part of the suffix: keys [N, H, S, D] and values [N, H, S, Dv]."""
        raise NotImplementedError

    def suffix_length(self) -> int:
        """S as a number (of a static suffix: read from the device)."""
        return self.suffix()[0].shape[-2]

    def rewrite_suffix(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace suffix keys and values by `change` of them (along the batch axis)."""
        raise NotImplementedError

    def drop_suffix(self, tokens: int) -> None:
        """Forget the last `tokens` of the suffix, which holds at least as many."""
        raise NotImplementedError

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the prefix says shapes, dtype and device."""

    def reset(self) -> None:
        """Forget the suffix: the state right after the prefill, ready for new branches."""
        self.drop_suffix(self.suffix_length())

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row n continue row `beam_idx[n]` (int64 [N]), which must be of the same request.

        Only the suffix moves. On a CPU a beam that left its request is a ValueError, elsewhere and
        in compiled code a device-side assertion, so that nothing waits for the device.
        """
        beam_idx = beam_idx.to(self.prefix_keys.device)
        rows = torch.arange(beam_idx.shape[0], device=beam_idx.device)
        stays = (beam_idx // self.branches == rows // self.branches).all()
        message = f"a beam left its request: row n must continue a row of n // {self.branches}"
        if beam_idx.device.type != "cpu" or torch.compiler.is_compiling():
            torch._assert_async(stays, message)
        elif not stays:
            raise ValueError(f"{message}, got beam_idx={beam_idx.tolist()}")
        self.rewrite_suffix(lambda suffix: suffix.index_select(0, beam_idx))

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens; beyond the suffix, view a shorter prefix.

        Raises:
            ValueError: a positive number (transformers gave up that form), or no token would stay.
        """
        count = -tokens_to_remove
        if count < 0:
            raise ValueError(f"crop takes minus the number of tokens to remove, got {-count}")
        if count == 0:
            return
        from_suffix = min(count, self.suffix_length())
        kept = self.prefix_length - (count - from_suffix)
        if kept <= 0:
            raise ValueError(
                f"cannot crop {count} of {self.prefix_length + from_suffix} tokens: none would stay"
            )
        self.drop_suffix(from_suffix)
        self._hold(self.prefix_keys[..., :kept, :], self.prefix_values[..., :kept, :])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Continue every row `repeats` times: T grows, the prefix stays."""
        self.branches *= repeats
        self.rewrite_suffix(lambda suffix: suffix.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep rows `indices` (int64 [N'] or bool [N]), in that order.

        Rows that still stand in runs of equal length, one request after the other, go on sharing
        their prefix; an irregular choice shares as far as the runs allow, in the worst case not
        at all (T = 1, a copy of the prefix a row). The result is right either way.
        """
        indices = torch.arange(self.batch_size, device=indices.device)[indices]
        requests = (indices // self.branches).tolist()
        self.branches = _regular_run(requests)
        heads = requests[:: self.branches]
        if heads != list(range(self.prefix_keys.shape[0])):
            chosen = torch.tensor(heads, device=self.prefix_keys.device)
            self._hold(
                self.prefix_keys.index_select(0, chosen), self.prefix_values.index_select(0, chosen)
            )
        self.rewrite_suffix(lambda suffix: suffix[indices.to(suffix.device)])

    def _hold(self, keys: Tensor, values: Tensor) -> None:
        """Make these the prefix, at an address that stays: CUDA graphs then copy none of it.

        Unguarded, because a guard on the address would compile the model again for every new cache.
        """
        self.prefix_keys, self.prefix_values = keys, values
        if not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(keys, guard=False)
            torch._dynamo.mark_static_address(values, guard=False)

    def _check_rows(self, key_states: Tensor) -> None:
        rows = self.prefix_keys.shape[0]
        if key_states.shape[0] != rows * self.branches:
            raise ValueError(
                f"expected {rows * self.branches} rows ({rows} prefilled x {self.branches} "
                f"branches), got {key_states.shape[0]}: repeat each prompt once a branch "
                "(num_return_sequences and num_beams of generate do)"
            )


class GrowingLayer(SharedPrefixLayer):
    """A suffix that grows by concatenation, like transformers' DynamicLayer."""

    is_compileable = False

    def __init__(self, prefix_keys: Tensor, prefix_values: Tensor, branches: int) -> None:
        """An empty suffix after the prefix; see `SharedPrefixLayer`."""
        super().__init__(prefix_keys, prefix_values, branches)
        self.suffix_keys: Tensor | None = None
        self.suffix_values: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append states [N, H, M, D], [N, H, M, Dv]; return everything, [N, H, P + S + M, D].

        Raises:
            ValueError: the batch is not R*T rows.
        """
        self._check_rows(key_states)
        if self.suffix_keys is None or self.suffix_values is None:
            self.suffix_keys = key_states.clone(memory_format=torch.contiguous_format)
            self.suffix_values = value_states.clone(memory_format=torch.contiguous_format)
        else:
            self.suffix_keys = torch.cat([self.suffix_keys, key_states], dim=-2)
            self.suffix_values = torch.cat([self.suffix_values, value_states], dim=-2)
        return (
            expanded(self.prefix_keys, self.branches, self.suffix_keys),
            expanded(self.prefix_values, self.branches, self.suffix_values),
        )

    def get_seq_length(self) -> int:
        """P + S."""
        return self.prefix_length + self.suffix_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Key length and offset of the mask of the next `query_length` queries."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """-1: no limit."""
        return -1

    def suffix_length(self) -> int:
        """S."""
        return 0 if self.suffix_keys is None else self.suffix_keys.shape[-2]

    def suffix(self) -> tuple[Tensor, Tensor]:
        """Keys [N, H, S, D] and values [N, H, S, Dv]."""
        if self.suffix_keys is None or self.suffix_values is None:
            return empty(self.prefix_keys, self.batch_size), empty(
                self.prefix_values, self.batch_size
            )
        return self.suffix_keys, self.suffix_values

    def rewrite_suffix(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace suffix keys and values by `change` of them."""
        if self.suffix_keys is not None and self.suffix_values is not None:
            self.suffix_keys = change(self.suffix_keys)
            self.suffix_values = change(self.suffix_values)

    def drop_suffix(self, tokens: int) -> None:
        """Forget the last `tokens` of the suffix."""
        kept = self.suffix_length() - tokens
        if kept == 0:
            self.suffix_keys = self.suffix_values = None
        else:
            self.rewrite_suffix(lambda suffix: suffix[..., :kept, :])


def expanded(prefix: Tensor, branches: int, suffix: Tensor) -> Tensor:
    """Prefix rows repeated once a branch (repeat_interleave order), then the suffix: [N, H, L, D].

    The compiler knows this chain and removes it.
    """
    repeated = prefix.unsqueeze(1).expand(-1, branches, -1, -1, -1).flatten(0, 1)
    return torch.cat([repeated, suffix], dim=-2)


def empty(prefix: Tensor, rows: int, length: int = 0) -> Tensor:
    """An uninitialised tensor [rows, H, length, D] like `prefix`."""
    return prefix.new_empty(rows, prefix.shape[1], length, prefix.shape[-1])


def _regular_run(requests: list[int]) -> int:
    """The largest T for which `requests` is a list of requests repeated T times each."""
    if not requests:
        raise ValueError("select at least one row")
    return math.gcd(*(len(list(run)) for _, run in itertools.groupby(requests)))
