"""transformers models whose keys and values pass a `cascade::reuse_kv` in every layer, captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from support.capture import joint_graph
from support.hf_models import EXPERTS, FAMILIES, MORE, VOCABULARY, tiny_model
from torch import Tensor, fx
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from torch_cascade.compiler.capture import capture
from torch_cascade.kernels.ops import reuse_kv

REUSING = FAMILIES + MORE
TOKENS, BATCH, FRESH = 11, 2, 5  # unlike all other sizes: equal ones share a symbol


class MarkedLayer(CacheLayerMixin):  # type: ignore[misc]
    """A layer whose whole prompt is given, with cached keys and values beside it."""

    is_sliding = False

    def __init__(self, k_cached: Tensor, v_cached: Tensor, fresh: Tensor) -> None:
        super().__init__()
        self.is_initialized = True
        self.cached = k_cached, v_cached, fresh

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: all comes with the update."""

    def update(self, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys, self.values = reuse_kv(k, v, *self.cached)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return query_length, 0

    def get_max_cache_shape(self) -> int:
        return -1

    get_max_length = get_max_cache_shape


@dataclass(frozen=True)
class Marked:
    """A captured prefill.

    Attributes:
        graph: functional ATen with one `reuse_kv` a layer; the logits of the last token and the
            caches' keys and values come out.
        module: holds its constants.
        inputs: real values of its placeholders, by name.
        values: what each node is for them, by name.
    """

    graph: fx.Graph
    module: fx.GraphModule
    inputs: dict[str, Any]
    values: dict[str, Any]

    def hidden(self, graph: fx.Graph) -> fx.Node:
        """The last hidden state [N, T, D] in this graph or a copy of it."""
        slices = graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor)
        last = [node for node in slices if node.args[1:3] == (1, -1)][-1]
        node = last.args[0]
        assert isinstance(node, fx.Node)
        return node


def prefill(
    family: str,
    *,
    padded: bool = False,
    dtype: torch.dtype = torch.float64,
    experts: str = "batched_mm",
    layers: int = 2,
    attention: str = "sdpa",
) -> tuple[Callable[..., Any], Any]:
    """(function, its arguments): a prefill of a tiny model through marked layers."""
    model = tiny_model(family, dtype, num_hidden_layers=layers)
    model.set_attn_implementation(attention)
    if family in EXPERTS:
        model.set_experts_implementation(experts)
    heads, size = _kv_sizes(family, model.config)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, VOCABULARY, (BATCH, TOKENS), generator=generator)
    shape = (BATCH, heads, TOKENS, size)
    cached = [torch.randn(shape, dtype=dtype, generator=generator) for _ in range(2 * layers)]
    fresh = torch.arange(TOKENS - FRESH, TOKENS).repeat(BATCH, 1)
    seen = torch.ones(BATCH, TOKENS, dtype=torch.int64)
    seen[0, :2] = 0

    def fn(ids: Tensor, fresh: Tensor, seen: Tensor, *cached: Tensor) -> Any:
        pairs = zip(cached[::2], cached[1::2], strict=True)
        cache = Cache(layers=[MarkedLayer(k, v, fresh) for k, v in pairs])
        options = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
        out = model(ids, attention_mask=seen if padded else None, **options)
        return out.logits, [(layer.keys, layer.values) for layer in cache.layers]

    return fn, (ids, fresh, seen, *cached)


def _kv_sizes(family: str, config: Any) -> tuple[int, int]:
    query_heads = config.num_attention_heads
    heads = 1 if family == "Falcon" else getattr(config, "num_key_value_heads", None)
    size = getattr(config, "head_dim", None) or config.hidden_size // query_heads
    return heads or query_heads, size


class _Values(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.found: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.found[n.name] = super().run_node(n)
        return self.found[n.name]


@cache
def marked(
    family: str,
    *,
    padded: bool = False,
    dynamic: bool | None = None,
    layers: int = 2,
    attention: str = "sdpa",
) -> Marked:
    """A family's prefill, captured and computed."""
    flat: list[Any] = []

    def keep(gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        def run(args: list[Any]) -> Any:
            flat[:] = args
            return gm(*args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    fn, args = prefill(family, padded=padded, layers=layers, attention=attention)
    gm = joint_graph(fn, *args, prepare=capture, dynamic=dynamic, inner_compile=keep)
    return computed(gm, flat)


def computed(gm: fx.GraphModule, flat: Sequence[Any]) -> Marked:
    """A captured prefill, computed for the values of its placeholders."""
    interpreter = _Values(gm)
    with torch.no_grad():
        interpreter.run(*flat)
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    return Marked(gm.graph, gm, dict(zip(names, flat, strict=True)), interpreter.found)
