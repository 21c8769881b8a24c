"""Floor 7: what the user asked for becomes a plan, the plan becomes parts, the engine runs the parts.

Knows the config and every part below it. Must not know job schedulers, or how another floor does its work.
"""

from mpispeed.engine.api import add_config_arguments, init_distributed, initialize
from mpispeed.engine.engine import Engine

__all__ = ["Engine", "add_config_arguments", "init_distributed", "initialize"]
