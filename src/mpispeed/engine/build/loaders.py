"""Loaders of an engine: that of the training data, and those that `engine.deepspeed_io` makes."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

from mpispeed.base.errors import UsageError
from mpispeed.base.events import Event
from mpispeed.data.feeding import AHEAD
from mpispeed.data.loader import ShardedLoader
from mpispeed.data.reading import has_whole_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mpispeed.data.stalls import Waits
    from mpispeed.engine.build.parts import Parts
    from mpispeed.engine.sampling import Sampling
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.plan.plan import Plan

ROUTES = ("train", "eval", "predict")
"""What a loader of `engine.deepspeed_io` is for."""


def make_loader(
    plan: Plan,
    mesh: Mesh,
    dataset: Any,
    collate_fn: Any,
    *,
    shuffles: bool,
    sampling: Sampling | None,
    batch_size: int | None = None,
    workers: int | None = None,
    pin_memory: bool = True,
    waits: Waits | None = None,
) -> ShardedLoader:
    """This batch rank's loader over `dataset`, read as the section `data_loader` says.

    Args:
        plan: the plan of the run.
        mesh: the ranks; each batch rank gets its own samples, those of a sequence get the same.
        dataset: map style or iterable.
        collate_fn: makes a batch of a list of samples; None: torch's.
        shuffles: the default where the config does not say.
        sampling: `data_efficiency.data_sampling`, or None.
        batch_size: samples of a batch of this rank, instead of the micro-batch of the plan.
        workers: processes that load, instead of those of the config.
        pin_memory: False: not, whatever the config says.
        waits: counts the time that is waited for batches.

    Raises:
        ConfigError: sizes do not fit, it is no data set, or samples of it cannot be chosen.
    """
    config, micro_batch = plan.config, batch_size or plan.batch.micro_batch_size
    chosen, reading = config.dataloader_shuffle, config.data_loader
    is_planned = micro_batch == plan.batch.micro_batch_size
    rank, slot_of = mesh.index("batch"), _slot_of(plan, mesh) if is_planned else None
    is_shuffled, of_config, order = shuffles if chosen is None else chosen, reading.workers, None
    if sampling is not None:
        of_config = sampling.workers or of_config
        step_samples = micro_batch * plan.batch.ranks * plan.batch.gradient_accumulation_steps
        order = sampling.order(
            dataset, micro_batch=micro_batch, step_samples=step_samples, shuffles=is_shuffled, slot_of=slot_of
        )
    return ShardedLoader(
        dataset,
        micro_batch=micro_batch,
        rank=rank,
        size=mesh["batch"].size,
        collate_fn=collate_fn,
        drop_last=config.dataloader_drop_last,
        seed=config.seed if sampling is None else sampling.seed,
        shuffle=is_shuffled,
        workers=of_config if workers is None else workers,
        prefetch=reading.prefetch,
        persistent_workers=reading.persistent_workers,
        pin_memory=pin_memory and reading.pin_memory and plan.device.type == "cuda",
        step_samples=plan.batch.train_batch_size if is_planned else None,
        device=plan.device,
        order=order,
        waits=waits,
        slot_of=slot_of,
    )


def _slot_of(plan: Plan, mesh: Mesh) -> Callable[[int], int] | None:
    """The slot of this rank in a micro-step, where samples belong to slots."""
    return None if plan.slots is None else functools.partial(plan.slots.slot, mesh.index("batch"))


def make_whole_loader(
    plan: Plan,
    dataset: Any,
    collate_fn: Callable[[list[Any]], Any] | None,
    *,
    sampler: Iterable[int] | None,
    batch_size: int | None,
    workers: int | None,
    pin_memory: bool,
) -> DataLoader[Any]:
    """A loader over all of `dataset` in its order, or over the samples that `sampler` chooses for this rank.

    Batches are short at the end. A data set that has `read_batch` is read by one call for each.
    """
    if sampler is not None and isinstance(dataset, IterableDataset):
        msg = "engine.deepspeed_io: a data_sampler chooses by index, and an IterableDataset has none; leave it out"
        raise UsageError(msg)
    reading, size = plan.config.data_loader, batch_size or plan.batch.micro_batch_size
    workers = reading.workers if workers is None else workers
    how: dict[str, Any] = {
        "num_workers": workers,
        "pin_memory": pin_memory and reading.pin_memory and torch.cuda.is_available(),
        "persistent_workers": reading.persistent_workers and workers > 0,
        "prefetch_factor": max(1, -(-(reading.prefetch or AHEAD) // workers)) if workers else None,
    }
    drop_last = plan.config.dataloader_drop_last
    if has_whole_batches(dataset, collate_fn):
        # An empty sampler is one, too.
        chosen = BatchSampler(SequentialSampler(dataset) if sampler is None else sampler, size, drop_last)
        return DataLoader(_Batches(dataset), batch_size=None, sampler=chosen, **how)
    return DataLoader(dataset, batch_size=size, sampler=sampler, collate_fn=collate_fn, drop_last=drop_last, **how)


class _Batches(Dataset[Any]):
    """A data set of whole batches, by lists of indices."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, indices: list[int]) -> Any:
        return self._dataset.read_batch(indices)


def require_loadable(dataset: Any, route: str) -> None:
    """Check what `engine.deepspeed_io` is given.

    Raises:
        UsageError: `dataset` is no data set, or there is no such route.
    """
    if route not in ROUTES:
        msg = f"engine.deepspeed_io(route={route!r}): the routes are {', '.join(map(repr, ROUTES))}"
        raise UsageError(msg)
    if not (is_map_style(dataset) or isinstance(dataset, IterableDataset)):
        msg = (
            f"engine.deepspeed_io: a {type(dataset).__name__} is no data set; give one with __getitem__ and __len__, "
            "or a torch.utils.data.IterableDataset"
        )
        raise UsageError(msg)


def is_map_style(dataset: Any) -> bool:
    """True if samples are read by index."""
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


class Loaders:
    """Loaders of an engine: that of `training_data`, and those that a script asks for."""

    def __init__(self, parts: Parts, *, shuffles: bool) -> None:
        """Args: `shuffles`: as in `make_loader`."""
        self._parts, self._shuffles = parts, shuffles
        made = self._made = weakref.WeakSet[ShardedLoader]()
        parts.bus.subscribe(Event.CLOSE, lambda _: _close_all(made))

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Iterable[int] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """Make a loader over `dataset`.

        Args:
            dataset: map style or iterable.
            batch_size: samples of a batch of one rank; by default the micro-batch size.
            route: "train": data ranks share the samples, as those of `training_data`, and by difficulty if the config
                says so. "eval" or "predict": each rank reads all of them in order.
            pin_memory: let torch pin the batches where there is a GPU.
            data_sampler: chooses this rank's samples, on any route.
            collate_fn: makes a batch of a list of samples; torch's by default.
            num_local_io_workers: processes that read; by default those of data_efficiency.data_sampling, or of the
                section `data_loader`.

        Returns:
            A loader. The position of that of `training_data` is part of checkpoints, that of this one is not.

        Raises:
            UsageError: `dataset` is no data set, there is no such route, or a sampler meets an iterable data set.
            ConfigError: sizes do not fit, or samples of the data set cannot be chosen by difficulty.
        """
        require_loadable(dataset, route)
        plan, mesh, waits = self._parts.plan, self._parts.mesh, self._parts.features.published.get("data_waits")
        if route != "train" or data_sampler is not None:
            return make_whole_loader(
                plan,
                dataset,
                collate_fn,
                sampler=data_sampler,
                batch_size=batch_size,
                workers=num_local_io_workers,
                pin_memory=pin_memory,
            )
        loader = make_loader(
            plan,
            mesh,
            dataset,
            collate_fn,
            shuffles=self._shuffles,
            sampling=self._parts.features.published.get("data_sampling"),
            batch_size=batch_size,
            workers=num_local_io_workers,
            pin_memory=pin_memory,
            waits=waits,
        )
        self._made.add(loader)
        return loader

    def is_map_style_dataset(self, obj: Any) -> bool:
        """True if samples of `obj` are read by index."""
        return is_map_style(obj)

    def is_iterable_style_dataset(self, obj: Any) -> bool:
        """True if `obj` is a torch.utils.data.IterableDataset."""
        return isinstance(obj, IterableDataset)

    def set_data_post_process_func(self, post_process_func: Callable[[Any, dict[str, Any]], Any] | None) -> None:
        """Let `training_dataloader` pass each batch through `post_process_func(batch, state)`; None ends that.

        `state` is that of the loader, with `position` and `epoch`; where samples are chosen by difficulty also with
        `current_difficulties`, by metric, `curriculum_step` and `consumed_samples`: those of the batch.

        Raises:
            UsageError: there is no `training_dataloader`.
        """
        loader = self._parts.features.published.get("training_dataloader")
        if loader is None:
            msg = (
                "engine.set_data_post_process_func() is for engine.training_dataloader, which is made of "
                "mpispeed.initialize(training_data=...); apply the function to batches of your own loader"
            )
            raise UsageError(msg)
        loader.post_process_func = post_process_func


def _close_all(loaders: Iterable[ShardedLoader]) -> None:
    for loader in list(loaders):
        loader.close()
