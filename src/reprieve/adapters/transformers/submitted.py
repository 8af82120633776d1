"""Arguments of trainers that the submitter of a job sets in place of the script (`SubmittedArguments`).

    import of transformers.trainer → all_trainers.py → each `Trainer(args=…)` → replace_arguments → the trainer is made

Scripts read `trainer.args.output_dir` to save results beside the checkpoints, so the arguments themselves change, not
only where checkpoints go.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from reprieve.adapters.transformers.patching import call_arguments
from reprieve.submitted_arguments import SubmittedArguments

log = logging.getLogger("reprieve")


def change_arguments(module: Any, change: Callable[[Any], None]) -> None:
    """Call a function with the arguments of every trainer of this process before the trainer is made.

    `module`: `transformers.trainer`.
    """
    original = module.Trainer.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        options = call_arguments(original, (self, *args), kwargs)
        if options.get("args") is None:
            options["args"] = module.TrainingArguments(output_dir="tmp_trainer")  # the trainer's own default
        change(options["args"])
        original(**options)

    module.Trainer.__init__ = init


def replace_arguments(submitted: SubmittedArguments, args: Any) -> None:
    """Put what the submitter has set into TrainingArguments."""
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    if submitted.output_dir is not None:
        folder = os.path.expanduser(submitted.output_dir)  # noqa: PTH111 - as TrainingArguments do when they are made
        if is_first:
            # Users look for this line in the log of a pod.
            line = f"[Kubeflow] output_dir: {folder} (the script: {args.output_dir})"
            print(line, file=sys.stderr, flush=True)
        args.output_dir = folder
    if submitted.save_strategy is None:
        return
    if reason := _reason_to_keep_strategy(submitted, args):
        if is_first:
            log.warning("save_strategy=%s is not used: %s", submitted.save_strategy, reason)
        return
    args.save_strategy = type(args.save_strategy)(submitted.save_strategy)
    if submitted.save_steps is not None:
        args.save_steps = submitted.save_steps
    if submitted.save_total_limit is not None:
        args.save_total_limit = submitted.save_total_limit


def _reason_to_keep_strategy(submitted: SubmittedArguments, args: Any) -> str | None:
    """Return why the script's own strategy stays: its best model would have no checkpoint otherwise.

    TrainingArguments check the same, but only when they are made.
    """
    if args.save_strategy == "best":
        return "the script saves whenever an evaluation is the best so far (save_strategy=best)"
    if not args.load_best_model_at_end:
        return None
    needs = "the script loads the best model at the end, for which checkpoints are saved when it evaluates"
    evaluates = getattr(args.eval_strategy, "value", args.eval_strategy)
    if submitted.save_strategy != evaluates:
        return f"{needs} (eval_strategy={evaluates})"
    steps = submitted.save_steps or args.save_steps
    # A number below 1 is a share of all steps, which are not known yet.
    if evaluates == "steps" and (args.eval_steps < 1 or steps % args.eval_steps):
        return f"{needs}, and save_steps={steps} is no multiple of its eval_steps={args.eval_steps:g}"
    return None
