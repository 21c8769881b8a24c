"""Messages between two ranks of a process group."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from mpispeed.mesh import recorder as recorders
from mpispeed.mesh.collectives.transport import Posted
from mpispeed.mesh.collectives.verbs import check_tag
from mpispeed.mesh.collectives.work import Work, in_this_mode
from mpispeed.mesh.comm import await_posted
from mpispeed.process_group import layouts
from mpispeed.process_group.carrier import Carrier, Tensors, one
from mpispeed.process_group.torch_work import TorchWork


class Messages(Carrier):
    """All travel on the group of started verbs, so that any send meets any receive."""

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> dist.Work:
        """Send a tensor to one rank."""
        x = one(tensors)
        return TorchWork([x], self.comm.start_send(layouts.plain(x), dst, tag))

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> dist.Work:
        """Receive a tensor from one rank."""
        x = one(tensors)
        flat = x if layouts.is_plain(x) else torch.empty_like(x, memory_format=torch.contiguous_format)
        work = self.comm.start_recv(flat, src, tag)
        if flat is not x:
            _then(work, lambda: x.detach().copy_(flat))
        return TorchWork([x], work)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        """Receive a tensor from whichever rank sends one first."""
        x = one(tensors)
        check_tag(self.comm.group, tag, "recv")
        flat = x.detach() if layouts.is_plain(x) and x.is_cpu else torch.empty(x.shape, dtype=x.dtype)
        poll, found = self.comm.started.transport.post_recv_any(flat.view(-1), tag), []

        def has_come() -> bool:
            source = poll()
            found.extend([] if source is None else [source])
            return source is not None

        work = await_posted(self.comm, "recv", x, Posted([has_come], flat), recorders.NO_ROW)
        if flat.data_ptr() != x.data_ptr():
            _then(work, lambda: x.detach().copy_(flat))
        return TorchWork([x], work, lambda: found[0])


def _then(work: Work, copy: Callable[[], object]) -> None:
    """Copy a message once it has arrived, if it does: where it is brought from host memory, after that."""
    bring, copy = work.bring, in_this_mode(copy)
    if bring is None:
        work.after(lambda: copy() if work.error is None else None)
    else:
        work.bring = lambda: (bring(), copy())
