"""Trainers of Transformers and TRL, made as scripts make them: small models from a config, with failpoints."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import Trainer, TrainingArguments

from reprieve.ranks.failpoints import reached
from tests.support.hf_data import LENGTH, VOCABULARY, Forgetful, Stream, Tokens, encoded, pairs, texts, tokenizer

if TYPE_CHECKING:
    from tests.support.jobs.hf_jobs import HfJob

_MODELS: dict[str, Any] = {
    "gpt2": lambda: transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=2),
    "wide_gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=384, n_layer=2, n_head=2
    ),
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


class Watched:
    """A mixin that makes a trainer pass failpoints and record its losses."""

    losses: Any

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        reached("forward")
        loss: torch.Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]
        step = self.state.global_step  # type: ignore[attr-defined]
        self.losses.write(json.dumps([step, loss.item(), _named(args[1])]) + "\n")
        return loss

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        reached("load")
        super()._load_from_checkpoint(*args, **kwargs)  # type: ignore[misc]

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        reached("save")
        super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]
        reached("saved")

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        reached("prediction")
        return super().prediction_step(*args, **kwargs)  # type: ignore[misc]


def _named(batch: Any) -> list[str]:
    """Name each sample by its first tokens."""
    if "labels" not in batch:
        return []
    return ["-".join(map(str, labels[:4].tolist())) for labels in batch["labels"]]


class WatchedTrainer(Watched, Trainer):
    pass


class Swapping(torch.optim.SGD):
    """An optimizer like the schedule-free ones: it trains one set of weights and evaluates another."""

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
    data: Any = Tokens(job.samples, 7, masking=job.masking)
    if job.stream:
        data = Stream(job.samples, 7) if job.masking else Forgetful(data)
    optimizer = Swapping(model.parameters(), 0.01) if job.swapping else None
    return WatchedTrainer(
        model=model, args=TrainingArguments(**arguments), train_dataset=data, eval_dataset=Tokens(12, 8),
        optimizers=(optimizer, None),
    )  # fmt: skip


def _mlm_trainer(job: HfJob, arguments: dict[str, Any]) -> Any:
    """A trainer whose collator masks at random, in the workers if there are any."""
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32,
    )  # fmt: skip
    collator = transformers.DataCollatorForLanguageModeling(tokenizer(), mlm_probability=0.3)
    return WatchedTrainer(
        model=transformers.BertForMaskedLM(config), args=TrainingArguments(**arguments), data_collator=collator,
        train_dataset=texts(job, 7).map(encoded, remove_columns="text"),
        eval_dataset=texts(job, 8, 12, stream=False).map(encoded, remove_columns="text"),
    )  # fmt: skip


def _sft_trainer(job: HfJob, arguments: dict[str, Any], **more: Any) -> Any:
    from trl import SFTConfig, SFTTrainer

    class WatchedSFT(Watched, SFTTrainer):
        pass

    args = SFTConfig(**{"max_length": LENGTH, "packing": job.trainer == "packed", **arguments})
    return WatchedSFT(
        model=_language_model(job), args=args,
        train_dataset=texts(job, 7), eval_dataset=texts(job, 8, 24, stream=False), processing_class=tokenizer(),
        **more,
    )  # fmt: skip


def _lora_trainer(job: HfJob, arguments: dict[str, Any], targets: Any = "all-linear") -> Any:
    from peft import LoraConfig

    return _sft_trainer(job, arguments, peft_config=LoraConfig(r=4, lora_dropout=0.1, target_modules=targets))


def _adapters_trainer(job: HfJob, arguments: dict[str, Any], active: tuple[str, ...]) -> Any:
    """A trainer of a model with two adapters, of which `active` are trained."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(_language_model(job), config)
    model.add_adapter("second", LoraConfig(r=2, target_modules=["o_proj"], task_type="CAUSAL_LM"))
    model.base_model.set_adapter(list(active))
    return WatchedTrainer(
        model=model, args=TrainingArguments(**arguments), train_dataset=Tokens(job.samples, 7),
        eval_dataset=Tokens(12, 8),
    )  # fmt: skip


def _dpo_trainer(job: HfJob, arguments: dict[str, Any]) -> Any:
    from trl import DPOConfig, DPOTrainer

    class WatchedDPO(Watched, DPOTrainer):
        pass

    return WatchedDPO(
        model=_language_model(job), args=DPOConfig(**{"max_length": 32, **arguments}), processing_class=tokenizer(),
        train_dataset=pairs(job.samples), eval_dataset=pairs(8), ref_model=_language_model(job),
    )  # fmt: skip


def _reward_trainer(job: HfJob, arguments: dict[str, Any]) -> Any:
    from trl import RewardConfig, RewardTrainer

    class WatchedReward(Watched, RewardTrainer):
        pass

    config = transformers.LlamaConfig(**_SMALL, num_key_value_heads=1, num_labels=1, pad_token_id=0)
    return WatchedReward(
        model=transformers.LlamaForSequenceClassification(config), args=RewardConfig(**{"max_length": 32, **arguments}),
        train_dataset=pairs(job.samples), eval_dataset=pairs(8), processing_class=tokenizer(),
    )  # fmt: skip


def _grpo_trainer(job: HfJob, arguments: dict[str, Any]) -> Any:
    """A trainer that uses a batch of generations for several steps."""
    from trl import GRPOConfig, GRPOTrainer

    class WatchedGRPO(Watched, GRPOTrainer):
        pass

    more = {"num_generations": 2, "max_completion_length": 6, "steps_per_generation": 4, "eval_strategy": "no"}
    return WatchedGRPO(
        model=_language_model(job), args=GRPOConfig(**{**arguments, **more}), processing_class=tokenizer(),
        reward_funcs=_reward, train_dataset=pairs(job.samples).remove_columns(["chosen", "rejected"]),
    )  # fmt: skip


def _reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def _seq2seq_trainer(job: HfJob, arguments: dict[str, Any]) -> Any:
    """A trainer that generates in evaluations."""

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


MAKERS = {
    "trainer": _plain_trainer, "mlm": _mlm_trainer, "seq2seq": _seq2seq_trainer, "packed": _sft_trainer,
    "lora": _lora_trainer, "dpo": _dpo_trainer, "reward": _reward_trainer, "grpo": _grpo_trainer,
    "lora_q": partial(_lora_trainer, targets=["q_proj"]), "lora_o": partial(_lora_trainer, targets=["o_proj"]),
    "first_adapter": partial(_adapters_trainer, active=("default",)),
    "both_adapters": partial(_adapters_trainer, active=("default", "second")),
    "lora_qo": partial(_lora_trainer, targets=["q_proj", "o_proj"]),
}  # fmt: skip
WITHOUT_TRL = ("trainer", "mlm", "seq2seq")


def _language_model(job: HfJob) -> Any:
    return transformers.AutoModelForCausalLM.from_config(_MODELS[job.model]())
