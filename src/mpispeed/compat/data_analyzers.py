"""DeepSpeed's two analyzers of data with the arguments that tell of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpispeed.base.errors import ConfigError
from mpispeed.compat.comm_groups import group_of
from mpispeed.curriculum import analyzer, distributed
from mpispeed.engine.distributed import init_distributed
from mpispeed.mesh.world import current

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from mpispeed.mesh.comm import Comm


class DataAnalyzer(analyzer.DataAnalyzer):
    """As `mpispeed.curriculum.analyzer.DataAnalyzer`; several workers wait for one another as a group of ranks."""

    def run_map_reduce(self, comm_group: Comm | ProcessGroup | None = None) -> None:
        """Run the map step, wait for all workers, and reduce on worker 0.

        Collective over: `comm_group`, by default all ranks, if there are several workers.

        Raises:
            ConfigError: there are not as many workers as ranks.
        """
        if comm_group is None and self.num_workers == 1:
            super().run_map_reduce()
            return
        comm = group_of(comm_group)
        _check_workers(comm, self.num_workers, self.worker_id)
        super().run_map_reduce(comm)


class DistributedDataAnalyzer(distributed.DistributedDataAnalyzer):
    """As `mpispeed.curriculum.distributed.DistributedDataAnalyzer`, over the group of all ranks by default."""

    def __init__(
        self,
        dataset: Any,
        num_workers: int | None = None,
        num_threads: int | None = 1,
        worker_id: int | None = None,
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Callable[[Any], Any]] = (),
        metric_types: Sequence[str] = (),
        save_path: str | Path = "./",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        device: object = None,
        comm_group: Comm | ProcessGroup | None = None,
        sample_indices: Sequence[int] | None = None,
    ) -> None:
        """Check the arguments; join the world if this process has not.

        Collective over: all ranks, if they have not joined yet.

        `num_workers` and `worker_id` are the size of the group and the rank in it, and need not be given; `device` is
        taken and not used, as ranks exchange what is in host memory. For the others see the base class.

        Raises:
            ConfigError: arguments that do not fit.
        """
        del device
        if current() is None:
            init_distributed()
        comm = group_of(comm_group)
        if comm_group is None:
            _check_workers(comm, num_workers, worker_id)
        super().__init__(
            dataset,
            comm=comm,
            num_threads=num_threads or 1,
            batch_size=batch_size,
            metric_names=metric_names,
            metric_functions=metric_functions,
            metric_types=metric_types,
            save_path=save_path,
            collate_fn=collate_fn,
            sample_indices=sample_indices,
        )
        self.num_workers, self.worker_id = comm.size, comm.rank


def _check_workers(comm: Comm, workers: int | None, worker: int | None) -> None:
    if workers not in (None, comm.size) or worker not in (None, comm.rank):
        msg = (
            f"num_workers={workers} and worker_id={worker} were given on rank {comm.rank} of {comm.size}; "
            "they have to be the number of ranks and the rank"
        )
        raise ConfigError(msg)
