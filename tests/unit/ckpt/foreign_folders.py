"""Folders as DeepSpeed writes them, from known tensors, by the documented layout."""

import contextlib
import sys
import types
from collections import OrderedDict

import torch

TAG = "global_step5"
SCALER = {"cur_scale": 1024.0, "cur_iter": 7, "last_overflow_iter": 3, "scale_window": 100, "cur_hysteresis": 2}
SLOTS = ("master", "exp_avg", "exp_avg_sq")


class Known:
    """What a folder is made of: two groups, a frozen and a tied parameter, buffers."""

    def __init__(self, seed=0):
        make = torch.Generator().manual_seed(seed)
        # 91, 35, 1, 5 and 7 elements: no number of ranks but one divides a group
        groups = [{"embed.weight": (13, 7), "a.weight": (5, 7)}, {"scale": (), "a.bias": (5,), "norm.weight": (7,)}]
        self.groups = [OrderedDict((name, torch.Size(shape)) for name, shape in group.items()) for group in groups]
        self.slots = {
            (name, slot): torch.rand(shape, generator=make)
            for group in self.groups
            for name, shape in group.items()
            for slot in SLOTS
        }
        self.frozen = {"frozen.weight": torch.randn(7, 5, generator=make).bfloat16()}
        self.buffers = {"norm.running_mean": torch.randn(7, generator=make), "norm.count": torch.tensor(5)}
        self.shared = {"head.weight": "embed.weight"}
        self.steps = 4
        self.hyper = [{"lr": 1e-3, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": decay} for decay in (0.1, 0.0)]

    @property
    def names(self):
        return [name for group in self.groups for name in group]

    def flat(self, group, slot):
        return torch.cat([self.slots[name, slot].reshape(-1) for name in self.groups[group]])

    def module(self):
        weights = {name: self.slots[name, "master"].bfloat16() for name in self.names}
        module = OrderedDict(weights | self.frozen | self.buffers)
        module.update({alias: module[name] for alias, name in self.shared.items()})
        return module


@contextlib.contextmanager
def deepspeed_classes():
    """Classes that pickle under the names of DeepSpeed's own; they are gone afterwards."""
    wanted = {
        "deepspeed.runtime.fp16.loss_scaler": ("DynamicLossScaler",),
        "deepspeed.utils.tensor_fragment": ("fragment_address",),
    }
    names, made = [], {}
    for module_name, classes in wanted.items():
        parts = module_name.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            if name not in sys.modules:
                sys.modules[name] = types.ModuleType(name)
                names.append(name)
        for class_name in classes:
            made[class_name] = type(class_name, (), {"__module__": module_name})
            setattr(sys.modules[module_name], class_name, made[class_name])
    try:
        yield made
    finally:
        for name in names:
            del sys.modules[name]


def save(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    with deepspeed_classes() as made:
        if content.get("optimizer_state_dict", {}).get("loss_scaler") is True:
            scaler = made["DynamicLossScaler"]()
            scaler.__dict__.update(SCALER)
            piece = made["fragment_address"]()
            piece.numel, piece.start = 3, 0
            content["optimizer_state_dict"] |= {"loss_scaler": scaler, "param_slice_mappings": [{"a.weight": piece}]}
        torch.save(content, path)


def model_states(known, ranks, **more):
    """The file with weights."""
    return {
        "module": known.module(),
        "buffer_names": list(known.buffers),
        "optimizer": None,
        "param_shapes": known.groups,
        "frozen_param_shapes": {name: tensor.shape for name, tensor in known.frozen.items()},
        "frozen_param_fragments": dict(known.frozen),
        "shared_params": dict(known.shared),
        "lr_scheduler": {"last_batch_iteration": 4},
        "data_sampler": None,
        "random_ltd": None,
        "sparse_tensor_module_names": set(),
        "skipped_steps": 1,
        "global_steps": 5,
        "global_samples": 40,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "ds_config": {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
        "ds_version": "0.16.5",
        "note": "hello",
        **more,
    }


def write_grouped(root, known, ranks, *, mp=0, keeps_padding=False, **more):
    """Stages 1 and 2."""
    folder = root / TAG
    save(folder / f"mp_rank_{mp:02d}_model_states.pt", model_states(known, ranks, **more))
    for rank in range(ranks):
        parts = {}
        for group in range(len(known.groups)):
            for slot in SLOTS:
                flat = known.flat(group, slot)
                grain = 2 * ranks
                padded = torch.zeros(-(-flat.numel() // grain) * grain)
                padded[: flat.numel()] = flat
                part = padded.chunk(ranks)[rank]
                lost = padded.numel() - flat.numel() if rank == ranks - 1 else 0
                is_cut = slot == "master" or not keeps_padding
                parts[group, slot] = part[: max(0, part.numel() - lost)].clone() if is_cut else part.clone()
        states = {
            group: {"step": torch.tensor(float(known.steps))} | {slot: parts[group, slot] for slot in SLOTS[1:]}
            for group in range(len(known.groups))
        }
        groups = [{**hyper, "params": [i]} for i, hyper in enumerate(known.hyper)]
        content = {
            "loss_scaler": True,
            "dynamic_loss_scale": True,
            "overflow": False,
            "base_optimizer_state": {"state": states, "param_groups": groups},
            "single_partition_of_fp32_groups": [parts[group, "master"] for group in range(len(known.groups))],
            "zero_stage": 2,
            "partition_count": [ranks] * len(known.groups),
        }
        save(folder / f"zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt", {"optimizer_state_dict": content})
    (root / "latest").write_text(TAG)


def write_cut(root, known, ranks):
    """Stage 3, with a sub-group for each parameter of the first group and one for the second group."""
    folder = root / TAG
    subs = [[name] for name in known.groups[0]] + [list(known.groups[1])]

    def part(tensor, rank):
        chunk = -(-tensor.numel() // ranks)
        padded = torch.zeros(chunk * ranks, dtype=tensor.dtype)
        padded[: tensor.numel()] = tensor.reshape(-1)
        return padded[rank * chunk : (rank + 1) * chunk].clone()

    for rank in range(ranks):
        placeholders = {name: torch.empty(0).bfloat16() for name in known.module()} | known.buffers
        fragments = {name: part(tensor, rank) for name, tensor in known.frozen.items()}
        more = {"module": placeholders, "frozen_param_fragments": fragments}
        save(folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", model_states(known, ranks, **more))
        flats = {
            (sub, slot): torch.cat([part(known.slots[name, slot], rank) for name in names])
            for sub, names in enumerate(subs)
            for slot in SLOTS
        }
        states = {
            sub: {"step": torch.tensor(float(known.steps))} | {slot: flats[sub, slot] for slot in SLOTS[1:]}
            for sub in range(len(subs))
        }
        ids = [list(range(len(subs) - 1)), [len(subs) - 1]]
        content = {
            "zero_stage": 3,
            "loss_scaler": True,
            "dynamic_loss_scale": True,
            "overflow": False,
            "partition_count": ranks,
            "optimizer_state_dict": {
                "state": states,
                "param_groups": [{**hyper, "params": own} for hyper, own in zip(known.hyper, ids, strict=True)],
            },
            "fp32_flat_groups": [flats[sub, "master"] for sub in range(len(subs))],
        }
        save(folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", {"optimizer_state_dict": content})
    (root / "latest").write_text(f"{TAG}\n")


def write_whole(root, known):
    """Stage 0: weights in fp32, and a torch optimizer that numbers its parameters."""
    names, state = known.names, {}
    for number, name in enumerate(names):
        slots = {slot: known.slots[name, slot] for slot in SLOTS[1:]}
        state[number] = {"step": torch.tensor(float(known.steps)), **slots}
    counts = [range(len(known.groups[0])), range(len(known.groups[0]), len(names))]
    groups = [{**hyper, "params": list(ids)} for hyper, ids in zip(known.hyper, counts, strict=True)]
    module = known.module() | {name: known.slots[name, "master"] for name in names}
    module |= {alias: module[name] for alias, name in known.shared.items()}
    unknown = dict.fromkeys(("param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params"))
    content = model_states(known, 2, module=module, optimizer={"state": state, "param_groups": groups}, **unknown)
    save(root / TAG / "mp_rank_00_model_states.pt", content)
    (root / "latest").write_text(TAG)


def write_universal(root, known):
    """A folder per parameter; tensors alone or beside notes."""
    folder = root / TAG
    save(folder / "mp_rank_00_model_states.pt", model_states(known, 2))
    for index, name in enumerate(known.names):
        for slot in SLOTS:
            value, file = known.slots[name, slot], "fp32" if slot == "master" else slot
            (folder / "zero" / name).mkdir(parents=True, exist_ok=True)
            torch.save({"cat_dim": 0, "param": value} if index % 2 else value, folder / "zero" / name / f"{file}.pt")
        torch.save(torch.tensor(float(known.steps)), folder / "zero" / name / "step.pt")
    groups = [{**hyper, "params": [i]} for i, hyper in enumerate(known.hyper)]
    torch.save({"param_groups": groups, "dynamic_loss_scale": False}, folder / "zero" / "optimizer_state.pt")
    (root / "latest_universal").write_text(TAG)
