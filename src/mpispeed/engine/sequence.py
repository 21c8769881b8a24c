"""The sequence axis of a run: batches are cut before the model sees them, and attention is told how."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.base.events import Event
from mpispeed.base.tensor_tree import tensors
from mpispeed.engine.hooks import Context, Hooks, Setup
from mpispeed.nn.hf_attention import adopt, padding_of
from mpispeed.nn.sequence import running
from mpispeed.nn.sequence.cut import NAMED, Shape, Wants, cut_inputs, cut_tensors, digest, lengths
from mpispeed.nn.sequence.group import SequenceGroup
from mpispeed.nn.sequence.handed import hand, handed
from mpispeed.nn.sequence.layout import Layout
from mpispeed.nn.sequence.running import Running
from mpispeed.pipe.module import PipelineModule

if TYPE_CHECKING:
    from mpispeed.mesh.mesh import Mesh


def transform(model: nn.Module, setup: Setup) -> None:
    """Give transformers' models the attention that works on parts of sequences, where sequences are cut. Local.

    Raises:
        ConfigError: a model computes its attention beside the interface, or carries a state along the sequence.
    """
    if setup.mesh["sequence"].size > 1:
        adopt(model)


def attach(context: Context) -> Hooks | None:
    """Cut batches where sequences are cut over ranks, or the section `sequence_parallel` is there; else None.

    Collective over: the sequence axis.

    Raises:
        ConfigError: the model cannot be trained with cut sequences.
    """
    config = context.plan.config
    if context.mesh["sequence"].size == 1 and "sequence_parallel" not in config.model_fields_set:
        return None
    group, cuts = group_of(context.mesh), cuts_batches(context)
    if isinstance(context.module, PipelineModule):
        stage = PipelineSequence(group, cuts=cuts)
        context.bus.subscribe(Event.CLOSE, lambda _: running.leave(group))
        return Hooks(batch=stage.batch, chunk=stage.begin if cuts else None, published={"sequence": stage})
    sequence = Sequence(group, context.module, cuts=cuts)
    context.bus.subscribe(Event.CLOSE, lambda _: sequence.end())
    return Hooks(batch=sequence.batch, published={"sequence": sequence})


def cuts_batches(context: Context) -> bool:
    """Whether the engine cuts batches; else the script or its loader does, as the config or the given mpu says."""
    return context.plan.config.sequence_parallel.cuts_batches and getattr(context.given.mpu, "cuts_batches", True)


def group_of(mesh: Mesh) -> SequenceGroup:
    """The ranks of this rank's sequence."""
    return SequenceGroup(mesh["sequence"], mesh["sequence.ulysses"], mesh["sequence.ring"])


class Sequence:
    """The sequences of one engine; `engine.sequence`.

    Attributes:
        group: the ranks of this rank's sequence.
        cuts_batches: batches are whole and are cut; False: each rank gets its own part, and whoever made it tells
            attention how (`mpispeed.sequence.use`).
    """

    def __init__(self, group: SequenceGroup, module: nn.Module, *, cuts: bool) -> None:
        """Watch the model's passes."""
        self.group, self.cuts_batches, self._is_handed = group, cuts, False
        wants, self._name = wants_of(module), type(_named(module)).__name__
        # transformers' models keep their own attention where nothing is cut, and read padding from the mask
        self._wants = wants if group.size > 1 else replace(wants, mask=True)
        self._is_hub = _is_hub(_named(module))
        self._params = _places_of(module)
        self._shape = Shape(group.ulysses.size, group.ring.size, group.rank)
        self._hooks = [module.register_forward_hook(self._ended)]

    def batch(self, inputs: Any, is_training: bool) -> Any:
        """This rank's part of the inputs of a forward pass, which begins the pass for attention.

        Collective over: the sequence axis.

        Raises:
            UsageError: on all ranks of the sequence, if one cannot cut its batch, or has another one.
        """
        if not self.cuts_batches:
            self._take_cut(tensors(inputs), is_training)
            return inputs
        args, kwargs = by_names(self._params, *inputs)
        problem, found = "", None
        try:
            self._check(kwargs)
            found = cut_inputs(args, kwargs, self._shape, self._wants)
            self._check_layout(found[2])
        except UsageError as error:
            problem = str(error)
        agree_on_batch(self.group, digest(args, kwargs), problem)
        if found is None:
            raise UsageError(problem)  # said above already, on all ranks
        args, kwargs, layout = found
        running.set_running(Running(self.group, layout))
        return args, kwargs

    def _ended(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """Mark the pass. Where a loader cuts batches, it is over: Trainers evaluate whole ones by the bare model."""
        running.mark(outputs)
        current = running.current()
        if self._is_handed and current is not None:
            hand(tensors(outputs), current)  # for the loss
            running.set_running(None)

    def _take_cut(self, inputs: Iterable[torch.Tensor], is_training: bool) -> None:
        """Begin the pass of a batch that a loader has cut; without one it is what the script has said.

        Batches to evaluate that nobody has cut are whole sequences.
        """
        found = handed(inputs)
        if found is not None or self._is_handed:
            running.set_running(found)
        self._is_handed = found is not None
        if self._is_hub and is_training and self.group.size > 1 and running.current() is None:
            msg = (
                f"nobody has told how the batch is cut over the {self.group.size} ranks of its sequence: take it from "
                "a UlyssesSPDataLoaderAdapter, run forward in mpispeed.sequence.use, or leave it whole and set "
                "sequence_parallel.cuts_batches to true"
            )
            raise UsageError(msg)

    def end(self) -> None:
        """Leave the model; it may go on without the engine."""
        for hook in self._hooks:
            hook.remove()
        running.leave(self.group)

    def _check(self, kwargs: Mapping[str, Any]) -> None:
        if self._is_hub and kwargs.get("labels") is not None and not self._wants.items and self.group.size > 1:
            msg = (
                f"{self._name} computes its loss from labels itself, and its mean over one rank's tokens is not that "
                "of the sequence; leave labels out, and give its logits to mpispeed.sequence.cross_entropy"
            )
            raise UsageError(msg)
        if kwargs.get("past_key_values") is not None and self.group.size > 1:
            msg = "past_key_values are of whole sequences: a model whose sequences are cut over ranks takes no cache"
            raise UsageError(msg)

    def _check_layout(self, layout: Layout) -> None:
        """Refuse empty parts where layers of transformers cannot take them; the other ranks would wait for ever."""
        if self._is_hub and layout.size > 1 and not all(layout.count(rank) for rank in range(layout.size)):
            msg = (
                f"a sequence of {layout.length} tokens has none for some of its {layout.size} ranks, and layers of "
                f"{self._name} cannot take an empty part; pad batches to {2 * layout.size} tokens or more, or use "
                "another sequence_parallel_size"
            )
            raise UsageError(msg)


class PipelineSequence:
    """The sequences of a pipeline: first and last stages cut what they load, and each chunk tells its attention.

    Stages in the middle load nothing: chunks learn the length of a sequence from its ranks. Documents are not known
    there, so they are refused.
    """

    def __init__(self, group: SequenceGroup, *, cuts: bool) -> None:
        self.group, self.cuts_batches = group, cuts

    def batch(self, inputs: Any, is_training: bool) -> Any:
        """This rank's part of a pair (inputs, labels). Collective over: the sequence axis.

        Raises:
            UsageError: on all ranks of the sequence, if one cannot cut its batch, or has another one.
        """
        if not self.cuts_batches:
            return inputs
        problem, found = "", inputs
        try:
            _, length = lengths((inputs,), {})
            layout = Layout(length, self.group.ulysses.size, self.group.ring.size)
            found = cut_tensors(inputs, layout, self.group.rank)
        except UsageError as error:
            problem = str(error)
        agree_on_batch(self.group, digest((inputs,), {}), problem)
        return found

    def begin(self, inputs: Any) -> Callable[[Any], None]:
        """Tell attention of a chunk, before it runs, how long the sequence is; returns what marks its outputs.

        Collective over: the sequence axis.

        Raises:
            UsageError: on the rank whose layers have moved tokens.
        """
        own = next((tensor.shape[1] for tensor in tensors(inputs) if tensor.dim() > 1), 0)
        total = torch.tensor([own])
        self.group.comm.all_reduce(total)
        layout = Layout(int(total), self.group.ulysses.size, self.group.ring.size)
        if layout.count(self.group.rank) != own:
            msg = (
                f"a chunk of the pipeline got {own} tokens of a sequence of {layout.length}, and the part of rank "
                f"{self.group.rank} of its {self.group.size} ranks has {layout.count(self.group.rank)}; layers of a "
                "pipeline must keep tokens where they are: dim 1 of their first tensor"
            )
            raise UsageError(msg)
        running.set_running(Running(self.group, layout))
        return running.mark


def agree_on_batch(group: SequenceGroup, number: int, problem: str) -> None:
    """Refuse a batch that one rank of a sequence cannot cut, or that differs between them.

    Collective over: the sequence axis.

    Raises:
        UsageError: on all of its ranks.
    """
    reports = group.comm.gather_objects((number, problem))
    for rank, (_, found) in enumerate(reports):
        if found:
            raise UsageError(found if group.size == 1 else f"rank {rank} of the {group.size} of a sequence: {found}")
    other = next((rank for rank, (found, _) in enumerate(reports) if found != reports[0][0]), None)
    if other is not None:
        msg = (
            f"ranks 0 and {other} of the {group.size} that share a sequence have different batches: give all of them "
            "the same, by a sampler over the batch axis (engine.training_dataloader, engine.deepspeed_io, or "
            "mpispeed.utils.groups), or cut them yourself and set sequence_parallel.cuts_batches to false"
        )
        raise UsageError(msg)


def by_names(
    params: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs by place, up to the first whose name says how it is cut; that one and those behind it by their names.

    Args:
        params: names of the inputs that `forward` takes by place, in order.
        args: inputs by place.
        kwargs: inputs by name.
    """
    first = next((place for place, name in enumerate(params[: len(args)]) if name in NAMED), len(args))
    behind = dict(zip(params[first:], args[first:], strict=False))
    if len(args) > len(params) or not behind.keys().isdisjoint(kwargs):
        return args, dict(kwargs)  # the model says what is wrong
    return args[:first], {**behind, **kwargs}


# -- models -----------------------------------------------------------------------------------------------------------


def wants_of(module: nn.Module) -> Wants:
    """What a model has to be given beside its tokens, by its forward, and by its loss if it is of transformers.

    Raises:
        ConfigError: it reads two sequences.
    """
    model = _named(module)
    try:
        params = dict(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):
        params = {}
    takes_positions = "position_ids" in params
    if not _is_hub(model):
        return Wants(positions=takes_positions)
    if getattr(model.config, "is_encoder_decoder", False):
        msg = (
            f"{type(model).__name__} reads two sequences, an encoder's and a decoder's; sequence_parallel_size above 1 "
            "is for models of one"
        )
        raise ConfigError(msg)
    forward = inspect.unwrap(type(model).forward)
    uses = "loss_function" in getattr(getattr(forward, "__code__", None), "co_names", ())
    passes = any(each.kind is each.VAR_KEYWORD for each in params.values())
    loss = getattr(model.loss_function, "__name__", "") if uses else ""
    return Wants(
        positions=takes_positions,
        padding=padding_of(model),
        mask=False,
        shift=loss == "ForCausalLMLoss",
        items=passes
        and re.fullmatch("For(CausalLM|MaskedLM|TokenClassification)Loss|.*ForTokenClassification", loss) is not None,
    )


def _places_of(module: nn.Module) -> tuple[str, ...]:
    """Names of the inputs that may be given by place and by name; empty where `forward` has others before."""
    try:
        params = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    if any(each.kind in (each.POSITIONAL_ONLY, each.VAR_POSITIONAL) for each in params):
        return ()
    return tuple(each.name for each in params if each.kind is each.POSITIONAL_OR_KEYWORD)


def _named(module: nn.Module) -> nn.Module:
    """The model itself, inside of an adapter's wrapper."""
    inner = getattr(module, "get_base_model", None)
    found = inner() if callable(inner) else module
    return found if isinstance(found, nn.Module) else module


def _is_hub(model: nn.Module) -> bool:
    """True for a model of transformers, of which nothing is imported here."""
    return any(each.__name__ == "PreTrainedModel" for each in type(model).__mro__)
