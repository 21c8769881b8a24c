"""Channels between watchdogs that all run in one loop."""

import asyncio
import contextlib

from mpispeed.watchdog.side_channel import Node, SideChannel, open_listener

SECRET = "s" * 32
LIMIT_SECONDS = 60.0


async def until(is_met):
    """Wait for a condition, not for ever."""
    for _ in range(int(LIMIT_SECONDS / 0.01)):
        if is_met():
            return
        await asyncio.sleep(0.01)
    message = "it did not happen"
    raise AssertionError(message)


@contextlib.asynccontextmanager
async def channels(count, secrets=None):
    """Channels of some nodes that all run here, and what each has received."""
    listeners = [open_listener() for _ in range(count)]
    for listener in listeners:
        listener.setblocking(False)
    nodes = [Node(f"h{i}", ("127.0.0.1",), listeners[i].getsockname()[1], (i,)) for i in range(count)]
    received = [[] for _ in range(count)]
    made = []
    for i in range(count):
        secret = SECRET if secrets is None else secrets[i]
        made.append(SideChannel(i, nodes, secret, lambda node, message, i=i: received[i].append((node, message))))
    yield made, received, listeners
    for channel in made:
        await channel.finish(0.2)
    for listener in listeners:
        listener.close()
