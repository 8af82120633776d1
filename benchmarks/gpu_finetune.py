"""`reprieve finetune` on a GPU: Qwen2.5-1.5B (from its config, random weights) with LoRA in bfloat16.

    PYTHONPATH=src python3 -m benchmarks.gpu_finetune --json $OUT/finetune.json       about 8 minutes
    python -m benchmarks.gpu_finetune --small --json /tmp/finetune.json               on a CPU: does it run?

    speed    tokens per second of the job's own code, and of the same script with TRL alone: alternately, as often each
    stop     SIGTERM at a random time → the checkpoint is visible, which it is only when it is durable; → exit
    equal    whether the adapter that was interrupted equals the undisturbed one (small model only, `--small`)

Each training is a process of its own. `--packages FILE` unpacks a tar file of packages, and puts them behind those that
are installed, for a machine without a package index.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import date
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu_transformers import QWEN, SMALL
from benchmarks.machine import machine, versions

ROOT = Path(__file__).parents[1]
LENGTH, BATCH, STEPS, WARM_STEPS = 512, 8, 120, 20
SMALL_LENGTH, SMALL_BATCH, SMALL_STEPS, SMALL_WARM_STEPS = 64, 2, 12, 2
RANK, RATE, SEED = 16, 2e-4, 42
PREEMPTED = 143
OURS, STOCK = "reprieve", "trl"
_LIMIT_S = 300.0
_POLL_S = 0.001
_BEGAN = time.monotonic()


# The process that trains


def train(which: str, folder: Path, inputs: Path, *, small: bool) -> None:
    trainer = _ours(folder, inputs, small=small) if which == OURS else _stock(folder, inputs, small=small)
    trainer.add_callback(_noting(folder, trainer))
    if which == OURS:
        from reprieve.finetune.training import train as train_protected

        train_protected(trainer, folder)
    else:
        trainer.train()
        trainer.save_model(str(folder))


def _ours(folder: Path, inputs: Path, *, small: bool) -> Any:
    """Make the trainer with the code of `reprieve finetune`."""
    from reprieve.finetune import options
    from reprieve.finetune.data import read_rows
    from reprieve.finetune.training import make_trainer

    texts = {
        "model_name": inputs / "model",
        "dataset_path": inputs / "data.jsonl",
        "output_dir": folder,
        "batch_size": SMALL_BATCH if small else BATCH,
        "steps": SMALL_STEPS if small else STEPS,
        "max_length": SMALL_LENGTH if small else LENGTH,
        "lora_rank": RANK,
        "learning_rate": RATE,
        "seed": SEED,
        "bf16": "no" if small else "yes",
    }
    resolved = options.resolve({name: str(value) for name, value in texts.items()}, {})
    rows = read_rows(inputs / "data.jsonl", resolved)
    return make_trainer(resolved, inputs / "model", rows, folder, date=date.today().isoformat())


def _stock(folder: Path, inputs: Path, *, small: bool) -> Any:
    """Make the trainer as a script does that knows nothing of Reprieve."""
    import datasets
    import peft
    import torch

    trl: Any = import_module("trl")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dtype = torch.float32 if small else torch.bfloat16
    return trl.SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=dtype),
        args=trl.SFTConfig(
            output_dir=str(folder),
            per_device_train_batch_size=SMALL_BATCH if small else BATCH,
            max_steps=SMALL_STEPS if small else STEPS,
            max_length=SMALL_LENGTH if small else LENGTH,
            learning_rate=RATE,
            seed=SEED,
            bf16=not small,
            gradient_checkpointing=False,
            completion_only_loss=False,
            logging_steps=0.01,
            logging_first_step=True,
            save_strategy="no",
            disable_tqdm=True,
            report_to="none",
            use_cpu=small,
        ),
        train_dataset=datasets.load_dataset("json", data_files=str(inputs / "data.jsonl"), split="train"),
        processing_class=AutoTokenizer.from_pretrained(inputs / "model"),
        peft_config=peft.LoraConfig(
            task_type="CAUSAL_LM", r=RANK, lora_alpha=2 * RANK, lora_dropout=0.05, target_modules="all-linear"
        ),
    )


def _noting(folder: Path, trainer: Any) -> Any:
    """Return a callback that notes the time and the tokens after each step. TRL waits for the GPU in each of them."""
    from transformers import TrainerCallback

    notes = (folder / "notes.jsonl").open("a", buffering=1)

    class Noting(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            note = {"at": time.monotonic(), "step": state.global_step, "tokens": trainer._total_train_tokens}
            notes.write(json.dumps(note) + "\n")

    return Noting()


# The inputs


def make_inputs(folder: Path, *, small: bool) -> None:
    """Make the model and the data, in a process of its own: the GPU stays free."""
    import torch
    from examples.finetune.make_tiny import make_tokenizer, sums
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32 if small else torch.bfloat16)
    with torch.device("cpu" if small else "cuda"):
        model: Any = Qwen2ForCausalLM(Qwen2Config(**QWEN | (SMALL if small else {})))
    tokenizer = make_tokenizer("qwen2")
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    length = SMALL_LENGTH if small else LENGTH
    count = (SMALL_BATCH * SMALL_STEPS if small else BATCH * STEPS) + 8
    sentences = [sample["prompt"] + sample["completion"] for sample in sums("completions", 40 * count, seed=1)]
    with (folder / "data.jsonl").open("w") as file:
        drawn = iter(sentences * 4)
        for _ in range(count):
            file.write(json.dumps({"text": _text(drawn, tokenizer, length - 1)}) + "\n")


def _text(sentences: Any, tokenizer: Any, length: int) -> str:
    """Return as many sentences as there is room for: one token is left for the end of the text."""
    text = next(sentences)
    while len(tokenizer(longer := f"{text}\n{next(sentences)}")["input_ids"]) <= length:
        text = longer
    return str(text)


# The measurements


class Training:
    """A process that trains."""

    def __init__(self, which: str, folder: Path, inputs: Path, *, small: bool) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "benchmarks.gpu_finetune", "--train", which, "--folder", str(folder)]
        command += ["--inputs", str(inputs), *(["--small"] if small else [])]
        self.process = _start(command, folder.parent / f"{folder.name}.log")

    def notes(self) -> list[dict[str, Any]]:
        path = self.folder / "notes.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait(self, until: Callable[[], object]) -> float:
        """Wait until something is true, and return when it was."""
        end = time.monotonic() + _LIMIT_S
        while not until():
            if self.process.poll() is not None or time.monotonic() > end:
                if until():
                    break
                self.process.kill()
                raise RuntimeError(f"{self.folder.name} does not train:\n{self.output()}")
            time.sleep(_POLL_S)
        return time.monotonic()

    def end(self, code: int) -> float:
        """Wait for the end, and return when it was."""
        if (found := self.process.wait(_LIMIT_S)) != code:
            raise RuntimeError(f"{self.folder.name}: exit code {found}:\n{self.output()}")
        return time.monotonic()

    def output(self) -> str:
        return (self.folder.parent / f"{self.folder.name}.log").read_text()[-3000:]


def _start(command: Sequence[str], log: Path) -> subprocess.Popen[str]:
    env = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "REPRIEVE_GRACE": "10m",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        "HF_HOME": str(log.parent / "cache"),
    }
    return subprocess.Popen(command, env=env, cwd=ROOT, text=True, stdout=log.open("w"), stderr=subprocess.STDOUT)


def speed(training: Training, warm: int) -> float:
    """Return the tokens per second after the first steps."""
    training.end(0)
    notes = training.notes()
    first, last = notes[warm], notes[-1]
    return float((last["tokens"] - first["tokens"]) / (last["at"] - first["at"]))


def stop(training: Training, warm: int, moments: random.Random) -> dict[str, float]:
    """Stop a training at a random time, and return the seconds until the checkpoint is there."""
    training.wait(lambda: len(training.notes()) > warm)
    time.sleep(moments.uniform(0.05, 0.5))
    notes = training.notes()
    step_s = median(after["at"] - before["at"] for before, after in itertools.pairwise(notes))
    signalled = time.monotonic()
    training.process.send_signal(signal.SIGTERM)
    durable = training.wait(lambda: next(training.folder.glob("checkpoint-*"), None))
    exited = training.end(PREEMPTED)
    return {"durable_s": durable - signalled, "exit_s": exited - signalled, "step_s": step_s}


def measure(folder: Path, rounds: int, *, small: bool, end: float, keep: Callable[[dict[str, Any]], None]) -> None:
    """Measure, and pass on what is known after each process. `end`: when to begin no other one."""
    inputs = folder / "inputs"
    inputs.mkdir()
    words = [sys.executable, "-m", "benchmarks.gpu_finetune", "--make", "--inputs", str(inputs)]
    making = _start([*words, *(["--small"] if small else [])], folder / "make.log")
    if making.wait(_LIMIT_S):
        raise RuntimeError((folder / "make.log").read_text()[-3000:])
    warm = SMALL_WARM_STEPS if small else WARM_STEPS
    moments = random.Random(7)
    adapters: dict[str, bytes] = {}
    found: dict[str, Any] = {f"{OURS}_tokens_per_s": [], f"{STOCK}_tokens_per_s": [], "stops": []}
    for number in range(rounds):
        for which in (OURS, STOCK) if number % 2 else (STOCK, OURS):  # what the machine does meanwhile hits both
            training = Training(which, folder / f"{which}-{number}", inputs, small=small)
            found[f"{which}_tokens_per_s"].append(speed(training, warm))
            adapters[which] = (training.folder / "adapter_model.safetensors").read_bytes()
            _say(f"{which:10} {found[f'{which}_tokens_per_s'][-1]:12,.0f} tokens/s")
            keep(found)
            shutil.rmtree(training.folder)
        training = Training(OURS, folder / f"stop-{number}", inputs, small=small)
        found["stops"].append(stop(training, warm, moments))
        _say(f"stop: {found['stops'][-1]}")
        found["equal_to_stock"] = adapters[OURS] == adapters[STOCK]
        keep(found)
        if time.monotonic() + (time.monotonic() - _BEGAN) / (number + 1) > end:
            _say(f"{number + 1} rounds: there is no time for more")
            break
    if small:
        training = Training(OURS, folder / "stop-0", inputs, small=small)
        training.end(0)
        found["equal"] = (training.folder / "adapter_model.safetensors").read_bytes() == adapters[STOCK]
        keep(found)


def markdown(found: dict[str, Any]) -> str:
    stops, ours, stock = found["stops"], found[f"{OURS}_tokens_per_s"], found[f"{STOCK}_tokens_per_s"]
    lines = [
        "| Qwen2.5-1.5B, LoRA, bfloat16 | median | all rounds |",
        "| --- | --- | --- |",
        f"| reprieve finetune, tokens/s | {median(ours):,.0f} | {' '.join(f'{value:,.0f}' for value in ours)} |",
        f"| TRL alone, tokens/s | {median(stock):,.0f} | {' '.join(f'{value:,.0f}' for value in stock)} |",
        f"| ratio of the medians | {median(ours) / median(stock):.4f} | |",
    ]
    for label, key in (("SIGTERM → durable, s", "durable_s"), ("→ exit, s", "exit_s"), ("one step, s", "step_s")):
        values = [each[key] for each in stops]
        lines.append(f"| {label} | {median(values):.3f} | {' '.join(f'{value:.3f}' for value in values)} |")
    return "\n".join(lines) + "\n"


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--small", action="store_true", help="a small model on the CPU")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=570.0, help="seconds; a round that would end later is left out")
    parser.add_argument("--packages", type=Path, help="a tar file of packages")
    parser.add_argument("--train", choices=(OURS, STOCK), help=argparse.SUPPRESS)
    parser.add_argument("--make", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--inputs", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.folder, options.inputs, small=options.small)
        return 0
    if options.make:
        make_inputs(options.inputs, small=options.small)
        return 0
    with tempfile.TemporaryDirectory(prefix="gpu-finetune-") as name:
        folder = Path(name)
        if options.packages is not None:
            with tarfile.open(options.packages) as packages:
                packages.extractall(folder / "packages", filter="data")
            sys.path.append(str(folder / "packages"))
        found: dict[str, Any] = {}

        def keep(values: dict[str, Any]) -> None:
            found.update(values, machine=machine(folder), versions=versions())
            if options.json is not None:
                options.json.write_text(json.dumps(found, indent=1) + "\n")

        measure(folder, options.rounds, small=options.small, end=_BEGAN + options.limit, keep=keep)
    print(markdown(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
