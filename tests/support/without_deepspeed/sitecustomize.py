"""Hide DeepSpeed from scripts of a test: where it is installed, Accelerate imports it in each process, for 1 s."""

import sys

sys.modules["deepspeed"] = None  # type: ignore[assignment]
