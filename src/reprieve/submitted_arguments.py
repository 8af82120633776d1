"""What the submitter of a job sets in place of the `TrainingArguments` of its script.

    TransformersTrainer(output_dir=…, periodic_checkpoint_config=…) → a variable of the pod → every trainer of the job

The SDK writes the variable (`sdk/pod.py`), the Transformers adapter reads it (`adapters/transformers/submitted.py`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from reprieve.errors import ConfigError

VARIABLE = "REPRIEVE_TRAINING_ARGUMENTS"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedArguments:
    """None: the script decides."""

    output_dir: str | None = None
    save_strategy: str | None = None
    """`steps`, `epoch` or `no`."""
    save_steps: int | None = None
    save_total_limit: int | None = None
    protected: bool = True
    """False: trainers only report their progress; nothing is saved, resumed or stopped."""
    version: int = VERSION

    def to_json(self) -> str:
        return json.dumps({name: value for name, value in asdict(self).items() if value is not None})

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> SubmittedArguments | None:
        text = env.get(VARIABLE, "")
        if not text:
            return None
        try:
            content = dict(json.loads(text))
        except (ValueError, TypeError):
            raise ConfigError(f"{VARIABLE}={text!r} is not a JSON object") from None
        found = cls(**{each.name: content[each.name] for each in fields(cls) if each.name in content})
        if found.version > VERSION:
            raise ConfigError(
                f"{VARIABLE} has version {found.version}, and this Reprieve reads versions up to {VERSION}: install "
                "the Reprieve in the image that the job was submitted with"
            )
        return found
