"""One open file for all ranks of a node: its descriptor goes to them through a socket of the kernel.

On a parallel file system every open is a question to one server, which thousands of ranks would ask at the same moment.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import struct
from typing import TYPE_CHECKING

from mpispeed.base.log import once

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpispeed.mesh.comm import Comm

log = logging.getLogger(__name__)

_SECONDS = 60.0
"""For a step that takes no time; a node that is slower than this gets files opened by each rank."""
_CREDENTIALS = struct.Struct("3i")  # process, user, group


def share_descriptor(node: Comm, handle: int | None) -> int | None:
    """Give the descriptor of the first rank to all others; None where that is not possible, as between containers.

    Args:
        node: the ranks of one node.
        handle: the descriptor on the first rank, which gets it back; ignored on others.

    Collective over: `node`.
    """
    listener = _listener(node.size) if node.rank == 0 and node.size > 1 else None
    try:
        address = node.share(listener.getsockname() if listener is not None else b"")
        caller = _connected(address) if node.rank else None
        try:
            callers = sum(node.gather_objects(caller is not None))
            if node.rank == 0:
                if listener is not None and handle is not None:
                    _send(listener, callers, handle)
                return handle
            return _received(caller)
        finally:
            if caller is not None:
                caller.close()
    finally:
        if listener is not None:
            listener.close()


def _listener(ranks: int) -> socket.socket | None:
    # a name without a file: nothing is left of it, and it is not looked for on a file system
    name = f"\0mpispeed-{os.getpid()}-{secrets.token_hex(16)}"

    def listen(made: socket.socket) -> None:
        made.bind(name)
        made.listen(ranks)

    return _socket(listen)


def _connected(address: bytes | str) -> socket.socket | None:
    return _socket(lambda made: made.connect(address)) if address else None


def _socket(begin: Callable[[socket.socket], None]) -> socket.socket | None:
    """A socket that has begun; None, and why in the log, where there can be none."""
    try:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as failure:
        _tell(failure)
        return None
    try:
        made.settimeout(_SECONDS)
        begin(made)
    except OSError as failure:
        made.close()
        _tell(failure)
        return None
    return made


def _send(listener: socket.socket, callers: int, handle: int) -> None:
    """Send the descriptor to so many ranks that have called; strangers who call get nothing."""
    served = 0
    listener.setblocking(False)  # all who have called wait already; one that was taken for a stranger calls no more
    while served < callers:
        try:
            connection, _ = listener.accept()
        except OSError as failure:
            _tell(failure)
            return
        with connection:
            user = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[
                1
            ]
            if user != os.getuid():
                continue
            served += 1
            try:
                socket.send_fds(connection, [b"f"], [handle])
            except OSError as failure:
                _tell(failure)


def _received(caller: socket.socket | None) -> int | None:
    if caller is None:
        return None
    try:
        _, handles, _, _ = socket.recv_fds(caller, 1, 1)
    except OSError as failure:
        _tell(failure)
        return None
    if not handles:
        return None
    os.set_inheritable(handles[0], False)
    return handles[0]


def _tell(failure: OSError) -> None:
    once(
        log,
        logging.WARNING,
        f"the ranks of this node cannot share one open file ({failure.strerror or failure}); each opens it by itself",
    )
