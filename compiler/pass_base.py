"""What a pass is: a frozen dataclass whose fields are its options and whose `apply` edits a graph.

The contract: the graph is functional ATen with `meta["val"]` on every node before and after
`apply`; nodes are swapped in place and the graph object is never rebuilt; no guard is added except
by decisions (`compiler.decide`, `compiler.decide_reuse`) and by `Sizes.agree`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from torch_cascade.compiler.graph import Sizes
from torch_cascade.compiler.options import Options
from torch_cascade.compiler.record import Compilation

ROLE = "cascade_role"
"""In a node's `meta`: the part that it plays for pictures, where its op does not say so."""
STAGE = "cascade_stage"
"""In a node's `meta`: the check layer (-1 before all) whose chosen rows it holds."""


@dataclass(frozen=True)
class PassContext:
    """What every pass of one compilation shares.

    Attributes:
        sizes: facts about the symbolic sizes.
        options: the user's options.
        record: where a pass says what it found and did.
    """

    sizes: Sizes
    options: Options
    record: Compilation


@dataclass(frozen=True)
class Pass(ABC):
    """One rewrite of a functional ATen graph."""

    name: ClassVar[str]

    @abstractmethod
    def apply(self, graph: fx.Graph, context: PassContext) -> None:
        """Edit `graph` in place and record what was done."""
