"""The LoRA fine-tuning job: `reprieve finetune`, or `main` in a script. See docs/finetune.md.

    options → sources (download) → data, columns → model → training (protected) → adapter, merge, summary

`main` reads the command line and the environment, trains, and returns the exit code:

    import sys
    from reprieve.finetune import main
    sys.exit(main())
"""

from __future__ import annotations

from reprieve.finetune.command import main

__all__ = ["main"]
