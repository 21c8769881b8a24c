from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NoReturn

from torch import Tensor

def are_aligned(*tensors: Tensor | None) -> bool: ...

class Queue:
    def __init__(
        self,
        launch: int,
        current: int,
        context: int,
        stream: Callable[[int], int],
        device: int,
        enter: Callable[[], AbstractContextManager[object]],
        failed: Callable[[str, int], NoReturn],
    ) -> None: ...
    def run(
        self,
        name: str,
        function: int,
        grid: tuple[int, int, int],
        threads: tuple[int, int, int],
        shared: int,
        packed: bytes,
    ) -> None: ...

class Launch:
    def __init__(
        self,
        queue: Queue,
        name: str,
        function: int,
        grid: tuple[int, int, int],
        threads: tuple[int, int, int],
        shared: int,
        pointers: int,
        tail: bytes,
    ) -> None: ...
    def __call__(self, *pointers: Tensor | int | None) -> None: ...
