"""Updates of states as they rest have the bits of windows that are decoded, updated and encoded again."""

import pytest

from mpispeed.mesh.world import current
from mpispeed.native import coded_update
from mpispeed.optim.adagrad import Adagrad
from mpispeed.optim.host_rule import HostRule
from tests.helpers.covering import in_turn
from tests.zoo import same_bits
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import config, start, train_averaged, weights

pytestmark = pytest.mark.mpi(min_size=1)

BATCH = 12
INT8 = {"optimizer_states": "int8"}
TYPES = {
    "int8": INT8,
    "bf16": {"optimizer_states": "bf16"},
    "nearest": INT8 | {"master_dtype": "bf16"},
    "stochastic": INT8 | {"master_dtype": "bf16", "master_rounding": "stochastic"},
    "kahan": INT8 | {"master_dtype": "bf16", "master_rounding": "kahan"},
}
RULES = {
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1},
    "Adagrad": {"lr": 1e-2},
    "Lion": {"lr": 1e-3, "weight_decay": 0.1},
}
CPU, NVME = {"device": "cpu"}, {"device": "nvme"}
CASES = [
    (0, "int8", "AdamW", {}),
    (3, "nearest", "Adagrad", CPU),
    (3, "kahan", "AdamW", {}),
    (2, "stochastic", "AdamW", NVME),
    (1, "kahan", "Lion", NVME),
    (1, "stochastic", "Lion", {}),
    (2, "bf16", "Adagrad", {}),
]


def grouped(model):
    """Vectors, as long as no block of codes, have a group of their own without decay: blocks have two groups."""
    vectors = [param for param in model.parameters() if param.dim() < 2]
    return [
        {"params": [param for param in model.parameters() if param.dim() >= 2]},
        {"params": vectors, "weight_decay": 0.0, "lr": 3e-3},
    ]


def place(zero):
    return zero.get("offload_optimizer", {}).get("device")


def trained(stage, types, rule, zero, **params):
    """Losses, weights, masters and states after two updates."""
    settings = config(
        stage, BATCH, 1, dtype="bf16", zero=zero, data_types=types, reduction="ordered",
        optimizer={"type": rule, "params": RULES[rule] | params}, gradient_clipping=0.5,
    )  # fmt: skip
    model = TinyLM(width=64 if place(zero) == NVME["device"] else 24)
    engine = start(settings, model, model_parameters=grouped(model))
    found = {"losses": train_averaged(engine, batches(2, BATCH)), "weights": weights(engine)}
    for unit in engine.parts.table.units:
        found[unit.name, "states"] = engine.parts.optimization.states.of(unit)
        found[unit.name, "masters"] = engine.parts.params.shards.master(unit).clone()
    engine.destroy()
    return found


@pytest.fixture
def lengths(monkeypatch):
    """Elements of every update as states rest."""
    found, update = [], coded_update.update

    def counted(rule, param, states, grad, *arguments, **more):
        found.append(grad.numel())
        update(rule, param, states, grad, *arguments, **more)

    monkeypatch.setattr(coded_update, "update", counted)
    return found


@pytest.mark.parametrize(("stage", "types", "rule", "offload"), in_turn(CASES))
def test_bits_are_those_of_windows(stage, types, rule, offload, lengths, monkeypatch, mpi_tmp_path):
    path = {"nvme_path": str(mpi_tmp_path)} if offload == NVME else {}
    zero = {"offload_optimizer": offload | path} if offload else {}
    ours = trained(stage, TYPES[types], rule, zero)
    taken = list(lengths)
    monkeypatch.setattr(HostRule, "takes_codes", lambda *_: False)
    theirs = trained(stage, TYPES[types], rule, zero)
    assert len(lengths) == len(taken)
    assert taken or current().rank > 0  # the last ranks may have only a border
    assert not any(length % 256 for length in taken)
    same_bits(ours, theirs)


@pytest.mark.ranks(3)
def test_the_first_value_of_adagrad_is_rounded_after_the_update(lengths, monkeypatch):
    """No code has to have it, so the first update has windows in fp32, and later ones do not."""
    ours = trained(1, INT8, "Adagrad", {}, initial_accumulator_value=0.1)
    taken = len(lengths)
    monkeypatch.setattr(Adagrad, "takes_codes", lambda *_: False)
    same_bits(ours, trained(1, INT8, "Adagrad", {}, initial_accumulator_value=0.1))
    assert len(lengths) == taken > 0
