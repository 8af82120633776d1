"""A script that trains, saves, evaluates, predicts and writes a model card, and the small files that it writes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import transformers

from reprieve.ranks.failpoints import reached
from reprieve.transformers import protect
from tests.support.hf_data import Tokens
from tests.support.jobs.hf_jobs import TIMES, HfJob, make

_TEXTS = (".json", ".md", ".jinja", ".txt")
_REPRIEVE_FILES = ("reprieve-manifest.json", "finished.json", "owner.json")


def script(job: HfJob) -> None:
    """Train as the example scripts of transformers do."""
    transformers.set_seed(3)
    trainer = make(job)
    if job.safe:
        protect(trainer, notices="off", **dict(job.options))
    with open(os.devnull, "w") as trainer.losses:
        result = trainer.train(job.given)
        reached("trained")
        trainer.save_model()
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
        reached("saved the model")
        trainer.save_metrics("eval", trainer.evaluate())
        reached("evaluated")
        trainer.save_metrics("predict", trainer.predict(Tokens(8, 9)).metrics)
        trainer.create_model_card(model_name="small")


def small_files(job: HfJob) -> dict[str, Any]:
    """Return the contents of the small files, without times and without the name of the folder."""
    found: dict[str, Any] = {}
    for path in sorted(job.output.rglob("*")):
        if path.suffix in _TEXTS and path.is_file() and path.name not in _REPRIEVE_FILES:
            text = path.read_text().replace(job.folder, "FOLDER")
            found[path.relative_to(job.output).as_posix()] = (
                _without_times(json.loads(text)) if path.suffix == ".json" else text
            )
    return found


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_times(inner) for name, inner in value.items() if not any(word in name for word in TIMES)}
    return [_without_times(inner) for inner in value] if isinstance(value, list) else value


def requested(job: HfJob) -> set[str]:
    """Return the checkpoints that the script's save strategy requested."""
    found = {path.parent: json.loads(path.read_text())["manifest"] for path in job.output.glob("c*/reprieve-m*.json")}
    return {Path(path).name for path, manifest in found.items() if "unrequested" not in manifest}
