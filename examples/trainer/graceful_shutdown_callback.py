"""A callback that makes the trainers of a script stop gracefully, on all ranks, and resume when they start again.

    from graceful_shutdown_callback import GracefulShutdownCallback

    trainer = SFTTrainer(model, args, train_dataset=data, callbacks=[GracefulShutdownCallback()])
    trainer.train()

On SIGTERM to any rank, all ranks stop at the same step, save together and end with 143; the next `train()` with the
same `output_dir` resumes there. Under `reprieve run` the callback is not needed, and does no harm.
"""

from transformers import TrainerCallback

import reprieve.transformers


class GracefulShutdownCallback(TrainerCallback):
    """Protects every trainer of this process. A callback does not know its trainer, so it cannot protect only that."""

    def __init__(self) -> None:
        reprieve.transformers.protect_all()
