"""Cached keys and values on their way to the device while the model already computes.

One thread reads the layers of a prompt in order; on CUDA it copies them from pinned memory on a
stream of its own, and an event a layer says when it is there. `take_kv` waits in the graph: the
host for the thread, the compute stream for the event.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from torch_cascade.runtime.blend_layers import KeyValue
from torch_cascade.runtime.chunk_parts import Span
from torch_cascade.runtime.take_kv import Pending, register

logger = logging.getLogger(__name__)


class Source(Protocol):
    """A chunk, wherever it is."""

    def layer(self, index: int) -> KeyValue:
        """Keys [H, T, D] and values [H, T, Dv], for the current stream."""


# A chunk, the places of its first tokens (row of the batch, span), whether to keep what is read.
Fetch: TypeAlias = tuple[Source, Sequence[tuple[int, Span]], bool]
Kept: TypeAlias = dict[int, list[KeyValue]]


class Load:
    """The cached keys and values of one prompt, layer by layer.

    Attributes:
        pending: what the layers of the cache take them by.
    """

    def __init__(
        self,
        fetches: Sequence[Fetch],
        buffers: Sequence[KeyValue],
        finished: Callable[[Kept], None],
    ) -> None:
        """Prepare; `start` begins.

        Args:
            fetches: what goes where.
            buffers: for each layer zeros, keys [N, H, L, D] and values [N, H, L, Dv].
            finished: called in the thread when all is read, with the host's copies [H, T, D] of
                what was to be kept, a pair a layer, by the index of the fetch.
        """
        self._fetches = fetches
        self._buffers: list[KeyValue | None] = list(buffers)
        self._finished = finished
        self._done: list[Future[Any]] = [Future() for _ in buffers]
        self._cancelled = False
        self._streaming = _Streaming(buffers[0][0].device)
        self._inference = buffers[0][0].is_inference()  # such may be written in that mode only
        handle = register(self)
        self.pending = [
            Pending(
                handle, (k.new_empty(0), v.new_empty(0)), index, k.shape[1], k.shape[3], v.shape[3]
            )
            for index, (k, v) in enumerate(buffers)
        ]

    def start(self, executor: Executor) -> None:
        """Read in the executor's thread; loads of one executor follow each other."""
        executor.submit(self._run)

    def cancel(self) -> None:
        """Stop reading: nobody will take the rest."""
        self._cancelled = True

    def take(self, layer: int) -> KeyValue:
        """A layer's keys and values, which are then the caller's.

        Raises:
            RuntimeError: taken before, or loading was cancelled.
            ChunkFileError: a file's content is corrupted.
        """
        pair = self.wait(layer)
        self._buffers[layer] = None
        return pair

    def wait(self, layer: int) -> KeyValue:
        """A layer's keys and values once they are there for the current stream; see `take`."""
        self._streaming.wait(self._done[layer].result())
        pair = self._buffers[layer]
        if pair is None:
            raise RuntimeError("the cached keys and values of this prompt were taken: blend again")
        return pair

    def _run(self) -> None:
        try:
            mode = torch.inference_mode(self._inference)
            with torch.no_grad(), mode, self._streaming.entered():
                kept = self._fill_all()
                self._keep(kept)
        except BaseException as error:
            for done in self._done:
                if not done.done():
                    done.set_exception(error)

    def _keep(self, kept: Kept) -> None:
        """Hand over what was read; the prompt has its keys and values whatever becomes of it."""
        try:
            self._finished(kept)
        except Exception:
            logger.exception("chunks that were loaded could not be kept for the next prompt")

    def _fill_all(self) -> Kept:
        kept: Kept = {index: [] for index, (_, _, keep) in enumerate(self._fetches) if keep}
        for layer, done in enumerate(self._done):
            buffers = self._buffers[layer]
            if self._cancelled or buffers is None:
                raise RuntimeError("loading was cancelled: the cache was prefilled without it")
            for index, (source, places, keep) in enumerate(self._fetches):
                pair = self._streaming.pinned(source.layer(layer), keep)
                _place(pair, places, buffers)
                if keep:
                    kept[index].append(pair)
            done.set_result(self._streaming.mark(buffers))
        return kept


def _place(pair: KeyValue, places: Sequence[tuple[int, Span]], buffers: KeyValue) -> None:
    for row, span in places:
        for target, states in zip(buffers, pair, strict=True):
            part = target[row, :, span.start : span.end]
            part.copy_(states[:, : span.length], non_blocking=True)


class _Streaming:
    """The stream that copies run on; on devices without streams, nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        if self._cuda:
            self._stream = _side_stream(device)
            self._zeroed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._zeroed.record(torch.cuda.current_stream(device))

    @contextlib.contextmanager
    def entered(self) -> Any:
        """Copy on the side stream, after the buffers' zeros."""
        if not self._cuda:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._zeroed)
            yield

    def pinned(self, pair: KeyValue, keep: bool) -> KeyValue:
        """Host memory that a copy can read asynchronously; of its own if it is to be kept."""
        if self._cuda:
            return _pinned(pair[0]), _pinned(pair[1])
        return (pair[0].clone(), pair[1].clone()) if keep else pair

    def mark(self, buffers: KeyValue) -> Any:
        """An event after all copies so far. The buffers are in use by the stream until then."""
        if not self._cuda:
            return None
        for buffer in buffers:
            buffer.record_stream(self._stream)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def wait(self, event: Any) -> None:
        """Let the current stream wait for a mark."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)


def _pinned(states: Tensor) -> Tensor:
    return states if states.is_cuda or states.is_pinned() else states.pin_memory()


_side_streams: dict[torch.device, Any] = {}


def _side_stream(device: torch.device) -> Any:
    """One a device, for the whole process."""
    if device not in _side_streams:
        _side_streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _side_streams[device]
