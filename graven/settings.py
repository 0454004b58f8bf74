"""Settings from TOML into frozen dataclasses: a key that nobody asked for, or a value of another type, is an error that names it."""

import dataclasses
import tomllib
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from graven.errors import SpecError

T = TypeVar("T")


def read_toml(path: Path) -> dict[str, Any]:
    """The table of a TOML file.

    Raises:
        SpecError: It is missing, not UTF-8, or not TOML.
    """
    try:
        return tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}. Give the path of a spec file.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} is no TOML file: {error}. Mend that line.") from error


def build(cls: type[T], table: object, *, where: str) -> T:
    """A dataclass from a table, dataclasses inside it included.

    Args:
        cls: The dataclass.
        table: What stands in the file.
        where: What to call it in an error.
    Raises:
        SpecError: A key is unknown or missing, a value has another type, or the dataclass itself refused.
    """
    if not isinstance(table, dict):
        raise SpecError(f"`{where}` is {table!r}; a table was expected. Write its keys under [{where}].")
    fields = {field.name: field for field in dataclasses.fields(typing.cast("Any", cls))}
    if unknown := sorted(set(table) - set(fields)):
        raise SpecError(f"`{where}` has the unknown key `{unknown[0]}`; it knows {', '.join(sorted(fields))}.")
    missing = [n for n, f in fields.items() if n not in table and f.default is f.default_factory is dataclasses.MISSING]
    if missing:
        raise SpecError(f"`{where}` lacks the key `{missing[0]}`; add it.")
    hints = typing.get_type_hints(cls)
    return cls(**{name: convert(hints[name], value, where=f"{where}.{name}") for name, value in table.items()})


def convert(hint: Any, value: object, *, where: str) -> Any:
    """One value as its annotation wants it; of a union of dataclasses the one whose `kind` the table names, or the first."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and types.NoneType in arguments:
            return None
        kinds = [kind for kind in arguments if kind is not types.NoneType]
        return convert(_one_of(kinds, value, where=where), value, where=where)
    if origin is typing.Literal:
        if value in arguments:
            return value
        raise SpecError(f"`{where}` is {value!r}; it must be one of {', '.join(map(repr, arguments))}.")
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise SpecError(f"`{where}` is {value!r}; a list was expected.")
        kinds = [arguments[0]] * len(value) if arguments[-1] is ... else list(arguments)
        if len(value) != len(kinds):
            raise SpecError(f"`{where}` has {len(value)} entries; {len(kinds)} were expected.")
        return tuple(convert(kind, item, where=f"{where}[{i}]") for i, (kind, item) in enumerate(zip(kinds, value, strict=True)))
    if dataclasses.is_dataclass(hint):
        return build(typing.cast("type[Any]", hint), value, where=where)
    if hint is float and type(value) is int:
        try:
            return float(value)
        except OverflowError as error:
            raise SpecError(f"`{where}` has {len(str(value))} digits, and no float is that large; give a smaller number.") from error
    if type(value) is not hint:
        wanted = getattr(hint, "__name__", str(hint))
        raise SpecError(f"`{where}` is {value!r}; a value of type {wanted} was expected.")
    return value


def _one_of(kinds: list[Any], value: object, *, where: str) -> Any:
    """The member of a union that a value is for: the first, unless the table names the `kind` of another."""
    if not isinstance(value, dict) or "kind" not in value or len(kinds) == 1:
        return kinds[0]
    by_name = {getattr(kind, "kind", None): kind for kind in kinds}  # the default of the field, which is its only value
    if value["kind"] not in by_name:
        raise SpecError(f"`{where}.kind` is {value['kind']!r}; it must be one of {', '.join(repr(name) for name in by_name if name)}.")
    return by_name[value["kind"]]


def table_of(value: object) -> dict[str, Any]:
    """A dataclass as a table that JSON can hold and `build` takes back."""
    return dataclasses.asdict(typing.cast("Any", value))
