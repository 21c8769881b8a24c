"""Activations of one rank: one forward and backward pass on torch's meta device, tensors counted while they live.

The model gets token ids, as language models take them. Attention of torch is counted as its fused kernels have it:
output and log-sum-exp are kept, no scores. What kernels need inside of themselves is not seen. Where sequences are cut,
the pass is that of one rank, over a mesh on which nothing moves; its attention layers exchange what they would send.
"""

from __future__ import annotations

import copy
import inspect
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mpispeed.exchange.cost import Sent
from mpispeed.nn.sequence import Layout, Running, SequenceGroup, current, use
from mpispeed.nn.sequence.attention import attention
from mpispeed.store.dry import META

if TYPE_CHECKING:
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.plan.plan import Plan

EXCHANGED = "sequences of attention layers"


@dataclass(frozen=True, slots=True)
class Activations:
    """Need of one micro-batch of a rank besides model states. Units: bytes.

    Attributes:
        peak_bytes: most tensors that live at once in forward and backward, without parameters; a gradient counts
            until the engine takes it.
        kept_bytes: what backward keeps at the end of forward.
        layer_bytes: most that one of the model's layers adds to it.
        sent: traffic of the sequence axis in one optimizer step.
        has_loss: the model gave one number; else what follows its outputs is not counted.
        refusal: why nothing is known; "" if it is.
    """

    peak_bytes: int = 0
    kept_bytes: int = 0
    layer_bytes: int = 0
    sent: tuple[Sent, ...] = ()
    has_loss: bool = True
    refusal: str = ""


def measure(model: nn.Module, plan: Plan, mesh: Mesh, length: int) -> Activations:
    """Run one micro-batch of whole sequences of `length` tokens through a model, without memory. Local.

    Args:
        model: on the meta device; it stays as it is.
        plan: the settings.
        mesh: a dry one.
        length: tokens of a sequence, before it is cut.
    """
    if plan.axes["pipe"] * plan.axes["model"] > 1:
        return Activations(refusal="of pipeline stages and of slices")
    try:
        own = copy.deepcopy(model).to(META)
        if plan.cast_by:
            own.to(plan.policy.compute)
        return _Pass(own, plan, mesh, length).run()
    except Exception as error:  # whatever the user's model raises without values
        text = str(error).strip().split("\n")[0]
        return Activations(
            refusal=f"as the model cannot run on token ids without values: {type(error).__name__}: {text}"
        )


# -- the pass --------------------------------------------------------------------------------------------------------


class _Pass:
    def __init__(self, model: nn.Module, plan: Plan, mesh: Mesh, length: int) -> None:
        self._model, self._micro_steps = model.train(), plan.batch.gradient_accumulation_steps
        self._mesh, self._running, tokens = mesh, None, length
        if mesh["sequence"].size > 1:
            group = SequenceGroup(mesh["sequence"], mesh["sequence.ulysses"], mesh["sequence.ring"])
            layout = Layout(length, group.ulysses.size, group.ring.size)
            self._running, tokens = Running(group, layout), layout.count(group.rank)
        self._shape = plan.batch.micro_batch_size, tokens
        self._living = Living((*model.parameters(), *model.buffers()))

    def run(self) -> Activations:
        """Forward and backward."""
        model, living = self._model, self._living
        for param in model.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(_take)
        grown: list[int] = []
        for layer in layers_of(model):
            _note_growth(layer, living, grown)
        sent: Counter[tuple[str, tuple[str, ...]]] = Counter()
        end = self._mesh.comm_trace.subscribe(
            lambda record: sent.update({(record.verb, record.axes): record.sent_bytes})
        )
        try:
            with _one_document(), FusedAttention(), living, use(self._running) if self._running else nullcontext():
                found = _outputs(call_with_ids(model, self._shape))
                kept = living.bytes
                torch.autograd.backward(found, [torch.empty_like(one) for one in found])
        finally:
            end()
        rows = (Sent(EXCHANGED, *key, self._micro_steps * size) for key, size in sorted(sent.items()) if size)
        has_loss = len(found) == 1 and found[0].numel() == 1
        return Activations(living.peak, kept, max(grown, default=0), tuple(rows), has_loss)


def call_with_ids(model: nn.Module, shape: tuple[int, int]) -> Any:
    """Call a model as language models are called, with token ids (and labels) without values.

    Raises:
        Exception: what the model raises.
    """
    wanted = inspect.signature(model.forward).parameters
    ids = torch.zeros(shape, dtype=torch.int64, device=META)
    if "input_ids" in wanted:
        given: dict[str, Any] = {"input_ids": ids}
        given.update({name: ids for name in ("labels",) if name in wanted})
        given.update({name: False for name in ("use_cache",) if name in wanted})
        return model(**given)
    required = [
        one for one in wanted.values()
        if one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]  # fmt: skip
    return model(*[ids] * max(len(required), 1))


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The modules of the list with most parameters: the layers of a transformer."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential) and len(module)]
    size = lambda module: sum(param.numel() for param in module.parameters())  # noqa: E731
    return list(max(lists, key=size)) if lists else []


@contextmanager
def _one_document() -> Iterator[None]:
    """Spare models of transformers the look at their positions for several documents in a row: there are no values."""
    masks = sys.modules.get("transformers.masking_utils")
    name = "find_packed_sequence_indices"
    own = getattr(masks, name, None)
    if own is None:
        yield
        return
    setattr(masks, name, lambda _: None)
    try:
        yield
    finally:
        setattr(masks, name, own)


def _outputs(made: Any) -> list[Tensor]:
    """The loss, or all outputs that depend on parameters.

    Raises:
        ValueError: there are none.
    """
    loss = made.get("loss") if isinstance(made, dict) else getattr(made, "loss", None)
    leaves = [loss] if isinstance(loss, Tensor) else tree_leaves(made)
    found = [one for one in leaves if isinstance(one, Tensor) and one.requires_grad]
    if not found:
        msg = "its outputs do not depend on a parameter"
        raise ValueError(msg)
    return found


def _take(param: Tensor) -> None:
    """As the engine takes gradients into its buckets."""
    param.grad = None


def _note_growth(layer: nn.Module, living: Living, grown: list[int]) -> None:
    before: list[int] = []
    layer.register_forward_pre_hook(lambda *_: before.append(living.bytes))
    layer.register_forward_hook(lambda *_: grown.append(living.bytes - before.pop()))


# -- counting --------------------------------------------------------------------------------------------------------


class Living(TorchDispatchMode):
    """Bytes of the tensors that operations made and somebody still holds.

    Attributes:
        bytes: now.
        peak: the most so far.
    """

    def __init__(self, others: Iterable[Tensor]) -> None:
        """Count all but `others`."""
        super().__init__()
        self.bytes = self.peak = 0
        self._others = list(others)  # they stay alive, so that their storages have no successors at their place
        self._known = {one.untyped_storage()._cdata for one in self._others}
        self._held: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run an operation and count what it has made."""
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, Tensor):
                self._count(one.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self._held[key] = weakref.ref(storage, lambda _: self._forget(key, size))
        self.bytes += size
        self.peak = max(self.peak, self.bytes)

    def _forget(self, key: int, size: int) -> None:
        self.bytes -= size
        self._known.discard(key)
        self._held.pop(key, None)


class FusedAttention(TorchFunctionMode):
    """Attention of torch as its fused kernels keep memory, which the meta device does not have.

    With dropout torch's CPU has no such kernel, and scores are made.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Stand in for `scaled_dot_product_attention`, hand on all else."""
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention and args[0].is_meta:
            return _attention(func, *args, **kwargs)
        return func(*args, **kwargs)


def _attention(
    func: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> Tensor:
    if current() is not None:  # a run has our attention instead
        return attention(query, key, value, causal=is_causal, dropout=dropout_p)
    if dropout_p:
        return func(query, key, value, attn_mask, dropout_p, is_causal, **more)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.empty(attn_mask.shape, dtype=query.dtype, device=META)
    out: Tensor = _Fused.apply(query, key, value, attn_mask)
    return out


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        out = _by_tokens(query, value.shape[-1])
        lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, lse, mask)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *_ = ctx.saved_tensors
        return *(_by_tokens(one, one.shape[-1]) for one in (query, key, value)), None


def _by_tokens(x: Tensor, width: int) -> Tensor:
    """[..., heads, S, width], the heads of a token as neighbours: so projections need no copy of what kernels give."""
    return x.new_empty((*x.transpose(-3, -2).shape[:-1], width)).transpose(-3, -2)
