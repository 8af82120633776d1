"""The function that a user passes to `TransformersTrainer`: checked, and as source that runs elsewhere.

A pod knows nothing of the notebook: what the function uses, it imports or gets as an argument. What cannot work there
is refused here, where the user sees it.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import inspect
import linecache
import logging
import symtable
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from reprieve.errors import ConfigError
from reprieve.sdk.request import ANNOTATIONS_AS_TEXT

log = logging.getLogger("reprieve")

_PLAIN = (type(None), bool, int, float, str, bytes)
_COLLECTIONS = (list, tuple, set)
_FUNCTION = "_reprieve_function"
_OF_NOTEBOOKS = {
    "get_ipython": "get_ipython (a ! or % command of a notebook: call subprocess.run)",
    "display": "display",
}
"""What IPython adds to Python's own names."""


@dataclass(frozen=True, slots=True)
class TrainingFunction:
    """A function and its arguments."""

    original: Callable[..., Any]
    source: str
    arguments: str
    """As a Python expression; empty: there are none."""

    @classmethod
    def of(cls, func: Any, arguments: Mapping[str, Any] | None) -> TrainingFunction:
        """ConfigError: it cannot run in a pod."""
        known = getattr(func, _FUNCTION, None)
        if known is not None:
            return cls(known.original, known.source, _expression_of(known.original, arguments))
        if not inspect.isfunction(func):
            raise ConfigError(f"func={func!r} is not a function: define one with def, and pass it")
        if func.__name__ == "<lambda>":
            raise ConfigError("func is a lambda, which has no source of its own: define a function with def")
        if inspect.iscoroutinefunction(func) or inspect.isgeneratorfunction(func):
            raise ConfigError(f"func={func.__name__} is async or a generator, and a call of it runs nothing: use def")
        source = _source_of(func)
        found = cls(func, source, _expression_of(func, arguments))
        if outside := _names_from_outside(source, found.has_text_annotations):
            log.warning(
                "func=%s uses names that are defined outside of it, and that pods do not have: %s. Import them in the "
                "function, or pass them in func_args",
                func.__name__,
                ", ".join(_OF_NOTEBOOKS.get(name, name) for name in outside),
            )
        return found

    @property
    def name(self) -> str:
        return self.original.__name__

    @property
    def has_text_annotations(self) -> bool:
        """Whether it comes from a module with `from __future__ import annotations`: they may name anything then."""
        code = inspect.unwrap(self.original).__code__
        return bool(code.co_flags & __future__.annotations.compiler_flag)

    def with_source(self, source_text: Callable[[], str]) -> Callable[..., Any]:
        """Return a function that does the same when it is called, and has another source.

        The Kubeflow SDK submits what `inspect.getsource` returns. `source_text` is called whenever somebody reads it,
        and may raise what should end the submission.
        """
        original = self.original

        def call(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs)

        file = f"reprieve-{uuid.uuid4().hex}/{self.name}.py"
        call.__code__ = call.__code__.replace(co_filename=file, co_name=self.name, co_firstlineno=1)
        call.__name__, call.__qualname__, call.__doc__ = self.name, self.name, original.__doc__
        setattr(call, _FUNCTION, self)
        linecache.cache[file] = (0, None, _Lines(source_text), file)  # type: ignore[assignment]
        return call


class _Lines(Sequence[str]):
    """The lines of a text that is made anew whenever they are read: `linecache` keeps the first text of a file."""

    def __init__(self, text: Callable[[], str]) -> None:
        self._text = text

    def __len__(self) -> int:
        return len(self._text().splitlines())

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self._text().splitlines(keepends=True)[index]


def _source_of(func: Callable[..., Any]) -> str:
    name = func.__name__
    function = inspect.unwrap(func)
    if local := [each for each in function.__code__.co_freevars if each != name]:
        raise ConfigError(
            f"func={name} uses variables of the function around it, which pods do not have: {', '.join(local)}. Pass "
            "them in func_args"
        )
    try:
        source = inspect.getsource(func)
    except (OSError, TypeError) as error:
        raise ConfigError(
            f"the source of func={name} cannot be read ({error}): define it in a file or in a cell of a notebook"
        ) from error
    indented = source[:1].isspace()
    try:
        [defined] = ast.parse(f"if True:\n{source}" if indented else source).body
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"the source of func={name} is not a function on its own: {error}") from error
    if indented and isinstance(defined, ast.If):
        [defined] = defined.body
    if not isinstance(defined, ast.FunctionDef) or defined.name != name:
        raise ConfigError(f"the source of func={name} does not define a function of that name with def: pass another")
    return source


def _names_from_outside(source: str, has_text_annotations: bool) -> list[str]:
    """Return the names in the source, decorators and defaults included, that neither it nor Python defines."""
    header = ANNOTATIONS_AS_TEXT if has_text_annotations else ""
    text = f"{header}if True:\n{source}" if source[:1].isspace() else f"{header}{source}"
    tables, used, defined = [symtable.symtable(text, "func", "exec")], set(), set(dir(builtins)) - _OF_NOTEBOOKS.keys()
    for table in tables:
        tables += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_global() and symbol.is_assigned():
                defined.add(symbol.get_name())
            elif symbol.is_global() and symbol.is_referenced():
                used.add(symbol.get_name())
    return sorted(name for name in used - defined if not name.startswith("__"))


def _expression_of(func: Callable[..., Any], arguments: Mapping[str, Any] | None) -> str:
    if arguments is not None and not isinstance(arguments, Mapping):
        raise ConfigError(f"func_args={arguments!r}: write a dictionary of arguments by name")
    values = dict(arguments or {})
    try:
        for name, value in values.items():
            _check_plain(value, f"func_args[{name!r}]")
    except RecursionError:
        raise ConfigError("func_args has a list or dictionary that contains itself: pass plain data") from None
    try:
        inspect.signature(func).bind(**values)
    except TypeError as error:
        raise ConfigError(f"func={func.__name__} cannot be called with func_args={values}: {error}") from None
    return repr(values) if values else ""


def _check_plain(value: object, where: str) -> None:
    """Raise ConfigError for what has no text from which Python makes an equal value."""
    if type(value) in _PLAIN:
        return
    if type(value) is dict:
        for key, each in value.items():
            _check_plain(key, f"a key of {where}")
            _check_plain(each, f"{where}[{key!r}]")
    elif type(value) in _COLLECTIONS:
        for index, each in enumerate(value):  # type: ignore[arg-type]
            _check_plain(each, f"{where}[{index}]")
    else:
        raise ConfigError(
            f"{where} is a {type(value).__qualname__}, which cannot travel to a pod: pass int(…), float(…) or str(…) "
            "of it, a list or a dictionary, and make the object in the function"
        )
