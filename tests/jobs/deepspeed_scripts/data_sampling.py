"""A curriculum whose metric chooses no samples, but says how a function cuts batches, as in DeepSpeed's own test."""

import deepspeed
import torch

growth = {
    "index_to_sample_path": "dummy", "index_to_metric_path": "dummy", "difficulty_type": "value",
    "clustering_type": "single_cluster", "min_difficulty": 2, "max_difficulty": 10, "schedule_type": "fixed_root",
    "schedule_config": {"total_curriculum_step": 8, "difficulty_step": 2, "root_degree": 1},
}  # fmt: skip
learning = {"enabled": True, "data_cluster_path": "dummy", "curriculum_metrics": {"dummy_metric": growth}}
sampling = {"enabled": True, "num_epochs": 1, "num_workers": 0, "curriculum_learning": learning}
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
    "data_efficiency": {"enabled": True, "seed": 1234, "data_sampling": sampling},
}
lengths: list[int] = []


def cut(data, data_sampler_state_dict):
    lengths.append(data_sampler_state_dict["current_difficulties"]["dummy_metric"])
    return data[0][:, : lengths[-1]], data[1]


net = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.ones(40, 16, 4), torch.zeros(40))
engine, _, loader, _ = deepspeed.initialize(
    model=net, model_parameters=net.parameters(), config=config, training_data=data
)
engine.set_data_post_process_func(cut)
assert engine.curriculum_learning_enabled()
for x, _ in loader:
    engine.backward(engine(x.to(engine.device)).pow(2).mean())
    engine.step()
assert lengths == [2, 4, 4, 6, 6, 8, 8, 10, 10, 10]
