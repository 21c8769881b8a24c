"""Contexts in which sharded parameters are unsharded: to read or change them, and to generate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mpispeed.base.errors import AgreementError, StoreError, UsageError
from mpispeed.base.units import format_list
from mpispeed.mesh.comm import Failures
from mpispeed.sharding import sharded_param
from mpispeed.sharding.external import register_external_parameter
from mpispeed.sharding.module_hooks import ModuleHooks
from mpispeed.sharding.param_shards import OffloadStateTypeEnum as Kind
from mpispeed.sharding.params import ParamStore
from mpispeed.sharding.sharded_init import ShardedInit, find_init_shard
from mpispeed.sharding.update_windows import take_edited

if TYPE_CHECKING:
    from mpispeed.mesh.collectives.work import Wait, Work
    from mpispeed.mesh.comm import Comm
    from mpispeed.store.layout import Place, Unit

NAMES_SHOWN = 5


class GatheredParameters:
    """Context in which `params` are unsharded on all ranks.

    With a `modifier_rank`, changes made by that rank are kept at the end, on all ranks: in the parameters and in the
    masters. Without one, changes of sharded parameters are lost at the end. Parameters that belong to no engine and no
    `zero.Init` are left alone. Contexts can be nested. After an exception inside, changes of sharded parameters are
    dropped, and ranks that wait for the values get an AgreementError.

    Collective over: the data axis (the group of `zero.Init` before `initialize`); all ranks name the same parameters.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        """Nothing is gathered yet.

        Args:
            params: one parameter, or any iterable of them; duplicates count once, None (a bias that is not there)
                does not.
            modifier_rank: position in the data axis of the rank whose values are kept.
            fwd_module: register the parameters as external ones of this module too.
            enabled: False makes the context do nothing.

        Raises:
            UsageError: something in `params` is no parameter, or `modifier_rank` is no rank of the group.
        """
        self._groups: list[_OfStore | _OfBirth] = []
        if not enabled:
            return
        found = _listed(params)
        self._root = modifier_rank
        self._groups = _grouped(found)
        for group in self._groups:
            _check_rank(modifier_rank, group.comm)
        if fwd_module is not None:
            for param in found:
                register_external_parameter(fwd_module, param)
        self._stack = ExitStack()

    def __enter__(self) -> None:
        """Gather.

        Raises:
            UsageError: on every rank, if ranks name different parameters or modifier ranks.
        """
        if not self._groups:
            return
        with ExitStack() as stack:
            for group in self._groups:
                group.agree_on_names(self._root)
                stack.enter_context(group.whole(self._root))
            self._stack = stack.pop_all()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Keep or drop changes, and reshard."""
        if self._groups:
            self._stack.__exit__(kind, error, trace)


class _OfStore:
    """Parameters that belong to one engine."""

    def __init__(self, store: ParamStore, params: list[tuple[nn.Parameter, Place]]) -> None:
        self._store, self.comm = store, store.mesh["data"]
        self._params = sorted(params, key=lambda item: (item[1].unit.index, item[1].entry.offset))
        units = {place.unit.index: place.unit for _, place in self._params}
        self._units: list[Unit] = [units[index] for index in sorted(units)]

    def agree_on_names(self, root: int | None) -> None:
        """Check that all ranks name the same parameters."""
        kinds = (Kind.lp_params,) if root is None else (Kind.lp_params, Kind.hp_params)
        self._store.require(kinds, "GatheredParameters")
        names = [place.entry.name for _, place in self._params]
        # Experts have other numbers on other ranks, and are not as many everywhere; their units are the same.
        apart: dict[tuple[str, ...], list[str]] = {}
        keys: dict[str, None] = {}
        for _, place in self._params:
            states, name = place.unit.states, place.entry.name
            if states.differs_over_data:
                apart.setdefault(states.partial, []).append(name)
            keys[f"unit {place.unit.index}" if states.differs_over_data else name] = None
        _agree(self.comm, self._store.wait, names, root, list(keys))
        for axes in sorted(apart):
            _agree(self._store.mesh[axes], self._store.wait, apart[axes], root)

    @contextmanager
    def whole(self, root: int | None) -> Iterator[None]:
        """Context in which they are unsharded."""
        is_kept = False
        try:
            with self._store.whole(self._units), _saving(self._store):
                if root is None:
                    yield
                else:
                    with _shared_fate(self.comm, self._store.wait):
                        yield
                        self._check()
                    failures = Failures()
                    for param, place in self._params:
                        self._keep(param, place, root, failures)
                    if self._store.tiers.is_swapping:
                        with self.comm.together(StoreError):
                            failures.raise_first()
                    is_kept = True
        finally:
            prefetcher = self._store.prefetcher
            if prefetcher is not None and not is_kept:
                prefetcher.reshard(unit for unit in self._units if not unit.states.param.is_replicated)

    def _check(self) -> None:
        for param, place in self._params:
            _check_numel(param, place.entry.name, place.entry.numel)

    def _keep(self, param: nn.Parameter, place: Place, root: int, failures: Failures) -> None:
        """Keep the values of rank `root` for `param`, which may have been given other memory.

        Parameters of which data ranks have their own: those of the rank at the place of `root` among ranks with copies.
        """
        store, unit, entry = self._store, place.unit, place.entry
        if unit.states.param.is_replicated:
            whole: torch.Tensor | None = store.shards.rest(unit)
        else:
            whole = None if store.prefetcher is None else store.prefetcher.full(unit)
        if whole is None:
            msg = f"parameter {entry.name!r} was gathered and is not there any more"
            raise UsageError(msg)
        view = whole[entry.span.slice]
        if param.data_ptr() != view.data_ptr() or not param.is_contiguous():
            view.copy_(param.detach().reshape(-1))
            sharded_param.to_unsharded(param, view.view(entry.shape))

        def told() -> str:
            return f"changes of parameter {entry.name!r} by rank {root}"

        alike = store.mesh[unit.states.partial]
        at = root if alike is self.comm else store.mesh.topology.index(self.comm.ranks[root], unit.states.partial)
        work = alike.start(lambda comm: comm.broadcast(view, at), "share", label=entry.name, describe=told)
        store.wait(work, told)
        # With swap files a failure is raised only after all ranks have exchanged it.
        with failures.kept() if store.tiers.is_swapping else nullcontext():
            take_edited(store, param)


class _OfBirth:
    """Parameters sharded by `zero.Init` that no engine has taken over yet."""

    def __init__(self, sharded_init: ShardedInit, params: list[nn.Parameter]) -> None:
        self._sharded_init, self._params, self.comm = sharded_init, params, sharded_init.comm

    def agree_on_names(self, root: int | None) -> None:
        """Check that all ranks name the same parameters."""
        _agree(self.comm, _just_wait, [self._name(param) for param in self._params], root)

    @contextmanager
    def whole(self, root: int | None) -> Iterator[None]:
        """Context in which they are unsharded."""
        self._sharded_init.gather(self._params)
        kept = None
        try:
            if root is None:
                yield
            else:
                with _shared_fate(self.comm, _just_wait):
                    yield
                    for param in self._params:
                        _check_numel(param, self._name(param), self._numel(param))
                kept = root
        finally:
            self._sharded_init.let_go(self._params, root=kept)

    def _name(self, param: nn.Parameter) -> str:
        init_shard = find_init_shard(param)
        return "?" if init_shard is None else init_shard.name

    def _numel(self, param: nn.Parameter) -> int:
        init_shard = find_init_shard(param)
        return -1 if init_shard is None else init_shard.numel


def unwrap_model_for_generation(engine: Any) -> Any:
    """Context that unshards the whole model and gives `engine.module`.

    Nothing is communicated inside, so that ranks can call the model different numbers of times, or not at all.
    The whole model has to fit in memory.

    Collective over: the data axis, on entering and on leaving.
    """
    return _unwrapped(getattr(engine, "module", engine))


@contextmanager
def _unwrapped(model: nn.Module) -> Iterator[nn.Module]:
    params = list(model.parameters())
    module_hooks = {
        id(store.reader): store.reader for store in _stores(params) if isinstance(store.reader, ModuleHooks)
    }
    with GatheredParameters(params):
        try:
            for reader in module_hooks.values():
                reader.is_paused = True
            yield model
        finally:
            for reader in module_hooks.values():
                reader.is_paused = False


def empty_partition_cache(model: nn.Module) -> None:
    """Free everything that is unsharded of the parameters of `model` (or of an engine's).

    Parameters that are persistent because of their size stay: their buffer is their storage.

    Collective over: the axes over which parameters are sharded at rest, without communication of its own.

    Raises:
        StoreError: some are in use, in a forward or in GatheredParameters.
    """
    for store in _stores(list(model.parameters())):
        if store.prefetcher is not None:
            store.prefetcher.reshard_all()


# -- what they share ---------------------------------------------------------------------------------------------


def _listed(params: nn.Parameter | Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """The distinct parameters, in the order given."""
    try:
        items: list[Any] = [params] if isinstance(params, torch.Tensor) else [p for p in params if p is not None]
    except TypeError:
        items = [params]
    for item in items:
        if not isinstance(item, nn.Parameter):
            msg = f"GatheredParameters takes parameters (torch.nn.Parameter), found a {type(item).__name__}"
            raise UsageError(msg)
    return list({id(item): item for item in items}.values())


def _saving(store: ParamStore) -> AbstractContextManager[Any]:
    """Hooks so that autograd saves references to units, looked up again in backward."""
    return store.reader.saving() if isinstance(store.reader, ModuleHooks) else nullcontext()


def _stores(params: Sequence[nn.Parameter]) -> list[ParamStore]:
    owners = {id(owner): owner for owner in map(sharded_param.owner_of, params) if isinstance(owner, ParamStore)}
    return list(owners.values())


def _grouped(params: Sequence[nn.Parameter]) -> list[_OfStore | _OfBirth]:
    """Parameters by owner; ordinary ones are left out."""
    of_stores: dict[int, tuple[ParamStore, list[tuple[nn.Parameter, Place]]]] = {}
    of_inits: dict[int, tuple[ShardedInit, list[nn.Parameter]]] = {}
    for param in params:
        owner, init_shard = sharded_param.owner_of(param), find_init_shard(param)
        place = owner.table.locate(param) if isinstance(owner, ParamStore) else None
        if isinstance(owner, ParamStore) and place is not None:
            of_stores.setdefault(id(owner), (owner, []))[1].append((param, place))
        elif init_shard is not None:
            of_inits.setdefault(id(init_shard.sharded_init), (init_shard.sharded_init, []))[1].append(param)
    return [*(_OfStore(*found) for found in of_stores.values()), *(_OfBirth(*found) for found in of_inits.values())]


def _check_rank(root: Any, comm: Comm) -> None:
    if root is None:
        return
    if not isinstance(root, int) or isinstance(root, bool) or not 0 <= root < comm.size:
        msg = f"modifier_rank is {root!r}; it has to be None or a rank of the group, 0 to {comm.size - 1}"
        raise UsageError(msg)


def _check_numel(param: nn.Parameter, name: str, numel: int) -> None:
    if param.numel() != numel:
        msg = f"parameter {name!r} has {numel} elements and was given data of {param.numel()} in GatheredParameters"
        raise UsageError(msg)


def _just_wait(work: Work, _: Any) -> None:
    work.wait()


def _exchange(comm: Comm, wait: Wait, value: int, what: str) -> list[int]:
    """The `value` of every rank. Collective over: the group."""
    mine, everyone = torch.tensor([value]), torch.empty(comm.size, dtype=torch.int64)
    wait(comm.start(lambda c: c.all_gather(everyone, mine), what, describe=lambda: what), lambda: what)
    return [int(number) for number in everyone.tolist()]


def _agree(comm: Comm, wait: Wait, names: Sequence[str], root: int | None, keys: Sequence[str] | None = None) -> None:
    """Check that all ranks name the same parameters; raise on all of them otherwise.

    `keys` are equal on ranks that do, by default the names.
    """
    if comm.size == 1:
        return
    digest = blake2b("\0".join((str(root), *(names if keys is None else keys))).encode(), digest_size=7).digest()
    if len(set(_exchange(comm, wait, int.from_bytes(digest, "big"), "entering GatheredParameters"))) == 1:
        return
    texts = comm.gather_objects(f"{format_list(names, NAMES_SHOWN)} with modifier_rank={root}")
    told = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts[:NAMES_SHOWN]))
    msg = f"GatheredParameters is entered for different parameters or modifier ranks: {told}; all ranks name the same"
    raise UsageError(msg)


@contextmanager
def _shared_fate(comm: Comm, wait: Wait) -> Iterator[None]:
    """Turn an exception on one rank into an AgreementError on the others, which would wait for its values."""
    what = "leaving GatheredParameters"
    try:
        yield
    except Exception as error:
        if any(_exchange(comm, wait, 1, what)):
            comm.gather_objects(f"{type(error).__name__}: {error}")
        raise
    if any(_exchange(comm, wait, 0, what)):
        texts = enumerate(comm.gather_objects(""))
        told = "; ".join(f"rank {rank}: {text}" for rank, text in texts if text)
        msg = f"changes in GatheredParameters are not kept, because another rank failed: {told}"
        raise AgreementError(msg)
