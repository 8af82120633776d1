"""Checks the structure of a DCP checkpoint: `.metadata` says where each item is in the `.distcp` files beside it.

Each item is a whole `torch.save` archive with its own CRCs. `.metadata` itself has none: a changed bit in it can move
an item, which is detected, or rename one, which is not. Items that went through a transform (compression, encryption)
are read, but not checked.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from reprieve.checkpoint.folder.foreign.file_reader import FileReader
from reprieve.checkpoint.folder.foreign.pickle_scan import scan_pickle
from reprieve.checkpoint.folder.foreign.torch_zip import check_archive
from reprieve.errors import InvalidCheckpoint

METADATA_GLOBALS = re.compile(
    r"torch\.distributed\.checkpoint\.metadata\.(Metadata|MetadataIndex|StorageMeta|TensorProperties"
    r"|(Tensor|Bytes|Chunk)StorageMetadata|_MEM_FORMAT_ENCODING)"
    r"|torch\.distributed\.checkpoint\.filesystem\.(_StorageInfo|_StoragePrefix)"
    r"|torch\.(Size|serialization\._get_layout|bool|(u?int|b?float|complex|qu?int|bits)\d\w*)"
    r"|collections\.OrderedDict|pathlib\.(_local\.)?(Pure)?(Posix|Windows)Path"
)
"""All globals that DCP itself puts into `.metadata`, which its reader unpickles without any check. By full name: a rule
for a whole module would allow `os.system` through the module's own imports."""


@dataclass(frozen=True, slots=True)
class Region:
    """One item of a DCP checkpoint: a torch.save archive inside a `.distcp` file."""

    file_name: str
    offset: int
    length: int
    plain: bool
    """False if a transform (compression, encryption) was applied: the item can be read, but not checked."""


def check_dcp_metadata(file: FileReader) -> list[Region]:
    """The items that `.metadata` lists. DCP writes it last: a save without it never finished."""
    scan = scan_pickle(file.read(0, file.size))
    if not_allowed := sorted(name for name in scan.globals if not METADATA_GLOBALS.fullmatch(name)):
        raise InvalidCheckpoint(f"not trusted: loading it would run {', '.join(not_allowed)}")
    regions = []
    for attributes in scan.regions:
        match attributes:
            case {"relative_path": str(name), "offset": int(offset), "length": int(length)} if min(offset, length) >= 0:
                regions.append(Region(name, offset, length, attributes.get("transform_descriptors") is None))
            case _:
                raise InvalidCheckpoint("damaged: an item without file, offset or length")
    return regions


def check_distcp(file: FileReader, regions: Collection[Region]) -> None:
    """Check one `.distcp` file. Bytes outside of its items (leftovers of older saves) are only read."""
    at = 0
    for region in sorted(regions, key=lambda region: region.offset):
        end = region.offset + region.length
        if end > file.size:
            raise InvalidCheckpoint(f"cut short: {file.size} bytes, an item of .metadata ends at {end}")
        if region.offset < at:
            raise InvalidCheckpoint(f"damaged: two items of .metadata share byte {region.offset}")
        file.read_through(at, region.offset - at)
        if region.plain:
            check_archive(file, region.offset, end, allowed=())
        else:
            file.read_through(region.offset, region.length)
        at = end
    file.read_through(at, file.size - at)
