import logging
import sys
from dataclasses import dataclass, field

import torch
from torch.utils.data import IterableDataset
from transformers import AutoModelForCausalLM, HfArgumentParser, Qwen2Config, Trainer, TrainingArguments, set_seed

logger = logging.getLogger(__name__)


@dataclass
class ModelArguments:
    hidden_size: int = field(default=64, metadata={"help": "Width of the model."})
    num_layers: int = field(default=2)


@dataclass
class DataArguments:
    num_samples: int = field(default=200)
    block_size: int = field(default=16)


class Stream(IterableDataset):
    def __init__(self, args):
        self.args = args

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        for _ in range(self.args.num_samples):
            ids = torch.randint(0, 90, (self.args.block_size,), generator=generator)
            yield {"input_ids": ids, "labels": ids}


def main():
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    logging.basicConfig(handlers=[logging.StreamHandler(sys.stdout)], level=logging.INFO)
    set_seed(training_args.seed)
    config = Qwen2Config(
        vocab_size=90, hidden_size=model_args.hidden_size, intermediate_size=96, max_position_embeddings=32,
        num_hidden_layers=model_args.num_layers, num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    trainer = Trainer(
        model=AutoModelForCausalLM.from_config(config), args=training_args, train_dataset=Stream(data_args)
    )
    result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.log_metrics("train", result.metrics)
    trainer.save_model(training_args.output_dir + "/final")
    trainer.save_state()


if __name__ == "__main__":
    main()
