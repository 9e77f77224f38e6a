"""Objects of torch and of libraries that belong to one process, so they cannot be sent to ranks."""

# %%
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

sampler = torch.utils.data.DistributedSampler([1, 2], num_replicas=1, rank=0)  # type: ignore[arg-type]
loader = torch.utils.data.DataLoader([1, 2], sampler=sampler)  # type: ignore[arg-type]

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
group = dist.group.WORLD
mesh = init_device_mesh("cpu", (1,))
wrapped = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
sharded = fully_shard(torch.nn.Linear(2, 2), mesh=mesh)
spread = distribute_tensor(torch.ones(2), mesh, [Shard(0)])
dist.destroy_process_group()

# %%
from accelerate import Accelerator
from lightning import Fabric
from lightning import Trainer as LightningTrainer
from transformers import BertConfig, BertModel, Trainer, TrainingArguments

config = BertConfig(
    vocab_size=9,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=1,
    intermediate_size=8,
)
arguments = TrainingArguments(output_dir="out", report_to=[], use_cpu=True)


class MyTrainer(Trainer):
    pass


trainer = MyTrainer(model=BertModel(config), args=arguments)
accelerator = Accelerator(cpu=True)


class Experiment:
    def __init__(self):
        self.parts = {"accelerator": accelerator}


experiment = Experiment()


def train():
    return experiment


lightning_trainer = LightningTrainer(accelerator="cpu", logger=False, enable_checkpointing=False)
fabric = Fabric(accelerator="cpu")
prepared = accelerator.prepare(torch.utils.data.DataLoader([1, 2]))  # type: ignore[arg-type]
