"""A model of the least that POSIX promises after a crash: what was not flushed may survive or not, in any mixture.

Real file systems promise more (ext4's journal commits a whole folder's changes, or none, and one file's fsync often
takes others along), so a real disk hides a missing flush that another one makes up for. This model shows it: a
file's bytes are safe only after a flush of that file, an entry of a folder only after a flush of that folder.

    log = []                          Recording(log) is a Disk that notes each verb while doing it
    for state in crash_states(log):   states of the tree, as {path: bytes}, each with the marks before the crash
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reprieve.storage.disk import Disk, OpenFile

Op = tuple[Any, ...]


class Recording(Disk):
    """A real disk that records every call."""

    def __init__(self, log: list[Op]) -> None:
        self.log = log

    def make_folder(self, path: Path) -> None:
        super().make_folder(path)
        self.log.append(("make_folder", path))

    def create(self, path: Path, size: int) -> OpenFile:
        file = super().create(path, size)
        self.log.append(("create", path))
        return file

    def write(self, file: OpenFile, data: memoryview, offset: int) -> None:
        super().write(file, data, offset)
        self.log.append(("write", file.path, bytes(data), offset))

    def truncate(self, file: OpenFile, size: int) -> None:
        super().truncate(file, size)
        self.log.append(("truncate", file.path, size))

    def flush(self, file: OpenFile) -> None:
        super().flush(file)
        self.log.append(("flush", file.path))

    def flush_folder(self, path: Path) -> None:
        super().flush_folder(path)
        self.log.append(("flush_folder", path))

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.log.append(("rename", source, target))

    def exchange(self, first: Path, second: Path) -> bool:
        done = super().exchange(first, second)
        if done:
            self.log.append(("exchange", first, second))
        return done

    def remove(self, path: Path) -> None:
        super().remove(path)
        self.log.append(("remove", path))

    def remove_folder(self, path: Path) -> None:
        super().remove_folder(path)
        self.log.append(("remove", path))

    def mark(self, text: str) -> None:
        self.log.append(("mark", text))


@dataclass(eq=False)
class _Node:
    """A file (with `data`) or a folder (with `entries`), as it is on the medium, and what is not on it yet."""

    folder: bool
    data: bytes = b""
    entries: dict[str, _Node] = field(default_factory=dict)
    pending: list[_Change] = field(default_factory=list)


@dataclass(eq=False)
class _Change:
    """One thing that may or may not survive; `nodes` are those whose flush would make it safe."""

    number: int
    apply: Callable[[], None]
    nodes: list[_Node]


class _Model:
    """The tree as running programs see it (`live`), and as it is on the medium."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.root = _Node(folder=True)
        self.live: dict[Path, _Node] = {top: self.root}
        self.count = 0

    def do(self, op: Op) -> None:
        getattr(self, f"_{op[0]}")(*op[1:])

    def _change(self, apply: Callable[[], None], *nodes: _Node) -> None:
        self.count += 1
        change = _Change(self.count, apply, list(dict.fromkeys(nodes)))
        for node in change.nodes:
            node.pending.append(change)

    def _add(self, path: Path, node: _Node) -> None:
        parent = self.live[path.parent]
        self.live[path] = node
        self._change(lambda: parent.entries.__setitem__(path.name, node), parent)

    def _make_folder(self, path: Path) -> None:
        self._add(path, _Node(folder=True))

    def _create(self, path: Path) -> None:
        self._add(path, _Node(folder=False))

    def _write(self, path: Path, data: bytes, offset: int) -> None:
        node = self.live[path]

        def apply() -> None:
            old = node.data.ljust(offset, b"\0")
            node.data = old[:offset] + data + old[offset + len(data) :]

        self._change(apply, node)

    def _truncate(self, path: Path, size: int) -> None:
        node = self.live[path]
        self._change(lambda: setattr(node, "data", node.data[:size].ljust(size, b"\0")), node)

    def _rename(self, source: Path, target: Path) -> None:
        old, new = self.live[source.parent], self.live[target.parent]
        for path in [path for path in self.live if path == source or source in path.parents]:
            self.live[target / path.relative_to(source)] = self.live.pop(path)
        node = self.live[target]

        def apply() -> None:  # one step: under the one name or under the other
            if old.entries.get(source.name) is node:
                del old.entries[source.name]
            new.entries[target.name] = node

        self._change(apply, old, new)

    def _exchange(self, first: Path, second: Path) -> None:
        assert first.parent == second.parent
        folder = self.live[first.parent]
        moved = {path: self.live.pop(path) for path in list(self.live) if {first, second} & {path, *path.parents}}
        for path, node in moved.items():
            old, new = (first, second) if first in (path, *path.parents) else (second, first)
            self.live[new / path.relative_to(old)] = node
        names = {first.name: self.live[first], second.name: self.live[second]}
        self._change(lambda: folder.entries.update(names), folder)  # one step

    def _remove(self, path: Path) -> None:
        parent, node = self.live[path.parent], self.live.pop(path)

        def apply() -> None:
            if parent.entries.get(path.name) is node:
                del parent.entries[path.name]

        self._change(apply, parent)

    def _flush(self, path: Path) -> None:
        node = self.live[path]
        for change in list(node.pending):
            self._settle(node, change)

    _flush_folder = _flush

    @staticmethod
    def _settle(node: _Node, change: _Change) -> None:
        node.pending.remove(change)
        change.nodes.remove(node)
        if not change.nodes:
            change.apply()

    def crash(self, survives: Callable[[_Node], bool]) -> dict[str, bytes | None]:
        """The tree that is found after a crash, by relative path; folders are None."""
        changes = {change for node in self._nodes() for change in node.pending}
        for change in sorted(changes, key=lambda change: change.number):
            if survives(change.nodes[0]):
                change.apply()
        found: dict[str, bytes | None] = {}
        _collect(self.root, "", found)
        return found

    def _nodes(self) -> Iterator[_Node]:
        seen: set[_Node] = set()
        todo = [self.root, *self.live.values()]
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                yield node
                todo += node.entries.values()


def _collect(node: _Node, at: str, found: dict[str, bytes | None]) -> None:
    for name, child in node.entries.items():
        path = f"{at}{name}"
        found[path] = None if child.folder else child.data
        _collect(child, f"{path}/", found)


def crash_states(
    log: list[Op], top: Path, *, seed: int = 0, after: int = 0, random_states: int = 2
) -> Iterator[tuple[list[str], dict[str, bytes | None]]]:
    """For a crash after each operation from `after` on: nothing, everything, only names, only bytes, and mixtures.

    Most of these states are equal; each is given once for the same marks.
    """
    rng = random.Random(seed)
    given: set[tuple[tuple[str, ...], frozenset[tuple[str, bytes | None]]]] = set()
    choices: list[Callable[[_Node], bool]] = [
        lambda node: False,
        lambda node: True,
        lambda node: node.folder,
        lambda node: not node.folder,
        *[lambda node: rng.random() < 0.5] * random_states,
    ]
    for point in range(after, len(log) + 1):
        if point and log[point - 1][0] in ("write", "truncate"):
            continue  # nothing is promised here that is not promised one operation earlier
        for survives in choices:
            model = _Model(top)
            marks = []
            for op in log[:point]:
                if op[0] == "mark":
                    marks.append(op[1])
                else:
                    model.do(op)
            state = model.crash(survives)
            key = tuple(marks), frozenset(state.items())
            if key not in given:
                given.add(key)
                yield marks, state


def build(found: dict[str, bytes | None], into: Path) -> None:
    """Put a crashed tree on a real disk."""
    into.mkdir(parents=True)
    for path, data in found.items():
        if data is None:
            (into / path).mkdir()
        else:
            (into / path).write_bytes(data)
