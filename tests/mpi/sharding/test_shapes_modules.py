"""Stage 3 trains models made of torch's own modules as stage 0 does, bit for bit: those that read weights unseen."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from tests.zoo.cut import WIDTH, check_like_whole, difference, one_step, run
from tests.zoo.models import Stack
from tests.zoo.training import ORDERED, config

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.ranks(2)]


class Recurrent(nn.Module):
    def __init__(self, cls, **more):
        super().__init__()
        self.first = nn.Linear(WIDTH, 4)
        self.body = cls(4, 5, num_layers=2, batch_first=True, **more)
        self.last = nn.Linear(5 * (1 + more.get("bidirectional", False)), WIDTH)

    def forward(self, x):
        rows = self.first(x)[:, None, :].repeat(1, 3, 1) * torch.arange(1.0, 4.0)[:, None]
        return self.last(self.body(rows)[0][:, -1])


def with_evaluation(engine, batch, step):
    """A step, and what the model says in evaluation."""
    loss = one_step(engine, batch, step)
    engine.eval()
    with torch.no_grad():
        loss += float(difference(engine(batch[0]), batch[1]))
    engine.train()
    if engine.parts.params.prefetcher is not None:
        engine.parts.params.prefetcher.reshard_all()
    return loss


@pytest.mark.parametrize("more", [{}, {"bidirectional": True}, {"bias": False}])
@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(cls, more):
    check_like_whole(lambda: Recurrent(cls, **more), with_evaluation, steps=3)


def test_recurrent_layer_in_blocks():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Recurrent(nn.LSTM) for _ in range(2))
            self.stored = nn.GRUCell(WIDTH, WIDTH)

        def forward(self, x):
            for block in self.blocks:
                x = x + block(x)
            return self.stored(x, x)

    check_like_whole(Wrapped, with_evaluation, steps=3)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList(nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2))
        self.other = nn.MultiheadAttention(WIDTH, 3, kdim=WIDTH, vdim=4, bias=False)
        self.side = nn.Linear(WIDTH, 4)

    def forward(self, x):
        rows = x[:, None, :].repeat(1, 3, 1) * torch.arange(1.0, 4.0)[:, None]
        for layer in self.body:
            rows = rows + layer(rows, rows, rows, need_weights=False)[0]
        return rows.sum(1) + self.other(x, x, self.side(x))[0]


def test_attention():
    check_like_whole(Attending, with_evaluation, steps=3)


class Encoding(nn.Module):
    """Torch's transformer; in evaluation its fast path reads the weights of all layers as attributes."""

    def __init__(self, nested):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)
        self.decoder = nn.TransformerDecoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)

    def forward(self, x):
        rows = x[:, None, :].repeat(1, 3, 1) * torch.arange(1.0, 4.0)[:, None]
        mask = torch.zeros(rows.shape[:2], dtype=torch.bool)
        mask[:, 2] = True
        rows = self.body(rows, src_key_padding_mask=mask)[:, :2]
        return self.decoder(rows, rows).sum(1)


@pytest.fixture
def _slow_path():
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.usefixtures("_slow_path")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("nested", [False, True])
def test_transformer_layers(nested):
    check_like_whole(lambda: Encoding(nested), with_evaluation, steps=3)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("nested", [False, True])
def test_transformer_layers_whose_fast_path_torch_declines_for_modules_with_hooks(nested):
    results = []
    for stage in (0, 3):
        outcome = run(lambda: Encoding(nested), config(stage, **ORDERED), with_evaluation, steps=3)
        results.append(outcome.losses)
    # Another order of summation in evaluation: a few units of 2^-24 of a loss below 8.
    assert max(abs(a - b) for a, b in zip(*results, strict=True)) < 16 * 8 * 2**-24


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(7, WIDTH, mode="mean")
        self.table = nn.Embedding(7, WIDTH, padding_idx=0)
        self.conv = nn.Conv1d(1, 2, 3, padding=1)
        self.norm = nn.BatchNorm1d(2)
        self.group = nn.GroupNorm(2, 2)
        self.slope = nn.PReLU()
        self.bilinear = nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def forward(self, x):
        index = (x.abs() * 3).long().clamp(max=6)
        rows = self.bag(index) + self.table(index[:, 0])
        both = self.group(self.norm(self.conv(rows[:, None, :]))).sum(1)
        return self.bilinear(self.slope(both), x)


def test_embeddings_convolutions_norms_with_buffers():
    check_like_whole(Bags, with_evaluation)


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2.0


class OwnScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, weight):
        return weight * self.scale

    def right_inverse(self, weight):
        return weight / 0.5


class Parametrized(nn.Module):
    def __init__(self):
        super().__init__()
        self.normed = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.spectral = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.orthogonal = parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))
        self.own = nn.Linear(WIDTH, WIDTH)
        parametrize.register_parametrization(self.own, "weight", Doubled())
        parametrize.register_parametrization(self.own, "weight", OwnScale())
        self.blocks = nn.ModuleList(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x):
        x = torch.tanh(self.own(torch.tanh(self.spectral(self.normed(x)))))
        with parametrize.cached():
            x = x + self.orthogonal(x) + self.orthogonal(torch.tanh(x))
        for block in self.blocks:
            x = block(x) + F.linear(x, block.weight)
        return x


@pytest.mark.filterwarnings("ignore:.*linalg")
def test_parametrizations():
    check_like_whole(Parametrized, with_evaluation)


def test_old_weight_norm():
    def make():
        with pytest.warns(FutureWarning):
            return nn.Sequential(nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH))

    check_like_whole(make, with_evaluation)


def test_lazy_modules_after_their_first_call():
    def make():
        model = nn.Sequential(nn.LazyLinear(WIDTH), nn.Tanh(), nn.LazyLinear(WIDTH))
        model(torch.zeros(2, WIDTH))
        return model

    check_like_whole(make)


# -- autocast --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_autocast(inside, cached):
    class Cast(Stack):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
                return super().forward(x).float()

    def drive(engine, batch, step):
        with torch.autocast("cpu", torch.bfloat16, enabled=not inside and step % 2 == 0, cache_enabled=cached):
            loss = difference(engine(batch[0]), batch[1])
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    check_like_whole(Cast if inside else Stack, drive)


def test_autocast_over_two_calls_and_a_step_uses_no_stale_weights():
    """The cache of casts lives as long as the outermost autocast: it must not outlive an update, nor a buffer."""

    def drive(engine, batch, step):
        total = 0.0
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            for factor in (1.0, 0.5):
                total += one_step(engine, (batch[0] * factor, batch[1]), step)
        return total

    check_like_whole(Stack, drive)


@pytest.mark.parametrize("section", ["bf16", "fp16"])
def test_sixteen_bits(section):
    class Casting(Stack):
        def forward(self, x):
            return super().forward(x.to(self.first.weight.dtype))

    # In 16 bits gradients are rounded where they land, as at stage 2.
    check_like_whole(
        Casting, like=2, **{section: {"enabled": True, **({"initial_scale_power": 8} if section == "fp16" else {})}}
    )


# -- compiled --------------------------------------------------------------------------------------------------------


@pytest.fixture
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def marked(test):
    """The compiler warns about much that it does itself."""
    return pytest.mark.usefixtures("_fresh_compiler")(pytest.mark.filterwarnings("ignore")(test))


def compiled_blocks(backend):
    model = Stack()
    for index in range(3):
        model.blocks[index] = torch.compile(model.blocks[index], backend=backend)
    return model


def compiled_in_place(backend):
    model = Stack()
    for block in model.blocks:
        block.compile(backend=backend)
    return model


@marked
@pytest.mark.parametrize(("make", "backend"), [(compiled_blocks, "aot_eager"), (compiled_in_place, "eager")])
def test_blocks_compiled_before(make, backend):
    check_like_whole(lambda: make(backend))


@marked
@pytest.mark.parametrize(("whole", "backend"), [(False, "aot_eager"), (True, "eager")])
def test_compiled_after_initialize(whole, backend):
    graphs = []

    def drive(engine, batch, step):
        if step == 0:
            torch._dynamo.reset()
            for module in [engine.module] if whole else engine.module.blocks:
                module.compile(backend=backend)
        loss = one_step(engine, batch, step)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        return loss

    check_like_whole(Stack, drive, steps=6)
    assert graphs[-1] > 0
    # Cut for the last four steps: nothing is compiled again although weights come and go.
    assert graphs[-1] == graphs[-4]


@marked
def test_compiled_blocks_in_evaluation_then_training():
    check_like_whole(lambda: compiled_in_place("aot_eager"), with_evaluation)


@marked
def test_blocks_compiled_to_machine_code():
    def make():
        model = Stack(1)
        model.blocks[0].compile(backend="inductor")
        return model

    check_like_whole(make)
