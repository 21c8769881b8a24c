"""The tests' own device: as strict as a real one, and with the numbers of the CPU."""

from __future__ import annotations

import copy
import io
import signal
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.helpers.device import NAME, stand_in, visible


@pytest.fixture(scope="module")
def device():
    return stand_in()


@pytest.fixture
def module(device):
    return torch.get_device_module(device)


class Block(nn.Module):
    def __init__(self, width=16, heads=2):
        super().__init__()
        self.heads = heads
        self.before, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.between, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.before(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Gpt(nn.Module):
    def __init__(self, is_checkpointed=False):
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.words, self.places = nn.Embedding(23, 16), nn.Embedding(12, 16)
        self.blocks, self.last = nn.ModuleList([Block(), Block()]), nn.LayerNorm(16)

    def forward(self, words, targets):
        x = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return F.cross_entropy(F.linear(self.last(x), self.words.weight).flatten(0, 1).float(), targets.flatten())


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.BatchNorm1d(33), nn.Linear(33, 3))

    def forward(self, x, y):
        return F.mse_loss(self.layers(x.to(self.layers[0].weight.dtype)).float(), y)


def words(count=5):
    data = torch.randint(0, 23, (count, 4, 13), generator=torch.Generator().manual_seed(2))
    return [(batch[:, :-1], batch[:, 1:]) for batch in data]


def numbers(count=5):
    data = torch.randn(count, 8, 9, generator=torch.Generator().manual_seed(3))
    return [(batch[:, :6], batch[:, 6:]) for batch in data]


def trained(model, data, device, **autocast):
    """Losses of some steps of AdamW on a device, and the weights after them on the host."""
    model = copy.deepcopy(model).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    losses = []
    for batch in data:
        with torch.autocast(torch.device(device).type, **(autocast or {"enabled": False})):
            loss = model(*(part.to(device) for part in batch))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.cpu() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "data"), [(Mlp, numbers), (Gpt, words)])
def test_training_is_that_of_the_cpu_to_the_bit(device, kind, data, dtype):
    torch.manual_seed(1)
    model = kind().to(dtype)
    losses, weights = trained(model, data(), device)
    expected_losses, expected = trained(model, data(), "cpu")
    assert losses == expected_losses
    assert losses[-1] < losses[0]
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name


def test_autocast_computes_in_low_precision_what_cuda_does(device):
    model = Gpt()
    losses, weights = trained(model, words(), device, dtype=torch.bfloat16)
    exact, _ = trained(model, words(), device)
    assert losses != exact
    # bf16 keeps 8 bits of each product's factors; the losses are near 3.
    assert losses == pytest.approx(exact, abs=0.05)
    assert all(weight.dtype == torch.float32 for weight in weights.values())
    x = torch.randn(4, 4, device=device)
    with torch.autocast(NAME, dtype=torch.float16):
        y = x @ x
        assert y.dtype == torch.float16
        assert {F.layer_norm(y, (4,)).dtype, y.softmax(-1).dtype, y.sum().dtype} == {torch.float32}


def test_half_precision_goes_into_a_softmax_of_single_precision(device):
    x = torch.randn(3, 5, dtype=torch.float16)
    for function in (torch.softmax, torch.log_softmax):
        ours, theirs = x.to(device).requires_grad_(), x.clone().requires_grad_()
        function(ours, -1, torch.float32)[:, 0].sum().backward()
        function(theirs, -1, torch.float32)[:, 0].sum().backward()
        assert torch.equal(ours.grad.cpu(), theirs.grad)


@pytest.mark.parametrize(("is_causal", "has_mask"), [(False, False), (True, False), (False, True)])
def test_attention_takes_the_way_of_the_cpu(device, is_causal, has_mask):
    q, k, v = torch.randn(3, 2, 4, 9, 8)
    mask = torch.randn(9, 9) if has_mask else None
    results = []
    for place in ("cpu", device):
        parts = [part.to(place, copy=True).requires_grad_() for part in (q, k, v)]
        seen = None if mask is None else mask.to(place)
        out = F.scaled_dot_product_attention(*parts, attn_mask=seen, is_causal=is_causal)
        out.square().sum().backward()
        results.append([out.detach().cpu(), *(part.grad.cpu() for part in parts)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_devices_do_not_mix(device):
    here, there = torch.ones(3, 3, device=device), torch.ones(3, 3)
    for wrong in (
        lambda: here + there,
        lambda: there.add_(here),
        lambda: here @ there,
        lambda: F.linear(here, there),
        lambda: F.layer_norm(here, (3,), there[0]),
        lambda: F.embedding(torch.tensor([1]), here),
        lambda: torch.cat([here, there]),
        lambda: torch._foreach_add_([here], [there]),
        lambda: torch.zeros(()).add_(here[0, 0]),
        lambda: here + here.to(f"{NAME}:1"),
        lambda: torch.dot(here[0], there[0]),
    ):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            wrong()
    with pytest.raises(RuntimeError, match="device type for generator"):
        torch.rand(3, device=device, generator=torch.Generator())
    with pytest.raises(RuntimeError, match="to a storage on different device"):
        here.set_(there.untyped_storage())
    with pytest.raises(TypeError, match="to copy the tensor to host memory"):
        here.numpy()
    # Numbers of the host go with any device, and so do indices.
    assert (here * torch.tensor(2.0)).device == here[torch.tensor([0, 2])].device == device


def test_the_host_cannot_touch_its_memory(device):
    touch = "import ctypes; from tests.helpers.device import stand_in; import torch; "
    touch += (
        "x = torch.ones(4, device=stand_in()); print(x.sum().item(), flush=True); ctypes.string_at(x.data_ptr(), 4)"
    )
    done = subprocess.run([sys.executable, "-c", touch], capture_output=True, text=True)
    assert done.stdout == "4.0\n", done.stderr
    assert done.returncode == -signal.SIGSEGV


def test_memory_is_unknown_until_it_is_written(device):
    assert torch.empty(7, device=device, dtype=torch.bfloat16).isnan().all()
    assert torch.empty(7, pin_memory=True).isnan().all()


def test_storages_give_their_memory_back(device, module):
    parameter = nn.Parameter(torch.ones(1000, device=device))
    storage, before = parameter.untyped_storage(), module.memory_allocated(device)
    storage.resize_(0)
    assert module.memory_allocated(device) == before - 4000
    with pytest.raises(RuntimeError, match="given back"):
        parameter + 1
    storage.resize_(4000)
    assert parameter.isnan().all()
    parameter.data.copy_(torch.arange(1000.0))
    assert parameter[-1] == 999
    storage.resize_(8000)
    assert parameter[-1] == 999


def test_data_of_parameters_can_be_changed(device):
    layer = nn.Linear(3, 2)
    kept = layer.weight
    assert layer.to(device).weight is kept  # as on CUDA: optimizers keep what they have
    assert layer.cpu().weight is kept
    parameter = nn.Parameter(torch.ones(3))
    parameter.data = torch.full((2, 2), 5.0, device=device)
    assert parameter.device == device
    (parameter * parameter).sum().backward()
    assert parameter.grad.cpu().tolist() == [[10.0, 10.0], [10.0, 10.0]]
    flat = torch.zeros(6, device=device)
    parameter.data = flat[1:5].view(2, 2)
    with torch.no_grad():
        parameter += 1
    assert flat.tolist() == [0, 1, 1, 1, 1, 0]
    parameter.data = torch.empty(0, device=device)
    assert parameter.numel() == 0


def test_views_share_memory_and_versions(device):
    base = torch.zeros(4, 6, device=device)
    for view in (base.view(24), base.t(), base[1:, ::2], base.unfold(1, 2, 2), base.expand(2, 4, 6), base.split(2)[1]):
        assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    before = base._version
    base.view(-1)[3:5].fill_(2)
    assert base.sum() == 4
    assert base._version > before
    x = torch.ones(3, device=device, requires_grad=True)
    y = x.exp()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_lazy_conjugates_and_negatives_are_numbers_like_others(device):
    x = torch.tensor([1 + 2j, -3j], device=device)
    assert x.conj().is_conj()
    assert x.conj().cpu().tolist() == x.cpu().conj().tolist() == [1 - 2j, 3j]
    assert x.conj().imag.tolist() == [-2, 3]
    assert (x.conj() * x).real.sum() == 14
    assert x.copy_(x.conj()).tolist() == [1 - 2j, 3j]


def test_results_grow_to_their_size(device):
    out = torch.empty(0, device=device)
    torch.add(torch.ones(3, device=device), 1, out=out)
    assert out.tolist() == [2, 2, 2]
    assert torch.empty(2, device=device).resize_(5).shape == (5,)
    assert torch.ones(2, 3, device=device).t().contiguous().stride() == (2, 1)


def test_memory_is_counted(device, module):
    module.reset_peak_memory_stats(device)
    before = module.memory_allocated(device)
    large = torch.empty(1 << 20, dtype=torch.uint8, device=device)
    del large
    assert module.memory_allocated(device) == before
    assert module.max_memory_allocated(device) == before + (1 << 20)
    assert torch.accelerator.max_memory_allocated(device) == before + (1 << 20)
    module.reset_peak_memory_stats(device)
    assert module.max_memory_allocated(device) == before


def test_pinned_memory(device):
    pinned = torch.arange(5.0).pin_memory()
    assert pinned.is_pinned()
    assert pinned[2:].is_pinned()
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert not torch.empty(3).is_pinned()
    with pytest.raises(RuntimeError, match="only tensors of the host can be pinned"):
        torch.empty(3, device=device, pin_memory=True)


def test_copies_that_do_not_block_are_as_late_as_they_may_be(device, module):
    side = module.Stream(device)
    here, pinned = torch.arange(4.0, device=device), torch.zeros(4).pin_memory()
    with module.stream(side):
        pinned.copy_(here, non_blocking=True)
        event = module.Event()
        event.record()
    assert pinned.tolist() == [0, 0, 0, 0]  # nobody waited
    event.synchronize()
    assert pinned.tolist() == [0, 1, 2, 3]

    with module.stream(side):
        here.copy_(pinned.fill_(7), non_blocking=True)
        assert here.sum() == 28  # the same stream
        here.copy_(pinned.fill_(8), non_blocking=True)
        event.record()
    assert here.sum() == 28  # another stream that does not wait
    module.current_stream(device).wait_event(event)
    assert here.sum() == 32

    with module.stream(side):
        here.copy_(pinned.fill_(9), non_blocking=True)
    pinned.fill_(1)  # used again too early
    module.current_stream(device).wait_stream(side)
    assert here.sum() == 4
    with module.stream(side):
        pinned.copy_(here.mul_(2), non_blocking=True)
    assert [side.query(), side.query()] == [False, True]
    assert pinned.tolist() == [2, 2, 2, 2]
    pinned.copy_(here + 1, non_blocking=True)
    module.synchronize(device)
    assert pinned.tolist() == [3, 3, 3, 3]
    plain = torch.zeros(4)
    plain.copy_(here, non_blocking=True)  # not pinned: blocks, as on CUDA
    assert plain.tolist() == [2, 2, 2, 2]


def test_copies_that_wait_survive_what_their_order_allows(device, module):
    pinned = torch.zeros(4).pin_memory()
    here = torch.arange(4.0, device=device)
    pinned.copy_(here, non_blocking=True)
    here.untyped_storage().resize_(0)  # after the copy in the order of the stream
    module.synchronize(device)
    assert pinned.tolist() == [0, 1, 2, 3]
    side, here = module.Stream(device), torch.arange(4.0, device=device)
    with module.stream(side):
        pinned.copy_(here, non_blocking=True)
    here.untyped_storage().resize_(0)  # beside it
    with pytest.raises(RuntimeError, match="given back"):
        side.synchronize()


def test_streams_and_events(device, module):
    side = module.Stream(device)
    assert module.current_stream(device) == module.default_stream(device) != side
    with side:
        assert module.current_stream(device) == torch.accelerator.current_stream() == side
        torch.ones(2, device=device).record_stream(side)
    first, second = module.Event(enable_timing=True), module.Event(enable_timing=True)
    first.record()
    second.record(side)
    side.wait_event(first)
    assert first.elapsed_time(second) >= 0
    with module.device(1):
        assert module.current_device() == torch.empty(1, device=NAME).device.index == 1
    assert module.current_device() == 0
    assert module.device_count() == 2


def test_random_numbers_have_a_state_of_their_own(device, module):
    torch.manual_seed(4)
    drawn = torch.randn(5, device=device)
    expected = torch.randn(5)  # the host's state is where the seed left it
    assert torch.equal(drawn.cpu(), expected)
    state, of_host = module.get_rng_state(device), torch.get_rng_state()
    layer = nn.Dropout(0.5)
    dropped = layer(torch.ones(100, device=device))
    assert torch.equal(torch.get_rng_state(), of_host)
    assert not torch.equal(layer(torch.ones(100, device=device)), dropped)
    module.set_rng_state(state, device)
    assert torch.equal(layer(torch.ones(100, device=device)), dropped)
    with torch.random.fork_rng([0], device_type=NAME):
        torch.rand(3, device=device)
    generators = [torch.Generator(device).manual_seed(8) for _ in range(2)]
    assert torch.equal(*(torch.rand(3, device=device, generator=generator) for generator in generators))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_activations_draw_the_same_numbers(device, use_reentrant):
    layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).to(device)
    x = torch.randn(4, 8, device=device, requires_grad=True)
    grads = []
    for is_checkpointed in (False, True):
        torch.manual_seed(6)
        out = checkpoint(layer, x, use_reentrant=use_reentrant) if is_checkpointed else layer(x)
        torch.rand(3, device=device)
        grads.append(torch.autograd.grad(out.sum(), x) if not use_reentrant else backward(out, x))
    assert torch.equal(grads[0][0], grads[1][0])


def backward(out, x):
    x.grad = None
    out.sum().backward()
    return (x.grad,)


def test_a_recomputed_model_trains_the_same(device):
    torch.manual_seed(7)
    plain = Gpt()
    recomputed = Gpt(is_checkpointed=True)
    recomputed.load_state_dict(plain.state_dict())
    assert trained(plain, words(2), device)[0] == trained(recomputed, words(2), device)[0]


def test_hooks_run(device):
    layer, seen = nn.Linear(3, 2).to(device), []
    layer.register_forward_hook(lambda *_: seen.append("forward"))
    layer.register_full_backward_hook(lambda *_: seen.append("backward"))
    layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.device.type))
    x = torch.ones(1, 3, device=device, requires_grad=True)
    x.register_hook(lambda grad: seen.append("input"))
    layer(x).sum().backward()
    assert sorted(seen) == sorted(["forward", "backward", NAME, "input"])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.cpu(), lambda t: t.to(device)):
        y = (x * x).sum()
    y.backward()


def test_several_threads_differentiate_at_once(device):
    results = {}

    def work(seed):
        weight = torch.full((16, 16), float(seed), device=device, requires_grad=True)
        for _ in range(10):
            (weight @ weight).sum().backward()
        results[seed] = weight.grad.sum().item()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {seed: 10 * 2 * 16**3 * seed for seed in (1, 2, 3)}


def test_copies_and_files(device):
    shared = torch.arange(6.0, device=device)
    first, second = copy.deepcopy([shared, shared[2:]])
    assert first.device == device
    assert (
        first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr() != shared.untyped_storage().data_ptr()
    )
    model = Gpt().to(device)
    other = Gpt().to(device)
    other.load_state_dict(model.state_dict())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    for place in ("cpu", device):
        file.seek(0)
        with visible():
            loaded = torch.load(file, map_location=place)
        for name, value in other.state_dict().items():
            assert loaded[name].device.type == torch.device(place).type
            assert torch.equal(loaded[name].cpu(), value.cpu())


def test_it_is_found_only_where_a_test_asks_for_it(device, module):
    assert torch.accelerator.current_accelerator(check_available=True) is None
    with visible():
        assert torch.accelerator.current_accelerator(check_available=True).type == NAME
        assert torch.accelerator.is_available()
    assert not module.is_available()
