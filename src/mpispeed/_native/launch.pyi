from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import Tensor
from typing_extensions import disjoint_base

def are_alike(x: Tensor, *others: Tensor | None) -> bool: ...
def are_aligned(*tensors: Tensor | None) -> bool: ...
def new_tensor(shape: tuple[int, ...], dtype: torch.dtype, index: int) -> Tensor: ...
def find_interface(names: tuple[str, ...] = ...) -> bool: ...
def place_of(function: Any) -> int: ...
def bound(function: Callable[..., Any]) -> Any: ...
def route(args: tuple[Any, ...], places: tuple[int, ...]) -> int: ...

@disjoint_base
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

@disjoint_base
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
        seed_at: int = -1,
    ) -> None: ...
    def __call__(self, *pointers: Tensor | int | None) -> None: ...
    def seeded(self, seed: int, *pointers: Tensor | int | None) -> None: ...

@disjoint_base
class NormLaunches:
    part: int
    def __init__(self, first: Launch, columns: Launch | None, add_up: Launch | None, part: int) -> None: ...

@disjoint_base
class NormCalls:
    apply: Any
    refuse: Any
    function_forward: Any
    function_backward: Any
    def __init__(
        self,
        prepare: Callable[[Any, tuple[Any, ...]], Launch],
        prepare_backward: Callable[[Any, tuple[Any, ...]], NormLaunches],
        launcher_of: Callable[[Tensor], Any],
        dtypes: Iterable[torch.dtype],
    ) -> None: ...
    def run(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        is_centered: bool,
    ) -> Any: ...
    def forward(
        self,
        runs: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        is_centered: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor]: ...
    def launch(
        self,
        runs: Any,
        y: Tensor,
        total: Tensor | None,
        mean: Tensor | int | None,
        rstd: Tensor | int,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        is_centered: bool,
    ) -> None: ...
    def backward(
        self,
        runs: Any,
        dy: Tensor,
        add: Tensor | None,
        x: Tensor,
        weight: Tensor | None,
        stats: Tensor,
        is_centered: bool,
        with_weight: bool,
        with_bias: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]: ...
    def launch_backward(
        self,
        runs: Any,
        dx: Tensor,
        dweight: Tensor | None,
        dbias: Tensor | None,
        dy: Tensor,
        add: Tensor | None,
        x: Tensor,
        weight: Tensor | None,
        mean: Tensor | int | None,
        rstd: Tensor,
    ) -> None: ...

@disjoint_base
class NormSize: ...

@disjoint_base
class Columns:
    parts: int
    def __init__(self, launch: Launch, add_up: Launch, parts: int) -> None: ...

@disjoint_base
class LayerPasses:
    runs: Any
    def __init__(
        self,
        runs: Any,
        key: tuple[Any, ...],
        passes: tuple[Launch, Launch, Launch],
        columns: tuple[Columns, Columns],
        norms: NormCalls,
    ) -> None: ...

@disjoint_base
class LayerCalls:
    refuse: Any
    before_forward: Any
    before_backward: Any
    after_forward: Any
    after_backward: Any
    def __init__(
        self,
        prepare: Callable[[Any, tuple[Any, ...]], LayerPasses],
        launcher_of: Callable[[Tensor], Any],
        is_placed: Callable[[Tensor], bool],
        vectors: dict[torch.dtype, int],
    ) -> None: ...
    def passes(
        self,
        x: Tensor,
        parameters: tuple[Tensor, ...],
        inner: int,
        heads: int,
        ratio: float,
        eps: float,
        is_pre: bool,
        keeps_gelu: bool,
    ) -> LayerPasses | None: ...

@disjoint_base
class FacePasses:
    def __init__(self, runs: Any, key: tuple[Any, ...], launch: Launch, back: Columns) -> None: ...

@disjoint_base
class FaceCalls:
    apply_gelu: Any
    apply_drop: Any
    apply_drop_norm: Any
    apply_softmax: Any
    prepare_softmax: Any
    refuse: Any
    gelu_forward: Any
    gelu_backward: Any
    drop_forward: Any
    drop_backward: Any
    drop_norm_forward: Any
    drop_norm_backward: Any
    softmax_forward: Any
    softmax_backward: Any
    def __init__(
        self,
        prepare: Callable[[Any, tuple[Any, ...]], FacePasses],
        launcher_of: Callable[[Tensor], Any],
        is_placed: Callable[[Tensor], bool],
        vectors: dict[torch.dtype, int],
        norms: NormCalls,
    ) -> None: ...
    def gelu(self, x: Tensor, bias: Tensor | None, form: str) -> Tensor | None: ...
    def drop(
        self, x: Tensor, bias: Tensor | None, residual: Tensor, ratio: float, seed: Tensor | None
    ) -> Tensor | None: ...
    def drop_norm(
        self,
        x: Tensor,
        x_bias: Tensor | None,
        residual: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        ratio: float,
        eps: float,
        seed: Tensor | None,
    ) -> tuple[Tensor, Tensor] | None: ...
    def softmax(self, scores: Tensor, scale: float, is_causal: bool) -> Tensor | None: ...

@disjoint_base
class SoftmaxPasses: ...
