"""accelerate: one function has the whole training, as for `notebook_launcher` and the CLI."""

# %%
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Digits(Dataset):
    def __init__(self, train):
        pixels, digits = load_digits(return_X_y=True)
        mine = slice(0, 1400) if train else slice(1400, None)
        self.pixels, self.digits = pixels[mine], digits[mine]

    def __len__(self):
        return len(self.digits)

    def __getitem__(self, index):
        pixels = torch.tensor(self.pixels[index] / 16, dtype=torch.float32)
        return {"pixel_values": pixels, "label": int(self.digits[index])}


def get_dataloaders(batch_size):
    train = DataLoader(Digits(True), batch_size=batch_size, shuffle=True, num_workers=1)
    return train, DataLoader(Digits(False), batch_size=batch_size, num_workers=1)


def training_loop(num_epochs=3, learning_rate=0.01, seed=42, batch_size=32):
    set_seed(seed)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    train_dataloader, eval_dataloader = get_dataloaders(batch_size)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, learning_rate, epochs=num_epochs, steps_per_epoch=len(train_dataloader)
    )
    model, optimizer, train_dataloader, eval_dataloader, scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, scheduler
    )
    for epoch in range(num_epochs):
        model.train()
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(batch["pixel_values"]), batch["label"])
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accuracy = evaluate(accelerator, model, eval_dataloader)
        accelerator.print(f"RESULT epoch {epoch} accuracy {accuracy:.3f}")
    accelerator.wait_for_everyone()
    accelerator.save_state("accelerate_state")
    weight = accelerator.unwrap_model(model)[0].weight.norm().item()
    print(f"RESULT process {accelerator.process_index} weight {weight:.4f}")
    accelerator.end_training()


def evaluate(accelerator, model, dataloader):
    model.eval()
    right = seen = 0
    for batch in dataloader:
        with torch.no_grad():
            predictions = model(batch["pixel_values"]).argmax(dim=-1)
        predictions, labels = accelerator.gather_for_metrics((predictions, batch["label"]))
        right += (predictions == labels).sum().item()
        seen += len(labels)
    return right / seen


# %% taas
if __name__ == "__main__":
    training_loop()
