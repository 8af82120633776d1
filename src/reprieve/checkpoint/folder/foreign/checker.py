"""Checks a checkpoint folder that has no Reprieve manifest, before a run resumes from it.

Stock transformers, `torch.save`, safetensors, DCP and DeepSpeed leave no record of what they wrote. Such a folder is
valid only if every file in it can be read and conforms to its format. This module has the rules for the folder;
`file_reader`, `torch_zip` and `dcp` check single files, `deepspeed` knows DeepSpeed's file names. Nothing is unpickled,
not even with weights_only.

The formats hold nothing to detect these with: changed bits in safetensors data, in torch files written with CRCs
switched off and in text files, and JSON that changed into other valid JSON.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from reprieve.checkpoint.folder.foreign import deepspeed
from reprieve.checkpoint.folder.foreign.dcp import Region, check_dcp_metadata, check_distcp
from reprieve.checkpoint.folder.foreign.file_reader import FileReader, check_safetensors, parse_json
from reprieve.checkpoint.folder.foreign.torch_zip import (
    NUMPY_RNG_GLOBALS,
    ZIP_MAGIC,
    check_other_zip,
    check_torch_file,
)
from reprieve.checkpoint.format.manifest import SENTINEL
from reprieve.errors import InvalidCheckpoint
from reprieve.storage.disk import DAMAGE

_TORCH_SUFFIXES = {".pt", ".pth", ".bin", ".ckpt"}
_INDEX_SUFFIXES = (".safetensors.index.json", ".bin.index.json")
_SHARD = re.compile(r"(?P<stem>.+)-\d{5}-of-\d{5}(?P<suffix>\.safetensors|\.bin)")

_DCP_METADATA = re.compile(r"(__\d+)?\.metadata")  # `__0.metadata` when saved without collectives

_MODEL_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "pytorch_model_fsdp.bin",  # accelerate, FULL_STATE_DICT
    "pytorch_model_fsdp_0/.metadata",  # accelerate, SHARDED_STATE_DICT
)
_ADAPTER_FILES = {"adapter_model.safetensors", "adapter_model.bin"}  # PEFT; named adapters lie one folder down
_OPTIMIZER_FILES = ("optimizer.pt", "optimizer.bin", "optimizer_0/.metadata")


def check_foreign(folder: Path, *, progress: Callable[[int], None] | None = None) -> None:
    """Raise InvalidCheckpoint(reason, path=folder) with the first problem. `progress` is called with the bytes read.

    The calls of `progress` add up to the sizes of all files. Checks of names and small files come first.
    """
    try:
        root = folder.resolve(strict=True)
        _Check(root, sorted(_regular_files(root)), progress).run()
    except InvalidCheckpoint as error:
        raise InvalidCheckpoint(error.reason, path=folder) from error.__cause__
    except OSError as error:
        if error.errno not in DAMAGE:
            raise
        raise InvalidCheckpoint(f"cannot be read: {error}", path=folder) from error


class _Check:
    """One pass over one folder. Files are named by their path from its root, with slashes."""

    def __init__(self, root: Path, files: list[str], progress: Callable[[int], None] | None) -> None:
        self.root = root
        self.files = dict.fromkeys(files)
        self.progress = progress
        self.tensors: dict[str, frozenset[str]] = {}
        """The names in the header of each safetensors file."""
        self.regions: dict[str, list[Region]] = {}
        """The items in each `.distcp` file."""

    def run(self) -> None:
        if not self.files:
            raise InvalidCheckpoint("an empty folder")
        for name in self.files:
            if _base(name) == SENTINEL:
                raise InvalidCheckpoint(f"a save that never finished: {name} is still there")
        if "trainer_state.json" in self.files:
            if deepspeed.partition(self.files) is None:
                _check_trainer_files(self.files)
            elif deepspeed.LATEST not in self.files:
                raise InvalidCheckpoint("latest is missing: a DeepSpeed save that never finished")
            else:
                self._open(deepspeed.LATEST, self._check_latest, count=False)
            _check_random_numbers(self.files)
            self._check_trainer_state()
        indexes = {name: self._read_index(name) for name in self.files if name.endswith(_INDEX_SUFFIXES)}
        self._check_shards_have_index()
        self._read_dcp_metadata()
        for name in self.files:
            self._open(name, self._check_file)
        for name, weights in indexes.items():
            for weight, shard in weights.items():
                if shard in self.tensors and weight not in self.tensors[shard]:
                    raise InvalidCheckpoint(f"{name}: {weight!r} should be in {shard} and is not")

    def _open(self, name: str, check: Callable[[str, FileReader], None], *, count: bool = True) -> None:
        try:
            with FileReader(self.root / name, self.progress if count else None) as file:
                check(name, file)
        except InvalidCheckpoint as error:
            raise InvalidCheckpoint(f"{name}: {error.reason}") from error.__cause__
        except OSError as error:
            if error.errno not in DAMAGE:
                raise
            raise InvalidCheckpoint(f"{name} cannot be read: {error.strerror or error}") from error

    def _check_file(self, name: str, file: FileReader) -> None:
        base = _base(name)
        suffix = Path(base).suffix
        if suffix == ".safetensors":
            self.tensors[name] = check_safetensors(file)
        elif suffix == ".json":
            parse_json(file.read(0, file.size))
        elif suffix == ".distcp":
            check_distcp(file, self.regions.get(name, ()))
        elif suffix in _TORCH_SUFFIXES:
            check_torch_file(file, allowed=_allowed_globals(base))
        elif file.read(0, min(4, file.size)) == ZIP_MAGIC:
            check_other_zip(file, self.root / name)
        else:
            file.read_through(0, file.size)

    def _json(self, name: str) -> object:
        values: list[object] = []
        self._open(name, lambda _, file: values.append(parse_json(file.read(0, file.size))), count=False)
        return values[0]

    def _check_trainer_state(self) -> None:
        match self._json("trainer_state.json"):
            case {"global_step": int(step)} if step is not True and step is not False:
                pass
            case _:
                raise InvalidCheckpoint("trainer_state.json: no global_step, or it is not a whole number")
        named = re.fullmatch(r"checkpoint-(\d+)", self.root.name)
        if named and int(named[1]) != step:
            raise InvalidCheckpoint(f"trainer_state.json is from step {step}, the folder's name says {named[1]}")

    def _check_latest(self, name: str, file: FileReader) -> None:
        """Check the folder that `latest` names: DeepSpeed resumes from it."""
        tag = file.read(0, file.size).decode(errors="replace").strip()
        saved = deepspeed.partition(file_name for file_name in self.files if file_name.startswith(f"{tag}/"))
        if saved is None:
            raise InvalidCheckpoint(f"it names {tag!r}, and there is no model in that folder")
        ranks = sum(_is_rng_file(file_name) for file_name in self.files)
        for what, count in (("the optimizer", saved.optimizers), ("the model", saved.models)):
            if count not in (0, ranks):
                raise InvalidCheckpoint(f"{tag} holds {count} parts of {what}, and {ranks} ranks saved it")

    def _read_index(self, name: str) -> dict[str, str]:
        """The file of each weight, all of which are there."""
        match self._json(name):
            case {"weight_map": dict(weights)} if weights:
                pass
            case _:
                raise InvalidCheckpoint(f"{name}: no weight_map")
        shards = {shard: self._beside(name, shard) for shard in dict.fromkeys(map(str, weights.values()))}
        return {weight: shards[str(shard)] for weight, shard in weights.items()}

    def _check_shards_have_index(self) -> None:
        for name in self.files:
            if shard := _SHARD.fullmatch(name):
                index = f"{shard['stem']}{shard['suffix']}.index.json"
                if index not in self.files:
                    raise InvalidCheckpoint(f"{index} is missing, and {name} is one shard of many")

    def _read_dcp_metadata(self) -> None:
        described = set()
        for name in self.files:
            if _DCP_METADATA.fullmatch(_base(name)):
                self._open(name, self._add_regions, count=False)
                described.add(_parent(name))
        for name in self.files:
            if name.endswith(".distcp") and _parent(name) not in described:
                raise InvalidCheckpoint(f"{_parent(name)}.metadata is missing: a DCP save that never finished")

    def _add_regions(self, name: str, file: FileReader) -> None:
        for region in check_dcp_metadata(file):
            self.regions.setdefault(self._beside(name, region.file_name), []).append(region)

    def _beside(self, name: str, other: str) -> str:
        """The file that `name` refers to as `other`."""
        if other.startswith("/") or ".." in other.split("/"):
            raise InvalidCheckpoint(f"{name}: not trusted, it names {other!r}, which is outside the folder")
        if (beside := _parent(name) + other) not in self.files:
            raise InvalidCheckpoint(f"{beside} is missing, and {name} names it")
        return beside


def _regular_files(root: Path) -> Iterator[str]:
    """Every file below root; a link that stays inside counts as one. Raises for anything but files and folders."""
    folders = [root]
    while folders:
        for path in folders.pop().iterdir():
            name = path.relative_to(root).as_posix()
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                target = path.resolve()
                if not target.is_relative_to(root):
                    raise InvalidCheckpoint(f"{name} is a link that leaves the folder: copy the file in its place")
                if target.is_file():
                    yield name
                elif not target.is_dir():  # a folder inside root is visited under its own name
                    raise InvalidCheckpoint(f"{name} is a link to nothing")
            elif stat.S_ISDIR(mode):
                folders.append(path)
            elif stat.S_ISREG(mode):
                yield name
            else:
                raise InvalidCheckpoint(f"{name} is neither a file nor a folder")


def _check_trainer_files(files: Collection[str]) -> None:
    """Check for what transformers.Trainer needs to resume. Without some of it, a Trainer would warn and train on."""
    has_adapter = any(name.count("/") <= 1 and _base(name) in _ADAPTER_FILES for name in files)
    if not has_adapter and not any(name in files for name in _MODEL_FILES):
        raise InvalidCheckpoint("the model is missing (no model.safetensors, shards, adapter or DCP folder)")
    if not any(name in files for name in _OPTIMIZER_FILES):
        raise InvalidCheckpoint("optimizer.pt is missing (saved with save_only_model?)")
    if "scheduler.pt" not in files:
        raise InvalidCheckpoint("scheduler.pt is missing")


def _check_random_numbers(files: Collection[str]) -> None:
    if not any(_is_rng_file(name) for name in files):
        raise InvalidCheckpoint("rng_state.pth is missing")


def _is_rng_file(name: str) -> bool:
    return "/" not in name and Path(name).match("rng_state*.pth")


def _allowed_globals(base: str) -> Collection[str] | None:
    if base == "training_args.bin":
        return None  # never unpickled: a resume uses the arguments of the running script
    if deepspeed.is_states(base):
        return deepspeed.GLOBALS
    return NUMPY_RNG_GLOBALS if Path(base).match("rng_state*.pth") else ()


def _base(name: str) -> str:
    return name.rpartition("/")[2]


def _parent(name: str) -> str:
    """The folder of a file, with the slash; empty for a file in the root."""
    return name[: len(name) - len(_base(name))]
