"""Folders with experts as DeepSpeed 0.19.6 writes them, from known tensors, by the documented layout."""

from collections import OrderedDict

import torch

from tests.unit.ckpt.foreign_folders import SLOTS, TAG, save

PREFIX = "{}.deepspeed_moe.experts.deepspeed_experts.{}."
GATE = "{}.deepspeed_moe.gate.wg.weight"
#: parameters of an expert of a layer; 20, 12 + 3 + 12 + 4 elements
EXPERTS = {"m1": {"weight": (4, 4), "bias": (4,)}, "m2": {"0.weight": (3, 4), "0.bias": (3,), "1.weight": (4, 3)}}
COUNTS = {"m1": 2, "m2": 4}
CONFIG = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


class Mixture:
    """Two layers of experts between dense parameters; some have the shapes of experts."""

    def __init__(self, dtype=torch.bfloat16, seed=0, frozen=()):
        make = torch.Generator().manual_seed(seed)
        self.dtype, self.steps, self.counts, self.frozen = dtype, 4, dict(COUNTS), frozenset(frozen)
        shapes = {"a.weight": (4, 4), "a.bias": (5,)}
        for layer, count in self.counts.items():
            shapes[GATE.format(layer)] = (count, 4)
            for number in range(count):
                rows = EXPERTS[layer].items()
                shapes |= {PREFIX.format(layer, number) + rest: shape for rest, shape in rows}
        shapes["b.weight"] = (3, 5)
        self.shapes = shapes
        self.slots = {
            (name, slot): torch.rand(shape, generator=make) for name, shape in shapes.items() for slot in SLOTS
        }

    @property
    def dense(self):
        return [name for name in self.shapes if "experts" not in name]

    @property
    def experts(self):
        return [name for name in self.shapes if "experts" in name]

    def weight(self, name):
        return self.slots[name, "master"].to(self.dtype)

    def of_rank(self, rank, ranks):
        """(name as the rank has it, name of the whole) of the experts of an expert-parallel rank."""
        pairs = []
        for layer, count in self.counts.items():
            held = count // ranks
            for number in range(held):
                for rest in EXPERTS[layer]:
                    local = PREFIX.format(layer, number) + rest
                    pairs.append((local, PREFIX.format(layer, rank * held + number) + rest))
        return [pair for pair in pairs if pair[1] not in self.frozen]


def model_states(known, ranks, ep, **more):
    """The file with weights, of data rank 0."""
    local = OrderedDict((mine, torch.Size(known.shapes[name])) for mine, name in known.of_rank(0, ep))
    return {
        "module": OrderedDict((name, known.weight(name)) for name in known.dense),
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [OrderedDict((name, torch.Size(known.shapes[name])) for name in known.dense), local],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "sparse_tensor_module_names": set(),
        "skipped_steps": 0,
        "global_steps": known.steps,
        "global_samples": 32,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "num_experts": list(known.counts.values()),
        "ds_autoep_layers": None,
        "ds_config": dict(CONFIG),
        "ds_version": "0.19.6",
        **more,
    }


def groups():
    hyper = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    return [{"name": "dense-params", **hyper}, {"name": "ep_size_2", "moe": True, **hyper}]


def write_expert_files(folder, known, mp=0, layout="layer_{}_"):
    for index, (layer, count) in enumerate(known.counts.items()):
        for number in range(count):
            names = [PREFIX.format(layer, number) + rest for rest in EXPERTS[layer]]
            content = {name: known.weight(name) for name in names}
            save(folder / f"{layout.format(index)}expert_{number}_mp_rank_{mp:02d}_model_states.pt", content)


def write_partitioned(root, known, ranks, ep, *, is_data_first=False, mp=0, **more):
    """Stages 1 and 2: groups of experts are cut over the data ranks that have the same ones."""
    folder, same = root / TAG, ranks // ep
    config = CONFIG | ({"use_data_before_expert_parallelism": True} if is_data_first else {})
    save(folder / f"mp_rank_{mp:02d}_model_states.pt", model_states(known, ranks, ep, ds_config=config, **more))
    write_expert_files(folder, known, mp)
    for rank in range(ranks):
        expert_rank, place = (rank // same, rank % same) if is_data_first else (rank % ep, rank // ep)
        own = [name for _, name in known.of_rank(expert_rank, ep)]
        parts = [
            {slot: _part(known, names, slot, count, at) for slot in SLOTS}
            for names, count, at in ((known.dense, ranks, rank), (own, same, place))
        ]
        states = {
            i: {"step": torch.tensor(4.0)} | {slot: part[slot] for slot in SLOTS[1:]} for i, part in enumerate(parts)
        }
        content = {
            "loss_scaler": None,
            "dynamic_loss_scale": False,
            "overflow": False,
            "base_optimizer_state": {
                "state": states,
                "param_groups": [{**group, "params": [i]} for i, group in enumerate(groups())],
            },
            "single_partition_of_fp32_groups": [part["master"] for part in parts],
            "zero_stage": 2,
            "partition_count": [ranks, same],
        }
        save(folder / f"bf16_zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt", {"optimizer_state_dict": content})
    (root / "latest").write_text(TAG)


def _part(known, names, slot, count, at):
    flat = torch.cat([known.slots[name, slot].reshape(-1) for name in names])
    grain = 2 * count
    padded = torch.zeros(-(-flat.numel() // grain) * grain)
    padded[: flat.numel()] = flat
    part = padded.chunk(count)[at]
    lost = padded.numel() - flat.numel() if slot == "master" and at == count - 1 else 0
    return part[: max(0, part.numel() - lost)].clone()


def write_whole(root, known, ep, kind, **more):
    """Stage 0: each expert-parallel rank's optimizer numbers its own parameters; of torch, or with fp32 copies."""
    folder = root / TAG
    for rank in range(ep):
        own = [name for _, name in known.of_rank(rank, ep)]
        if kind == "mixed":  # one group, in the order of the model
            names, rows = [], [[name for name in known.shapes if name in known.dense or name in own]]
            listed = [{key: value for key, value in groups()[0].items() if key != "name"}]
        else:
            rows, listed = [known.dense, own], groups()
        names = [name for row in rows for name in row]
        ids = {name: number for number, name in enumerate(names)}
        state = {
            ids[name]: {"step": torch.tensor(4.0)} | {slot: known.slots[name, slot] for slot in SLOTS[1:]}
            for name in names
        }
        inner = {
            "state": state,
            "param_groups": [
                {**group, "params": [ids[name] for name in row]} for group, row in zip(listed, rows, strict=True)
            ],
        }
        masters = [[known.slots[name, "master"] for name in row] for row in rows]
        if kind == "copies":
            content = {"dynamic_loss_scale": False, "cur_scale": 1.0, "cur_iter": 4, "optimizer_state_dict": inner}
            content["fp32_groups"] = masters
        elif kind == "flat":
            flats = [torch.cat([tensor.reshape(-1) for tensor in row]) for row in masters]
            flat_state = {
                i: {"step": torch.tensor(4.0)}
                | {slot: torch.cat([known.slots[name, slot].reshape(-1) for name in row]) for slot in SLOTS[1:]}
                for i, row in enumerate(rows)
            }
            plain = [{**group, "params": [i]} for i, group in enumerate(listed)]
            content = {"optimizer_state_dict": {"state": flat_state, "param_groups": plain}, "fp32_groups_flat": flats}
        else:
            content = inner
        save(folder / f"expp_rank_{rank}_mp_rank_00_optim_states.pt", {"optimizer": content})
        if rank == 0:
            whole = {"param_shapes": None, "shared_params": None, "optimizer": content, **more}
            save(folder / "mp_rank_00_model_states.pt", model_states(known, 2 * ep, ep, **whole))
    write_expert_files(folder, known)
    (root / "latest").write_text(TAG)
