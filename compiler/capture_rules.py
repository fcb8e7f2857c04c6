"""Which attention calls of a Dynamo graph may become `cascade::sdpa`, and why the others may not.

Nothing here changes a graph or asks a symbolic size for its truth value. Values are read from
`meta["example_value"]`; they belong to Dynamo's own fake mode and are never computed with.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from torch_cascade.compiler import capture_regions as regions
from torch_cascade.compiler.record import source_line
from torch_cascade.compiler.report import EXPLANATIONS, Declined, Reason

aten = torch.ops.aten

SDPA_TARGETS = frozenset(
    {
        torch.nn.functional.scaled_dot_product_attention,
        aten.scaled_dot_product_attention,
        aten.scaled_dot_product_attention.default,
    }
)
# One node for a whole attention block: AOTAutograd takes these apart after capture.
MULTI_HEAD_TARGETS = frozenset(
    {
        torch.nn.functional.multi_head_attention_forward,
        torch._native_multi_head_attention,
        torch._transformer_encoder_layer_fwd,
        aten._native_multi_head_attention,
        aten._native_multi_head_attention.default,
        aten._transformer_encoder_layer_fwd,
        aten._transformer_encoder_layer_fwd.default,
    }
)
DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})

_NUMBERS = (float, int, torch.SymFloat, torch.SymInt)

Scale: TypeAlias = "float | fx.Node | None"


@dataclass(frozen=True)
class Call:
    """The arguments of one attention call, with the meaning `cascade::sdpa` gives them."""

    node: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    attn_mask: fx.Node | None
    is_causal: bool
    scale: Scale
    enable_gqa: bool


@dataclass(frozen=True)
class Scope:
    """What holds for a whole graph.

    Attributes:
        training: AOTAutograd will trace a backward for the graph.
        forward_mode: the graph computes with dual numbers.
        pinned: nodes at which the graph itself has changed the choice of kernels.
        devices: device types that have a lowering.
    """

    training: bool
    forward_mode: bool
    pinned: frozenset[fx.Node]
    devices: frozenset[str]

    @classmethod
    def of(cls, gm: fx.GraphModule, inputs: Sequence[Any], devices: Collection[str]) -> Scope:
        """What holds for `gm`, called with `inputs`."""
        return cls(
            builds_training_graph(gm, inputs),
            regions.differentiates_forward(gm.graph),
            regions.pinned_nodes(gm.graph),
            frozenset(devices),
        )


def is_attention(node: fx.Node) -> bool:
    """True for every call this package knows to be an attention, capturable or not."""
    if node.op != "call_function":
        return False
    named = node.target in SDPA_TARGETS or node.target in MULTI_HEAD_TARGETS
    return named or _is_flex(node) or _is_part(node)


def target_name(node: fx.Node) -> str:
    """What the user would call the target of a call node."""
    return str(getattr(node.target, "__name__", node.target))


def describe(node: fx.Node) -> str:
    """Dtype and shape of a tensor node, e.g. `float32[2, 8, s0, 64]`."""
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    sizes = ", ".join(str(size) for size in value.shape)
    return f"{str(value.dtype).removeprefix('torch.')}[{sizes}]"


def builds_training_graph(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """True if AOTAutograd will trace a backward for this graph.

    Its rule (`create_aot_state` in torch/_functorch/aot_autograd.py): an input requires grad, and
    so does an output that is no alias of such an input, or such an input is mutated. The last is
    left out: it changes nothing for attention calls that record no gradient themselves, and those
    that do are refused one by one.
    """
    if not any(isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs):
        return False
    inputs = map(_value, gm.graph.find_nodes(op="placeholder"))
    aliased = {_storage(x) for x in inputs if _requires_grad(x)}
    outputs = map(_value, pytree.tree_leaves(gm.graph.output_node().args))
    return any(_requires_grad(x) and _storage(x) not in aliased for x in outputs)


def legal_call(node: fx.Node, scope: Scope) -> Call | Declined:
    """The call at an attention node if `cascade::sdpa` can stand for it, else the reason."""
    opaque = _opaque(node)
    if opaque is not None:
        return opaque
    if scope.training or _requires_grad(_value(node)):
        return refuse(Reason.REQUIRES_GRAD, node, "an input of the graph requires grad")
    if scope.forward_mode:
        return _unsupported(node, "the graph computes forward-mode derivatives")
    if node in scope.pinned:
        detail = "the compiled function itself says which kernels may run"
        return refuse(Reason.SDPA_KERNEL_CONTEXT, node, detail)
    call = _bind(node)
    if isinstance(call, Declined):
        return call
    refusal = _refused_operands(call, scope.devices)
    return call if refusal is None else refusal


def refuse(reason: Reason, node: fx.Node, detail: str) -> Declined:
    """A refusal with the remedy its reason has and the user's line."""
    return Declined(reason, node.name, detail, EXPLANATIONS[reason].remedy, source_line(node))


def _unsupported(node: fx.Node, detail: str) -> Declined:
    return refuse(Reason.UNSUPPORTED_CALL, node, detail)


def _opaque(node: fx.Node) -> Declined | None:
    """The refusal of an attention that is no `scaled_dot_product_attention` call."""
    name = target_name(node)
    if _is_flex(node):
        return refuse(Reason.FLEX_ATTENTION, node, name)
    if node.target in MULTI_HEAD_TARGETS:
        return refuse(Reason.MULTI_HEAD_ATTENTION, node, name)
    if _is_part(node):
        return _unsupported(node, f"{name} names one kernel")
    return None


def _arguments(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: Any = False,
    *,
    scale: Any = None,
    enable_gqa: Any = False,
) -> dict[str, Any]:
    """The parameters of `scaled_dot_product_attention`, a builtin without a signature."""
    return locals()


def _bind(node: fx.Node) -> Call | Declined:
    """The arguments of a `scaled_dot_product_attention` call, however they are passed."""
    try:
        given = _arguments(*node.args, **node.kwargs)
    except TypeError as error:
        return _unsupported(node, str(error).removeprefix("_arguments() "))
    dropout = given.pop("dropout_p")
    if dropout != 0:  # a node is not 0 either: its value is not known
        return refuse(Reason.DROPOUT, node, f"dropout_p={dropout}")
    scale = _value(given["scale"])
    if isinstance(scale, torch.Tensor):
        return refuse(Reason.TENSOR_SCALE, node, f"scale={given['scale']}")
    if given["scale"] is not None and not isinstance(scale, _NUMBERS):
        return _unsupported(node, f"scale is {type(scale).__name__}")
    for flag in ("is_causal", "enable_gqa"):
        if not isinstance(given[flag], bool):
            return _unsupported(node, f"{flag} is {type(_value(given[flag])).__name__}")
    for name in ("query", "key", "value", "attn_mask"):
        if not isinstance(given[name], fx.Node) and (name, given[name]) != ("attn_mask", None):
            return _unsupported(node, f"{name} is {type(given[name]).__name__}")
    return Call(node, **given)


def _refused_operands(call: Call, devices: frozenset[str]) -> Declined | None:
    """The refusal of a call for what its tensors are, or None."""
    masks = [] if call.attn_mask is None else [call.attn_mask]
    for operand in (call.query, call.key, call.value, *masks):
        value = _value(operand)
        if not isinstance(value, FakeTensor) or value.layout != torch.strided:
            return _unsupported(call.node, f"{operand.name} is not a plain dense tensor")
        if value.device.type not in devices:
            return refuse(Reason.NO_KERNEL, call.node, f"{operand.name} is on {value.device}")
    for operand in (call.query, call.key, call.value):
        dtype = _value(operand).dtype
        if dtype not in DTYPES:
            return _unsupported(call.node, f"{operand.name} is {dtype}")
        if dtype == torch.float64 and _value(operand).device.type != "cpu":
            detail = f"{operand.name} is float64 on {_value(operand).device}"
            return refuse(Reason.FLOAT64, call.node, detail)
    return None


def _value(argument: Any) -> Any:
    """What an argument holds: a node's example value, or the constant itself."""
    return argument.meta.get("example_value") if isinstance(argument, fx.Node) else argument


def _is_flex(node: fx.Node) -> bool:
    return isinstance(node.target, HigherOrderOperator) and target_name(node).startswith("flex_")


def _is_part(node: fx.Node) -> bool:
    """True for the kernel-specific ops behind `scaled_dot_product_attention`, called directly."""
    if not isinstance(node.target, OpOverload | OpOverloadPacket):
        return False
    return target_name(node).startswith("_scaled_dot_product_")


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _storage(tensor: torch.Tensor) -> int:
    """Identity of what a tensor is a view of; of the tensor itself where it has no storage."""
    if isinstance(tensor, FakeTensor) and tensor.layout == torch.strided:
        return int(tensor.untyped_storage()._cdata)
    return id(tensor)
