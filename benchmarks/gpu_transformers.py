"""Qwen2.5-1.5B (from its config) fine-tuned in float32 with AdamW on a GPU: SIGTERM, and what follows.

python -m benchmarks.gpu_transformers            everything: about 10 minutes, and space for three times 18.5 GB
python -m benchmarks.gpu_transformers --only full,lora

    full      SIGTERM → durable, compared with the disk's own time after each stop; one is in an evaluation
    stock     the same with transformers' own just-in-time checkpoints
    periodic  how long a background save blocks training
    lora      SIGTERM → durable with an adapter on the same model
    zero      SIGTERM → durable with DeepSpeed, in bfloat16 (ZeRO 2, 24.7 GB)
    exact     a small model in float16 (with a loss scale), in bfloat16, and with DeepSpeed (ZeRO 2 and 3): stopped,
              resumed, and compared bit for bit
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import disk
from benchmarks.measure import settle

ROOT = Path(__file__).parents[1]
QWEN: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
SMALL = {"hidden_size": 24, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 2000}
BYTES, SMALL_BYTES = 18_500_000_000, 50_000_000
LENGTH, BATCH = 512, 4
PREEMPTED = 143
WAYS = [disk.Way(threads, 16 * 2**20) for threads in (1, 2, 4)]
_LIMIT_S = 240.0


# The process that trains


def train(options: argparse.Namespace) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

    class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __init__(self, count: int) -> None:
            self._data = torch.randint(0, 1000, (count, LENGTH), generator=torch.Generator().manual_seed(count))

        def __len__(self) -> int:
            return len(self._data)

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"input_ids": self._data[index], "labels": self._data[index]}

    class Noting(Trainer):
        notes = (Path(options.folder) / "notes.jsonl").open("a", buffering=1)

        def note(self, **what: Any) -> None:
            self.notes.write(json.dumps({"at": time.monotonic(), "step": self.state.global_step, **what}) + "\n")

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            self.note(loss=loss.item())
            return loss

        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            self.note(evaluating=True)
            return super().prediction_step(*args, **kwargs)

    if options.zero:
        _alone()
    torch.manual_seed(0)
    with torch.device("cpu" if options.small else "cuda"):
        model: Any = Qwen2ForCausalLM(Qwen2Config(**QWEN | (SMALL if options.small else {})))
    if options.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
    model.config.use_cache = False
    trainer = Noting(
        model=model,
        args=TrainingArguments(
            output_dir=options.folder,
            max_steps=options.steps,
            per_device_train_batch_size=BATCH,
            logging_steps=10,
            report_to=[],
            disable_tqdm=True,
            save_strategy="steps",
            save_steps=options.every or 10**6,
            eval_strategy="steps",
            eval_steps=options.evaluate or 10**6,
            per_device_eval_batch_size=1,
            torch_compile=options.compile,
            enable_jit_checkpoint=options.jit,
            save_total_limit=1,
            fp16=options.fp16,
            bf16=options.bf16,
            full_determinism=options.deterministic,
            use_cpu=not torch.cuda.is_available(),
            deepspeed=_deepspeed(options.zero) if options.zero else None,
        ),
        train_dataset=Tokens(4000),
        eval_dataset=Tokens(200),
    )
    if not options.jit and not options.bare:
        import reprieve

        reprieve.transformers.protect(trainer, grace_period="5m", notices="off")
    trainer.train()
    trainer.save_model(options.folder)


def _deepspeed(stage: int) -> dict[str, Any]:
    theirs = ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps", "gradient_clipping")
    return {
        **dict.fromkeys(theirs, "auto"),
        "bf16": {"enabled": "auto"},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
    }


def _alone() -> None:
    """DeepSpeed expects these from its launcher."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in world.items()}


# The measurements


class Run:
    """One training process, and the times that it recorded."""

    small = False

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self._before = len(self.notes())
        command = [sys.executable, "-m", "benchmarks.gpu_transformers", "--train", "--folder", str(folder), *options]
        command += ["--small"] * self.small
        paths = [str(ROOT), *filter(None, sys.path)]
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)}
        self.process = subprocess.Popen(
            command, env=env, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def notes(self) -> list[dict[str, Any]]:
        path = self.folder / "notes.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def new(self) -> list[dict[str, Any]]:
        return self.notes()[self._before :]

    def until(self, true: Callable[[list[dict[str, Any]]], object]) -> None:
        end = (began := time.monotonic()) + _LIMIT_S
        while not true(self.new()):
            if self.process.poll() is not None or time.monotonic() > end:
                self.process.kill()
                lines = self.process.communicate()[0].splitlines()
                raise RuntimeError("\n".join(["it does not train:", *lines[-20:]]))
            time.sleep(0.02)
        print(f"  {self.folder.name}: there after {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)

    def stop(self) -> tuple[float, int, str]:
        """Return when it was signalled, its exit code, and its output."""
        told = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        output, _ = self.process.communicate(timeout=_LIMIT_S)
        return told, self.process.returncode, output

    def end(self) -> None:
        output, _ = self.process.communicate(timeout=_LIMIT_S)
        if self.process.returncode != 0:
            raise RuntimeError(f"exit code {self.process.returncode}:\n{output[-3000:]}")


def _step_s(notes: list[dict[str, Any]]) -> float:
    times: list[float] = [one["at"] for one in notes if "loss" in one]
    steps = sorted(after - before for before, after in pairwise(times))
    return steps[len(steps) // 2]


def full(folder: Path) -> dict[str, float]:
    """Three stops, the disk's own time measured after each: in training, in an evaluation, in training after it."""
    size = SMALL_BYTES if Run.small else BYTES
    stops, times = list[float](), dict[str, list[float]]()

    def stop(run: Run) -> None:
        _, code, output = run.stop()
        if code != PREEMPTED:
            raise RuntimeError(f"exit code {code}, not {PREEMPTED}:\n{output[-3000:]}")
        stops.append(_after_signal(output))
        for old in sorted(folder.glob("checkpoint-*"), key=lambda path: path.stat().st_mtime)[:-1]:
            shutil.rmtree(old)  # there would be no space
        for way in WAYS:
            times.setdefault(str(way), []).append(_disk_s(folder / "disk", size, way))
        print(f"  stopped after {stops[-1]} s, the disk: {times}", file=sys.stderr, flush=True)

    run = Run(folder, "--compile")
    run.until(lambda notes: len(notes) >= 8)
    step_s = _step_s(run.new())
    stop(run)
    found = {"step_s": step_s, "bytes": float(sum(path.stat().st_size for path in folder.glob("checkpoint-*/*")))}
    evaluating = ("--evaluate", str(run.notes()[-1]["step"] + 5), "--compile")
    second = Run(folder, *evaluating)
    second.until(lambda notes: sum("evaluating" in one for one in notes) >= 3)
    stop(second)
    third = Run(folder, *evaluating)
    third.until(lambda notes: any("loss" in one for one in notes))
    found["evaluation.batches_again"] = float(sum("evaluating" in one for one in third.new()))
    stop(third)
    disk_s = min(median(seconds) for seconds in times.values())
    found |= {f"stop_{number}_s": seconds for number, seconds in enumerate(stops, 1)}
    return found | {"stop_s": median(stops), "disk_s": disk_s, "x_disk": (median(stops) - step_s) / disk_s}


def zero(folder: Path) -> dict[str, float]:
    """One stop, and after it the disk's own time for as many bytes."""
    run = Run(folder, "--zero", "2", "--bf16")
    run.until(lambda notes: len(notes) >= 8)
    step_s = _step_s(run.new())
    _, code, output = run.stop()
    stop_s = _after_signal(output)
    size = sum(path.stat().st_size for path in folder.glob("checkpoint-*/**/*") if path.is_file())
    shutil.rmtree(folder)
    folder.mkdir()
    times = {str(way): [_disk_s(folder / "disk", size, way) for _ in range(3)] for way in WAYS}
    disk_s = min(median(seconds) for seconds in times.values())
    return {
        "stop_s": stop_s,
        "step_s": step_s,
        "exit_code": code,
        "bytes": float(size),
        "disk_s": disk_s,
        "x_disk": (stop_s - step_s) / disk_s,
    }


def _disk_s(path: Path, size: int, way: disk.Way) -> float:
    disk.create(path, size)
    settle()
    began = time.monotonic()
    disk.write(path, size, way)
    seconds = time.monotonic() - began
    path.unlink()
    return seconds


def stock(folder: Path) -> dict[str, float]:
    run = Run(folder, "--jit")
    run.until(lambda notes: len(notes) >= 8)
    told, code, _ = run.stop()
    states = [path.stat().st_mtime for path in folder.glob("checkpoint-*/trainer_state.json")]
    now = time.time() - time.monotonic()
    subprocess.run(["sync"], check=True)
    return {"stop_s": max(states) - now - told, "flushed_s": time.monotonic() - told, "exit_code": code}


def periodic(folder: Path) -> dict[str, float]:
    """The first save comes before memory is ready; the others show the usual case."""
    run = Run(folder, "--every", "30")  # a save takes as long as 20 steps, and the next would wait for it
    run.until(lambda notes: notes and notes[-1]["step"] >= 125)
    notes = [one for one in run.new() if "loss" in one]
    usual = _step_s(notes)
    blocked = {
        int(after["step"]): after["at"] - before["at"] - usual
        for before, after in pairwise(notes)
        if after["step"] in (30, 60, 90, 120)
    }
    run.process.kill()
    run.process.communicate()
    return {f"blocked_{step}_s": seconds for step, seconds in blocked.items()} | {"step_s": usual}


def lora(folder: Path) -> dict[str, float]:
    run = Run(folder, "--lora")
    run.until(lambda notes: len(notes) >= 20)
    _, code, output = run.stop()
    return {"stop_s": _after_signal(output), "step_s": _step_s(run.new()), "exit_code": code}


def exact(folder: Path) -> dict[str, float]:
    """Count the losses of 200 that differ from a training without Reprieve, and compare the final weights."""
    found: dict[str, float] = {}
    kinds = {"fp16": ["--fp16"], "bf16": ["--bf16"], **{f"zero_{n}": ["--bf16", "--zero", str(n)] for n in (2, 3)}}
    if Run.small:
        del kinds["fp16"]
    for kind, precision in kinds.items():
        options = ("--small", "--deterministic", "--steps", "200", *precision)
        folder.mkdir(exist_ok=True)
        alone = Run(folder / kind, *options, "--bare")
        alone.end()
        first = Run(stopped := folder / f"{kind}-stopped", *options)
        first.until(lambda notes: len(notes) >= 30)
        _, code, _ = first.stop()
        second = Run(stopped, *options)
        second.end()
        expected, losses = (
            {one["step"]: one["loss"] for one in run.notes() if "loss" in one} for run in (alone, second)
        )
        weights = [(path / "model.safetensors").read_bytes() for path in (folder / kind, stopped)]
        found |= {
            f"{kind}.exit_code": code,
            f"{kind}.went_on_at": second.new()[0]["step"],
            f"{kind}.losses": len(losses),
            f"{kind}.other_losses": sum(expected.get(step) != loss for step, loss in losses.items()),
            f"{kind}.other_weights": weights[0] != weights[1],
        }
    return found


def _after_signal(output: str) -> float:
    found = re.search(r"saved step \d+ in [\d.]+ s, ([\d.]+) s after", output)
    if found is None:
        raise RuntimeError(f"it did not save:\n{output[-3000:]}")
    return float(found[1])


PARTS: dict[str, Callable[[Path], dict[str, float]]] = {
    "full": full,
    "lora": lora,
    "periodic": periodic,
    "stock": stock,
    "zero": zero,
    "exact": exact,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--folder", default=None, help="where to write")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--small", action="store_true", help="a small model on the CPU: to try this script")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    for name in ("jit", "bare", "lora", "compile", "fp16", "bf16", "deterministic"):
        parser.add_argument(f"--{name}", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=100_000, help=argparse.SUPPRESS)
    parser.add_argument("--zero", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--every", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--evaluate", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options)
        return 0
    found: dict[str, float] = {}
    folder = Path(tempfile.mkdtemp(prefix="gpu-", dir=options.folder))
    Run.small = options.small
    disk.touch_memory()
    try:
        for part in options.only:
            measured = PARTS[part](folder / part)
            shutil.rmtree(folder / part)
            found |= {f"{part}.{name}": value for name, value in measured.items()}
            print(json.dumps({part: measured}), flush=True)
            if options.json:
                options.json.write_text(json.dumps(found, indent=2))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
