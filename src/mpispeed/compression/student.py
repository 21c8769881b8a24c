"""Students with fewer layers than their teacher: which layers they take over, and linear layers in one form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import nn

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.base.units import format_list
from mpispeed.config.load import load
from mpispeed.engine.ownership import engine_of
from mpispeed.nn.compression.model import mark_taught
from mpispeed.pipe.module import PipelineModule
from mpispeed.sharding.gathered import GatheredParameters
from mpispeed.sharding.sharded_init import find_init_shard

if TYPE_CHECKING:
    from mpispeed.config.compress import LayerReduction

_SECTION = "compression_training.layer_reduction"
_NAMES_SHOWN = 3

Model = TypeVar("Model", bound=nn.Module)


def student_initialization(
    student_model: Model, teacher_model: Any, deepspeed_config: str | Path | Mapping[str, Any]
) -> Model:
    """Give a student values of its teacher: the layers that `layer_reduction` names, and other modules whole.

    Layer i of the student becomes layer `teacher_layer[i]` of the list `module_name_prefix`. Modules of
    `other_module_name` have the same name in both; in a list that is shorter in the student the k-th name goes to the
    student's k-th module. Parameters and buffers are copied by name; what the student has beyond them stays.
    Either model may be sharded, by `zero.Init` or an engine: one module of each is unsharded at a time.

    Args:
        student_model: the model, or what has it as `module`; changed in place.
        teacher_model: the same, or a `Teacher`.
        deepspeed_config: a mapping or the path of a JSON file, with the section `compression_training`.

    Returns:
        The student.

    Collective over: the ranks over which a model is sharded; without such ranks local.

    Raises:
        ConfigError: the section names something that a model does not have, or shapes differ. Nothing was copied then.
    """
    copy_layers(student_model, teacher_model, load(deepspeed_config).config.compression_training.layer_reduction)
    return student_model


def copy_layers(student_model: nn.Module, teacher_model: Any, section: LayerReduction) -> None:
    """As `student_initialization`, with the section itself; does nothing if it is not enabled.

    Raises:
        ConfigError: as there; or the section is enabled without a teacher.
    """
    if not section.enabled:
        return
    if teacher_model is None:
        msg = f"{_SECTION} is enabled, and there is no teacher; give teacher_model, or set enabled to false"
        raise ConfigError(msg)
    student, teacher = unwrapped(student_model), unwrapped(teacher_model)
    for model in (student, teacher):
        if isinstance(model, PipelineModule):
            msg = f"{_SECTION}: a PipelineModule has its layers on several ranks; copy before its layers are put in"
            raise ConfigError(msg)
    pairs = _pairs(section, student, teacher)
    parts = [_parts(*pair, student, teacher) for pair in pairs]
    with torch.no_grad():
        for part in parts:
            with GatheredParameters(part.given), GatheredParameters(part.wanted, modifier_rank=0):
                for target, source in part.copies:
                    target.copy_(source)
    for name, _ in pairs:
        mark_taught(student.get_submodule(name))


def unwrapped(model: Any) -> nn.Module:
    """The module of an engine or another wrapper that has it as `module`; else the model itself."""
    inner = getattr(model, "module", None)
    found = inner if isinstance(inner, nn.Module) else model
    if not isinstance(found, nn.Module):
        msg = f"a model is expected, found a {type(model).__name__}; pass a torch.nn.Module"
        raise UsageError(msg)
    return found


def _pairs(section: LayerReduction, student: nn.Module, teacher: nn.Module) -> list[tuple[str, str]]:
    """Names of modules: of the student, and of the teacher."""
    prefix, pairs = section.module_name_prefix, []
    if bool(section.teacher_layer) != (prefix is not None):
        msg = (
            f"{_SECTION}: module_name_prefix, the name of the list of layers, and teacher_layer are given together, or "
        )
        msg += "neither is"
        raise ConfigError(msg)
    if prefix is not None:
        pairs = [(f"{prefix}.{i}", f"{prefix}.{layer}") for i, layer in enumerate(section.teacher_layer)]
    taken: Counter[str] = Counter()
    for name in section.other_module_name:
        parent, _, last = name.rpartition(".")
        wanted = name
        if last.isdigit() and _is_shorter(parent, student, teacher):
            wanted = f"{parent}.{taken[parent]}".lstrip(".")
            taken[parent] += 1
        pairs.append((wanted, name))
    twice = [name for name, count in Counter(wanted for wanted, _ in pairs).items() if count > 1]
    if twice:
        msg = f"{_SECTION}: {twice[0]} of the student is to be copied from two modules; name it once"
        raise ConfigError(msg)
    return pairs


def _is_shorter(parent: str, student: nn.Module, teacher: nn.Module) -> bool:
    """True for a list of modules that has fewer of them in the student."""
    try:
        return len(student.get_submodule(parent)._modules) < len(teacher.get_submodule(parent)._modules)
    except AttributeError:  # told when the module itself is looked up
        return False


class _Parts(NamedTuple):
    """Values that are copied for one module: parameters of both models; (target, source) of them and of buffers."""

    wanted: list[nn.Parameter]
    given: list[nn.Parameter]
    copies: list[tuple[torch.Tensor, torch.Tensor]]


def _parts(wanted: str, name: str, student: nn.Module, teacher: nn.Module) -> _Parts:
    """Values of one module, by name.

    Raises:
        ConfigError: a module or a parameter is not there, has another shape, or has no values.
    """
    own, other = _module(student, wanted, "student"), _module(teacher, name, "teacher")
    targets = dict(own.named_parameters(remove_duplicate=False))
    sources = dict(other.named_parameters(remove_duplicate=False))
    wrong = [_told(key, targets.get(key), source) for key, source in sources.items()]
    wrong = [text for text in wrong if text]
    if wrong:
        what = format_list(wrong, _NAMES_SHOWN)
        msg = f"{_SECTION}: {wanted} of the student cannot be copied from {name} of the teacher: {what}"
        raise ConfigError(msg)
    copies: list[tuple[torch.Tensor, torch.Tensor]] = [(targets[key], source) for key, source in sources.items()]
    buffers = dict(own.named_buffers())
    for key, source in other.named_buffers():
        if key in buffers and buffers[key].shape == source.shape:
            copies.append((buffers[key], source))
    return _Parts([targets[key] for key in sources], list(sources.values()), copies)


def _told(key: str, target: nn.Parameter | None, source: nn.Parameter) -> str:
    """The reason why a parameter cannot be copied; "" if it can."""
    if target is None:
        return f"it has no {key}"
    if target.shape != source.shape:
        return f"{key} has shape {list(target.shape)}, that of the teacher {list(source.shape)}"
    whose = "student" if target.is_meta else "teacher" if source.is_meta else ""
    return f"{key} of the {whose} is on torch's meta device and has no values" if whose else ""


def _module(model: nn.Module, name: str, whose: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        known = name
        while known and not any(path == known for path, _ in model.named_modules()):
            known = known.rpartition(".")[0]
        inner = format_list(list(model.get_submodule(known)._modules), 8) or "no modules"
        where = f"{known} has {inner}" if known else f"it has {inner}"
        msg = f"{_SECTION}: the {whose} ({type(model).__name__}) has no module {name!r}; {where}"
        raise ConfigError(msg) from None


def convert_conv1d_to_linear(model: Model, convert_type: type[nn.Module]) -> Model:
    """Replace layers whose weight is [inputs, outputs], as transformers' Conv1D, by nn.Linear with the same function.

    The weight is transposed, the bias is the same parameter. A layer at several places stays one layer. Under
    `zero.Init` the new weight is sharded as the old one was.

    Args:
        model: the model, or what has it as `module`; changed in place, before `initialize`.
        convert_type: the class, `transformers.pytorch_utils.Conv1D`.

    Returns:
        The model.

    Collective over: the ranks over which `zero.Init` has sharded the model; without such ranks local.

    Raises:
        UsageError: an engine has the model; its parameters are registered with the optimizer already.
    """
    root = unwrapped(model)
    if engine_of(root) is not None:
        msg = "convert_conv1d_to_linear: the model belongs to an engine; convert its layers before initialize"
        raise UsageError(msg)
    made: dict[nn.Module, nn.Linear] = {}
    for parent in list(root.modules()):
        for name, layer in parent._modules.items():
            if isinstance(layer, convert_type):
                if layer not in made:
                    made[layer] = _linear(layer)
                parent._modules[name] = made[layer]
    return model


def _linear(layer: Any) -> nn.Linear:
    old: nn.Parameter = layer.weight
    shard = find_init_shard(old)
    with GatheredParameters(old), torch.no_grad():
        linear = nn.Linear(old.shape[0], old.shape[1], bias=False, device="meta")
        linear.weight = nn.Parameter(old.detach().t().clone(memory_format=torch.contiguous_format), old.requires_grad)
    linear.bias = layer.bias
    if shard is not None:
        shard.sharded_init.cut(linear)
    return linear.train(layer.training)
