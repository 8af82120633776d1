"""Fine-tunes a language model with LoRA: `reprieve finetune` as a script, for torchrun and `kubectl cp`.

    torchrun --nproc_per_node=2 model_train_lora.py --model_name … --dataset_path … --output_dir output

It saves when it is stopped, and resumes when it is started again with the same --output_dir. `--help` lists the
options; each can also be set by a variable.
"""

import sys

from reprieve.finetune import main

if __name__ == "__main__":
    sys.exit(main())
