"""Make tiny models and instruction data for `reprieve finetune`, where nothing can be downloaded.

    python examples/finetune/make_tiny.py tiny
    reprieve finetune --model_name tiny/llama --dataset_path tiny/chat.jsonl --output_dir tuned --merge

The models have the shape of Llama and Qwen2 and a few hundred kilobytes of random weights. Each has a tokenizer with
the special tokens, the chat template and the gaps of its family: Llama has no padding token, and Qwen2 no token at the
beginning of a text. The data are small sums, as conversations, as prompts with completions, and in Alpaca's columns.

    tiny/llama, tiny/qwen2                              models
    tiny/chat.jsonl, completions.csv, alpaca.json, …    data; tiny/saved is a saved dataset
    tiny/hub/models--tiny--llama/snapshots/HASH         a model as huggingface_hub caches it (HF_HUB_CACHE=tiny/hub)
    tiny/hub/datasets--tiny--sums/snapshots/HASH        data as it caches them

The same arguments make the same bytes.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

Sample = dict[str, Any]

SHAPES = ("llama", "qwen2")
FORMS = ("chat", "completions", "alpaca")
_NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_NUMBERS += ["thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"]
_VOCABULARY = 384

_LLAMA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n{{ message['content'] }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# With the markers of the assistant's part, which TRL's assistant_only_loss reads.
_QWEN2_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# Data


def sums(form: str, count: int, *, seed: int = 0) -> list[Sample]:
    """Return `count` samples of a form: `chat` (messages), `completions` (prompt, completion) or `alpaca`."""
    return [_FORM[form](drawn) for drawn in _draw(count, seed)]


def _draw(count: int, seed: int) -> Iterator[tuple[int, int, int]]:
    drawn = random.Random(f"sums {seed}")
    for _ in range(count):
        yield drawn.randrange(10), drawn.randrange(10), drawn.randrange(3)


def _question(a: int, b: int) -> str:
    return f"What is {_NUMBERS[a]} and {_NUMBERS[b]}?"


def _answer(a: int, b: int) -> str:
    return f"{_NUMBERS[a]} and {_NUMBERS[b]} is {_NUMBERS[a + b]}."


def _chat(drawn: tuple[int, int, int]) -> Sample:
    """One turn in two conversations of three, and two turns in the others."""
    a, b, kind = drawn
    messages = [{"role": "system", "content": "You add numbers."}] if kind == 1 else []
    messages += [{"role": "user", "content": _question(a, b)}, {"role": "assistant", "content": _answer(a, b)}]
    if kind == 2:
        messages += [{"role": "user", "content": _question(b, a)}, {"role": "assistant", "content": _answer(b, a)}]
    return {"messages": messages}


def _completion(drawn: tuple[int, int, int]) -> Sample:
    a, b, _ = drawn
    return {"prompt": f"{_question(a, b)}\n", "completion": _answer(a, b)}


def _alpaca(drawn: tuple[int, int, int]) -> Sample:
    """Two of three have an input beside the instruction."""
    a, b, kind = drawn
    if kind == 0:
        return {"instruction": _question(a, b), "input": "", "output": _answer(a, b)}
    return {"instruction": "Add the numbers.", "input": f"{_NUMBERS[a]}, {_NUMBERS[b]}", "output": _answer(a, b)}


_FORM: dict[str, Callable[[tuple[int, int, int]], Sample]] = {
    "chat": _chat,
    "completions": _completion,
    "alpaca": _alpaca,
}


def write(path: Path, samples: Sequence[Sample]) -> Path:
    """Write samples in the format that the name ends with: .json, .jsonl, .csv, .parquet; others: a saved dataset."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        path.write_text(json.dumps(list(samples), indent=1) + "\n")
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, list(samples[0]))
            table.writeheader()
            table.writerows(samples)
    else:
        import datasets

        data = datasets.Dataset.from_list(list(samples))
        if path.suffix == ".parquet":
            data.to_parquet(path)
        else:
            data.save_to_disk(path)
    return path


# Models


def make_model(folder: Path, shape: str = "llama", *, seed: int = 0, layers: int = 2, width: int = 64) -> Path:
    """Make a model of a shape with random weights, its configuration and its tokenizer, as a folder."""
    import torch
    import transformers

    tokenizer = make_tokenizer(shape)
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if shape == "llama":
        config: Any = transformers.LlamaConfig(**sizes, tie_word_embeddings=False)
    else:
        config = transformers.Qwen2Config(**sizes, tie_word_embeddings=True)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_tokenizer(shape: str = "llama") -> Any:
    """Train a byte-level tokenizer on the data of this module."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    if shape == "llama":
        special = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
        special.append("<|finetune_right_pad_id|>")
        named = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    else:
        special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        named = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [f"{_question(a, b)}\n{_answer(a, b)}\nsystem user assistant" for a in range(10) for b in range(10)]
    built.train_from_iterator([*texts, "You add numbers. Add the numbers."], trainer)
    if shape == "llama":
        begin = built.token_to_id("<|begin_of_text|>")
        built.post_processor = processors.TemplateProcessing(
            single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", begin)]
        )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=built, additional_special_tokens=special, model_max_length=512, **named
    )
    tokenizer.chat_template = _LLAMA_TEMPLATE if shape == "llama" else _QWEN2_TEMPLATE
    return tokenizer


# The cache of huggingface_hub


def put_into_cache(cache: Path, repository: str, source: Path, *, kind: str = "models") -> Path:
    """Put a folder or a file into a cache as a download would, and return the snapshot's folder.

    `kind`: models or datasets.
    """
    files = sorted(path for path in source.rglob("*") if path.is_file()) if source.is_dir() else [source]
    root = source if source.is_dir() else source.parent
    digest = hashlib.sha1(usedforsecurity=False)
    for path in files:
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    folder = cache / "--".join((kind, *repository.split("/")))
    snapshot = folder / "snapshots" / digest.hexdigest()
    for path in files:
        blob = folder / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, blob)
        link = snapshot / path.relative_to(root)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(Path(*[".."] * len(link.relative_to(folder).parent.parts), "blobs", blob.name))
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text(snapshot.name)
    return snapshot


def make_all(folder: Path, count: int = 48, *, seed: int = 0) -> None:
    """Make both models, the data in every form and format, and a cache with a model and data in it."""
    for shape in SHAPES:
        put_into_cache(folder / "hub", f"tiny/{shape}", make_model(folder / shape, shape, seed=seed))
    for form in FORMS:
        for suffix in (".json", ".jsonl", ".parquet", *([".csv"] if form != "chat" else [])):
            write(folder / f"{form}{suffix}", sums(form, count, seed=seed))
    saved = write(folder / "saved", sums("chat", count, seed=seed))
    put_into_cache(folder / "hub", "tiny/sums", folder / "chat.jsonl", kind="datasets")
    put_into_cache(folder / "hub", "tiny/saved", saved, kind="datasets")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    make_all(options.folder, options.samples, seed=options.seed)
    print(f"models and data are in {options.folder}")


if __name__ == "__main__":
    main()
