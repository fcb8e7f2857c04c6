"""The compilations of this process in order, each once, and the counters about them."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch._guards import CompileContext

from torch_cascade.compiler.record import Compilation


@dataclass(frozen=True)
class Place:
    """Which compilation of Dynamo is going on, and its how-manieth attempt this is.

    Attributes:
        context: one object for all attempts; None outside of Dynamo.
        attempt: Dynamo starts again when it learns something, and may call the backend again.
        compile_id: as torch's logs name it, "0/0"; "" outside of Dynamo.
    """

    context: Any = None
    attempt: int = 0
    compile_id: str = ""

    @classmethod
    def current(cls) -> Place:
        """The compilation that this thread is in."""
        context = CompileContext.try_get()
        if context is None or context.compile_id is None:
            return cls()
        return cls(context, context.attempt, str(context.compile_id))

    def repeats(self, other: Place) -> bool:
        """True iff this is a later attempt at what `other` compiled in vain.

        Graphs of one attempt are different ones: a splitter may sit between Dynamo and us.
        """
        return self.context is not None and (
            self.context is other.context and self.attempt > other.attempt
        )


class Journal:
    """Records in order; a repeated attempt takes the place of the one before it."""

    def __init__(
        self, size: int | None = None, *, counted: bool = False, draws: bool = False
    ) -> None:
        """Keep the last `size` records; `counted` ones show in torch's counters.

        With `draws` the backend puts a picture into each.
        """
        self.draws = draws
        self._kept: deque[tuple[Place, Compilation]] = deque(maxlen=size)
        self._counted = counted

    @property
    def records(self) -> tuple[Compilation, ...]:
        """Oldest first."""
        return tuple(record for _, record in self._kept)

    @contextlib.contextmanager
    def growing(self) -> Iterator[None]:
        """Keep every record of the context and those only, with pictures; then as before."""
        kept, self._kept = self._kept, deque()
        draws, self.draws = self.draws, True
        try:
            yield
        finally:
            self.draws = draws
            self._kept = deque([*kept, *self._kept], kept.maxlen)

    def add(self, record: Compilation) -> None:
        """Keep and count a compilation that has ended."""
        place = Place.current()
        record.compile_id = place.compile_id
        while self._kept and place.repeats(self._kept[-1][0]):
            self._count(self._kept.pop()[1], -1)
        self._kept.append((place, record))
        self._count(record, 1)

    def _count(self, record: Compilation, times: int) -> None:
        """`counters["cascade"]`: sites, rewritten, and declined.<reason> for each reason.

        Likewise blend.layers (marked ones), blend.reused and blend.declined.<reason>.
        """
        if not self._counted:
            return
        from torch._dynamo.utils import counters

        tally: Counter[str] = counters["cascade"]
        for site in record.sites:
            tally["sites"] += times
            declined = site.declined
            tally["rewritten" if declined is None else f"declined.{declined.reason.value}"] += times
        blend = record.blend
        if blend is not None:
            tally["blend.layers"] += times * len(blend.layers)
            tally["blend.reused"] += times * blend.reused
            if blend.declined is not None:
                tally[f"blend.declined.{blend.declined.reason.value}"] += times
