"""Fine-tune a small GPT-2."""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Numbers(torch.utils.data.Dataset):
    def __init__(self, n):
        self.data = torch.randint(0, 97, (n, 16), generator=torch.Generator().manual_seed(n))

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        return {"input_ids": self.data[i], "labels": self.data[i]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="out")
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args()

    set_seed(42)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_positions=16, n_embd=64, n_layer=3, n_head=2))
    training_args = TrainingArguments(
        output_dir=args.output_dir,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=8,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        load_best_model_at_end=True,
        logging_steps=10,
        report_to="none",
        use_cpu=True,
    )
    trainer = Trainer(model=model, args=training_args, train_dataset=Numbers(400), eval_dataset=Numbers(80))
    trainer.train()
    trainer.save_model(args.output_dir + "/final")
    print(trainer.evaluate())


if __name__ == "__main__":
    main()
