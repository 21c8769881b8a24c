"""`mpispeed run --stage-env`: the ranks start from a copy of the environment on their node."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from mpispeed.launch.options import Wishes

if TYPE_CHECKING:
    from mpispeed.staging.spread import Reach


@contextmanager
def maybe_staged(
    chosen: Mapping[str, Any], program: Sequence[str], wishes: Wishes
) -> Iterator[tuple[Sequence[str], Wishes]]:
    """The program and the wishes of a start, with --stage-env from the folder that it was unpacked to meanwhile.

    Raises:
        UsageError: with --elastic, too few hosts answer.
        StagingError: the environment cannot be packed, or not be unpacked on a node.
    """
    if not chosen["stage_env"]:
        yield program, wishes
        return
    from mpispeed.launch.staged import ended_by_exit, job_number, lease_of
    from mpispeed.staging.pack import pack
    from mpispeed.staging.spread import staged

    reach, wishes = _reach(chosen, program, wishes)
    if chosen["dry_run"]:
        click.echo("mpispeed: the environment is staged first, and the ranks start from its copy", err=True)
        yield program, wishes
        return
    with ended_by_exit():
        began = time.monotonic()
        archive = pack()
        packed = time.monotonic()
        job, lease = job_number(os.environ), lease_of(os.environ, is_held=True)
        with staged(reach, archive, job, chosen["stage_dir"] or "", lease, warn=_say) as found:
            _say(f"the environment is in {found.folder}: packed in {packed - began:.1f} s, "
                 f"unpacked in {time.monotonic() - packed:.1f} s")  # fmt: skip
            variables = {**wishes.variables, **found.variables({**os.environ, **wishes.variables})}
            words = [found.python if word == sys.executable else word for word in program]
            yield words, replace(wishes, variables=variables)


def _reach(chosen: Mapping[str, Any], program: Sequence[str], wishes: Wishes) -> tuple[Reach, Wishes]:
    """The way to the hosts of a start, and the wishes for them: with --elastic for those that answer now.

    Raises:
        UsageError: too few answer.
    """
    from mpispeed.launch.staged import reach_of

    ranks = None if wishes.hosts else chosen["ranks"]
    if not chosen["elastic"] or chosen["dry_run"]:
        return reach_of(wishes, ranks, chosen["mpi"], os.environ), wishes
    from mpispeed.cli.run_elastic import supervisor_of
    from mpispeed.staging.spread import Survivors

    supervisor = supervisor_of(chosen, wishes, program, ())
    hosts = supervisor.answering()

    def reach_to(names: Sequence[str]) -> Reach:
        some = tuple(host for host in hosts if host.name in names)
        return reach_of(replace(wishes, hosts=some), None, chosen["mpi"], os.environ)

    way = Survivors([host.name for host in hosts], reach_to, lambda: supervisor.prober.silence(hosts))
    return way, replace(wishes, hosts=hosts)


def _say(text: str) -> None:
    click.echo(f"mpispeed: {text}", err=True)
