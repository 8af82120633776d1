"""`plain_pytorch.py`, made preemptible by six lines. Send it SIGTERM at any moment, then start it again.

python examples/plain_pytorch_safe.py                                    one process
torchrun --nproc-per-node 2 examples/plain_pytorch_safe.py               data-parallel
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import reprieve

torch.manual_seed(0)
data = TensorDataset(torch.randn(2048, 1, 16, 16), torch.randint(0, 10, (2048,)))
train_data, eval_data = torch.utils.data.random_split(data, [1792, 256])
model: nn.Module = nn.Sequential(
    nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(16 * 14 * 14, 10)
)
sampler: DistributedSampler[Any] | None = None
if "WORLD_SIZE" in os.environ:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
    sampler = DistributedSampler(train_data)
loader = DataLoader(train_data, 32, shuffle=sampler is None, sampler=sampler, num_workers=2)
eval_loader = DataLoader(eval_data, 64)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3 * len(loader))

run = reprieve.Run("checkpoints", model=model, optimizer=optimizer, scheduler=scheduler, every="5m")
for epoch in run.epochs(3):
    if sampler is not None:
        sampler.set_epoch(epoch)
    model.train()
    for images, labels in run.batches(loader):
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.step(loss=loss)
        print(f"epoch {epoch} loss {loss.item():.6f}", flush=True)
    model.eval()
    correct = 0
    with torch.no_grad():
        for images, labels in run.evaluation(eval_loader):
            correct += int((model(images).argmax(1) == labels).sum())
    print(f"epoch {epoch} accuracy {correct / len(eval_data):.4f}", flush=True)
