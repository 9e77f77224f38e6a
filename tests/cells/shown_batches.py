"""A function that describes a batch, and a cell that prints all batches of all loaders."""

loaders = {}
EPOCHS = 1

# %%
import dataclasses
from collections import UserDict

import numpy as np
import torch


def show(value):
    if isinstance(value, torch.Tensor) and value.is_nested:
        return ["nested", str(value.dtype), [show(part) for part in value.unbind()]]
    if isinstance(value, torch.Tensor):
        plain = value.to_dense() if value.layout is not torch.strided else value
        parts = [str(value.dtype), list(value.shape), value.requires_grad, str(value.layout)]
        return [*parts, str(plain.tolist())]
    if isinstance(value, np.ndarray):
        texts = [str(one) for one in np.ma.getdata(value).ravel().tolist()]
        mask = str(getattr(value, "mask", ""))
        return [type(value).__name__, str(value.dtype), list(value.shape), texts, mask]
    if hasattr(value, "__slots__") and not isinstance(value, tuple):
        return [type(value).__name__, [show(getattr(value, name)) for name in value.__slots__]]
    if isinstance(value, UserDict):
        return [type(value).__name__, show(value.data)]
    if dataclasses.is_dataclass(value):
        return [type(value).__name__, show(vars(value))]
    if isinstance(value, dict):
        return {str(key): show(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *[show(one) for one in value]]
    return [type(value).__name__, str(value)]


# %%
import json

for name, loader in sorted(loaders.items()):
    for epoch in range(EPOCHS):
        for batch in loader:
            print(json.dumps([name, epoch, show(batch)]))
