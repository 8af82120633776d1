"""Fine-tuning jobs with Hugging Face's trainers that are stopped and started again, and the same without Reprieve.

What a job has seen goes into its folder: `losses-<rank>.jsonl`, a line for each micro-batch (an
interrupted job appends), and `end-<rank>.json`: what its log says, which checkpoint was best, and the weights.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset, IterableDataset
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import ExportableState

from reprieve.points import reached
from reprieve.testing.child import disk

VOCABULARY, LENGTH = 99, 16
PRELOAD = ("transformers.trainer", "transformers.models.gpt2.modeling_gpt2", "accelerate")
PRELOAD_TRL = (*PRELOAD, "trl.trainer.sft_trainer", "peft")

_MODELS: dict[str, Any] = {
    "gpt2": lambda: transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=2),
    "llama": lambda: transformers.LlamaConfig(**_SMALL, num_key_value_heads=1),
    "wide_llama": lambda: transformers.LlamaConfig(**_SMALL | {"hidden_size": 64}, num_key_value_heads=1),
    "qwen2": lambda: transformers.Qwen2Config(**_SMALL, num_key_value_heads=1, tie_word_embeddings=True),
    "mixtral": lambda: transformers.MixtralConfig(**_SMALL, num_local_experts=4, num_key_value_heads=1),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **_SMALL, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16, num_key_value_heads=1
    ),
}
_SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 32, "attention_dropout": 0.1,
}  # fmt: skip
_TIMES = ("runtime", "per_second", "preparation_time", "step_time")


@dataclass(frozen=True)
class HfJob:
    """What is trained, and how."""

    folder: str
    safe: bool = True
    trainer: str = "trainer"
    """One of `_MAKERS`."""
    model: str = "gpt2"
    stream: bool = False
    masking: bool = True
    """Of what is fetched, at random."""
    workers: int = 0
    sharded: str | None = None
    """By FSDP2, over all ranks: which kind of state dict is saved."""
    samples: int = 60
    arguments: tuple[tuple[str, Any], ...] = ()
    """Of TrainingArguments."""
    options: tuple[tuple[str, Any], ...] = ()
    """Of `protect`."""
    given: str | bool | None = None
    """What the script gives to `train`."""
    patience: int | None = None
    """Of an EarlyStoppingCallback."""
    swapping: bool = False
    """An optimizer that holds other weights in evaluations."""
    raising: int | None = None
    """At this step a callback raises when it is asked for its state."""
    trainings: int = 1
    """How often the script calls `train`."""
    callbacks: tuple[transformers.TrainerCallback, ...] = ()
    """That the script adds."""

    def but(self, **arguments: Any) -> HfJob:
        return replace(self, arguments=(*self.arguments, *arguments.items()))

    @property
    def output(self) -> Path:
        return Path(self.folder) / "out"


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random masking in `__getitem__`: each fetch draws from the global generators."""

    def __init__(self, count: int, seed: int, *, masking: bool = True) -> None:
        self._masking = masking
        self._data = torch.randint(3, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        reached("fetch")
        sample = self._data[index]
        return _masked(sample) if self._masking else {"input_ids": sample, "labels": sample}


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """The same, one after the other; knows where it is."""

    def __init__(self, count: int, seed: int) -> None:
        self._data = torch.randint(3, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
        self._next: int | None = None

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        if self._next is None:
            self._next = first
        while self._next < len(self._data):
            at, self._next = self._next, self._next + step
            yield _masked(self._data[at])
        self._next = None

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]


def _masked(sample: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": sample.masked_fill(torch.rand(LENGTH) < 0.2, 1), "labels": sample}


class Watched:
    """Mixed into a trainer: it passes points, and writes its losses down."""

    losses: Any

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        reached("forward")
        loss: torch.Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]
        step = self.state.global_step  # type: ignore[attr-defined]
        self.losses.write(json.dumps([step, loss.item(), _named(args[1])]) + "\n")
        return loss

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        reached("save")
        super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]
        reached("saved")

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        reached("prediction")
        return super().prediction_step(*args, **kwargs)  # type: ignore[misc]


def _named(batch: Any) -> list[str]:
    """Each sample by its first tokens."""
    if "labels" not in batch:
        return []
    return ["-".join(map(str, labels[:4].tolist())) for labels in batch["labels"]]


class WatchedTrainer(Watched, Trainer):
    pass


def train(job: HfJob) -> None:
    """One attempt at the job, from where the last one was."""
    folder, rank = Path(job.folder), int(os.environ.get("RANK", "0"))
    folder.mkdir(parents=True, exist_ok=True)
    transformers.set_seed(3)
    trainer = make(job)
    with (folder / f"losses-{rank}.jsonl").open("a", buffering=1) as trainer.losses:
        if job.safe:
            from reprieve.frameworks.transformers import protect

            protect(trainer, disk=disk(), notices="off", **dict(job.options))
        for _ in range(job.trainings):
            output = trainer.train(resume_from_checkpoint=job.given)
    weights = hashlib.sha256()
    for name, tensor in sorted(trainer.accelerator.unwrap_model(trainer.model).state_dict().items()):
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()  # noqa: PLW2901
        weights.update(name.encode() + tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    state = trainer.state
    found = {
        "weights": weights.hexdigest(),
        "steps": output.global_step,
        "loss": output.training_loss,
        "log": [_without_times(entry) for entry in state.log_history],
        "best": Path(state.best_model_checkpoint).name if state.best_model_checkpoint else None,
        "best_metric": state.best_metric,
        "epoch": state.epoch,
    }
    (folder / f"end-{rank}.json").write_text(json.dumps(found))


def make(job: HfJob) -> Any:
    """As a script does it."""
    torch.manual_seed(3)
    arguments = {
        "output_dir": str(job.output), "per_device_train_batch_size": 4, "num_train_epochs": 2, "logging_steps": 5,
        "eval_strategy": "epoch", "save_strategy": "epoch", "use_cpu": True, "report_to": [], "disable_tqdm": True,
        "dataloader_num_workers": job.workers, "learning_rate": 1e-3, "seed": 5,
        **({"max_steps": 20, "eval_strategy": "steps", "eval_steps": 7} if job.stream else {}),
        **({"fsdp": True, "fsdp_config": {"state_dict_type": job.sharded}} if job.sharded else {}),
        **dict(job.arguments),
    }  # fmt: skip
    if job.sharded:
        shard_on_cpus()
    trainer = _MAKERS[job.trainer](job, arguments)
    trainer.add_callback(Counting(job.raising))
    if job.sharded:
        trainer.add_callback(SeesShards())
    if job.patience is not None:
        trainer.add_callback(transformers.EarlyStoppingCallback(job.patience))
    for callback in job.callbacks:
        trainer.add_callback(callback)
    return trainer


class Counting(transformers.TrainerCallback, ExportableState):
    """Has something to remember, and logs it."""

    def __init__(self, raising: int | None = None) -> None:
        self.steps = self.epochs = 0
        self._raising = raising

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.steps += 1

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        self.epochs += 1

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        state.log_history[-1] |= {"counted": [self.steps, self.epochs]}

    def state(self) -> dict[str, Any]:
        if self.steps == self._raising:
            raise RuntimeError("the callback does not want to")
        return {"args": {}, "attributes": {"steps": self.steps, "epochs": self.epochs}}


class SeesShards(transformers.TrainerCallback):
    """Before the first step. Later ones may find weights that an evaluation has left gathered."""

    def on_train_begin(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
        assert all(isinstance(one, DTensor) for one in model.parameters()), "it is not sharded"


def shard_on_cpus() -> None:
    """Accelerate leaves CPUs out of FSDP, without a word, and would run DDP instead."""
    real = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        real(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
        if "fsdp_plugin" in vars(self):
            self.distributed_type = DistributedType.FSDP  # each time: it is copied from where it is not known

    AcceleratorState.__init__ = init  # type: ignore[method-assign]


class Swapping(torch.optim.SGD):
    """As optimizers without a schedule: trains one set of weights, and evaluates another."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self._training = True

    def train(self) -> None:
        self._swap(training=True)

    def eval(self) -> None:
        self._swap(training=False)

    def _swap(self, *, training: bool) -> None:
        if training != self._training:
            self._training = training
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter.mul_(2.0 if training else 0.5)


def _plain_trainer(job: HfJob, arguments: dict[str, Any]) -> Any:
    model = _language_model(job)
    data = Stream(job.samples, 7) if job.stream else Tokens(job.samples, 7, masking=job.masking)
    optimizer = Swapping(model.parameters(), 0.01) if job.swapping else None
    return WatchedTrainer(
        model=model, args=TrainingArguments(**arguments), train_dataset=data, eval_dataset=Tokens(12, 8),
        optimizers=(optimizer, None),
    )  # fmt: skip


def _mlm_trainer(job: HfJob, arguments: dict[str, Any]) -> Any:
    """The collator masks at random, in the workers if there are any."""
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32,
    )  # fmt: skip
    collator = transformers.DataCollatorForLanguageModeling(tokenizer(), mlm_probability=0.3)
    return WatchedTrainer(
        model=transformers.BertForMaskedLM(config), args=TrainingArguments(**arguments), data_collator=collator,
        train_dataset=_texts(job, 7).map(_encoded, remove_columns="text"),
        eval_dataset=_texts(job, 8, 12, stream=False).map(_encoded, remove_columns="text"),
    )  # fmt: skip


def _sft_trainer(job: HfJob, arguments: dict[str, Any], **more: Any) -> Any:
    from trl import SFTConfig, SFTTrainer

    class WatchedSFT(Watched, SFTTrainer):
        pass

    args = SFTConfig(**{"max_length": LENGTH, "packing": job.trainer == "packed", **arguments})
    return WatchedSFT(
        model=_language_model(job), args=args,
        train_dataset=_texts(job, 7), eval_dataset=_texts(job, 8, 24, stream=False), processing_class=tokenizer(),
        **more,
    )  # fmt: skip


def _lora_trainer(job: HfJob, arguments: dict[str, Any]) -> Any:
    from peft import LoraConfig

    return _sft_trainer(job, arguments, peft_config=LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear"))


def _dpo_trainer(job: HfJob, arguments: dict[str, Any]) -> Any:
    from trl import DPOConfig, DPOTrainer

    class WatchedDPO(Watched, DPOTrainer):
        pass

    return WatchedDPO(
        model=_language_model(job), args=DPOConfig(**{"max_length": 32, **arguments}), processing_class=tokenizer(),
        train_dataset=_pairs(job.samples), eval_dataset=_pairs(8), ref_model=_language_model(job),
    )  # fmt: skip


def _reward_trainer(job: HfJob, arguments: dict[str, Any]) -> Any:
    from trl import RewardConfig, RewardTrainer

    class WatchedReward(Watched, RewardTrainer):
        pass

    config = transformers.LlamaConfig(**_SMALL, num_key_value_heads=1, num_labels=1, pad_token_id=0)
    return WatchedReward(
        model=transformers.LlamaForSequenceClassification(config), args=RewardConfig(**{"max_length": 32, **arguments}),
        train_dataset=_pairs(job.samples), eval_dataset=_pairs(8), processing_class=tokenizer(),
    )  # fmt: skip


def _grpo_trainer(job: HfJob, arguments: dict[str, Any]) -> Any:
    """A batch of generations is used for several steps."""
    from trl import GRPOConfig, GRPOTrainer

    class WatchedGRPO(Watched, GRPOTrainer):
        pass

    more = {"num_generations": 2, "max_completion_length": 6, "steps_per_generation": 4, "eval_strategy": "no"}
    return WatchedGRPO(
        model=_language_model(job), args=GRPOConfig(**{**arguments, **more}), processing_class=tokenizer(),
        reward_funcs=_reward, train_dataset=_pairs(job.samples).remove_columns(["chosen", "rejected"]),
    )  # fmt: skip


def _reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def _seq2seq_trainer(job: HfJob, arguments: dict[str, Any]) -> Any:
    """Evaluations generate."""

    class WatchedSeq2Seq(Watched, transformers.Seq2SeqTrainer):
        pass

    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2, decoder_start_token_id=0,
        pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    args = transformers.Seq2SeqTrainingArguments(**arguments, predict_with_generate=True, generation_max_length=6)
    return WatchedSeq2Seq(
        model=transformers.T5ForConditionalGeneration(config), args=args, train_dataset=Tokens(job.samples, 7),
        eval_dataset=Tokens(12, 8), compute_metrics=lambda found: {"mean": float(found.predictions.clip(0).mean())},
        processing_class=tokenizer(),
    )  # fmt: skip


_MAKERS = {
    "trainer": _plain_trainer, "mlm": _mlm_trainer, "seq2seq": _seq2seq_trainer, "packed": _sft_trainer,
    "lora": _lora_trainer, "dpo": _dpo_trainer, "reward": _reward_trainer, "grpo": _grpo_trainer,
}  # fmt: skip
WITHOUT_TRL = ("trainer", "mlm", "seq2seq")


def _language_model(job: HfJob) -> Any:
    return transformers.AutoModelForCausalLM.from_config(_MODELS[job.model]())


def _pairs(count: int) -> Any:
    import datasets

    random = torch.Generator().manual_seed(count)
    words = [[f"w{one}" for one in row] for row in torch.randint(3, VOCABULARY, (count, 15), generator=random).tolist()]
    return datasets.Dataset.from_list(
        [{"prompt": " ".join(row[:5]), "chosen": " ".join(row[5:10]), "rejected": " ".join(row[10:])} for row in words]
    )


def tokenizer() -> Any:
    """Built here: one token a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<mask>": 1, "<eos>": 2} | {f"w{number}": number for number in range(3, VOCABULARY)}
    built = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=built, pad_token="<pad>", mask_token="<mask>", eos_token="<eos>", model_max_length=32
    )


def _texts(job: HfJob, seed: int, count: int | None = None, *, stream: bool | None = None) -> Any:
    import datasets

    random = torch.Generator().manual_seed(seed)
    # Of a stream each rank needs as many rows, packed or not: stock TRL waits for ever where they are not as many.
    lengths = torch.randint(5, LENGTH, (count or job.samples,), generator=random)
    if job.stream:
        lengths.fill_(LENGTH // 2 - 1)
    words = [torch.randint(3, VOCABULARY, (int(length),), generator=random).tolist() for length in lengths]
    data = datasets.Dataset.from_dict({"text": [" ".join(f"w{one}" for one in text) for text in words]})
    return data.to_iterable_dataset(num_shards=12) if (job.stream if stream is None else stream) else data


def _encoded(sample: dict[str, Any]) -> dict[str, Any]:
    found = tokenizer()(sample["text"], padding="max_length", max_length=LENGTH)
    return {"input_ids": found["input_ids"], "attention_mask": found["attention_mask"]}


def seen(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What all ranks of a job have seen, by file."""
    found: dict[str, Any] = {}
    for path in sorted(Path(folder).glob("losses-*.jsonl")):
        found[path.name] = [json.loads(line) for line in path.read_text().splitlines()]
    for path in sorted(Path(folder).glob("end-*.json")):
        found[path.name] = json.loads(path.read_text())
    return found


def _without_times(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if not any(one in name for one in _TIMES)}
