"""A configuration file: options of a command line in TOML, and the way back from a command line to such a file.

An option counts from the command line; else from its variable of the environment; else from the file; else it has its default.
"""

import json
import os
import tomllib
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer

from fastps.errors import UsageError
from fastps.job.options import NodePolicy

SCRIPT = "script"  # the name that the arguments have: a script and what it gets
ORDER = "the command line counts before the environment, the environment before the file, and the file before the defaults"
_NOT_IN_A_FILE = ("config", "print_config", "help")
_OF_NODES = {each.name: each.variable for each in NodePolicy.options().values()}  # which several nodes alone read
_WORDS = {"COMMANDLINE": "command line", "ENVIRONMENT": "environment", "DEFAULT_MAP": "file"}


def read(context: typer.Context, file: Path | None) -> Path | None:
    """Let a file's values be the defaults of a command's options. Raises UsageError that names the file and the key."""
    if file is None:
        return None
    try:
        given = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"--config {file}: expected options in TOML, such as workers = 4, found: {error}") from None
    known = _names(context)
    for key, value in given.items():
        name = key.replace("-", "_")
        if name not in known:
            near = get_close_matches(name, known, 1)
            raise UsageError(
                f"--config {file}: expected the name of an option, found {key!r}{f'; the nearest is {near[0]}' if near else ''}"
            )
        _check(known[name], f"--config {file}: {key}", value)
    values = {known[key.replace("-", "_")].name: value for key, value in given.items()}
    if isinstance(script := given.get(SCRIPT), str):
        values["arguments"] = [script]
    context.default_map = {**(context.default_map or {}), **values}
    return file


def _names(context: typer.Context) -> dict[str, Any]:
    """The parameters that a file may give, by name."""
    found: dict[str, Any] = {}
    for each in context.command.params:
        flags = [flag.lstrip("-") for flag in each.opts if flag.startswith("--")]
        name = SCRIPT if each.param_type_name == "argument" else flags[0].replace("-", "_")
        if name not in _NOT_IN_A_FILE:
            found[name] = each
    return found


def _check(parameter: Any, shown: str, value: Any) -> None:
    """Raise UsageError for a value of the wrong kind. The option's own type reads texts and numbers."""
    if parameter.param_type_name == "argument":
        is_right, kind = (
            isinstance(value, str | list) and all(isinstance(each, str) for each in value),
            "a text, or a list of texts",
        )
    elif parameter.is_flag:
        is_right, kind = isinstance(value, bool), "true or false"
    else:
        is_right, kind = isinstance(value, str | int | float) and not isinstance(value, bool), "a text or a number"
    if not is_right:
        raise UsageError(f"{shown}: expected {kind}, found {value!r:.60}")


def lines(context: typer.Context) -> Iterator[str]:
    """The command's options as a configuration file: those that were given, with where from, and the others as comments."""
    yield f"# fastps {context.command.name}: {ORDER}"
    for name, parameter in _names(context).items():
        source = context.get_parameter_source(parameter.name)
        word = _WORDS.get(source.name) if source is not None else None
        value, variable = context.params.get(parameter.name), _OF_NODES.get(name, parameter.envvar)
        if name in _OF_NODES and word != _WORDS["COMMANDLINE"] and os.environ.get(variable):
            word, value = _WORDS["ENVIRONMENT"], os.environ[variable]
        text = _toml(value)
        if word is not None:
            yield f"{name} = {text}  # {word}{f' ({variable})' if word == _WORDS['ENVIRONMENT'] else ''}"
        elif text not in ('""', "[]"):
            yield f"# {name} = {text}"


def _toml(value: Any) -> str:
    """A value in TOML, whose texts, numbers and lists are those of JSON.

    >>> _toml(["train.py", "a b"]), _toml(True), _toml(None), _toml(0.5)
    ('["train.py", "a b"]', 'true', '""', '0.5')
    """
    if value is None:
        return '""'
    return json.dumps(list(value) if isinstance(value, list | tuple) else value, default=str, ensure_ascii=False)
