"""Writes `final/`: the model with the adapter merged into its weights, which loads without PEFT.

It is made from what is on the disk, the model and the adapter, in the dtype of the model's checkpoint, and appears when
it is whole.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from reprieve.errors import ConfigError
from reprieve.finetune.environment import print_once
from reprieve.finetune.job_record import make_durable
from reprieve.finetune.model import load_model
from reprieve.finetune.options import FinetuneOptions
from reprieve.finetune.sources import weight_files
from reprieve.storage.disk import Disk, free_bytes
from reprieve.units import format_size

FOLDER = "final"
_UNFINISHED = ".final.saving"
_MARGIN_BYTES = 64 * 2**20
"""Tokenizer, configuration, and checkpoints of a small adapter."""


def check_room(output: Path, model_folder: Path) -> None:
    """Raise ConfigError unless the merged model will fit beside the checkpoints. Called before anything is trained."""
    need = sum(path.stat().st_size for path in weight_files(model_folder)) + _MARGIN_BYTES
    # What an earlier start has left is removed before the model is written.
    left = [path for name in (_UNFINISHED, FOLDER) for path in (output / name).rglob("*") if path.is_file()]
    if (free := free_bytes(output) + sum(path.stat().st_size for path in left)) < need:
        raise ConfigError(
            f"no room for the merged model: {output / FOLDER} needs {format_size(need)}, and {format_size(free)} are "
            "free. Make room, choose another --output_dir, or leave out --merge: the adapter can be merged later, by "
            "the same command with --merge"
        )


def merge(output: Path, model_folder: Path, options: FinetuneOptions) -> Path:
    """Merge the adapter in the output folder, and return the folder of the merged model."""
    import peft
    import transformers

    unfinished, final = output / _UNFINISHED, output / FOLDER
    for leftover in (unfinished, final):
        if leftover.exists():
            shutil.rmtree(leftover)
    print_once(f"merging the adapter into {final}")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(output), local_files_only=True)
    model: Any = load_model(model_folder, tokenizer, options, "auto")
    merged = peft.PeftModel.from_pretrained(model, str(output)).merge_and_unload()
    _repair_generation_config(merged)
    merged.save_pretrained(str(unfinished))
    tokenizer.save_pretrained(str(unfinished))
    make_durable(unfinished)
    unfinished.rename(final)
    Disk().flush_folder(output)
    return final


def _repair_generation_config(model: Any) -> None:
    """Let the model be saved: transformers loads a contradictory generation_config.json, and refuses to write it."""
    import transformers

    config = model.generation_config
    if config is None or _is_valid(config):
        return
    # Values for sampling (temperature, top_p) without do_sample are the usual contradiction.
    was, config.do_sample = config.do_sample, True
    if was is not True and _is_valid(config):
        print_once("final/ gets do_sample=True: the model's generation_config.json has values for sampling without it")
        return
    model.generation_config = transformers.GenerationConfig.from_model_config(model.config)
    print_once("the model's generation_config.json contradicts itself: final/ gets one made from its config.json")


def _is_valid(config: Any) -> bool:
    try:
        config.validate(strict=True)
    except ValueError:
        return False
    return True


def name_base_model(output: Path, name: str, commit: str | None) -> None:
    """Name the hub's model in the adapter's configuration, in place of the cache's folder: it loads anywhere then.

    Only here, at the end: with a name of the hub, PEFT looks the model up there in every save.
    """
    path = output / "adapter_config.json"
    content = json.loads(path.read_bytes())
    content |= {"base_model_name_or_path": name, "revision": commit}
    Disk().replace_file(path, json.dumps(content, indent=2, sort_keys=True).encode())
