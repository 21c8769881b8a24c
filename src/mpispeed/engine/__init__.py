"""Floor 8: the engine, its construction from a plan, and its state.

Knows the config and every part below it. Must not know job schedulers, or how another floor does its work.
"""

from mpispeed.engine.api import add_config_arguments, initialize
from mpispeed.engine.distributed import init_distributed
from mpispeed.engine.engine import Engine

__all__ = ["Engine", "add_config_arguments", "init_distributed", "initialize"]
