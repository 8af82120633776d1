"""What the ranks of the fault tests run: a state that follows from the step, so that a mixture of two steps shows."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from reprieve import Checkpointer, RanksError
from reprieve.checkpoint.format.manifest import MANIFEST
from reprieve.storage.disk import OpenFile
from reprieve.testing import FullDisk
from tests.support.jobs import engine_jobs

LIMIT_S = 2.0
"""How much later than the first a rank may come, in these tests."""

_ROOM = 2**40


class Room(FullDisk):
    """A disk with more room than any test needs, until it has none: for files, or only for the manifest."""

    no_manifest = False

    def __init__(self) -> None:
        super().__init__(_ROOM)

    def set(self, full: bool, *, for_manifest: bool = False) -> None:
        self.left_bytes = 5000 if full else _ROOM
        self.no_manifest = for_manifest

    def write_file(self, path: Path, data: bytes, *, flush: bool = True) -> None:
        if self.no_manifest and path.name == MANIFEST:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        super().write_file(path, data, flush=flush)


class Numbers:
    """A model, its optimizer and what is each rank's own. Everything in it follows from the step (and the rank)."""

    def __init__(self, *, spread: bool = False) -> None:
        self.rank = int(os.environ["RANK"])
        self.model = nn.Module()
        # No number of ranks divides 601 rows; with 4 kB each the file is large enough to be split and read together.
        for name, shape in (("large", (601, 1024)), ("odd", (7, 3))):
            tensor = torch.zeros(shape)
            self.model.register_parameter(name, nn.Parameter(_spread(tensor, 0) if spread else tensor))
        self.model.register_buffer("seen", torch.zeros(3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.mine: dict[str, Any] = {}
        self.put(0)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "mine": self.mine}

    def put(self, step: int) -> None:
        """Be as after this step."""
        with torch.no_grad():
            for number, param in enumerate(self.model.parameters()):
                _local(param).copy_(_part_of(param, step + number))
                momentum = self.optimizer.state[param].setdefault("momentum_buffer", torch.zeros_like(param))
                _local(momentum).copy_(_part_of(param, step + 10 + number))
            self.model.seen.copy_(torch.arange(3) + step + 100 * self.rank)
        self.mine.clear()
        self.mine.update(rank=self.rank, step=step)

    def holds(self) -> int | str:
        """The step whose state this is, to the last bit; what is odd where it is none's."""
        step = self.mine.get("step", -1)
        for number, (name, param) in enumerate(self.model.named_parameters()):
            momentum = self.optimizer.state[param]["momentum_buffer"]
            if not torch.equal(_local(param), _part_of(param, step + number)):
                return f"{name} is not of step {step}"
            if not torch.equal(_local(momentum), _part_of(param, step + 10 + number)):
                return f"the momentum of {name} is not of step {step}"
        if not torch.equal(self.model.seen, torch.arange(3.0) + step + 100 * self.rank):
            return f"the buffer is not of step {step} and rank {self.rank}"
        return step if self.mine == {"rank": self.rank, "step": step} else f"{self.mine} is not rank {self.rank}'s"


def _spread(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(tensor, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(dim)])


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()


def _part_of(param: torch.Tensor, start: int) -> torch.Tensor:
    """The numbers from `start` on, in the shape of `param`; of one that is spread over the ranks, our part."""
    whole = torch.arange(param.numel(), dtype=torch.float32).view(param.shape) + start
    if not hasattr(param, "to_local"):
        return whole
    parts = torch.chunk(whole, dist.get_world_size())
    return parts[dist.get_rank()] if dist.get_rank() < len(parts) else whole[:0]


@dataclass(frozen=True)
class Outcome:
    """How a call ended on one rank."""

    value: Any = None
    type: str | None = None
    message: str = ""
    seconds: float = 0.0


def tried(call: Callable[[], Any]) -> Outcome:
    start = time.monotonic()
    try:
        value = call()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return Outcome(None, type(error).__name__, str(error), time.monotonic() - start)
    return Outcome(value, seconds=time.monotonic() - start)


def checkpointer(root: Path, numbers: Numbers, **settings: Any) -> Checkpointer:
    settings = {"rank_timeout": LIMIT_S, "take_over_after": "1s", "keep": None, "name": "r", **settings}
    return Checkpointer(root, **numbers.state, **settings)


def saves(
    root: Path,
    steps: Sequence[int],
    full: Mapping[int, int | str] | None = None,
    *,
    spread: bool = False,
    background: bool = False,
    **settings: Any,
) -> tuple[list[Outcome], Outcome]:
    """Save at each of the steps, come what may, and restore at the end. The ranks are together before each of them, as
    collectives make those of a training.

    `full`: at this step the disk of that rank is full; "commit": rank 0 has no room for the manifest. In the background
    each save is waited for, so that its outcome is its own.
    """
    numbers, disk = Numbers(spread=spread), Room()
    outcomes = []
    with checkpointer(root, numbers, disk=disk, **settings) as saver:
        saver.warm_up(wait=True)

        def one(step: int) -> str | None:
            save = saver.save(step, background=background)
            numbers.put(1000 + step)  # training goes on
            saver.wait()
            return save.skipped

        for step in steps:
            numbers.put(step)
            dist.barrier()
            on = (full or {}).get(step)
            disk.set(on == numbers.rank, for_manifest=on == "commit")
            outcomes.append(tried(lambda step=step: one(step)))
        dist.barrier()
        disk.set(False)
        return outcomes, tried(lambda: _restored(saver, numbers))


def _restored(saver: Checkpointer, numbers: Numbers) -> tuple[int, int | str, list[str]]:
    """The step that was restored, the step whose state is there now, and what was passed over."""
    numbers.put(5000)
    restored = saver.restore()
    assert restored is not None
    return restored.step, numbers.holds(), [f"{one.name}: {one.reason}" for one in restored.passed_over]


def restores(root: Path, times: int, *, spread: bool = False, **settings: Any) -> list[Outcome]:
    """Restore so many times, come what may."""
    numbers = Numbers(spread=spread)
    outcomes = []
    with checkpointer(root, numbers, **settings) as saver:
        for _ in range(times):
            dist.barrier()
            outcomes.append(tried(lambda: _restored(saver, numbers)))
    return outcomes


def restore_dying(root: Path) -> Outcome:
    """Restore, while one of the ranks dies. The others leave as an exception would make them."""
    numbers = Numbers()
    saver = checkpointer(root, numbers)
    outcome = tried(lambda: _restored(saver, numbers))
    saver.__exit__(outcome.type, None, None)
    return outcome


def restore_then_save(root: Path, step: int | None, background: bool = False) -> tuple[Outcome, Outcome | None]:
    """As a job that is started again does; what it restored, and how the save went."""
    numbers = Numbers()
    restored, saved, start = Outcome(), None, 0.0
    try:
        with checkpointer(root, numbers) as saver:
            start = time.monotonic()
            if list(root.glob("checkpoint-*")):
                restored = Outcome(_restored(saver, numbers))
            if step is not None:
                numbers.put(step)
                if background:
                    saver.warm_up(wait=True)
                start = time.monotonic()
                saver.save(step, background=background)
                saver.wait()
                saved = Outcome(seconds=time.monotonic() - start)
    except RanksError as error:
        saved = Outcome(None, type(error).__name__, str(error), time.monotonic() - start)
    return restored, saved


def restore_with_bad_blocks(root: Path, bad: Sequence[tuple[int, int, str, str]]) -> list[Outcome]:
    """Restore once for each (rank, step, file, how) of `bad`: on that rank, the file of that checkpoint is damaged
    ("flipped" bits) or not readable ("EIO"). Nobody else sees it. "stuck": and rank 0 cannot set it aside."""
    from reprieve.checkpoint.folder import commit
    from reprieve.checkpoint.io import reader

    numbers = Numbers()
    really, really_aside = reader.read_into, commit.quarantine
    now = [(-1, -1, "", "")]

    def read_into(file: OpenFile, buffer: memoryview, offset: int) -> int:
        rank, step, name, how = now[0]
        done = really(file, buffer, offset)
        if rank == numbers.rank and file.path.name == name and file.path.parent.name == f"checkpoint-{step}":
            if how == "EIO":
                raise OSError(5, os.strerror(5))
            buffer[done // 2] ^= 1
        return done

    def set_aside(*args: Any) -> Path:
        if now[0][3] == "stuck":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return really_aside(*args)

    reader.read_into, commit.quarantine = read_into, set_aside
    reader.read_from_cache = lambda *_: False  # the medium is asked for every byte
    outcomes = []
    with checkpointer(root, numbers) as saver:
        for one in bad:
            dist.barrier()
            now[0] = one
            outcomes.append(tried(lambda: _restored(saver, numbers)))
    return outcomes


def background_faults(root: Path) -> list[Outcome]:
    """Saves in the background that fail, each followed by the next one, with nothing waited for in between."""
    from reprieve.checkpoint.io.writer import Writer

    numbers, disk = Numbers(), Room()
    really = Writer.stage

    def no_memory(writer: Writer) -> None:
        raise MemoryError("no memory")

    outcomes = []
    with checkpointer(root, numbers, disk=disk) as saver:
        saver.warm_up(wait=True)
        for step in range(1, 11):
            if step == 2:
                saver.wait()
            dist.barrier()
            numbers.put(step)
            disk.set(step in (2, 3) and numbers.rank == 1)  # until the save at step 3 says so
            Writer.stage = no_memory if step == 8 and numbers.rank == 1 else really
            outcomes.append(tried(lambda step=step: saver.save(step, background=True).skipped))
            numbers.put(1000 + step)
            if step == 2:
                # Some ranks know already that it failed when they come to the next save, some do not.
                time.sleep(0.3 * numbers.rank)
        dist.barrier()
        outcomes += [tried(saver.wait), tried(lambda: _restored(saver, numbers))]
    return outcomes


def skips(root: Path) -> list[Outcome]:
    """Saves in the background that may be left out."""
    numbers = Numbers()
    outcomes = []
    with checkpointer(root, numbers, when_busy="skip") as saver:
        saver.warm_up(wait=True)
        for step in (1, 2, 3):
            numbers.put(step)
            dist.barrier()
            if step == 2 and numbers.rank != 0:
                saver.wait()  # not busy any more; rank 0 is
            if step == 3:
                saver.wait()
                dist.barrier()
            outcomes.append(tried(lambda step=step: saver.save(step, background=True).skipped))
        saver.wait()
        outcomes.append(tried(lambda: _restored(saver, numbers)))
    return outcomes


def disagreements(root: Path) -> list[Outcome]:
    """Ranks that are not as they should be, and then are again."""
    numbers = Numbers()
    rank, model, optimizer = numbers.rank, numbers.model, numbers.optimizer
    settings = optimizer.param_groups[0]
    momentum = optimizer.state[model.odd]["momentum_buffer"]

    def save(step: int) -> list[tuple[str, tuple[int, ...]]]:
        return [(one.tensor, one.ranks) for one in saver.save(step).diverged]

    outcomes = []
    with checkpointer(root, numbers) as saver:
        numbers.put(1)
        outcomes.append(tried(lambda: save(1)))
        outcomes.append(tried(lambda: save(3 if rank == 1 else 2)))
        outcomes.append(tried(lambda: save(3 if rank == 1 else 1)))  # rank 0 has that one already
        settings["lr"] = 0.2 if rank == 2 else 0.1
        outcomes.append(tried(lambda: save(4)))
        settings["lr"] = 0.1
        numbers.mine["odd"] = print if rank == 1 else 0
        outcomes.append(tried(lambda: save(4)))
        outcomes.append(tried(lambda: saver.save(4, epoch="first" if rank == 1 else 1)))
        numbers.put(5)
        with torch.no_grad():
            model.large += rank == 2
            momentum[0] += rank == 1
        outcomes.append(tried(lambda: save(5)))
        numbers.put(6)
        outcomes.append(tried(lambda: save(6)))
        outcomes.append(tried(lambda: _restored(saver, numbers)))
    return outcomes


def own_folders(roots: Sequence[Path]) -> None:
    """Each rank with a folder of its own, where there should be one that all share."""
    numbers = Numbers()
    with checkpointer(roots[numbers.rank], numbers):
        pass


def lose_the_folder(root: Path, own: Path) -> list[Outcome]:
    """Rank 1 reaches the folder through a link, which breaks, and is there again."""
    numbers = Numbers()
    here = root if numbers.rank != 1 else own
    outcomes = []
    with checkpointer(here, numbers) as saver:
        for step in (1, 2, 3):
            dist.barrier()
            if numbers.rank == 1 and step == 2:
                own.unlink()
            elif numbers.rank == 1 and step == 3:
                own.symlink_to(root)
            numbers.put(step)
            outcomes.append(tried(lambda step=step: saver.save(step).skipped))
        outcomes.append(tried(lambda: _restored(saver, numbers)))
    return outcomes


def older_attempt(root: Path, signs: Path, in_the_middle: bool) -> tuple[int, list[Outcome]]:
    """Saves, and goes on when a newer attempt has taken over."""
    numbers = Numbers()
    with checkpointer(root, numbers, rank_timeout="20s") as saver:
        numbers.put(1)
        saver.save(1)
        dist.barrier()
        (signs / "older is there").touch()
        if not in_the_middle:
            _wait_for(signs / "newer has saved")
        numbers.put(2)
        return saver.attempt, [tried(lambda: saver.save(2)), tried(lambda: saver.save(4))]


def newer_attempt(root: Path, signs: Path) -> tuple[int, list[Outcome]]:
    numbers = Numbers()
    with checkpointer(root, numbers, rank_timeout="20s") as saver:
        outcomes = [tried(lambda: _restored(saver, numbers))]
        numbers.put(2)
        outcomes.append(tried(lambda: saver.save(2).skipped))
        dist.barrier()
        (signs / "newer has saved").touch()
        _wait_for(signs / "older has ended")
        numbers.put(3)
        outcomes.append(tried(lambda: saver.save(3).skipped))
        outcomes.append(tried(lambda: _restored(saver, numbers)))
        return saver.attempt, outcomes


def _wait_for(sign: Path) -> None:
    while not sign.exists():  # no limit: the test has one
        time.sleep(0.02)


def wait_in_the_middle(signs: Path) -> Callable[[str], None]:
    """For `points.on_reached`: rank 1 has written its part of a second save when a newer attempt takes over."""

    def on_reached(name: str) -> None:
        if name == "publish write" and (signs / "older is there").exists():
            _wait_for(signs / "newer has saved")

    return on_reached


def older_attempt_in_the_middle(root: Path, signs: Path) -> tuple[int, list[Outcome]]:
    from reprieve.ranks import failpoints

    if int(os.environ["RANK"]) == 1:
        failpoints.on_reached = wait_in_the_middle(signs)
    return older_attempt(root, signs, in_the_middle=True)


def norms(root: Path, kind: str, *, restore: bool) -> dict[str, torch.Tensor]:
    """A model with running statistics, saved or restored; its buffers."""
    seed = 7 if restore else 0
    if kind == "fsdp":
        model = engine_jobs.sharded(engine_jobs.Normed, seed)
    else:
        model = engine_jobs.replicated(engine_jobs.Normed, seed, broadcast_buffers=kind == "broadcast")
    optimizer = engine_jobs.adamw(model)
    with engine_jobs.checkpointer(root, model, optimizer) as saver:
        if restore:
            assert saver.restore() is not None
        else:
            engine_jobs.steps(model, optimizer, 2, engine_jobs.data_of(dist.get_rank()))
            saver.save(2)
        return {key.removeprefix("module."): buffer.clone() for key, buffer in model.named_buffers()}


def norms_of_all_kinds(root: Path, *, restore: bool) -> dict[str, dict[str, torch.Tensor]]:
    return {kind: norms(root / kind, kind, restore=restore) for kind in ("broadcast", "each", "fsdp")}


def sharded_by_columns(root: Path) -> None:
    model = nn.Module()
    model.register_parameter("columns", nn.Parameter(_spread(torch.zeros(8, 8), 1)))
    Checkpointer(root, model=model, rank_timeout=LIMIT_S)


def hugging_face(root: Path) -> None:
    """Models of transformers under FSDP2, saved; rank 0 loads them as anybody would."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    size = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": 101}  # fmt: skip
    for kind, config in ((LlamaForCausalLM, LlamaConfig), (Qwen2ForCausalLM, Qwen2Config)):
        for tied in (True, False):
            torch.manual_seed(0)
            model = kind(config(**size, tie_word_embeddings=tied))
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
            optimizer = engine_jobs.adamw(model)
            model(input_ids=torch.arange(12).view(1, 12), labels=torch.arange(12).view(1, 12)).loss.backward()
            optimizer.step()
            assert all(isinstance(param, DTensor) for param in model.parameters())
            folder = root / f"{kind.__name__}-{tied}"
            with engine_jobs.checkpointer(folder, model, optimizer) as saver:
                saver.save(1)
            saved = engine_jobs.whole(model.state_dict())
            if dist.get_rank() == 0:
                loaded = AutoModelForCausalLM.from_pretrained(folder / "checkpoint-1")
                assert type(loaded) is kind
                assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
                state = loaded.state_dict()
                assert list(state) == list(saved)
                assert all(torch.equal(state[key], saved[key]) for key in saved)
