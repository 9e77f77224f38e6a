"""transformers' Trainer: a tiny BERT made from a configuration, two DataLoader workers."""

# %%
import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

WORDS = 32


class Sentences(Dataset):
    """Random sentences of word numbers; the label of a sentence says whether it has word 1."""

    def __init__(self, length, seed):
        random = np.random.default_rng(seed)
        self.sentences = [random.integers(2, WORDS, random.integers(4, 9)) for _ in range(length)]
        for sentence in self.sentences[::2]:
            sentence[0] = 1

    def __len__(self):
        return len(self.sentences)

    def __getitem__(self, index):
        words = self.sentences[index].tolist()
        return {"input_ids": words, "label": int(1 in words)}


def pad(features):
    longest = max(len(feature["input_ids"]) for feature in features)
    rows = [f["input_ids"] + [0] * (longest - len(f["input_ids"])) for f in features]
    return {
        "input_ids": torch.tensor(rows),
        "attention_mask": torch.tensor([[int(word > 0) for word in row] for row in rows]),
        "labels": torch.tensor([feature["label"] for feature in features]),
    }


def compute_metrics(prediction):
    logits, labels = prediction
    return {"accuracy": (np.argmax(logits, axis=-1) == labels).mean()}


# %% taas
set_seed(0)
config = BertConfig(
    vocab_size=WORDS,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=16,
    num_labels=2,
)
arguments = TrainingArguments(
    output_dir="trainer_output",
    num_train_epochs=3,
    per_device_train_batch_size=16,
    learning_rate=5e-3,
    dataloader_num_workers=2,
    eval_strategy="epoch",
    save_strategy="epoch",
    logging_strategy="epoch",
    report_to="none",
    disable_tqdm=True,
    use_cpu=not torch.cuda.is_available(),
)
trainer = Trainer(
    model=BertForSequenceClassification(config),
    args=arguments,
    train_dataset=Sentences(256, seed=0),
    eval_dataset=Sentences(64, seed=1),
    data_collator=pad,
    compute_metrics=compute_metrics,
)
outcome = trainer.train()
metrics = trainer.evaluate()
print(f"RESULT process {arguments.process_index} of {arguments.world_size}", end=" ")
print(f"steps {outcome.global_step} loss {metrics['eval_loss']:.3f}")
