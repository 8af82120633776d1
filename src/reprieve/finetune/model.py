"""Loads the model and its tokenizer, and decides which of its modules get an adapter."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from reprieve.errors import ConfigError
from reprieve.finetune.environment import print_once
from reprieve.finetune.options import ALL_LINEAR, FinetuneOptions

_TURN_BEGIN = "<|im_start|>"
_PAD_TOKENS = (
    re.compile(r"[<\[|]+(finetune_right_pad_id|pad|padding)[>\]|]+", re.IGNORECASE),
    re.compile(r".*reserved.*|<unused_?\d+>|<SPECIAL_\d+>"),
)
"""Special tokens that a tokenizer has and nothing uses: Llama's, those of others, then what is kept free for such."""
_DATE_CALL = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
_ANSWER = "{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}"
_TURNS = (
    "{{ bos_token if bos_token }}{% for message in messages %}BEGIN{% if message['role'] == 'assistant' %}"
    + _ANSWER
    + "{% else %}{{ message['content'] }}END{% endif %}\n{% endfor %}{% if add_generation_prompt %}OPEN{% endif %}"
)
PLAIN_TEMPLATE = (
    _TURNS.replace("BEGIN", "### {{ message['role'] }}:\n").replace("OPEN", "### assistant:\n").replace("END", "\n")
)
"""A chat template without special tokens but the one at the end of an answer, for tokenizers that have none."""
TOKEN_TEMPLATE = (
    _TURNS.replace("BEGIN", f"{_TURN_BEGIN}{{{{ message['role'] }}}}\n")
    .replace("OPEN", f"{_TURN_BEGIN}assistant\n")
    .replace("END", "{{ eos_token }}")
)
"""The same with a token at the beginning of a turn, which --add_special_tokens adds."""


def load_tokenizer(folder: Path, options: FinetuneOptions, *, chat: bool, date: str) -> tuple[Any, list[int]]:
    """Return the tokenizer, and the ids of tokens whose embeddings must be learned.

    `chat`: the data are turns of conversations. `date`: the day when the job began.
    """
    import transformers

    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise _refused("the tokenizer", options, error) from error
    if tokenizer.eos_token is None:
        raise ConfigError(f"the tokenizer of --model_name {options.model_name} has no token for the end of a text")
    _pin_date(tokenizer, date)
    learned: list[int] = []
    if options.add_special_tokens and tokenizer.pad_token is None:
        tokenizer.pad_token = _unused_token(tokenizer) or tokenizer.unk_token or tokenizer.eos_token
        print_once(f"the tokenizer pads with {tokenizer.pad_token}")
    if chat and tokenizer.chat_template is None:
        if options.add_special_tokens:
            if tokenizer.add_tokens([_TURN_BEGIN], special_tokens=True):
                learned = [tokenizer.convert_tokens_to_ids(_TURN_BEGIN)]
            tokenizer.chat_template = TOKEN_TEMPLATE
            print_once(f"the tokenizer gets a chat template, with {_TURN_BEGIN} before each turn")
        else:
            tokenizer.chat_template = PLAIN_TEMPLATE
            print_once("the tokenizer has no chat template: turns begin with a line like '### user:'")
    return tokenizer, learned


def _unused_token(tokenizer: Any) -> str | None:
    """Return a token to pad with that the model has an embedding for: with a new one, the adapter would hold all
    embeddings and fit no other copy of the model. What pads is never learned, whichever token it is: TRL masks it by
    its place."""
    special = [token.content for _, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special]
    free = [name for name in special if name not in (tokenizer.chat_template or "")]
    return next((name for pattern in _PAD_TOKENS for name in free if pattern.fullmatch(name)), None)


def _pin_date(tokenizer: Any, date: str) -> None:
    """Keep the date that the chat template shows: a resume on another day must read the same data. `datasets` sees the
    date, too, so that it does not take another day's tokens from its cache."""
    if "strftime_now" in (tokenizer.chat_template or ""):
        tokenizer.apply_chat_template = partial(_apply_on_date, tokenizer, date)


def _apply_on_date(
    tokenizer: Any, date: str, conversation: Any, *, chat_template: str | None = None, tools: Any = None, **options: Any
) -> Any:
    """Take the place of a tokenizer's `apply_chat_template`. Its chat template stays as it is, and is saved so."""

    def shown(call: re.Match[str]) -> str:
        return json.dumps(datetime.fromisoformat(date).strftime(call[2]))

    # In the text: transformers passes no function of ours to a template.
    pinned = _DATE_CALL.sub(shown, tokenizer.get_chat_template(chat_template, tools))
    apply = type(tokenizer).apply_chat_template
    return apply(tokenizer, conversation, chat_template=pinned, tools=tools, **options)


def load_model(folder: Path, tokenizer: Any, options: FinetuneOptions, dtype: Any) -> Any:
    """Return the model with this dtype, or with the checkpoint's for "auto", and a row for each token."""
    import transformers
    from safetensors import SafetensorError

    try:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError, SafetensorError) as error:
        raise _refused("the model", options, error) from error
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        transformers.set_seed(options.seed)
        model.resize_token_embeddings(len(tokenizer))
    return model


def _refused(what: str, options: FinetuneOptions, error: Exception) -> ConfigError:
    reason = next((line for line in str(error).strip().splitlines() if line.strip()), type(error).__name__)
    return ConfigError(f"{what} of --model_name {options.model_name} cannot be loaded: {reason[:300]}")


def check_targets(model: Any, targets: str | Sequence[str]) -> None:
    """Raise ConfigError for a target that no module has, and list what there is."""
    if targets == ALL_LINEAR:
        return
    there = linear_modules(model)
    head = _name_of(model, model.get_output_embeddings())
    for target in targets:
        if head is not None and target in (head, head.rpartition(".")[2]):
            raise ConfigError(f"--lora_targets {target}: TRL trains no adapter of the output layer. Leave it out")
        if not any(name == target or name.endswith(f".{target}") for name in there):
            names = sorted({re.sub(r".*\.", "", name) for name in there})
            raise ConfigError(f"--lora_targets {target} matches no module: there are {', '.join(names)}")


def linear_modules(model: Any) -> list[str]:
    """Return the names of all modules that can get an adapter."""
    import torch
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, (torch.nn.Linear, Conv1D)) and module is not head
    ]


def adapter_config(model: Any, options: FinetuneOptions, learned: Sequence[int]) -> Any:
    """Return PEFT's configuration. `learned`: the ids of new tokens."""
    import peft

    targets = options.lora_targets
    embeddings = _name_of(model, model.get_input_embeddings())
    return peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=options.lora_rank,
        lora_alpha=options.alpha,
        lora_dropout=options.lora_dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        trainable_token_indices={str(embeddings).rpartition(".")[2]: list(learned)} if learned else None,
    )


def _name_of(model: Any, module: Any) -> str | None:
    return next((name for name, each in model.named_modules() if each is module), None)
