"""Scripts that know nothing of Reprieve, under `reprieve run`: stopped, resumed, and equal to undisturbed ones."""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from reprieve.testing import run_ranks
from tests.support.jobs.hf_jobs import PRELOAD, deepspeed_config
from tests.support.launch_kit import Lab, until
from tests.support.places import HF_SCRIPTS, HIDE_DEEPSPEED, HIDE_OPTIONAL

SOAK = bool(os.environ.get("REPRIEVE_SOAK"))

COMMANDS = {
    "with_argparse": ["--epochs", "6"],
    "with_trl": [],
    "flat": [],
    "with_hf_argument_parser": [
        "--output_dir", "out", "--max_steps", "150", "--per_device_train_batch_size", "4", "--save_steps", "40",
        "--report_to", "none", "--use_cpu", "True", "--logging_steps", "10", "--dataloader_num_workers", "2",
    ],
}  # fmt: skip


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    lab = Lab(tmp_path)
    lab.env |= {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRAINING_PROGRESS_FILE": str(tmp_path / "progress.json"),
        "PROGRESS_UPDATE_FREQUENCY": "1",
    }
    return lab


def _final(folder: Path) -> dict[str, bytes]:
    """The weights that the script saved at its end."""
    found = {path.name: path.read_bytes() for path in (folder / "out" / "final").glob("*.safetensors")}
    assert found
    return found


LAUNCHERS = {
    "python": [],
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"],
    "deepspeed": ["-m", "deepspeed.launcher.runner", "--num_gpus=2", "--no_local_rank"],
}


SCRIPTS = [
    ("with_argparse", "python"),
    ("with_trl", "python"),
    ("flat", "python"),
    # In test_defects.py, torchrun starts a script that does not know Reprieve either.
    *([("with_hf_argument_parser", "torchrun")] if SOAK else []),
    ("with_hf_argument_parser", "deepspeed"),
]


@pytest.mark.soak
@pytest.mark.parametrize(("script", "launcher"), SCRIPTS)
def test_an_unmodified_script(lab: Lab, script: str, launcher: str) -> None:
    arguments = COMMANDS[script]
    if script == "with_trl":
        lab.env |= HIDE_DEEPSPEED  # and nothing else: it needs datasets and PEFT
    if launcher == "deepspeed":
        lab.env["TESTS_COMPILE_NOTHING"] = "1"
        (lab.folder / "zero.json").write_text(json.dumps(deepspeed_config(2)))
        arguments = [*arguments, "--deepspeed", str(lab.folder / "zero.json")]
        for name in HIDE_OPTIONAL:
            del lab.env[name]
    plain = lab.folder / "undisturbed"
    plain.mkdir()
    _run_undisturbed(script, arguments, plain, 1 if launcher == "python" else 2)
    command = [sys.executable, *LAUNCHERS[launcher], str(HF_SCRIPTS / f"{script}.py"), *arguments]
    launched = lab.start(command)
    until(lambda: _steps(lab) > 20, launched)
    launched.terminate()
    ended = launched.wait()
    assert ended.code == 143, str(ended)
    assert "stopped by SIGTERM: saved at step" in ended.err, str(ended)
    assert not (lab.folder / "out" / "final").exists()
    ended = lab.run(command)
    assert ended.code == 0, str(ended)
    assert _final(lab.folder) == _final(plain)
    assert "reprieve" not in (HF_SCRIPTS / f"{script}.py").read_text()


def _run_undisturbed(script: str, arguments: list[str], folder: Path, ranks: int) -> None:
    """Run the script as `python` and launchers do, in forks of a process that has imported what it needs."""
    alone = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **(alone if ranks == 1 else {})}
    results = run_ranks(
        ranks,
        run_script,
        str(HF_SCRIPTS / f"{script}.py"),
        arguments,
        str(folder),
        backend=None,
        env=environment,
        timeout="180s",
        modules=PRELOAD,
    )
    assert all(result.ok for result in results), "\n\n".join(map(str, results))


def run_script(path: str, arguments: list[str], folder: str) -> None:
    import deepspeed

    deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # as TESTS_COMPILE_NOTHING does
    os.chdir(folder)
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")


def _steps(lab: Lab) -> int:
    path = lab.folder / "progress.json"
    return int(json.loads(path.read_text())["step"]) if path.exists() else 0


def test_a_rerun_after_the_end_goes_on_with_the_script(lab: Lab) -> None:
    """Training is finished; the script was preempted in its last part."""
    command = [sys.executable, str(HF_SCRIPTS / "with_argparse.py"), "--epochs", "1"]
    assert lab.run(command).code == 0
    before = _final(lab.folder)
    for path in (lab.folder / "out" / "final").iterdir():
        path.unlink()
    ended = lab.run(command)
    assert ended.code == 0, str(ended)
    assert _final(lab.folder) == before
    assert os.listdir(lab.folder / "out" / "final")
