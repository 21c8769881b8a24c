"""Counts of a model by module and by pass, what recomputation is, and what a counter leaves behind."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

from mpispeed.base.errors import UsageError
from mpispeed.flops.by_module import Counts, ModuleCounter
from mpispeed.nn.activation_checkpointing import checkpoint

WIDTH, ROWS = 8, 3
PRODUCT = 2 * ROWS * WIDTH * WIDTH
"""Operations of one linear layer."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    """Blocks, each run by `call(block, x)`."""

    def __init__(self, blocks: int = 2, call: Callable[[nn.Module, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.call = call or (lambda block, x: block(x))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x)


def rows(requires_grad: bool = False) -> Tensor:
    return torch.randn(ROWS, WIDTH, requires_grad=requires_grad)


def counted(model: nn.Module, run: Callable[[], Any], **options: Any) -> ModuleCounter:
    counter = ModuleCounter(model, **options)
    counter.start()
    try:
        run()
    finally:
        counter.stop()
    return counter


def train(model: nn.Module, x: Tensor) -> Callable[[], None]:
    return lambda: model(x).square().sum().backward()


def three(counts: Counts) -> tuple[int, int, int]:
    return counts.forward, counts.backward, counts.recompute


# -- torch's counter ---------------------------------------------------------------------------------------------------


def bert(**options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = transformers.BertConfig(vocab_size=50, **sizes, attn_implementation="eager", **options)
    return transformers.BertForSequenceClassification(config)


def gpt2(**options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_head=2, n_layer=2, n_positions=16, **options)
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize("make", [bert, gpt2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_with_eager_attention_count_as_in_torch(make: Callable[..., nn.Module], dtype: torch.dtype) -> None:
    model, ids = make(attn_implementation="eager") if make is gpt2 else make(), torch.randint(0, 50, (2, 7))
    model.to(dtype)
    labels = torch.tensor([0, 1]) if make is bert else ids
    with FlopCounterMode(display=False) as theirs:
        loss = model(ids, labels=labels).loss
        forward = theirs.get_total_flops()
        loss.backward()
    counter = counted(model, lambda: model(ids, labels=labels).loss.backward())
    assert three(counter.total()) == (forward, theirs.get_total_flops() - forward, 0)
    assert not counter.unknown
    assert counter.outside == 0


def test_fused_attention_counts_as_eager_attention() -> None:
    ids, found = torch.randint(0, 50, (2, 7)), []
    for kind in ("eager", "sdpa"):
        model = gpt2(attn_implementation=kind)
        counter = counted(model, lambda model=model: model(ids, labels=ids).loss.backward())
        found.append({path: three(counts) for path, counts in counter.own.items()})
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_bert_and_gpt2_of_full_size_count_by_their_closed_forms(kind: str) -> None:
    """Per layer and token 12 h^2 weights and 2 s h of attention; without memory."""
    transformers = pytest.importorskip("transformers")
    layers, h, tokens = 12, 768, 128
    macs = layers * (12 * h * h * tokens + 2 * tokens * tokens * h)
    with torch.device("meta"):
        config = transformers.BertConfig(attn_implementation=kind)
        bert = transformers.BertForSequenceClassification(config)
        gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(attn_implementation=kind))
        ids = torch.zeros(1, tokens, dtype=torch.long)
    assert sum(param.numel() for param in bert.parameters()) == 109_483_778
    assert sum(param.numel() for param in gpt2.parameters()) == 124_439_808
    for model, last in ((bert, h * h + 2 * h), (gpt2, h * 50257 * tokens)):
        total = counted(model, lambda model=model: model(ids).logits.sum().backward()).total()
        assert (total.forward, total.backward) == (2 * (macs + last), 4 * (macs + last))
        assert total.deepspeed_macs == macs + last


def test_models_without_memory_are_counted() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = Stack()
    expected = three(counted(model, train(model, rows())).total())
    meta = Stack().to("meta")
    assert three(counted(meta, train(meta, rows().to("meta"))).total()) == expected
    with FakeTensorMode():
        fake = Stack()
        assert three(counted(fake, train(fake, rows())).total()) == expected


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_compiled_models_run_as_operators_while_they_are_counted() -> None:
    model, x = Stack(), rows()
    expected = three(counted(model, train(model, x)).total())
    for compiled in (torch.compile(model, backend="eager"), model):
        if compiled is model:
            model.compile(backend="eager")
        compiled(x)
        assert three(counted(compiled, train(compiled, x)).total()) == expected


def test_sharded_tensors_of_torch_count_their_part() -> None:
    from torch import distributed
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.testing._internal.distributed.fake_pg import FakeStore

    model, x = Block(), rows(requires_grad=True)
    whole = three(counted(model, train(model, x)).total())
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = distributed.init_device_mesh("cpu", (2,))
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        part = three(counted(model, train(model, x)).total())
    finally:
        distributed.destroy_process_group()
    assert part == tuple(count // 2 for count in whole)


# -- modules -----------------------------------------------------------------------------------------------------------


def test_backward_is_counted_in_the_module_that_ran_forward() -> None:
    """Also where the input needs no gradient, and its product is left out."""
    model = Stack()
    counter = counted(model, train(model, rows()))
    assert three(counter.own["blocks.0.up"]) == (PRODUCT, PRODUCT, 0)
    for path in ("blocks.0.down", "blocks.1.up", "blocks.1.down", "head"):
        assert three(counter.own[path]) == (PRODUCT, 2 * PRODUCT, 0)
    assert three(counter.total("blocks.1")) == (2 * PRODUCT, 4 * PRODUCT, 0)
    assert three(counter.total("blocks")) == (4 * PRODUCT, 7 * PRODUCT, 0)
    assert three(counter.total()) == (5 * PRODUCT, 9 * PRODUCT, 0)
    assert three(counter.own["blocks.0"]) == (0, 0, 0)
    with pytest.raises(UsageError, match=r"no module 'blocks\.7'"):
        counter.total("blocks.7")


def test_losses_and_other_models_are_outside() -> None:
    model, other, x = Stack(), nn.Linear(WIDTH, WIDTH), rows()
    counter = counted(model, lambda: other(model(x)))
    assert counter.total().forward == 5 * PRODUCT
    assert counter.outside == PRODUCT
    assert counter.total().deepspeed_macs == 5 * PRODUCT // 2


def test_backward_through_another_model_is_outside() -> None:
    """As of a generator that learns from a critic."""
    model, critic, x = Stack(), Stack(1), rows()
    counter = counted(model, lambda: critic(model(x)).sum().backward())
    assert three(counter.total()) == (5 * PRODUCT, 9 * PRODUCT, 0)
    assert counter.outside == (3 + 6) * PRODUCT


def test_graphs_from_before_the_start_are_the_model_s() -> None:
    model = Stack()
    loss = model(rows()).sum()
    counter = counted(model, loss.backward)
    assert three(counter.own[""]) == (0, 9 * PRODUCT, 0)


def test_modules_called_by_themselves_are_counted() -> None:
    model = Stack()
    counter = counted(model, lambda: model.head(model.blocks[0](rows())))
    assert counter.total().forward == 3 * PRODUCT
    assert counter.own[""].calls == 0


def test_a_module_that_is_called_twice_and_passes_that_add_up() -> None:
    model, x = Stack(), rows()
    model.blocks.append(model.blocks[0])
    counter = ModuleCounter(model)
    for _ in range(2):
        counter.start()
        train(model, x)()
        counter.stop()
        train(model, x)()
    assert three(counter.total()) == (14 * PRODUCT, 26 * PRODUCT, 0)
    assert counter.own[""].calls == 2
    assert counter.own["blocks.0"].calls == 4
    counter.reset()
    assert counter.total() == Counts()


def test_a_graph_of_an_earlier_start_is_still_known() -> None:
    model = Stack()
    counter = ModuleCounter(model)
    counter.start()
    loss = model(rows()).sum()
    counter.stop()
    model(rows())
    counter.start()
    loss.backward()
    counter.stop()
    assert three(counter.own["head"]) == (PRODUCT, 2 * PRODUCT, 0)
    assert three(counter.total()) == (5 * PRODUCT, 9 * PRODUCT, 0)


def test_a_shared_module_is_counted_where_it_was_called() -> None:
    model = Stack()
    model.blocks[1].up = model.blocks[0].up
    counter = counted(model, train(model, rows()))
    for path in ("blocks.0.up", "blocks.1.up"):
        assert counter.own[path].forward == PRODUCT
        assert counter.own[path].calls == 1
    assert counter.own["blocks.0.up"].backward == PRODUCT
    assert counter.own["blocks.1.up"].backward == 2 * PRODUCT
    assert counter.total().forward == 5 * PRODUCT


def test_ignored_kinds_are_left_out_with_what_is_in_them() -> None:
    model = Stack()
    counter = counted(model, train(model, rows()), ignore=[Block])
    assert three(counter.total()) == (PRODUCT, 2 * PRODUCT, 0)
    assert counter.total("blocks") == Counts()
    assert counter.total().deepspeed_macs == PRODUCT // 2


def test_other_threads_are_not_counted() -> None:
    model, x = Stack(), rows()

    def run() -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(model, x).result()
        model(x)

    counter = counted(model, run)
    assert counter.total().forward == 5 * PRODUCT
    assert counter.own[""].calls == 1


# -- recomputation -----------------------------------------------------------------------------------------------------

CHECKPOINTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "ours": checkpoint,
    "reentrant": lambda call, x: torch_checkpoint.checkpoint(call, x, use_reentrant=True),
    "not reentrant": lambda call, x: torch_checkpoint.checkpoint(call, x, use_reentrant=False, early_stop=False),
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("inside", ["a module", "a function", "a part of a module"])
def test_recomputation_is_apart_from_backward(kind: str, inside: str) -> None:
    again = CHECKPOINTS[kind]
    ways = {
        "a module": again,
        "a function": lambda block, x: again(
            lambda x: F.linear(F.gelu(F.linear(x, block.up.weight)), block.down.weight) + x, x
        ),
        "a part of a module": lambda block, x: block.down(again(block.up, x)),
    }
    model, x = Stack(call=ways[inside]), rows(requires_grad=True)
    counter = counted(model, train(model, x))
    if kind == "ours":  # stops with the last tensor that is saved: the last product is not needed
        repeated = {"a module": 2, "a function": 2, "a part of a module": 0}[inside]
    else:
        repeated = {"a module": 4, "a function": 4, "a part of a module": 2}[inside]
    assert three(counter.total()) == (5 * PRODUCT, 10 * PRODUCT, repeated * PRODUCT)
    if inside == "a module":
        assert three(counter.own["blocks.0.up"]) == (PRODUCT, 2 * PRODUCT, PRODUCT)
        assert counter.own["blocks.0.up"].calls == 1
    if inside == "a function":
        assert three(counter.own[""])[:2] == (4 * PRODUCT, 8 * PRODUCT)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_checkpoints_inside_of_checkpoints() -> None:
    for kind, again in CHECKPOINTS.items():
        model, x = Stack(), rows(requires_grad=True)
        outer = lambda x, model=model, again=again: again(model.blocks[1], again(model.blocks[0], x))  # noqa: E731
        counter = counted(model, lambda outer=outer, again=again, x=x: again(outer, x).square().sum().backward())
        total = counter.total()
        assert (total.forward, total.backward) == (4 * PRODUCT, 8 * PRODUCT), kind
        assert total.recompute > 0, kind


def test_second_derivatives_are_backward() -> None:
    model, x = Stack(call=CHECKPOINTS["not reentrant"]), rows(requires_grad=True)

    def run() -> None:
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()

    found = three(counted(model, run).total())
    plain = Stack()
    assert found[2] > 0
    expected = three(counted(plain, lambda: _twice(plain, x)).total())
    assert found[:2] == expected[:2]
    assert expected[1] > 10 * PRODUCT
    assert expected[2] == 0


def _twice(model: nn.Module, x: Tensor) -> None:
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    slope.square().sum().backward()


# -- what stays --------------------------------------------------------------------------------------------------------


def _traces(model: nn.Module) -> list[Any]:
    names = [
        name
        for name in vars(torch_module)
        if name.startswith("_global_") and isinstance(getattr(torch_module, name), dict)
    ]
    return [
        [dict(getattr(torch_module, name)) for name in names],
        [{key: repr(value) for key, value in vars(each).items()} for each in model.modules()],
        [vars(F).copy(), vars(torch.Tensor).copy()],
        _get_current_function_mode_stack(),
        _get_current_dispatch_mode_stack(),
    ]


def test_nothing_is_left_behind() -> None:
    model, x = Stack(), rows()
    before = _traces(model)
    counter = ModuleCounter(model)
    assert _traces(model) == before
    counter.start()
    assert _traces(model) != before
    with pytest.raises(UsageError, match="started already"):
        counter.start()
    train(model, x)()
    model.zero_grad()
    counter.stop()
    assert _traces(model) == before
    counter.stop()
    train(model, x)()
    assert counter.total().forward == 5 * PRODUCT
    model.zero_grad()


def test_results_are_the_same_bits() -> None:
    model, x, found = gpt2(), torch.randint(0, 50, (2, 7)), []
    model.train()

    def run() -> None:
        torch.manual_seed(3)
        model.zero_grad()
        loss = model(x, labels=x).loss
        loss.backward()
        found.append([loss.detach(), *(param.grad.clone() for param in model.parameters())])

    run()
    counted(model, run)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class _Others(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [_Others, _Dispatched])
def test_modes_of_others_stay_where_they_are(kind: Any) -> None:
    model, x = Stack(), rows()
    counter, other = ModuleCounter(model), kind()
    counter.start()
    with other:
        model(x)
        counter.stop()
        stacks = _get_current_function_mode_stack() + _get_current_dispatch_mode_stack()
        assert [each for each in stacks if isinstance(each, kind)] == [other]
        assert len(stacks) == 1
    assert not _get_current_function_mode_stack() + _get_current_dispatch_mode_stack()
    assert counter.total().forward == 5 * PRODUCT


def test_a_pass_that_fails_does_not_disturb_the_next_one() -> None:
    class Interrupted(BaseException):
        pass

    model, x, fails = Stack(), rows(), [ValueError("no"), Interrupted()]
    counter = ModuleCounter(model)
    counter.start()
    for failure in fails:

        def hook(*_: Any, failure: BaseException = failure) -> None:
            raise failure

        handle = model.blocks[1].register_forward_pre_hook(hook)
        with pytest.raises(type(failure)):
            model(x)
        handle.remove()
    counter.reset()
    train(model, x)()
    counter.stop()
    assert three(counter.own["head"]) == (PRODUCT, 2 * PRODUCT, 0)
    assert three(counter.total()) == (5 * PRODUCT, 9 * PRODUCT, 0)


def test_a_counter_holds_no_graph() -> None:
    import weakref

    model, x = Stack(), rows(requires_grad=True)
    counter = counted(model, train(model, x))
    reference = weakref.ref(x)
    del x
    gc.collect()
    assert reference() is None
    assert not counter.is_started


def test_what_torch_loads_for_a_dispatch_mode_is_in_no_time():
    code = (
        "import sys, torch\n"
        "from mpispeed.flops.by_module import ModuleCounter\n"
        "model = torch.nn.Linear(2, 2)\n"
        "counter = ModuleCounter(model)\n"
        "counter.start()\n"
        "before = set(sys.modules)\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
        "counter.stop()\n"
        "print(len(set(sys.modules) - before))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 20, done.stdout  # torch._dynamo alone has hundreds
