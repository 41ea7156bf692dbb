"""From a TOML file and `key=value` overrides to a checked configuration; every refusal names the remedy."""

from __future__ import annotations

import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import ValidationError

from steadyrl.axes import Table
from steadyrl.config import RunConfig
from steadyrl.errors import ConfigError
from steadyrl.method import nearest


def load_config(recipe: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML recipe and apply `key=value` overrides with dotted keys.

    Raises:
        ConfigError: with one sentence that names the key and what to write instead.
    """
    return build_config(read_toml(Path(recipe)), overrides)


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a recipe or grid file.

    Raises:
        ConfigError: there is no such file, or it is not TOML.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}; the bundled recipes and grids are in recipes/") from None
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or no possible path
        raise ConfigError(f"the recipe {str(path)!r} cannot be read: {error}") from None
    try:
        return _parse(text, str(path))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def build_config(data: Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """Check recipe tables plus overrides; see `load_config`."""
    try:
        merged = _copy(data)
        for override in overrides:
            _apply_override(merged, override)
        for key in _paths(merged):
            _check_key(key)
        return RunConfig.model_validate(merged)
    except RecursionError:
        raise ConfigError("the recipe has a table nested too deeply: flatten it") from None
    except ValidationError as error:
        raise ConfigError("; ".join(_sentence(item) for item in error.errors())) from None


def with_values(data: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Recipe tables with other values under dotted keys; see `load_config` for what is raised."""
    merged = _copy(data)
    for key, value in values.items():
        _check_key(key)
        _set(merged, key, value)
    return merged


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"{override!r} is not an override: write key=value, for example pipeline.lag=4")
    _check_key(key)
    try:
        value = _parse(f"value = {text}", key)["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    _set(data, key, value)


def _set(data: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    table = data
    for depth, name in enumerate(parents):
        inner: Any = table.get(name, {})
        if table is data and name == "objective" and isinstance(inner, str):  # objective = "sat-gspo"
            inner = {"preset": inner}
        if not isinstance(inner, dict):
            parent = ".".join(parents[: depth + 1])
            raise ConfigError(
                f"{key} cannot be set where {parent} = {inner!r}: {parent} is a table, leave out its value"
            )
        table[name] = inner
        table = inner
    table[last] = value


def _parse(text: str, where: str) -> dict[str, Any]:
    """The tables of a TOML text whose values can also be written out again, in messages and files."""
    try:
        data = tomllib.loads(text)
        repr(data)
    except tomllib.TOMLDecodeError:
        raise
    except (ValueError, RecursionError):
        raise ConfigError(f"{where} has a number too long or a value nested too deeply: shorten it") from None
    return data


def _check_key(key: str) -> None:
    known = set(_known_keys(RunConfig))
    if key not in known and not any(key.startswith(f"{free}.") for free in _free_keys(RunConfig)):
        raise ConfigError(f"unknown key {key!r}{nearest(key, known)}")


def _tables(annotation: Any) -> Iterator[type[Table]]:
    """The recipe tables that an annotation admits, through unions and `Annotated`."""
    if isinstance(annotation, type) and issubclass(annotation, Table):
        yield annotation
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType, Annotated):
        for part in typing.get_args(annotation):
            yield from _tables(part)


def _tags(annotation: Any) -> Iterator[str]:
    """The values that tell the tables of a union apart, such as "sat"; pydantic puts them into locations."""
    for table in _tables(annotation):
        for info in table.model_fields.values():
            if typing.get_origin(info.annotation) is typing.Literal and len(typing.get_args(info.annotation)) == 1:
                yield from typing.get_args(info.annotation)
            yield from _tags(info.annotation)


def _known_keys(model: type[Table], prefix: str = "") -> Iterator[str]:
    for name, info in model.model_fields.items():
        yield prefix + name
        for table in _tables(info.annotation):
            yield from _known_keys(table, f"{prefix}{name}.")


def _free_keys(model: type[Table], prefix: str = "") -> Iterator[str]:
    """Keys whose value is an open table, such as `task.options`."""
    for name, info in model.model_fields.items():
        if typing.get_origin(info.annotation) is dict:
            yield prefix + name
        for table in _tables(info.annotation):
            yield from _free_keys(table, f"{prefix}{name}.")


def _paths(data: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in data.items():
        yield prefix + name
        if isinstance(value, Mapping):
            yield from _paths(value, f"{prefix}{name}.")


def _copy(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _copy(value) if isinstance(value, Mapping) else value for name, value in data.items()}


def _sentence(error: Any) -> str:
    """One pydantic error as `key: what is wrong (got ...)`."""
    tags = set(_tags(RunConfig))  # no parts of a key
    names = [str(part) for part in error["loc"] if part not in tags]
    message = error["msg"].removeprefix("Value error, ")
    if not names:
        return message
    got = "" if isinstance(error["input"], Mapping) else f" (got {error['input']!r})"
    return f"{'.'.join(names)}: {message}{got}" if error["type"] != "value_error" else message
