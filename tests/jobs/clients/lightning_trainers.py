"""Lightning's Trainer with the strategy of this library: fit, validate, test, save on two ranks, resume on three."""

import logging
import warnings
from functools import partial

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from mpispeed.lightning import MpispeedStrategy

ROWS, BATCH, CLIP = 48, 12, 0.3
"""Rows of an epoch and of a step; two epochs."""

SAVED = (1, 3)
"""Stages whose runs on two ranks are saved after each epoch and resumed on three."""


def cases(place):
    """Name -> case, for this number of ranks."""
    if place.ranks == 2:
        return {
            "lightning plain": plain,
            **{f"lightning {stage}": partial(fit, place, stage) for stage in range(4)},
            "lightning name": partial(run, place.own / "name", 2, "mpispeed", accumulate=1),
            "lightning bf16": partial(fit_bf16, place),
            "lightning sequence": partial(share_samples, place),
        }
    if place.ranks == 3:
        return {f"lightning resumed {stage}": partial(resume, place, stage) for stage in SAVED}
    return {}


def fit(place, stage):
    strategy = MpispeedStrategy(config=config(stage))
    return run(place.folder / f"lightning{stage}", place.ranks, strategy, save=stage in SAVED)


def share_samples(place):
    """Both ranks share sequences, so that they have the same samples; the model does not look at their parts apart."""
    cut = {"sequence_parallel_size": 2, "sequence_parallel": {"cuts_batches": False}}
    return run(place.own / "sequence", 1, MpispeedStrategy(config=config(1) | cut))


def fit_bf16(place):
    return run(place.own / "bf16", place.ranks, MpispeedStrategy(stage=3), precision="bf16-mixed")


def resume(place, stage):
    start = place.folder / f"lightning{stage}" / "epoch=0.ckpt"
    return run(place.own / "on", place.ranks, MpispeedStrategy(config=config(stage)), resume_from=str(start))


def data():
    made = torch.Generator().manual_seed(7)
    x = torch.randn(ROWS, 6, generator=made)
    return torch.utils.data.TensorDataset(x, x[:, :2] * 2 + torch.randn(ROWS, 2, generator=made))


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2))
        self.save_hyperparameters({"width": 9})
        self.losses, self.rates = [], []

    def error(self, batch):
        return torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def training_step(self, batch, _):
        loss = self.error(batch)
        mean = self.trainer.strategy.reduce(loss.detach().float().clone())
        self.losses.append(float(mean))
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return loss

    def validation_step(self, batch, _):
        self.log("val", self.error(batch), sync_dist=True)

    def test_step(self, batch, _):
        self.log("test", self.error(batch), sync_dist=True)

    def configure_optimizers(self):
        made = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
        return [made], [torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.5)]


def steps_of(model, accumulate):
    """Losses of global batches."""
    parts = torch.tensor(model.losses).reshape(-1, accumulate)
    return parts.mean(1).tolist()


def run(folder, ranks, strategy, accumulate=2, resume_from=None, save=False, epochs=2, **settings):
    """Twelve rows a step on any number of ranks: Lightning shuffles, and gives each rank its part."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    micro = BATCH // ranks // accumulate
    saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1) if save else None
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", max_epochs=epochs, accumulate_grad_batches=accumulate,
        gradient_clip_val=CLIP, callbacks=[saver] if saver else None, enable_checkpointing=save, logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, **settings,
    )  # fmt: skip
    model = Model()
    loader = torch.utils.data.DataLoader(data(), batch_size=micro)
    other = torch.utils.data.DataLoader(data(), batch_size=ROWS // 12)
    trainer.fit(model, loader, other, ckpt_path=resume_from)
    fitted = {"losses": steps_of(model, accumulate), "val": float(trainer.callback_metrics["val"])}
    found = {**fitted, "rate": model.rates[-1], "ranks": trainer.world_size, "step": trainer.global_step}
    found["validated"] = trainer.validate(model, other, verbose=False)[0]["val"]
    found["tested"] = trainer.test(model, other, verbose=False)[0]["test"]
    return found


def plain():
    """The same loop on one process, without any library but torch."""
    model, rows, losses = Model(), data(), []
    [optimizer], [schedule] = model.configure_optimizers()
    for epoch in range(2):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch))
        for chosen in order.split(BATCH):
            optimizer.zero_grad()
            loss = model.error(rows[chosen])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            losses.append(loss.item())
        schedule.step()
    with torch.no_grad():
        return {"losses": losses, "val": model.error(rows[:]).item()}


def config(stage):
    return {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
