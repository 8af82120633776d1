"""Reads a pickle without unpickling it: which globals it names, which storages it refers to.

A pickle is a program. This module only walks through it, opcode by opcode, with a stack of plain strings, numbers and
tuples, on which one opaque object stands for everything that the program could build. It imports and calls nothing.
"""

from __future__ import annotations

import pickletools
import struct
from dataclasses import dataclass, field

from reprieve.errors import InvalidCheckpoint


class _Opaque:
    """Stands for any object that the pickle would build."""


_OPAQUE = _Opaque()
_MARK = _Opaque()


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function that the pickle names, as `module.name`."""

    name: str


@dataclass(slots=True)
class PickleScan:
    """What a pickle refers to."""

    globals: set[str] = field(default_factory=set)

    persistent_ids: list[object] = field(default_factory=list)
    """Tuples of strings, numbers and `Global`s; for torch `("storage", Global, key, location, count)`."""

    regions: list[dict[str, object]] = field(default_factory=list)
    """Attributes of objects that have a `relative_path`: in DCP's metadata, the place of each item."""


def scan_pickle(data: bytes) -> PickleScan:
    """Scan one pickle; InvalidCheckpoint if the bytes are not one whole pickle."""
    try:
        return _Walker().walk(data)
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, struct.error) as error:
        raise InvalidCheckpoint(f"damaged pickle ({type(error).__name__}: {error})") from error


class _Walker:
    """A pickle machine whose stack holds plain values and opaque stand-ins."""

    def __init__(self) -> None:
        self.scan = PickleScan()
        self.stack: list[object] = []
        self.memo: dict[object, object] = {}

    def walk(self, data: bytes) -> PickleScan:
        last = 0
        for opcode, argument, position in pickletools.genops(data):
            self.step(opcode, argument)
            last = position or 0
        if last + 1 != len(data):
            raise ValueError(f"{len(data) - last - 1} bytes after its end")
        return self.scan

    def step(self, opcode: pickletools.OpcodeInfo, argument: object) -> None:
        stack = self.stack
        match opcode.name:
            case "MARK":
                stack.append(_MARK)
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = stack[-1]
            case "MEMOIZE":
                self.memo[len(self.memo)] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(self.memo[argument])
            case "NONE":
                stack.append(None)
            case "DUP":
                stack.append(stack[-1])
            case "TUPLE":
                stack.append(tuple(self.pop_to_mark()))
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(reversed([stack.pop() for _ in opcode.stack_before])))
            case "GLOBAL":
                stack.append(self.name_global(*str(argument).split(" ", 1)))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                stack.append(self.name_global(module, name))
            case "INST":
                self.pop_to_mark()
                self.name_global(*str(argument).split(" ", 1))
                stack.append(_OPAQUE)
            case "EXT1" | "EXT2" | "EXT4":
                stack.append(self.name_global("copyreg extension", str(argument)))
            case "PERSID":
                self.scan.persistent_ids.append(argument)
                stack.append(_OPAQUE)
            case "BINPERSID":
                self.scan.persistent_ids.append(stack.pop())
                stack.append(_OPAQUE)
            case "SETITEMS":
                items = self.pop_to_mark()
                if "relative_path" in items[::2]:
                    pairs = zip(items[::2], items[1::2], strict=True)
                    self.scan.regions.append({key: value for key, value in pairs if isinstance(key, str)})
            case _:
                self.apply(opcode, argument)

    def name_global(self, module: object, name: object) -> Global:
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError("a global with a computed name")
        self.scan.globals.add(f"{module}.{name}")
        return Global(f"{module}.{name}")

    def pop_to_mark(self) -> list[object]:
        at = len(self.stack) - 1
        while at >= 0 and self.stack[at] is not _MARK:
            at -= 1
        if at < 0:
            raise IndexError("no mark on the stack")
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items

    def apply(self, opcode: pickletools.OpcodeInfo, argument: object) -> None:
        """Any other opcode: pop and push as many values as pickletools documents for it."""
        before = opcode.stack_before
        if pickletools.markobject in before:
            self.pop_to_mark()
            before = before[: before.index(pickletools.markobject)]
        for _ in before:
            self.stack.pop()
        is_plain_value = argument is not None and not opcode.stack_before
        self.stack += [argument if is_plain_value else _OPAQUE for _ in opcode.stack_after]
