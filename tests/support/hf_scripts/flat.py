# %% imports
import numpy as np
import torch
from transformers import BertConfig, BertForSequenceClassification, EarlyStoppingCallback, Trainer, TrainingArguments

# %% data
torch.manual_seed(1)
x = torch.randint(0, 50, (600, 12))
y = (x.sum(1) % 3).long()
data = [
    {"input_ids": a, "attention_mask": torch.ones(12, dtype=torch.long), "labels": b} for a, b in zip(x, y, strict=True)
]
train, test = data[:500], data[500:]

# %% model
config = BertConfig(
    vocab_size=50, hidden_size=48, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, num_labels=3
)
model = BertForSequenceClassification(config)


# %% train
def accuracy(p):
    return {"accuracy": float(np.mean(p.predictions.argmax(1) == p.label_ids))}


args = TrainingArguments(
    "out", num_train_epochs=4, per_device_train_batch_size=8, learning_rate=5e-4, eval_strategy="steps", eval_steps=25,
    save_strategy="steps", save_steps=25, save_total_limit=3, load_best_model_at_end=True,
    metric_for_best_model="accuracy", lr_scheduler_type="cosine", warmup_steps=20, report_to=[], use_cpu=True,
)  # fmt: skip
trainer = Trainer(
    model, args, train_dataset=train, eval_dataset=test, compute_metrics=accuracy, callbacks=[EarlyStoppingCallback(20)]
)
trainer.train()

# %% save
trainer.save_model("out/final")
print(trainer.evaluate())
