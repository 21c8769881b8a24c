"""Engine methods with DeepSpeed's names that are not part of a training step: loaders, compilation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from mpispeed.base.errors import UsageError
from mpispeed.engine.build.loaders import is_map_style, make_loader, make_whole_loader, require_loadable
from mpispeed.pipe.module import PipelineModule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import nn

    from mpispeed.engine.build.parts import Parts


class DeepSpeedCalls:
    """Engine methods for loaders and compilation."""

    parts: Parts
    module: nn.Module

    # -- data ------------------------------------------------------------------------------------------------------

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
            route: "train": data ranks share the samples, as those of `training_data`. "eval" or "predict": each rank
                reads all of them in order.
            pin_memory: let torch pin the batches where there is a GPU.
            data_sampler: chooses this rank's samples, on any route.
            collate_fn: makes a batch of a list of samples; torch's by default.
            num_local_io_workers: processes that read; by default none beside this one.

        Returns:
            A loader. The position of that of `training_data` is part of checkpoints, that of this one is not.

        Raises:
            UsageError: `dataset` is no data set, there is no such route, or a sampler meets an iterable data set.
            ConfigError: sizes do not fit.
        """
        require_loadable(dataset, route)
        plan, workers = self.parts.plan, num_local_io_workers or 0
        if route != "train" or data_sampler is not None:
            return make_whole_loader(
                plan,
                dataset,
                collate_fn,
                sampler=data_sampler,
                batch_size=batch_size,
                workers=workers,
                pin_memory=pin_memory,
            )
        return make_loader(
            plan,
            self.parts.mesh,
            dataset,
            collate_fn,
            shuffles=not isinstance(self.module, PipelineModule),
            batch_size=batch_size,
            workers=workers,
            pin_memory=pin_memory,
        )

    def is_map_style_dataset(self, obj: Any) -> bool:
        """True if samples of `obj` are read by index."""
        return is_map_style(obj)

    def is_iterable_style_dataset(self, obj: Any) -> bool:
        """True if `obj` is a torch.utils.data.IterableDataset."""
        return isinstance(obj, IterableDataset)

    def set_data_post_process_func(self, post_process_func: Callable[[Any, dict[str, Any]], Any] | None) -> None:
        """Let `training_dataloader` pass each batch through `post_process_func(batch, state)`; None ends that.

        `state` is that of the loader, with `position` and `epoch`.

        Raises:
            UsageError: there is no `training_dataloader`.
        """
        if self.parts.loader is None:
            msg = (
                "engine.set_data_post_process_func() is for engine.training_dataloader, which is made of "
                "mpispeed.initialize(training_data=...); apply the function to batches of your own loader"
            )
            raise UsageError(msg)
        self.parts.loader.post_process_func = post_process_func

    # -- compilation -----------------------------------------------------------------------------------------------

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        **more: Any,
    ) -> None:
        """Let torch compile the model: `engine.module.compile(backend=backend, **compile_kwargs)`.

        Args:
            backend: of `torch.compile`.
            compile_kwargs: other arguments of `torch.compile`.
            schedule: must be None: passes of DeepSpeed's own compiler.
            more: as `compile_kwargs`.

        Raises:
            UsageError: a schedule is given.
        """
        if schedule is not None:
            msg = "engine.compile(schedule=...): passes of DeepSpeed's own compiler are not available; leave it out"
            raise UsageError(msg)
        self.module.compile(backend=backend, **{**(compile_kwargs or {}), **more})
        self.parts.is_compiled = True

    @property
    def is_compiled(self) -> bool:
        """True once `compile` was called."""
        return self.parts.is_compiled
