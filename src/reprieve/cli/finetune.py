"""`reprieve finetune`: fine-tunes a language model with LoRA. It can be stopped at any moment, and resumes.

The data may be chats (messages), prompts with completions, or Alpaca's columns. The output folder gets checkpoints, the
adapter, with --merge also final/, and a summary. Several processes: reprieve run torchrun -m reprieve finetune ….
HF_TOKEN, for what is private or gated, is read from the environment only. Options win over variables, and these over
the file of --config.

exit codes:
  0     the training is finished
  143   stopped (SIGTERM) and saved: the next start resumes exactly there
  42    permanent failure: a wrong option, no such model, data that cannot be trained with

examples:
  reprieve finetune --model_name Qwen/Qwen2.5-1.5B --dataset_path chats.jsonl --output_dir tuned --merge
  reprieve run --every 5m reprieve finetune --config job.yaml
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from reprieve.finetune.command import execute
from reprieve.finetune.options import add_arguments


def arguments(parser: ArgumentParser) -> None:
    add_arguments(parser)


def main(args: Namespace) -> int:
    return execute(vars(args))
