"""Background saves, and how stock libraries read their checkpoints."""

from __future__ import annotations

import errno
import logging
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from reprieve import Checkpointer, ConfigError, StorageError, StorageFull
from reprieve.checkpoint.buffers import staging
from reprieve.checkpoint.buffers.block_pool import BLOCK_BYTES, RING_BLOCKS
from reprieve.checkpoint.folder.catalog import list_checkpoints
from reprieve.checkpoint.folder.verify import verify
from reprieve.checkpoint.save.background import Background
from reprieve.storage.disk import Disk
from tests.support.helpers import FailingDisk, SlowDisk, assert_same, copied, pool, small_model, train


def warm(root: Path, **options: Any) -> Checkpointer:
    checkpointer = Checkpointer(root, **options)
    checkpointer.warm_up(wait=True)
    return checkpointer


def test_it_holds_the_state_of_the_moment_it_was_asked_for(tmp_path: Path) -> None:
    model, disk = small_model(), SlowDisk()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    log = [1, 2]
    with warm(tmp_path, model=model, optimizer=optimizer, log=log, disk=disk) as checkpointer:
        want = copied(model)
        state = {
            key: {k: v.clone() for k, v in value.items()} for key, value in optimizer.state_dict()["state"].items()
        }
        random_state = torch.get_rng_state()
        save = checkpointer.save(1, background=True)
        assert disk.writing.wait(10)
        assert not save.done
        assert not save.path.exists()
        train(model, optimizer, 3)
        log.append(3)
        disk.go.set()
        path = save.wait()
        assert save.done
        got = load_file(path / "model.safetensors")
        assert all(torch.equal(got[key], value) for key, value in want.items())
        assert_same(torch.load(path / "optimizer.pt", weights_only=True)["state"], state)
        assert torch.load(path / "log.pt", weights_only=True) == [1, 2]
        assert torch.equal(torch.load(path / "rng_state.pth", weights_only=True)["cpu"], random_state)
        verify(path, pool)


class SlowToCreate(SlowDisk):
    """Slow, like a file system during the removal of something large."""

    def write(self, file: Any, data: memoryview, offset: int) -> None:
        Disk.write(self, file, data, offset)

    def create(self, path: Path, size: int) -> Any:
        if path.suffix == ".safetensors":
            assert self.go.wait(60)
        return Disk.create(self, path, size)


def test_training_does_not_wait_for_files_to_be_made(tmp_path: Path) -> None:
    disk = SlowToCreate()
    with warm(tmp_path, model=small_model(), disk=disk) as checkpointer:
        save = checkpointer.save(1, background=True)
        assert not save.done
        disk.go.set()
        save.wait()
    assert [info.step for info in list_checkpoints(tmp_path)] == [1]


def test_a_second_one_waits_its_turn(tmp_path: Path) -> None:
    disk = SlowDisk()
    with warm(tmp_path, model=small_model(), disk=disk, when_busy="wait") as checkpointer:
        first = checkpointer.save(1, background=True)
        disk.go.set()
        second = checkpointer.save(2, background=True)
        assert first.done, "one at a time"
        second.wait()
        assert second.skipped is None
    assert [info.step for info in list_checkpoints(tmp_path)] == [2, 1]


def test_a_second_one_is_left_out_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = SlowDisk()
    with warm(tmp_path, model=small_model(), disk=disk, when_busy="skip") as checkpointer:
        first = checkpointer.save(1, background=True)
        second = checkpointer.save(2, background=True)
        assert second.skipped
        assert "step 2 is skipped" in caplog.text
        disk.go.set()
        first.wait()
        checkpointer.wait()
        assert checkpointer.save(3, background=True).skipped is None
    assert [info.step for info in list_checkpoints(tmp_path)] == [3, 1]


def test_a_blocking_one_is_never_left_out(tmp_path: Path) -> None:
    disk = SlowDisk()
    with warm(tmp_path, model=small_model(), disk=disk, when_busy="skip") as checkpointer:
        checkpointer.save(1, background=True)
        disk.go.set()
        assert checkpointer.save(2).skipped is None
        assert [info.step for info in list_checkpoints(tmp_path)] == [2, 1]


def test_when_busy_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="when_busy"):
        Checkpointer(tmp_path, model=small_model(), when_busy="later")


class FailsInSaves(FailingDisk):
    """Fails once `broken` is set, and only for the data of a save."""

    broken = False

    def flush(self, file: Any) -> None:
        if self.broken and file.path.suffix == ".safetensors":
            raise OSError(self.code, "no", str(file.path))
        Disk.flush(self, file)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("call", ["save", "background", "not due", "wait", "restore", "close"])
def test_an_error_in_the_background_is_raised_at_the_next_call(tmp_path: Path, call: str, code: int) -> None:
    disk = FailsInSaves(code=code)
    checkpointer = warm(tmp_path, model=small_model(), disk=disk)
    checkpointer.save(1)
    disk.broken = True
    save = checkpointer.save(2, background=True)
    with pytest.raises(StorageFull if code == errno.ENOSPC else StorageError, match=str(tmp_path)) as caught:
        save.wait()
    assert isinstance(caught.value.__cause__, OSError)
    disk.broken = False
    calls = {
        "save": lambda: checkpointer.save(3),
        "background": lambda: checkpointer.save(3, background=True),
        "not due": lambda: checkpointer.save_if_due(3),
        "wait": checkpointer.wait,
        "restore": checkpointer.restore,
        "close": checkpointer.close,
    }
    with pytest.raises(StorageError):
        calls[call]()
    assert [path.name for path in tmp_path.iterdir() if "saving" in path.name] == []
    if call != "close":
        checkpointer.save(4)
        checkpointer.close()
    assert list_checkpoints(tmp_path)[-1].problem is None


def test_without_memory_it_writes_through_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state is larger than the ring: what fits into that is staged there."""
    monkeypatch.setattr(staging, "available_bytes", lambda: 1000)
    with Checkpointer(tmp_path, x=torch.zeros(BLOCK_BYTES * RING_BLOCKS, dtype=torch.uint8), keep=1) as checkpointer:
        for step in (1, 2):
            save = checkpointer.save(step, background=True)
            assert save.done
            assert save.path.exists(), "durable on return"
    assert caplog.text.count("no memory for a staging copy") == 1


def test_before_memory_is_ready_it_writes_through(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "reprieve")
    with Checkpointer(tmp_path, model=small_model(), every=1) as checkpointer:
        assert checkpointer.save_if_due(1).path.exists()
        assert "not ready yet" in caplog.text
        assert checkpointer.save_if_due(1) is None


def test_staging_is_reused(tmp_path: Path) -> None:
    with warm(tmp_path, model=small_model()) as checkpointer:
        made = checkpointer._pool.made
        for step in range(1, 6):
            checkpointer.save(step, background=True).wait()
        assert checkpointer._pool.made == made
        assert checkpointer._pool.ready == made


def test_memory_for_files_that_are_not_known_yet(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, model=small_model()) as checkpointer:
        checkpointer.warm_up(more=5 * BLOCK_BYTES, wait=True)
        assert checkpointer._pool.ready > 5


def test_its_memory_is_given_back_when_it_is_closed(tmp_path: Path) -> None:
    """A process may have several checkpointers in turn, each with as much memory as the state takes."""
    model, disk = small_model(), FailingDisk(forever=True)
    with warm(tmp_path, model=model) as checkpointer:
        checkpointer.save(1, background=True)
    assert checkpointer._pool.made == 0
    checkpointer.verify(1)  # it can still be looked at
    with pytest.raises(StorageError), warm(tmp_path, model=model, disk=disk) as checkpointer:
        disk.at = disk.calls
        checkpointer.save(2, background=True).wait()
    assert checkpointer._pool.made == 0


def test_the_last_save_is_not_slowed_down_by_memory_that_is_being_made(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, model=small_model()) as checkpointer:
        checkpointer.warm_up(more=100 * BLOCK_BYTES)
        checkpointer.save(1, time_limit=timedelta(seconds=30))
        made = checkpointer._pool.made
        assert made < 100
        time.sleep(0.2)
        assert checkpointer._pool.made == made


def test_close_finishes_what_runs(tmp_path: Path) -> None:
    with warm(tmp_path, model=small_model()) as checkpointer:
        checkpointer.save(1, background=True)
    verify(tmp_path / "checkpoint-1", pool)


def test_a_background_save_at_the_end_of_a_program_without_close(tmp_path: Path) -> None:
    code = (
        "import sys, torch; from reprieve import Checkpointer\n"
        "checkpointer = Checkpointer(sys.argv[1], x=torch.zeros(50_000_000, dtype=torch.uint8))\n"
        "checkpointer.warm_up(wait=True)\n"
        "checkpointer.save(1, background=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert [info.step for info in list_checkpoints(tmp_path)] == [1]
    verify(tmp_path / "checkpoint-1", pool)


# Stock libraries


def tiny_gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=32, n_positions=16, bos_token_id=0, eos_token_id=0)
    ).eval()


@pytest.fixture
def quiet_transformers() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.usefixtures("quiet_transformers")
@pytest.mark.parametrize("shard_bytes", ["50GB", "1kB"], ids=["one-file", "shards"])
def test_transformers_loads_what_we_saved(tmp_path: Path, shard_bytes: str) -> None:
    from transformers import AutoModel, AutoModelForCausalLM

    model = tiny_gpt2()
    with Checkpointer(tmp_path, model=model, shard_bytes=shard_bytes) as checkpointer:
        path = checkpointer.save(1).path
    ids = torch.arange(8)[None]
    with torch.no_grad():
        loaded = AutoModelForCausalLM.from_pretrained(path)
        assert torch.equal(loaded(ids).logits, model(ids).logits)
        assert loaded.lm_head.weight is loaded.transformer.wte.weight
        base = AutoModel.from_pretrained(path)
        assert torch.equal(base(ids).last_hidden_state, model.transformer(ids).last_hidden_state)


@pytest.mark.usefixtures("quiet_transformers")
def test_a_checkpoint_of_the_stock_trainer_is_resumed(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    model = tiny_gpt2()
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(8)]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, save_steps=2, per_device_train_batch_size=2, use_cpu=True, report_to="none",
        disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
    other = tiny_gpt2()
    stand_in = Trainer(other, arguments, train_dataset=data)
    stand_in.create_optimizer_and_scheduler(2)
    with Checkpointer(
        tmp_path, model=other, optimizer=stand_in.optimizer, scheduler=stand_in.lr_scheduler
    ) as checkpointer:
        assert checkpointer.restore().step == 2
    assert_same(copied(other), copied(model))
    assert_same(stand_in.optimizer.state_dict()["state"], trainer.optimizer.state_dict()["state"])


class FailsWhenLookedAtTwice(Future[None]):
    """A job that ends between two calls of done()."""

    _looks = 0

    def done(self) -> bool:
        self._looks += 1
        if self._looks == 2:
            self.set_exception(OSError(errno.EIO, "the disk"))
        return super().done()


@pytest.mark.parametrize("look", [Background.raise_errors, Background.drain])
def test_an_error_that_comes_while_somebody_looks_is_told_the_next_time(
    look: Callable[[Background], BaseException | None],
) -> None:
    background, job = Background(), FailsWhenLookedAtTwice()
    background._jobs.append(job)
    assert look(background) is None
    assert job.done() or job.done()
    with pytest.raises(OSError, match="the disk"):
        background.wait()


@pytest.mark.parametrize("look", [Background.wait, Background.drain])
def test_of_several_errors_the_first_is_told_and_the_others_are_logged(
    look: Callable[[Background], BaseException | None], caplog: pytest.LogCaptureFixture
) -> None:
    background = Background()

    def fail(what: str) -> None:
        raise OSError(errno.EIO, what)

    for what in ("the first", "the second", "the third"):
        background.submit(partial(fail, what))
    background.join()
    try:
        error = look(background)
    except OSError as raised:
        error = raised
    assert "the first" in str(error)
    assert "the first" not in caplog.text and "the second" in caplog.text and "the third" in caplog.text
    background.wait()


def test_a_plain_torch_program_reads_everything(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    with Checkpointer(tmp_path, model=model, log=[1]) as checkpointer:
        path = checkpointer.save(1, values={"n": 1}).path
    assert sorted(file.name for file in path.iterdir()) == [
        "log.pt", "model.safetensors", "reprieve-manifest.json", "rng_state.pth", "values.pt",
    ]  # fmt: skip
    model.load_state_dict(load_file(path / "model.safetensors"))
    for name in ("log.pt", "rng_state.pth", "values.pt"):
        torch.load(path / name, weights_only=True)
