"""Times in which cut parameters are whole: to read or change them, and to generate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mpispeed.base.errors import AgreementError, StoreError, UsageError
from mpispeed.zero import guard
from mpispeed.zero.birth import Birth, find_born
from mpispeed.zero.external import register_external_parameter
from mpispeed.zero.frames import Frames
from mpispeed.zero.kinds import OffloadStateTypeEnum as Kind
from mpispeed.zero.params import ParamStore

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm
    from mpispeed.mesh.work import Wait, Work
    from mpispeed.store.table import Place, Unit

NAMES_SHOWN = 5


class GatheredParameters:
    """The time in which `params` are whole on all ranks.

    With a `modifier_rank` what this rank has changed is kept at the end, on all ranks: in what the model computes
    with, and in the masters. Without one, changes of cut parameters are lost at the end. Ordinary parameters, which
    no engine and no `zero.Init` has, are left alone. Contexts can be nested. After an exception inside of it nothing
    is kept of cut parameters, and ranks that wait for the values get an AgreementError.

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
            params: one parameter, or any iterable of them; duplicates count once.
            modifier_rank: position in the data axis of the rank whose values are kept.
            fwd_module: register the parameters as external ones of this module too.
            enabled: False: nothing happens at all.

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
        """Keep or drop changes, and cut again."""
        if self._groups:
            self._stack.__exit__(kind, error, trace)


class _OfStore:
    """Parameters that one engine has."""

    def __init__(self, store: ParamStore, params: list[tuple[nn.Parameter, Place]]) -> None:
        self._store, self.comm = store, store.mesh["data"]
        self._params = sorted(params, key=lambda item: (item[1].unit.index, item[1].entry.offset))
        units = {place.unit.index: place.unit for _, place in self._params}
        self._units: list[Unit] = [units[index] for index in sorted(units)]

    def agree_on_names(self, root: int | None) -> None:
        """All ranks mean the same."""
        kinds = (Kind.lp_params,) if root is None else (Kind.lp_params, Kind.hp_params)
        self._store.require(kinds, "GatheredParameters")
        _agree(self.comm, self._store.wait, [place.entry.name for _, place in self._params], root)

    @contextmanager
    def whole(self, root: int | None) -> Iterator[None]:
        """The time in which they are whole."""
        is_kept = False
        try:
            with self._store.whole(self._units), _saving(self._store):
                if root is None:
                    yield
                else:
                    with _shared_fate(self.comm, self._store.wait):
                        yield
                        self._check()
                    problem = ""
                    for param, place in self._params:
                        # A failure is kept until all have been told: the others take part in that.
                        problem = self._keep(param, place, root) or problem
                    if self._store.tiers.is_swapping:
                        self.comm.agree(not problem, problem, StoreError)
                    is_kept = True
        finally:
            fetcher = self._store.fetcher
            if fetcher is not None and not is_kept:
                fetcher.drop(unit for unit in self._units if not self._store.is_resident(unit))

    def _check(self) -> None:
        for param, place in self._params:
            _check_numel(param, place.entry.name, place.entry.numel)

    def _keep(self, param: nn.Parameter, place: Place, root: int) -> str:
        """Take over what rank `root` has in `param`, which may have been given other memory; returns what failed."""
        store, unit, entry = self._store, place.unit, place.entry
        if store.is_resident(unit):
            whole: torch.Tensor | None = store.rest(unit)
        else:
            whole = None if store.fetcher is None else store.fetcher.full(unit)
        if whole is None:
            msg = f"parameter {entry.name!r} was gathered and is not there any more"
            raise UsageError(msg)
        view = whole[entry.span.slice]
        if param.data_ptr() != view.data_ptr() or not param.is_contiguous():
            view.copy_(param.detach().reshape(-1))
            guard.unseal(param, view.view(entry.shape))

        def told() -> str:
            return f"changes of parameter {entry.name!r} by rank {root}"

        work = self.comm.start(lambda comm: comm.broadcast(view, root), "share", label=entry.name, describe=told)
        store.wait(work, told)
        try:
            store.take(param)
        except StoreError as error:
            if not store.tiers.is_swapping:
                raise
            return str(error)
        return ""


class _OfBirth:
    """Parameters that `zero.Init` has cut and no engine has yet."""

    def __init__(self, birth: Birth, params: list[nn.Parameter]) -> None:
        self._birth, self._params, self.comm = birth, params, birth.comm

    def agree_on_names(self, root: int | None) -> None:
        """All ranks mean the same."""
        _agree(self.comm, _just_wait, [self._name(param) for param in self._params], root)

    @contextmanager
    def whole(self, root: int | None) -> Iterator[None]:
        """The time in which they are whole."""
        self._birth.gather(self._params)
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
            self._birth.let_go(self._params, root=kept)

    def _name(self, param: nn.Parameter) -> str:
        born = find_born(param)
        return "?" if born is None else born.name

    def _numel(self, param: nn.Parameter) -> int:
        born = find_born(param)
        return -1 if born is None else born.numel


def unwrap_model_for_generation(engine: Any) -> Any:
    """A context in which the whole model is there, as `engine.module`, which it gives.

    Nothing is communicated inside, so that ranks can call the model different numbers of times, or not at all.
    The whole model has to fit in memory.

    Collective over: the data axis, on entering and on leaving.
    """
    return _unwrapped(getattr(engine, "module", engine))


@contextmanager
def _unwrapped(model: nn.Module) -> Iterator[nn.Module]:
    params = list(model.parameters())
    frames = {id(store.reader): store.reader for store in _stores(params) if isinstance(store.reader, Frames)}
    with GatheredParameters(params):
        try:
            for reader in frames.values():
                reader.is_paused = True
            yield model
        finally:
            for reader in frames.values():
                reader.is_paused = False


def empty_partition_cache(model: nn.Module) -> None:
    """Let go of everything that is whole of the cut parameters of `model` (or of an engine's).

    Parameters that stay whole between steps, by their size, stay so: their memory is where they rest.

    Collective over: the axes by which parameters rest cut, without communication of its own.

    Raises:
        StoreError: some are in use, in a forward or in GatheredParameters.
    """
    for store in _stores(list(model.parameters())):
        if store.fetcher is not None:
            store.fetcher.drop_all()


# -- what they share ---------------------------------------------------------------------------------------------


def _listed(params: nn.Parameter | Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Different parameters in the order given."""
    try:
        items: list[Any] = [params] if isinstance(params, torch.Tensor) else list(params)
    except TypeError:
        items = [params]
    for item in items:
        if not isinstance(item, nn.Parameter):
            msg = f"GatheredParameters takes parameters (torch.nn.Parameter), found a {type(item).__name__}"
            raise UsageError(msg)
    return list({id(item): item for item in items}.values())


def _saving(store: ParamStore) -> AbstractContextManager[Any]:
    """What autograd saves in this time is looked up again when backward wants it."""
    return store.reader.saving() if isinstance(store.reader, Frames) else nullcontext()


def _stores(params: Sequence[nn.Parameter]) -> list[ParamStore]:
    keepers = {id(keeper): keeper for keeper in map(guard.keeper_of, params) if isinstance(keeper, ParamStore)}
    return list(keepers.values())


def _grouped(params: Sequence[nn.Parameter]) -> list[_OfStore | _OfBirth]:
    """Parameters by who has them; ordinary ones are left out."""
    of_stores: dict[int, tuple[ParamStore, list[tuple[nn.Parameter, Place]]]] = {}
    of_births: dict[int, tuple[Birth, list[nn.Parameter]]] = {}
    for param in params:
        keeper, born = guard.keeper_of(param), find_born(param)
        place = keeper.table.locate(param) if isinstance(keeper, ParamStore) else None
        if isinstance(keeper, ParamStore) and place is not None:
            of_stores.setdefault(id(keeper), (keeper, []))[1].append((param, place))
        elif born is not None:
            of_births.setdefault(id(born.birth), (born.birth, []))[1].append(param)
    return [*(_OfStore(*found) for found in of_stores.values()), *(_OfBirth(*found) for found in of_births.values())]


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
    """`value` of every rank. Collective over: the group."""
    mine, everyone = torch.tensor([value]), torch.empty(comm.size, dtype=torch.int64)
    wait(comm.start(lambda c: c.all_gather(everyone, mine), what, describe=lambda: what), lambda: what)
    return [int(number) for number in everyone.tolist()]


def _agree(comm: Comm, wait: Wait, names: Sequence[str], root: int | None) -> None:
    """All ranks name the same parameters, or all raise."""
    if comm.size == 1:
        return
    digest = blake2b("\0".join((str(root), *names)).encode(), digest_size=7).digest()
    if len(set(_exchange(comm, wait, int.from_bytes(digest, "big"), "entering GatheredParameters"))) == 1:
        return
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    texts = comm.gather_objects(f"{', '.join(names[:NAMES_SHOWN])}{more} with modifier_rank={root}")
    told = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts[:NAMES_SHOWN]))
    msg = f"GatheredParameters is entered for different parameters or modifier ranks: {told}; all ranks name the same"
    raise UsageError(msg)


@contextmanager
def _shared_fate(comm: Comm, wait: Wait) -> Iterator[None]:
    """An exception on one rank inside is an AgreementError of the others, which would wait for its values."""
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
