"""Trainers of accelerate and models of transformers over the default group; as the programs of `torch_clients`."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.torch_clients import Found, Net, data, weights

VOCABULARY = 32


@contextmanager
def environment() -> Iterator[None]:
    """Take back what accelerate sets, and let these packages use what torch calls old."""
    kept, threads = dict(os.environ), torch.get_num_threads()
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.environ.clear()
        os.environ.update(kept)
        torch.set_num_threads(threads)


def trainer() -> Found:
    """accelerate adopts the default group: batches dealt out, accumulation, clipping, collected results."""
    with environment():
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        assert accelerator.num_processes == dist.get_world_size()
        assert accelerator.process_index == dist.get_rank()
        samples = [pair for x, y in data(12, is_same=True) for pair in zip(x, y, strict=True)]
        loader = torch.utils.data.DataLoader(samples, batch_size=2)
        model = Net()
        model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), loader)
        losses = []
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        found = {"losses": torch.stack(losses), "gathered": accelerator.gather_for_metrics(losses[-1])}
        found["reduced"] = accelerator.reduce(losses[0], "mean")
        accelerator.wait_for_everyone()
        AcceleratorState._reset_state(reset_partial_state=True)
        return found | weights(model)


def _config(kind: str) -> Any:
    import transformers

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 16}
    if kind == "llama":
        return transformers.LlamaConfig(**sizes)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 4}
    return transformers.Qwen3MoeConfig(**sizes, **experts, decoder_sparse_step=1)


def hub_model(kind: str, **layout: Any) -> Found:
    """A model that transformers cuts over the ranks while it loads it, trained for some steps."""
    with environment(), tempfile.TemporaryDirectory() as own:
        import transformers
        from transformers.distributed import DistributedConfig

        transformers.utils.logging.disable_progress_bar()
        folder = [own]
        if dist.get_rank() == 0:
            torch.manual_seed(7)
            transformers.AutoModelForCausalLM.from_config(_config(kind)).save_pretrained(Path(own))
        dist.broadcast_object_list(folder, 0)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder[0], distributed_config=DistributedConfig(**layout), dtype=torch.float32
        )
        dist.barrier()
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False), []
        is_cut_by_data = "fsdp_size" in layout
        generator = torch.Generator().manual_seed(3 + dist.get_rank() * is_cut_by_data)
        for _ in range(3):
            tokens = torch.randint(VOCABULARY, (2, 9), generator=generator)
            loss = model(input_ids=tokens, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(getattr(loss, "full_tensor", lambda loss=loss: loss)().detach())
        return {"losses": torch.stack(losses)} | weights(model)


def hub() -> dict[str, Callable[[], Found]]:
    """Clients by name, for this number of ranks."""
    return {
        "accelerate": trainer,
        "llama tensor parallel": lambda: hub_model("llama", tp_size=dist.get_world_size(), tp_plan="auto"),
        "llama fsdp": lambda: hub_model("llama", fsdp_size=dist.get_world_size()),
        "experts tensor parallel": lambda: hub_model("experts", tp_size=dist.get_world_size(), tp_plan="auto"),
        "experts": lambda: hub_model("experts", tp_size=dist.get_world_size(), ep_size=dist.get_world_size()),
        "experts fsdp": lambda: hub_model("experts", fsdp_size=dist.get_world_size(), ep_size=dist.get_world_size()),
    }
