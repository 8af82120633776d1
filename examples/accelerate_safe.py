"""A preemptible loop with Hugging Face Accelerate: `reprieve.Run` takes what `accelerator.prepare` returns.

python examples/accelerate_safe.py                                    one process
torchrun --nproc-per-node 2 examples/accelerate_safe.py               data-parallel
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import reprieve

ACCUMULATE = 2

torch.manual_seed(0)
data = TensorDataset(torch.randn(1024, 16), torch.randn(1024, 1))
accelerator = Accelerator(cpu=True)
model: nn.Module = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.1), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.9)
loader = DataLoader(data, 16, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

run = reprieve.Run("checkpoints", model=model, optimizer=optimizer, scheduler=scheduler, every="5m")
for epoch in run.epochs(3):
    for inputs, targets in run.batches(loader):
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss / ACCUMULATE)
        if run.batch % ACCUMULATE:
            continue
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.step(loss=loss)
        accelerator.print(f"epoch {epoch} step {run.steps} loss {loss.item():.6f}", flush=True)
