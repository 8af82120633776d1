"""Checkpoints without a manifest: real ones from transformers, torch and DCP pass; all detectable damage is found."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from reprieve.checkpoint.folder.foreign import check_foreign, unsafe_globals
from reprieve.errors import InvalidCheckpoint

FLIPS = 300


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Checkpoints as their own libraries write them. Tests change copies, never these."""
    root = tmp_path_factory.mktemp("stock")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("HF_HUB_OFFLINE", "1")
        from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

        torch.manual_seed(0)
        config = GPT2Config(
            n_layer=1, n_head=2, n_embd=8, vocab_size=32, n_positions=16, bos_token_id=0, eos_token_id=0
        )
        model = GPT2LMHeadModel(config)
        data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(8)]
        arguments = TrainingArguments(
            str(root / "trainer"), max_steps=2, save_steps=1, per_device_train_batch_size=2, use_cpu=True,
            report_to="none", disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=data)
        trainer.train()
        model.save_pretrained(root / "sharded", max_shard_size="2KB")
        state = {"model": model.state_dict(), "optimizer": trainer.optimizer.state_dict(), "epoch": 3}
        (root / "plain").mkdir()
        torch.save(state, root / "plain" / "state.pt")
        del state["optimizer"]
        dcp.save(state, storage_writer=dcp.FileSystemWriter(root / "dcp", thread_count=2))
        # One item for two threads: the second file stays empty, and that is no damage.
        dcp.save({"a": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(root / "dcp-small", thread_count=2))
    return SimpleNamespace(
        trainer=root / "trainer" / "checkpoint-2",
        earlier=root / "trainer" / "checkpoint-1",
        sharded=root / "sharded",
        plain=root / "plain",
        dcp=root / "dcp",
        dcp_small=root / "dcp-small",
    )


@pytest.fixture
def copy(stock: SimpleNamespace, tmp_path: Path) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        original = getattr(stock, name)
        return Path(shutil.copytree(original, tmp_path / original.name))

    return make


def reason(folder: Path) -> str:
    with pytest.raises(InvalidCheckpoint) as caught:
        check_foreign(folder)
    assert caught.value.path == folder
    return caught.value.reason


def found(folder: Path) -> bool:
    try:
        check_foreign(folder)
    except InvalidCheckpoint:
        return True
    return False


def flipped(path: Path, bits: list[int]) -> Iterator[int]:
    """Flips one bit after the other; each is restored before the next."""
    with path.open("r+b", buffering=0) as file:
        for bit in bits:
            byte = os.pread(file.fileno(), 1, bit // 8)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 1 << bit % 8]), bit // 8)
            yield bit
            os.pwrite(file.fileno(), bytes([byte]), bit // 8)


def bits_of(ranges: list[tuple[int, int]]) -> list[int]:
    return [bit for begin, end in ranges for bit in range(8 * begin, 8 * end)]


def alone(path: Path, tmp_path: Path) -> Path:
    """A copy of one file in a folder of its own."""
    (tmp_path / "alone").mkdir()
    return Path(shutil.copy(path, tmp_path / "alone"))


# What its own library wrote is accepted


@pytest.mark.parametrize("name", ["trainer", "earlier", "sharded", "plain", "dcp", "dcp_small"])
def test_stock_checkpoint_is_accepted_and_read_as_a_whole(stock: SimpleNamespace, name: str) -> None:
    folder = getattr(stock, name)
    calls: list[int] = []
    check_foreign(folder, progress=calls.append)
    assert sum(calls) == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_fixtures_are_what_they_should_be(stock: SimpleNamespace) -> None:
    assert {path.name for path in stock.trainer.iterdir()} >= {
        "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "trainer_state.json",
    }  # fmt: skip
    assert len(list(stock.sharded.glob("model-*.safetensors"))) > 1
    assert len(list(stock.dcp.glob("*.distcp"))) == 2
    assert (stock.dcp_small / "__0_1.distcp").stat().st_size == 0


def test_every_kind_of_tensor_is_accepted(tmp_path: Path) -> None:
    names = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128 float8_e4m3fn"
    state = {name: torch.zeros(2, 3, dtype=getattr(torch, name)) for name in (*names.split(), "uint16", "uint64")}
    shared = torch.arange(20)
    extras = {"view": shared[3:7], "tied": shared, "empty": torch.empty(0), "scalar": torch.tensor(1.0)}
    big = {"numbers": list(range(3000)), "text": "x" * 300, "bytes": b"abc", "set": {1, 2}, "long": 2**80, "none": None}
    torch.save(state | extras | big, tmp_path / "state.pt")
    torch.save(state, tmp_path / "no_suffix")
    savable = {name: value for name, value in (state | extras).items() if name not in ("tied", "complex128")}
    save_file({name: value.clone() for name, value in savable.items()}, tmp_path / "model.safetensors")
    save_file({}, tmp_path / "nothing.safetensors")
    np.savez_compressed(tmp_path / "arrays.npz", a=np.ones(3))
    (tmp_path / "notes.txt").write_text("anything")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "nan.json").write_text('{"loss": NaN}')
    check_foreign(tmp_path)


def test_link_inside_the_folder_is_accepted(copy: Callable[[str], Path]) -> None:
    folder = copy("trainer")
    (folder / "blobs").mkdir()
    (folder / "model.safetensors").rename(folder / "blobs" / "0")
    (folder / "model.safetensors").symlink_to("blobs/0")
    (folder / "loop").symlink_to(".", target_is_directory=True)
    check_foreign(folder)


def test_archive_without_any_crc_is_accepted_and_one_with_some_is_not(tmp_path: Path) -> None:
    state = {"a": torch.arange(10), "b": torch.ones(3)}
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, tmp_path / "state.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    check_foreign(tmp_path)
    with torch.serialization.skip_data():
        torch.save(state, tmp_path / "state.pt")
    assert "perhaps never filled in" in reason(tmp_path)


# Damage: truncation


@pytest.mark.parametrize("name", ["trainer", "sharded", "plain", "dcp"])
def test_truncation_of_every_file_is_found(copy: Callable[[str], Path], name: str) -> None:
    folder = copy(name)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        whole = path.read_bytes()
        size = len(whole)
        for length in {0, 1, 4, 8, 22, 98, size // 3, size // 2, size - 22, size - 2, size - 1}:
            if 0 <= length < size:
                cut = whole[:length]
                if path.suffix == ".json" and cut.rstrip() == whole.rstrip():
                    continue  # only the last newline is gone
                path.write_bytes(cut)
                assert found(folder), f"{path.name} cut to {length} of {size} bytes"
        path.write_bytes(whole + b"\n")
        assert found(folder) or path.suffix in (".json", ".distcp"), f"{path.name} with a byte too many"
        path.write_bytes(whole)
    check_foreign(folder)


# Damage: single bits


def zip_bits(path: Path) -> tuple[list[int], list[int]]:
    """The bits of a torch.save file that decide what is read, and all others."""
    size = path.stat().st_size
    decisive: list[tuple[int, int]] = []
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        at = archive.start_dir
        for info in archive.infolist():
            file.seek(info.header_offset + 26)
            name_length, extra_length = struct.unpack("<2H", file.read(4))
            data = info.header_offset + 30 + name_length + extra_length
            decisive += [
                (info.header_offset, info.header_offset + 4),  # magic
                (info.header_offset + 8, info.header_offset + 10),  # method
                (info.header_offset + 14, info.header_offset + 30 + name_length),  # CRC, sizes, lengths, name
                (data, data + info.file_size + (16 if info.flag_bits & 8 else 0)),  # data, CRC and sizes again
                (at, at + 4),
                (at + 8, at + 9),  # flags, without the one that says that the name is UTF-8
                (at + 10, at + 12),  # method
                (at + 16, at + 36),  # CRC, sizes, lengths, disk
                (at + 42, at + 46 + name_length),  # offset, name
            ]
            at += 46 + len(info.filename) + len(info.extra)
    decisive += [(at, at + 12), (at + 16, size)]  # the end records, without two version numbers
    wanted = set(bits_of(decisive))
    return sorted(wanted), sorted(set(range(8 * size)) - wanted)


def equal(left: object, right: object) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return isinstance(right, dict) and left.keys() == right.keys() and all(equal(left[k], right[k]) for k in left)
    if isinstance(left, list):
        return isinstance(right, list) and len(left) == len(right) and all(map(equal, left, right))
    return left == right


def test_every_bit_of_a_torch_file_that_matters_is_covered(stock: SimpleNamespace, tmp_path: Path) -> None:
    path = alone(stock.trainer / "optimizer.pt", tmp_path)
    decisive, others = zip_bits(path)
    chosen = random.Random(0).sample(decisive, FLIPS)
    assert [bit for bit in flipped(path, chosen) if not found(path.parent)] == []
    whole = torch.load(path, weights_only=True)
    unseen = 0
    for bit in flipped(path, random.Random(1).sample(others, 100)):
        if not found(path.parent):
            unseen += 1
            assert equal(torch.load(path, weights_only=True), whole), f"bit {bit} changes what is read"
    assert unseen
    check_foreign(path.parent)


def test_every_bit_of_the_end_of_a_torch_file_is_covered(tmp_path: Path) -> None:
    """The directory and the end records, exhaustively."""
    path = tmp_path / "x.pt"
    torch.save(torch.arange(4), path)
    with zipfile.ZipFile(path) as archive:
        directory = archive.start_dir
    decisive, _ = zip_bits(path)
    chosen = [bit for bit in decisive if bit >= 8 * directory]
    assert [bit for bit in flipped(path, chosen) if not found(tmp_path)] == []


def test_bits_of_distcp_items_are_covered(stock: SimpleNamespace, tmp_path: Path) -> None:
    """DCP's items are archives one after the other: their data has CRCs."""
    folder = Path(shutil.copytree(stock.dcp_small, tmp_path / "dcp"))
    path = folder / "__0_0.distcp"
    decisive, _ = zip_bits(path)
    chosen = random.Random(0).sample(decisive, FLIPS)
    assert [bit for bit in flipped(path, chosen) if not found(folder)] == []


def header_of(path: Path) -> dict[str, object]:
    data = path.read_bytes()
    return json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])


def test_bits_of_a_safetensors_header_are_covered_but_for_names(stock: SimpleNamespace, tmp_path: Path) -> None:
    path = alone(stock.trainer / "model.safetensors", tmp_path)
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    whole = header_of(path)
    metadata = whole.pop("__metadata__")
    length_bits, header_bits = bits_of([(0, 8)]), bits_of([(8, 8 + length)])
    unseen = 0
    for bit in flipped(path, length_bits + random.Random(0).sample(header_bits, 3 * FLIPS)):
        if not found(path.parent):
            unseen += 1
            changed = header_of(path)
            other_text = changed.pop("__metadata__") != metadata
            # Types, shapes and places are all as before: a tensor has another name, or a text another letter.
            assert list(changed.values()) == list(whole.values()), f"bit {bit}"
            assert other_text or len(changed.keys() - whole.keys()) == 1, f"bit {bit}"
    assert unseen


def test_renamed_tensor_of_a_sharded_model_is_found_through_the_index(copy: Callable[[str], Path]) -> None:
    folder = copy("sharded")
    shard = next(path for path in folder.glob("model-*.safetensors") if b"ln_f.bias" in path.read_bytes())
    shard.write_bytes(shard.read_bytes().replace(b"ln_f.bias", b"ln_f.biat"))
    assert "'transformer.ln_f.bias' should be in" in reason(folder)


def test_data_bits_of_safetensors_cannot_be_seen(stock: SimpleNamespace, tmp_path: Path) -> None:
    """A known limit: the format has no checksum."""
    path = alone(stock.trainer / "model.safetensors", tmp_path)
    for _ in flipped(path, [8 * path.stat().st_size - 1]):
        check_foreign(path.parent)


# Damage: structure


def write_safetensors(folder: Path, header: object, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(begin: int, end: int, shape: list[object] | None = None, dtype: str = "U8") -> dict[str, object]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (b"[]", "not a JSON object"),
        (b"{", "not JSON"),
        (b'{"a": ' + b"[" * 100_000, "not JSON"),
        (b'{"a": 1, "a": 1}', "twice"),
        ({"a": 1}, "lacks dtype"),
        ({"a": {"dtype": "U8", "shape": [8]}}, "lacks dtype"),
        ({"a": entry(0, 4), "b": entry(5, 8)}, "starts at 5"),
        ({"a": entry(0, 5), "b": entry(4, 8)}, "starts at 4"),
        ({"a": entry(1, 8)}, "starts at 1"),
        ({"a": entry(0, 7)}, "overlong"),
        ({"a": entry(0, 9)}, "cut short"),
        ({"a": entry(8, 0, [8])}, "does not fill"),
        ({"a": entry(0, 8, [4])}, "does not fill"),
        ({"a": entry(0, 8, [-8])}, "whole numbers"),
        ({"a": entry(0, 8, [8.0])}, "whole numbers"),
        ({"a": entry(0, 8, [True, 8])}, "whole numbers"),
        ({"a": entry(0, 8, [2], "F33")}, "'F33'"),
        ({"a": entry(0, 8), "__metadata__": {"x": 1}}, "__metadata__"),
    ],
)
def test_wrong_safetensors_header_is_found(tmp_path: Path, header: object, expected: str) -> None:
    write_safetensors(tmp_path, header, bytes(8))
    assert expected in reason(tmp_path)


def rewritten(path: Path, change: Callable[[str, bytes], tuple[str, bytes] | None]) -> None:
    """The archive again, with other records and right CRCs."""
    with zipfile.ZipFile(path) as archive:
        records = [(name, archive.read(name)) for name in archive.namelist()]
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w") as archive:
        warnings.simplefilter("ignore", UserWarning)  # duplicate names are the point of one test
        for name, data in records:
            if (kept := change(name, data)) is not None:
                archive.writestr(*kept)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda name, data: (name, data), None),
        (lambda name, data: None if name.endswith("data/0") else (name, data), "'data/0', which is missing"),
        (lambda name, data: (name, data[:-1] if name.endswith("data/0") else data), "80 bytes of record 'data/0'"),
        (lambda name, data: None if name.endswith("version") else (name, data), "no record 'version'"),
        (lambda name, data: None if name.endswith("data.pkl") else (name, data), "no record 'data.pkl'"),
        (lambda name, data: (name.replace("x/byteorder", "y/byteorder"), data), "2 top folders"),
        (lambda name, data: (name.replace("byteorder", "constants.pkl"), data), "TorchScript"),
        (lambda name, data: (name.replace("byteorder", "data.pkl"), data), "twice"),
        (lambda name, data: (name.replace("byteorder", "DATA.pkl"), data), "twice"),
        (lambda name, data: (name, data[:-1] if name.endswith("data.pkl") else data), "damaged pickle"),
        (lambda name, data: (name, data + b"." if name.endswith("data.pkl") else data), "damaged pickle"),
    ],
)
def test_archive_with_right_crcs_and_wrong_records_is_found(
    tmp_path: Path, change: Callable[[str, bytes], tuple[str, bytes] | None], expected: str | None
) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.arange(10), "b": torch.ones(3)}, path)
    rewritten(path, change)
    if expected is None:
        check_foreign(tmp_path)
    else:
        assert expected in reason(tmp_path)


def test_compressed_archive_and_leading_bytes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save(torch.zeros(1000), path)
    whole = path.read_bytes()
    with zipfile.ZipFile(io.BytesIO(whole)) as archive, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as squeezed:
        for name in archive.namelist():
            squeezed.writestr(name, archive.read(name))
    assert "compressed" in reason(tmp_path)
    path.write_bytes(b"PK\x03\x04" + whole)  # zipfile would step over them
    zipfile.ZipFile(path).close()
    assert "does not fit" in reason(tmp_path) or "points elsewhere" in reason(tmp_path)


def test_comment_at_the_end_is_accepted_with_its_exact_length(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save(torch.ones(3), path)
    whole = path.read_bytes()
    comment = b"written by hand"
    path.write_bytes(whole[:-2] + struct.pack("<H", len(comment)) + comment)
    check_foreign(tmp_path)
    for length in (len(comment) - 1, len(comment) + 1):
        path.write_bytes(whole[:-2] + struct.pack("<H", length) + comment)
        assert "not at its end" in reason(tmp_path)


def test_old_format_is_refused_with_the_way_out(tmp_path: Path) -> None:
    torch.save(torch.ones(3), tmp_path / "model.bin", _use_new_zipfile_serialization=False)
    assert "torch.save(torch.load(PATH, weights_only=True), PATH)" in reason(tmp_path)


def test_other_zip_with_wrong_crc_is_found(tmp_path: Path) -> None:
    np.savez(tmp_path / "arrays.npz", a=np.ones(30))
    data = bytearray((tmp_path / "arrays.npz").read_bytes())
    data[200] ^= 1
    (tmp_path / "arrays.npz").write_bytes(data)
    assert "CRC-32 of record 'a.npy'" in reason(tmp_path)


# Missing things


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.safetensors", "the model is missing"),
        ("optimizer.pt", "optimizer.pt is missing (saved with save_only_model?)"),
        ("scheduler.pt", "scheduler.pt is missing"),
        ("rng_state.pth", "rng_state.pth is missing"),
    ],
)
def test_file_missing_from_a_trainer_checkpoint_is_found(copy: Callable[[str], Path], name: str, expected: str) -> None:
    folder = copy("trainer")
    (folder / name).unlink()
    assert expected in reason(folder)


def test_other_forms_of_model_and_optimizer_count(copy: Callable[[str], Path], stock: SimpleNamespace) -> None:
    folder = copy("trainer")
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    check_foreign(folder)
    (folder / "adapter_model.safetensors").unlink()
    shutil.copytree(stock.dcp, folder / "pytorch_model_fsdp_0")
    (folder / "optimizer.pt").unlink()
    shutil.copytree(stock.dcp, folder / "optimizer_0")
    check_foreign(folder)
    (folder / "optimizer_0" / ".metadata").unlink()
    assert "optimizer.pt is missing" in reason(folder)


def test_missing_shard_and_missing_index_are_found(copy: Callable[[str], Path]) -> None:
    folder = copy("sharded")
    shard = next(folder.glob("model-00001-of-*.safetensors"))
    moved = shard.rename(folder.parent / "elsewhere")
    assert f"{shard.name} is missing" in reason(folder)
    moved.rename(shard)
    (folder / "model.safetensors.index.json").unlink()
    assert "model.safetensors.index.json is missing" in reason(folder)


def test_missing_parts_of_a_dcp_checkpoint_are_found(copy: Callable[[str], Path]) -> None:
    folder = copy("dcp")
    whole = (folder / "__0_1.distcp").read_bytes()
    (folder / "__0_1.distcp").write_bytes(whole[:-1])
    assert f"__0_1.distcp: cut short: {len(whole) - 1} bytes, an item of .metadata ends at {len(whole)}" in reason(
        folder
    )
    (folder / "__0_1.distcp").rename(folder.parent / "elsewhere")
    assert "__0_1.distcp is missing" in reason(folder)
    (folder / ".metadata").unlink()
    assert ".metadata is missing: a DCP save that never finished" in reason(folder)


def test_wrong_step_is_found(copy: Callable[[str], Path]) -> None:
    folder = copy("trainer")
    check_foreign(folder.rename(folder.with_name("best")))
    renamed = folder.with_name("best").rename(folder.with_name("checkpoint-7"))
    assert "from step 2, the folder's name says 7" in reason(renamed)
    for step in ("null", "true", '"2"', "2.0"):
        (renamed / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
        assert "no global_step" in reason(renamed)


def test_unfinished_empty_and_absent_folders_are_refused(copy: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy("trainer")
    (folder / "checkpoint-is-incomplete.txt").touch()
    assert reason(folder).startswith("a save that never finished")
    (tmp_path / "empty" / "inner").mkdir(parents=True)
    assert reason(tmp_path / "empty") == "an empty folder"
    assert "cannot be read" in reason(tmp_path / "absent")
    (tmp_path / "file").touch()
    assert "cannot be read" in reason(tmp_path / "file")


def test_read_error_is_a_failure(copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy("trainer")

    def bad_block(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", bad_block)
    assert "cannot be read: Input/output error" in reason(folder)


# Hostile things


class Hostile:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize(
    "name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "rng_state_1.pth", "extra.ckpt", "plain"]
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_hostile_pickle_is_refused_and_never_runs(
    copy: Callable[[str], Path], tmp_path: Path, name: str, protocol: int
) -> None:
    folder = copy("trainer")
    marker = tmp_path / "marker"
    torch.save({"state": Hostile(marker), "a": torch.ones(2)}, folder / name, pickle_protocol=protocol)
    text = reason(folder)
    assert text.startswith(f"{name}: ")
    assert ("posix.system" if protocol == 2 else "would refuse it") in text
    if protocol == 2:
        assert unsafe_globals(folder / name) == ["posix.system"]
    assert not marker.exists()


def test_training_args_are_never_unpickled(copy: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy("trainer")
    marker = tmp_path / "marker"
    torch.save(Hostile(marker), folder / "training_args.bin")
    check_foreign(folder)
    assert not marker.exists()


def test_numpy_types_are_for_the_rng_file_only(stock: SimpleNamespace, copy: Callable[[str], Path]) -> None:
    assert "numpy.ndarray" in unsafe_globals(stock.trainer / "rng_state.pth")
    assert unsafe_globals(stock.trainer / "optimizer.pt") == []
    folder = copy("trainer")
    shutil.copy(folder / "rng_state.pth", folder / "scheduler.pt")
    assert "numpy.ndarray" in reason(folder)


def test_hostile_dcp_is_refused_and_never_runs(copy: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy("dcp")
    marker = tmp_path / "marker"
    whole = (folder / ".metadata").read_bytes()
    for protocol in (0, 2, 4):
        (folder / ".metadata").write_bytes(pickle.dumps(Hostile(marker), protocol))
        assert "posix.system" in reason(folder)
    # Reached through names that are themselves harmless.
    for module, name in (("torch.distributed.checkpoint.filesystem", "os.system"), ("torch", "Size.__new__")):
        names = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name))
        (folder / ".metadata").write_bytes(b"\x80\x04" + names + b"\x93\x8c\x04true\x85R.")
        assert f"would run {module}.{name}" in reason(folder)
    (folder / ".metadata").write_bytes(whole.replace(b"__0_0.distcp", b"../_0.distcp"))
    assert "outside the folder" in reason(folder)
    blob = io.BytesIO()
    torch.save(Hostile(marker), blob)
    size = len(blob.getvalue())
    small = copy("dcp_small")
    described = (small / ".metadata").read_bytes()
    before = (small / "__0_0.distcp").stat().st_size
    (small / ".metadata").write_bytes(
        described.replace(b"M" + struct.pack("<H", before), b"M" + struct.pack("<H", size))
    )
    (small / "__0_0.distcp").write_bytes(blob.getvalue())
    assert "posix.system" in reason(small)
    assert not marker.exists()


@pytest.mark.parametrize("outside", ["../../secret.safetensors", "/etc/passwd", "sub/../../secret.safetensors"])
def test_index_that_leaves_the_folder_is_refused(copy: Callable[[str], Path], outside: str) -> None:
    folder = copy("sharded")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"][next(iter(index["weight_map"]))] = outside
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "outside the folder" in reason(folder)


@pytest.mark.parametrize("index", ["{}", "[]", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_useless_index_is_refused(copy: Callable[[str], Path], index: str) -> None:
    folder = copy("sharded")
    (folder / "model.safetensors.index.json").write_text(index)
    assert "model.safetensors.index.json" in reason(folder)


def test_links_that_leave_and_special_files_are_refused(copy: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy("trainer")
    (tmp_path / "outside.txt").write_text("x")
    for target in (tmp_path / "outside.txt", tmp_path, Path("/absent"), Path("../outside.txt")):
        (folder / "link").symlink_to(target)
        assert reason(folder).startswith("link is a link that leaves the folder")
        (folder / "link").unlink()
    (folder / "link").symlink_to("absent")
    assert reason(folder) == "link is a link to nothing"
    (folder / "link").unlink()
    os.mkfifo(folder / "pipe")
    assert reason(folder) == "pipe is neither a file nor a folder"
