"""Trainings with Lightning, which give the same scalars to several loggers."""

# %%
import logging
import warnings

import lightning.pytorch
import pytorch_lightning
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def train(package, name, logger, **placement):
    class Model(package.LightningModule):  # type: ignore[name-defined]
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch):
            loss = self.layer(batch[0]).square().mean()
            self.log(f"{name}/loss", loss, prog_bar=True)
            self.log(f"{name}/both", loss, on_step=True, on_epoch=True, sync_dist=True)
            return loss

        def on_train_batch_end(self, *_):
            self.log(f"{name}/late", float(self.global_step))

        def on_train_epoch_end(self):
            self.log(f"{name}/epoch", float(self.current_epoch))

        def validation_step(self, batch):
            loss = self.layer(batch[0]).square().mean()
            self.log(f"{name}/validation", loss, sync_dist=True)
            self.log(f"{name}/single", loss, on_step=True, on_epoch=False)

        def test_step(self, batch):
            self.log(f"{name}/test", self.layer(batch[0]).mean(), sync_dist=True)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.arange(28.0)[:, None] / 28), 1)
    trainer = package.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=logger,
        log_every_n_steps=2,
        accumulate_grad_batches=2,
        val_check_interval=7,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **placement,
    )
    trainer.fit(Model(), loader, loader)
    trainer.test(trainer.model, loader, verbose=False)


ddp = {"devices": 2, "strategy": "ddp"}
train(lightning.pytorch, "csv", CSVLogger("."), **ddp)
train(pytorch_lightning, "none", False, **ddp)
train(lightning.pytorch, "wandb", WandbLogger("wandb", offline=True), **ddp)
train(lightning.pytorch, "tensorboard", TensorBoardLogger("."), **ddp)
train(lightning.pytorch, "alone", False)
