"""Compare an interrupted training on a GPU with the undisturbed one, bit for bit. Part of `gpu_stop`.

A compiled model with dropout (the GPU's random numbers), fused AdamW, mixed precision (fp16 with a GradScaler, and
bf16), two DataLoader workers that augment, deterministic kernels. The undisturbed training is the same script without
Reprieve, run twice: where it does not equal itself, there is nothing to compare with. Then the script runs under
`reprieve.Run`, gets SIGTERM at random steps, and is started again each time.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from benchmarks.stop_process import ROOT

PRECISIONS = ("fp16", "bf16")
STOPS = 3
EPOCHS, SAMPLES, BATCH, WIDTH, CLASSES = 4, 320, 16, 64, 10
STEPS = EPOCHS * SAMPLES // BATCH
_STEP_S = 0.03
"""A pause in every step, so that a signal hits a chosen one."""
_LIMIT_S = 300
_LOOK_S = 0.005
PREEMPTED = 143


def compare(folder: Path, device: str, moments: random.Random) -> dict[str, dict[str, Any]]:
    """What was equal, and after which steps it was interrupted, by precision."""
    folder.mkdir()
    found = {}
    for precision in PRECISIONS:
        undisturbed, again, interrupted = (
            folder / f"{precision}-{name}" for name in ("undisturbed", "again", "interrupted")
        )
        _attempt(undisturbed, device, precision, safe=False)
        _attempt(again, device, precision, safe=False)
        stopped_after = []
        for part in range(STOPS):
            # One in each part of the training; the rest is for the attempt after the last interruption.
            first, last = (STEPS * number // (STOPS + 1) for number in (part, part + 1))
            _attempt(interrupted, device, precision, stop_after=moments.randrange(first + 1, last))
            stopped_after.append(len(_losses(interrupted)))
        _attempt(interrupted, device, precision)
        expected = _seen(undisturbed)
        found[precision] = {
            "equal": _seen(interrupted) == expected,
            "undisturbed_equals_itself": _seen(again) == expected,
            "steps": len(expected["losses"]),
            "losses_equal": sum(a == b for a, b in zip(_losses(interrupted), expected["losses"], strict=False)),
            "weights_equal": _seen(interrupted)["end"] == expected["end"],
            "stopped_after": stopped_after,
        }
        print(f"{precision}: {found[precision]}", file=sys.stderr, flush=True)
    return found


def markdown(found: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| interrupted training | bit for bit | equal losses | weights | stopped after steps | undisturbed twice |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for precision, one in found.items():
        itself, weights, same = (
            "equal" if one[key] else "NOT EQUAL" for key in ("undisturbed_equals_itself", "weights_equal", "equal")
        )
        losses, stops = f"{one['losses_equal']} of {one['steps']}", ", ".join(map(str, one["stopped_after"]))
        lines.append(f"| {precision} | {same} | {losses} | {weights} | {stops} | {itself} |")
    return "\n".join(lines) + "\n"


def _attempt(folder: Path, device: str, precision: str, *, safe: bool = True, stop_after: int | None = None) -> None:
    """Run one process to the end, or until SIGTERM in the step after this one."""
    given = json.dumps({"folder": str(folder), "device": device, "precision": precision, "safe": safe})
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # cuBLAS is not deterministic without
        # The compiler benchmarks kernels, and all processes must choose the same.
        "TORCHINDUCTOR_CACHE_DIR": str(folder.parent / "kernels"),
    }
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu_exact", given], cwd=ROOT, stdout=sys.stderr, env=env
    ) as process:
        try:
            end = time.monotonic() + _LIMIT_S
            while stop_after is not None and process.poll() is None and len(_losses(folder)) < stop_after:
                if time.monotonic() > end:
                    raise RuntimeError(f"{folder} does not train")
                time.sleep(_LOOK_S)
            if stop_after is not None:
                process.send_signal(signal.SIGTERM)
            code = process.wait(_LIMIT_S)
        except BaseException:
            process.kill()
            raise
    if code != (0 if stop_after is None else PREEMPTED):
        raise RuntimeError(f"{folder}: exit code {code}")


def _losses(folder: Path) -> list[str]:
    path = folder / "losses"
    return path.read_text().splitlines() if path.exists() else []


def _seen(folder: Path) -> dict[str, Any]:
    return {"losses": _losses(folder), "end": (folder / "end").read_text()}


# The training


class _Augmented(Dataset[tuple[Tensor, int]]):
    def __init__(self) -> None:
        self._data = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._data[index] * (1 + 0.1 * random.random()) + 0.1 * torch.rand(WIDTH), index % CLASSES


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.dropout(functional.gelu(self.up(self.norm(x)))))
        return out


class _Undisturbed:
    """In place of `Run`."""

    def epochs(self, count: int) -> Iterable[int]:
        return range(count)

    def batches(self, loader: Any) -> Any:
        return loader

    def step(self, **_: Any) -> None:
        pass


def _train(folder: Path, device: str, precision: str, *, safe: bool) -> None:
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(3)
    random.seed(3)
    folder.mkdir(exist_ok=True)
    plain = nn.Sequential(_Block(), _Block(), nn.Dropout(0.1), nn.Linear(WIDTH, CLASSES)).to(device)
    model: Any = torch.compile(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
    # The scale grows often here, until steps overflow and are skipped: it has a history to restore.
    scaler = torch.amp.GradScaler(device, init_scale=2.0**14, growth_interval=5, enabled=precision == "fp16")
    loader = DataLoader(_Augmented(), BATCH, shuffle=True, num_workers=2, pin_memory=device == "cuda")
    run: Any = _Undisturbed()
    if safe:
        import reprieve

        run = reprieve.Run(
            folder / "checkpoints",
            notices="off",
            grace_period="10m",
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            scaler=scaler,
        )
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    with (folder / "losses").open("a", buffering=1) as losses:
        for _ in run.epochs(EPOCHS):
            for batch, labels in run.batches(loader):
                with torch.autocast(device, dtype):
                    loss = functional.cross_entropy(model(batch.to(device)), labels.to(device))
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
                optimizer.zero_grad()
                time.sleep(_STEP_S)
                run.step(loss=loss)
                losses.write(f"{float(loss.item()).hex()} {scaler.get_scale()}\n")
    digest = hashlib.sha256()
    for value in plain.state_dict().values():
        digest.update(value.cpu().numpy().tobytes())
    drawn = [random.random(), float(torch.rand(())), float(torch.rand((), device=device))]
    (folder / "end").write_text(json.dumps({"weights": digest.hexdigest(), "drawn": drawn}))


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    _train(Path(told.pop("folder")), **told)
