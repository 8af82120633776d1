import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, 100)}
base = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
base.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=base, pad_token="<pad>", eos_token="<eos>")

rng = torch.Generator().manual_seed(0)
texts = [" ".join(f"w{int(i)}" for i in torch.randint(2, 100, (12,), generator=rng)) for _ in range(300)]
dataset = Dataset.from_dict({"text": texts}).train_test_split(0.1, seed=0)

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64,
    )
)  # fmt: skip

trainer = SFTTrainer(
    model=model,
    args=SFTConfig(
        output_dir="out",
        max_length=32,
        packing=True,
        num_train_epochs=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        save_steps=20,
        eval_strategy="steps",
        eval_steps=20,
        logging_steps=5,
        report_to="none",
        use_cpu=True,
    ),
    train_dataset=dataset["train"],
    eval_dataset=dataset["test"],
    processing_class=tokenizer,
    peft_config=LoraConfig(r=8, lora_dropout=0.05, target_modules=["q_proj", "v_proj"]),
)
trainer.train()
trainer.save_model("out/final")
