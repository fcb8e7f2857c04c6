"""What a pass does about a bug of its own: it declines the site it was at, and warns once.

A rewrite is an optimisation, so an exception while one site is analysed or emitted must cost no
more than that site. With `strict` it is raised instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import fx

from torch_cascade.compiler.record import source_line
from torch_cascade.compiler.report import EXPLANATIONS, Declined, Reason

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class Failures:
    """The exceptions that one pass raised while it handled one graph.

    Attributes:
        strict: raise them.
        users: exceptions that are the user's to know; raised in any case.
        raised: where, in the user's words, and what.
    """

    strict: bool = True
    users: tuple[type[Exception], ...] = ()
    raised: list[tuple[str, Exception]] = field(default_factory=list)

    def guarded(self, node: fx.Node | None, step: Callable[..., T], *args: Any) -> T | Declined:
        """`step(*args)`, or the decline of the site at `node` if it raises.

        Args:
            node: the attention that the step is about; None if it is about all of them.
            step: must leave the graph as it was if it raises.
            args: its arguments.
        """
        try:
            return step(*args)
        except Exception as error:
            if self.strict or isinstance(error, self.users):
                raise
            return self._declined(node, error)

    def warn(self, what: str, then: str = "the attention there stays as it is") -> None:
        """One warning for all failures, with the traceback of the first; nothing if none."""
        if not self.raised:
            return
        where, error = self.raised[0]
        logger.warning(
            "%s failed %d time(s), first at %s; %s: %s",
            what,
            len(self.raised),
            where,
            then,
            _summary(error),
            exc_info=error,
        )

    def _declined(self, node: fx.Node | None, error: Exception) -> Declined:
        name = "" if node is None else node.name
        where = "" if node is None else source_line(node)
        self.raised.append((where or name or "no single attention", error))
        remedy = EXPLANATIONS[Reason.PASS_FAILED].remedy
        return Declined(Reason.PASS_FAILED, name, _summary(error), remedy, where)


def _summary(error: Exception) -> str:
    """Type and first line of an exception: those of torch go on for pages."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
