"""Fine-tune a small Llama with LoRA, and evaluate it now and then: `python with_lora.py FOLDER PAUSE_S`.

It pauses after each batch, so that a test can stop it where it wants. `batches.jsonl` has a line for each, and
`end.json` has all losses and a hash of the weights.
"""

import hashlib
import json
import sys
import time
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

folder, pause_s = Path(sys.argv[1]), float(sys.argv[2])


def samples(n):
    data = torch.randint(0, 97, (n, 16), generator=torch.Generator().manual_seed(n))
    return [{"input_ids": ids, "labels": ids} for ids in data]


class Pauses(TrainerCallback):
    def _pause(self, what, state):
        with (folder / "batches.jsonl").open("a") as file:
            file.write(json.dumps([what, state.global_step]) + "\n")
        time.sleep(pause_s)

    def on_step_end(self, args, state, control, **kwargs):
        self._pause("train", state)

    def on_prediction_step(self, args, state, control, **kwargs):
        self._pause("evaluate", state)


set_seed(3)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, attention_dropout=0.1,
    )
)  # fmt: skip
trainer = Trainer(
    model=get_peft_model(model, LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])),
    args=TrainingArguments(
        output_dir=str(folder / "out"),
        max_steps=40,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        learning_rate=1e-3,
        eval_strategy="steps",
        eval_steps=10,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
    ),
    train_dataset=samples(60),
    eval_dataset=samples(40),
    callbacks=[Pauses()],
)
trainer.train()
weights = hashlib.sha256()
for name, tensor in sorted(trainer.model.state_dict().items()):
    weights.update(name.encode() + tensor.numpy().tobytes())
losses = [
    [name, entry["step"], entry[name]] for entry in trainer.state.log_history for name in ("loss", "eval_loss")
    if name in entry
]  # fmt: skip
(folder / "end.json").write_text(json.dumps({"losses": losses, "weights": weights.hexdigest()}))
