"""`reprieve drill`: its predictions match real preemptions."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from tests.support.launch_kit import Lab, until
from tests.support.places import HF_SCRIPTS, HIDE_DEEPSPEED

WIDTH = 400_000
"""About 30 MB of state."""


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def preempted_after(lab: Lab, command: list[str]) -> float:
    """Preempt the job without a time limit and return the seconds until the launcher has exited."""
    launched = lab.start(command, "--grace-period", "10m")
    before = lab.steps()
    until(lambda: lab.steps() >= before + 3, launched)
    stopped_at = time.monotonic()
    launched.terminate()
    assert launched.wait().code == 143
    return time.monotonic() - stopped_at


@pytest.mark.parametrize(("ranks", "slow", "grace", "survives"), [(2, None, 30, True), (1, 5_000_000, 2, False)])
def test_it_foretells_a_preemption(lab: Lab, ranks: int, slow: int | None, grace: int, survives: bool) -> None:
    options = {"steps": 2000, "step_s": 0.05, "width": WIDTH if slow else 16, "slow": slow}
    command = lab.torchrun(ranks, **options) if ranks > 1 else lab.python(**options)
    first = preempted_after(lab, command)  # so that there is a checkpoint to start from
    kept = _files(lab.job / "checkpoints")
    steps = lab.steps()

    output = lab.reprieve("drill", "--grace-period", f"{grace}s", "--json", *command, code=0 if survives else 1)
    report = json.loads(output.out)
    assert report["survives"] is survives and report["ranks"] == ranks
    assert report["equal"] is True, "the state after the start is the one at the stop"
    assert report["step"] > steps, "it went on from a copy of the newest checkpoint"
    parts = report["agreement_s"] + report["save_s"] + report["exit_s"]
    assert parts == pytest.approx(report["needed_s"], abs=0.01)
    assert _files(lab.job / "checkpoints") == kept, "the job's own checkpoints are not touched"
    assert not list(lab.job.glob(".reprieve-drill-*")), "the scratch folder is gone"

    seen = lab.job / "seen-0.jsonl"
    seen.unlink()  # a drill trains, too: what the script writes elsewhere, it writes
    real = preempted_after(lab, command)
    assert report["margin_s"] == pytest.approx(grace - real, rel=0.2), f"the first took {first:.2f} s"
    if not survives:
        assert report["save_s"] > report["agreement_s"] and "faster disk" in " ".join(report["advice"])
        assert "grace period" in " ".join(report["advice"])


def test_the_table(lab: Lab) -> None:
    shown = lab.reprieve("drill", "--grace-period", "60s", "--steps", "2", *lab.python(steps=500, step_s=0.05))
    for words in ("signal → all ranks at one step", "→ durable", "margin", "state equal, bit for bit", "survives"):
        assert words in shown.out, str(shown)
    assert "the job to find the folder of its checkpoints" in shown.err
    assert not (lab.job / "checkpoints").exists()


def test_a_job_that_cannot_be_rehearsed(lab: Lab) -> None:
    output = lab.reprieve("drill", *lab.python(steps=3, safe=False), code=2)
    assert "nothing in this job is protected" in output.err
    output = lab.reprieve("drill", *lab.python(steps=2), code=2)
    assert "before it had trained 3 steps" in output.err
    assert lab.reprieve("drill", "trian", code=127)
    assert "--steps" in lab.reprieve("drill", "--steps", "0", "true", code=2).err


TRL = [sys.executable, str(HF_SCRIPTS / "with_trl.py")]
ON_TWO_RANKS = [
    *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"),
    *(str(HF_SCRIPTS / "with_hf_argument_parser.py"), "--output_dir", "runs/out", "--max_steps", "150"),
    *("--num_samples", "2000"),  # less than an epoch: at its end there is no next batch to compare
    *("--per_device_train_batch_size", "4", "--report_to", "none", "--use_cpu", "True"),
]


@pytest.fixture
def hf_lab(lab: Lab) -> Lab:
    lab.env |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return lab


def test_an_unmodified_script_survives_and_leaves_no_folder(hf_lab: Lab) -> None:
    before = sorted(hf_lab.folder.iterdir())
    command = ["drill", "--grace-period", "60s", "--json", "--checkpoints", "runs/out", *ON_TWO_RANKS]
    report = json.loads(hf_lab.reprieve(*command).out)
    assert report["survives"] is True
    assert report["equal"] is True
    assert {"model", "optimizer", "random numbers", "data position", "data order"} <= set(report["compared"])
    assert report["ranks"] == 2
    assert report["advice"] == []
    assert sorted(hf_lab.folder.iterdir()) == before


def test_what_is_in_the_output_folder_stays_as_it_is(hf_lab: Lab) -> None:
    """TRL overwrites the model card with every save."""
    hf_lab.env |= HIDE_DEEPSPEED  # and nothing else: it needs datasets and PEFT
    out = hf_lab.folder / "out"
    out.mkdir()
    (out / "README.md").write_text("mine")
    before = _files(out)
    report = json.loads(hf_lab.reprieve("drill", "--grace-period", "60s", "--json", *TRL).out)
    assert report["equal"] is True
    assert _files(out) == before
    assert (out / "README.md").read_text() == "mine"


def test_data_in_another_order_is_noticed(hf_lab: Lab) -> None:
    script = hf_lab.folder / "unseeded.py"
    script.write_text(
        "import random, torch\n"
        "from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments\n"
        "torch.manual_seed(0)\n"
        "ids = torch.randint(0, 90, (400, 16))\n"
        "data = [{'input_ids': one, 'labels': one} for one in ids]\n"
        "random.shuffle(data)\n"
        "model = GPT2LMHeadModel(GPT2Config(vocab_size=90, n_positions=16, n_embd=32, n_layer=1, n_head=2))\n"
        "arguments = TrainingArguments('out', max_steps=10_000, report_to=[], use_cpu=True)\n"
        "Trainer(model, arguments, train_dataset=data).train()\n"
    )
    command = ["drill", "--grace-period", "60s", "--checkpoints", "out", sys.executable, str(script)]
    shown = hf_lab.reprieve(*command, code=1)
    assert "the state after the restart is not the one that was saved: data order (rank 0)" in shown.out, str(shown)
    assert "STATE NOT EQUAL" in shown.out
    assert "to change: shuffle and sample the data with a fixed seed" in shown.out
    assert "a grace period of" not in shown.out, "time is not the problem"


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*") if path.is_file() and os.sep + ".reprieve" + os.sep not in str(path)
    }  # fmt: skip
