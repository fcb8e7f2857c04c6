"""What a pass is: a frozen dataclass whose fields are its options and whose `apply` edits a graph.

The contract: the graph is functional ATen with `meta["val"]` on every node before and after
`apply`; nodes are swapped in place and the graph object is never rebuilt; no guard is added except
by decisions (`compiler.decide`, `compiler.decide_reuse`) and by `Sizes.agree`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

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
        options: the user's options, as the pass sees them.
        record: where a pass says what it found and did.
    """

    sizes: Sizes
    options: Options
    record: Compilation


class PassError(RuntimeError):
    """A pass of others raised an exception."""


@dataclass(frozen=True)
class Pass(ABC):
    """One rewrite of a functional ATen graph.

    `before` and `after` name the passes between which it must stand
    (`compiler.pass_registry.register_pass` has more). `keeps_strides` is False where nodes that it
    leaves alone, results included, may read values of other strides than before.
    """

    name: ClassVar[str]
    before: ClassVar[tuple[str, ...]] = ()
    after: ClassVar[tuple[str, ...]] = ()
    keeps_strides: ClassVar[bool] = True

    @abstractmethod
    def apply(self, graph: fx.Graph, context: PassContext) -> None:
        """Edit `graph` in place and record what was done."""

    def uuid(self) -> Any:
        """What Inductor's cache key has to know of the code of this pass, beside its options.

        For passes of others, such as `get_hash_for_files((__file__,))` of
        `torch._inductor.custom_graph_pass`. None: what it compiles is not cached.
        """
        return None
