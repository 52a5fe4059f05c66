"""``everyframe config show``: every configured option and setting, with where it was set.

`everyframe.planning.config_files` reads environment and files; ``docs/how-to/config.md`` explains
their order.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from everyframe.cli.options import command, flag, request_flag, run_flag
from everyframe.cli.streams import print_message
from everyframe.cli.table_layout import table
from everyframe.cli.tables import console, json_line, one_line
from everyframe.core.errors import ExitCode
from everyframe.core.options import facts_of
from everyframe.core.request import Request
from everyframe.planning import config_files
from everyframe.planning.config_files import SETTINGS, ConfigFile, Default

_HELP = """Show what configuration sets: each option and setting, its value, and its source.

A flag goes before an EVERYFRAME_ variable, that before the project's everyframe.toml or
pyproject.toml, and that before your own everyframe.toml.
"""


def show(*, model: str | None = None, everything: bool = False, json: bool = False) -> int:
    """Print the configuration for a model, by default the configured one; the exit code."""
    user, project = config_files.read_user_file(), config_files.read_project_file()
    options = config_files.default_options(model)
    if everything:
        options = {**_built_in(), **options}
    settings = _settings(user)
    if json:
        print(json_line({
            "type": "config",
            "files": {"project": _path(project), "user": _path(user)},
            "options": {name: _plain(each) for name, each in options.items()},
            "settings": {name: _plain(each) for name, each in settings.items()},
            "unknown_variables": list(config_files.unknown_variables()),
        }))  # fmt: skip
        return int(ExitCode.DONE)
    out = console(sys.stdout)
    out.print(f"project's file: {_file_line(project, None)}")
    out.print(f"user's file: {_file_line(user, config_files.user_file())}")
    rows = table(*((name, "left") for name in ("name", "value", "set by")), wraps="value")
    for name, default in {**options, **{f"settings.{n}": d for n, d in settings.items()}}.items():
        source = default.source
        for label, file in (("project's file", project), ("user's file", user)):
            if file is not None and source.startswith(str(file.path)):
                source = f"{label}{source.removeprefix(str(file.path))}"
        rows.add_row(name, one_line(_text(default.value)), one_line(source))
    out.print(rows if rows.row_count else "nothing is set; every option has its built-in default")
    for line in config_files.unknown_variables():
        print_message(f"note: {line}")
    return int(ExitCode.DONE)


@contextmanager
def applied_settings() -> Iterator[None]:
    """Context: settings of the user's file are in the environment, where it has none of its own.

    What the package reads there, and the processes that it starts, follow them.
    """
    user = config_files.read_user_file()
    settings = {} if user is None else user.settings
    added = {SETTINGS[name]: value for name, value in settings.items()}
    added = {name: value for name, value in added.items() if not os.environ.get(name)}
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _settings(user: ConfigFile | None) -> dict[str, Default]:
    """Settings of environment and file. The environment has the file's where it had none."""
    of_file = {} if user is None else user.settings
    found = {}
    for name, variable in SETTINGS.items():
        value = os.environ.get(variable)
        if user is not None and name in of_file and value in (None, "", of_file[name]):
            found[name] = Default(of_file[name], f"{user.path} [settings]")
        elif value:
            found[name] = Default(value, variable)
    return found


def _built_in() -> dict[str, Default]:
    return {
        name: Default(field.default, "built in" if field.default is not None else "by the model")
        for name, field in Request.model_fields.items()
        if not facts_of(Request, name)["python_only"]
    }


def _path(file: ConfigFile | None) -> str | None:
    return None if file is None else str(file.path)


def _file_line(file: ConfigFile | None, wanted: Path | None) -> str:
    if file is not None:
        return one_line(str(file.path))
    return "none" if wanted is None else f"none; it would be {one_line(str(wanted))}"


def _plain(default: Default) -> dict[str, Any]:
    value = default.value
    is_plain = value is None or isinstance(value, (bool, int, float, str, dict))
    return {"value": value if is_plain else _text(value), "source": default.source}


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{name}={each}" for name, each in value.items())
    return "" if value is None else str(value)


SHOW = command(
    show,
    (
        request_flag("model"),
        flag("everything", bool, "Show options that nothing sets as well.", alias="--all"),
        run_flag("json"),
        run_flag("log_level"),
    ),
    _HELP,
)
