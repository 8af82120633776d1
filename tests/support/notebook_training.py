"""A training function as notebooks for OpenShift AI have it: its output folder is a placeholder, the final model goes
below the folder that the trainer has."""

from __future__ import annotations


def train_func(
    model_path: str, data_path: str, record: str, steps: int = 40, pause_s: float = 0.0, slow_from: int = 0
) -> None:
    """Steps from `slow_from` on take `pause_s` longer, until there is a file `hurry` in `record`."""
    import json
    import os
    import time
    from pathlib import Path

    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

    set_seed(5)
    rank = int(os.environ.get("RANK", "0"))
    samples = [
        {"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)} for ids in json.loads(Path(data_path).read_text())
    ]

    class Recorded(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
            with Path(f"{record}/steps-{rank}").open("a") as file:
                file.write(f"{state.global_step}\n")
            is_slow = state.global_step >= slow_from and not Path(f"{record}/hurry").exists()
            time.sleep(pause_s if is_slow else 0)

    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(model_path),
        args=TrainingArguments(
            output_dir="/tmp/output",  # replaced by TransformersTrainer(output_dir=…)
            max_steps=steps,
            per_device_train_batch_size=2,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
        ),
        train_dataset=samples,
        callbacks=[Recorded()],
    )
    trainer.train()
    trainer.save_model(f"{trainer.args.output_dir}/final")
    if rank == 0:
        losses = {each["step"]: each["loss"] for each in trainer.state.log_history if "loss" in each}
        Path(f"{record}/losses.json").write_text(json.dumps({"losses": losses, "output_dir": trainer.args.output_dir}))


def make_inputs(model_path: str, data_path: str) -> None:
    """Make a model and data for it: what a workbench downloads."""
    import json
    from pathlib import Path

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(2)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=97, num_key_value_heads=1, max_position_embeddings=32, attention_dropout=0.1, **shape
    )
    LlamaForCausalLM(config).save_pretrained(model_path)
    data = torch.randint(0, 97, (60, 16), generator=torch.Generator().manual_seed(3)).tolist()
    Path(data_path).write_text(json.dumps(data))
