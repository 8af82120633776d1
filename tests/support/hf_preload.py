"""What ranks with Hugging Face's trainers need, imported once in the process that they are forked from.

Importing it takes a rank longer than its training. There is one such process for all tests of a worker: what only some
of them need costs less than another process.
"""

from __future__ import annotations

from importlib import import_module

_MODULES = (
    "accelerate",
    "datasets",
    "deepspeed",  # Accelerate imports it where it is installed, for any trainer
    "deepspeed.module_inject",
    "deepspeed.module_inject.auto_ep_config",
    "deepspeed.ops.op_builder.builder",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # each engine imports it, and with it all of inductor: 1.3 s
    "mlflow",
    "peft",
    "peft.utils.transformers_weight_conversion",
    "reprieve.adapters.dcp",
    "reprieve.adapters.loop.run",
    "reprieve.adapters.transformers",
    "reprieve.adapters.transformers.training",
    "reprieve.finetune.job",
    "reprieve.finetune.training",
    "reprieve.transformers",
    "tests.support.jobs.finetune_jobs",
    "tests.support.jobs.hf_jobs",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.profiler",
    "torch.utils.tensorboard",
    "torchdata.stateful_dataloader",
    "transformers.conversion_mapping",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen2_moe.modeling_qwen2_moe",
    "transformers.models.t5.modeling_t5",
    "transformers.trainer",
    "transformers.trainer_seq2seq",
    "trl.trainer.dpo_trainer",
    "trl.trainer.grpo_trainer",
    "trl.trainer.reward_trainer",
    "trl.trainer.sft_trainer",
    "wandb",
)

for _name in _MODULES:
    try:
        import_module(_name)
    except ModuleNotFoundError as error:  # other versions have other modules
        if error.name is None or not _name.startswith(error.name):
            raise

try:
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
except ImportError:
    pass
else:  # 800 regular expressions, which it compiles at the first save of a process
    get_checkpoint_conversion_mapping("gpt2")
