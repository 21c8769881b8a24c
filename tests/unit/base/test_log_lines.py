"""Lines of ranks that run unbuffered are written whole, and at once."""

import socket
import subprocess
import sys

SCRIPT = """
import os
from mpispeed.base.log import keep_lines_whole
keep_lines_whole()
print("a", 1, "b")
print("c", 2)
os._exit(0)  # what is still kept would be lost
"""


def test_each_line_is_one_write():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # each write is a message
    with ours, theirs:
        subprocess.run([sys.executable, "-u", "-c", SCRIPT], stdout=theirs, check=True, timeout=60)
        ours.setblocking(False)
        assert [ours.recv(100), ours.recv(100)] == [b"a 1 b\n", b"c 2\n"]
