"""DeepSpeed's names, served by mpispeed."""

from mpispeed.compat.modules import become_deepspeed

become_deepspeed(__name__)
