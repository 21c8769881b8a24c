"""A model built in parts: gathered, tiled, with an external parameter, and its states read."""

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state


class LanguageModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = torch.nn.Embedding(12, 8)
        self.tiles = deepspeed.zero.TiledLinear(8, 8, in_splits=2, out_splits=2)

    def forward(self, tokens):
        return self.tiles(self.embeddings(tokens)) @ self.embeddings.weight.t()


config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 0.05}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
torch.manual_seed(0)
with deepspeed.zero.Init(config_dict_or_path=config):
    model = LanguageModel()
with deepspeed.zero.GatheredParameters(model.embeddings.weight, modifier_rank=0):
    torch.nn.init.normal_(model.embeddings.weight, std=0.5)
engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
tokens, weight, losses = torch.arange(12, device=engine.device).view(4, 3), model.embeddings.weight, []
for _ in range(5):
    loss = torch.nn.functional.cross_entropy(engine(tokens).flatten(0, 1), tokens.flatten())
    engine.backward(loss)
    grad, local = safe_get_full_grad(weight), deepspeed.utils.safe_get_local_grad(weight)
    engine.step()
    losses.append(loss.item())
assert losses[-1] < losses[0] and safe_get_full_fp32_param(weight).any(), losses
assert grad.shape == safe_get_full_optimizer_state(weight, "exp_avg").shape == (12, 8)
sizes = torch.tensor([local.numel(), deepspeed.utils.safe_get_local_fp32_param(weight).numel()])
deepspeed.comm.all_reduce(sizes)
assert sizes.tolist() == [96, 96]
