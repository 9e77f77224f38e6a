"""Lightning: DDP, persistent workers, ModelCheckpoint, EarlyStopping, and a second start."""

# %%
import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class DigitsData(L.LightningDataModule):
    def setup(self, stage):
        pixels, digits = load_digits(return_X_y=True)
        data = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits))
        halves = random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))
        self.train_set, self.val_set = halves

    def loader(self, dataset, **options):
        return DataLoader(dataset, 32, num_workers=2, persistent_workers=True, **options)

    def train_dataloader(self):
        return self.loader(self.train_set, shuffle=True)

    def val_dataloader(self):
        return self.loader(self.val_set)


class LitModel(L.LightningModule):
    def __init__(self, width=32):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


# %% taas
L.seed_everything(0, workers=True)
checkpoint = ModelCheckpoint(
    dirpath="lightning_checkpoints", filename="{epoch}", monitor="val_loss", save_top_k=1
)
stopping = EarlyStopping("val_loss", min_delta=0.03, patience=1)
trainer = L.Trainer(
    accelerator="auto",
    devices=2,
    strategy="ddp",
    max_epochs=20,
    callbacks=[checkpoint, stopping],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(LitModel(), datamodule=DigitsData())
print(f"RESULT rank {trainer.global_rank} of {trainer.world_size}", end=" ")
print(f"stopped after epoch {stopping.stopped_epoch} best {checkpoint.best_model_score:.4f}")
best = LitModel.load_from_checkpoint(checkpoint.best_model_path)
print(f"RESULT rank {trainer.global_rank} weight {best.net[0].weight.norm().item():.4f}")
