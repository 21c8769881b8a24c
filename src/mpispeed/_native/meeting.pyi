from collections.abc import Callable

from typing_extensions import disjoint_base

LINE_BYTES: int
DOOR_BYTES: int

@disjoint_base
class Meeting:
    def __init__(self, memory: int, place: int, size: int, slot_bytes: int) -> None: ...
    def meet(self, source: int, nbytes: int, code: int, spin_ns: int, beat: Callable[[], object]) -> int: ...
