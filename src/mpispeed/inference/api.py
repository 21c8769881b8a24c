"""`init_inference`: read the settings, compare them between ranks, build the engine."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from mpispeed.base.errors import ConfigError
from mpispeed.base.site_file import NONE, hold, read_for_job
from mpispeed.base.units import format_ranks
from mpispeed.config.inference import InferenceConfig
from mpispeed.config.inference_effects import find_sentences
from mpispeed.config.inference_load import resolve
from mpispeed.config.load import INLINE, flatten, read_source
from mpispeed.engine.agreement import configuring
from mpispeed.engine.distributed import init_distributed
from mpispeed.engine.engine import Engine
from mpispeed.engine.ownership import engine_of
from mpispeed.inference.build import build
from mpispeed.inference.engine import InferenceEngine
from mpispeed.pipe.module import PipelineModule

if TYPE_CHECKING:
    from pathlib import Path

    from mpispeed.mesh.comm import Comm
    from mpispeed.mesh.world import World

log = logging.getLogger(__name__)

_OBJECTS = ("mpu", "tp_group", "ep_group", "ep_mp_group")
"""Keys whose values are each rank's own."""


def init_inference(
    model: nn.Module, config: str | Path | Mapping[str, Any] | InferenceConfig | None = None, **kwargs: Any
) -> InferenceEngine:
    """Make an engine that answers with a model, sliced over `tensor_parallel.tp_size` neighbouring ranks.

    Args:
        model: a torch module, of transformers or any other; it is changed in place and put into evaluation mode.
        config: settings: a mapping, or the path of a JSON file, which rank 0 reads.
        kwargs: the same settings as keywords. A key may be in both if its values agree.

    Returns:
        The engine, which stands in for the model: `pipe.model = mpispeed.init_inference(pipe.model)`.

    Collective over: all ranks of the job.

    Raises:
        ConfigError: on every rank, with all mistakes of the settings in one message.
    """
    world = init_distributed()
    with configuring(world.comm):
        _check_model(model)
    content, where = _shared_source(world, config)
    with configuring(world.comm):
        settings = resolve(content, kwargs, where)
    _require_equal(world.comm, settings)
    if world.rank == 0:
        for sentence in find_sentences(settings):
            log.warning("%s", sentence)
    return build(model, settings, world)


def default_inference_config() -> dict[str, Any]:
    """All settings of `init_inference` with their defaults, as plain values; a new dict at each call."""
    return InferenceConfig.model_validate({}).model_dump()


def _check_model(model: Any) -> None:
    what = ""
    if isinstance(model, (InferenceEngine, Engine)):
        what = f"the model is a {type(model).__name__} already; pass the module that it was made of"
    elif not isinstance(model, nn.Module):
        what = f"the model is a {type(model).__name__}; pass a torch.nn.Module (of a pipeline, its .model)"
    elif isinstance(model, PipelineModule):
        what = "a PipelineModule has its layers on several ranks and trains; pass the whole module, without stages"
    elif engine_of(model) is not None:
        what = "the model belongs to an engine that trains it; call its destroy() first, which leaves the weights"
    if what:
        msg = f"init_inference: {what}"
        raise ConfigError(msg)


def _shared_source(world: World, config: Any) -> tuple[str | Mapping[str, Any] | InferenceConfig | None, str]:
    """The config, and a name for it; of a file the text that rank 0 read, as it reads the site's defaults.

    Collective over: all ranks.
    """
    content, where = config, INLINE
    with configuring(world.comm):
        if config is not None and not isinstance(config, (Mapping, InferenceConfig)) and world.rank == 0:
            content, where = read_source(config)
        site = read_for_job() if world.rank == 0 else NONE
    text, name, site = world.comm.share((content if isinstance(content, str) else None, where, site))
    hold(site)
    is_given = config is None or isinstance(config, (Mapping, InferenceConfig))
    return (content, where) if is_given else (text, name)


def _require_equal(comm: Comm, settings: InferenceConfig) -> None:
    """Refuse settings that differ between ranks. Collective over: `comm`."""
    values = {path: value for path, value in flatten(settings.model_dump()).items() if _is_common(path)}
    own = {path: repr(value) for path, value in values.items()}
    first = comm.share(own)
    wrong = [path for path in {**first, **own} if first.get(path) != own.get(path)]
    told = [(path, own.get(path, "not there"), first.get(path, "not there")) for path in wrong[:1]]
    reports = comm.gather_objects(told)
    if any(reports):
        path, value, at_first = next(report[0] for report in reports if report)
        ranks = format_ranks([rank for rank, report in enumerate(reports) if report and report[0][0] == path])
        msg = f"init_inference: {path} is {value} on {ranks} and {at_first} on rank 0; all ranks need equal settings"
        raise ConfigError(msg)


def _is_common(path: str) -> bool:
    keys = path.split(".")
    return keys[-1] not in _OBJECTS and keys[0] not in ("config", "injection_policy")
