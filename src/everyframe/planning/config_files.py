"""Default options from configuration: environment, project file, user file. Imports no torch.

Precedence: flag, environment variable, project file, user file. A project file is untrusted: it
sets no option of the machine, and names only known models and files in its own folder. See
``docs/how-to/config.md``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from everyframe.checkpoints.locate import is_listed
from everyframe.core.errors import InputError, did_you_mean
from everyframe.core.lora import Lora
from everyframe.core.option_values import REPEATED, replaced_by
from everyframe.core.options import Options, facts_of, flag_of, shown
from everyframe.core.paths import config_folder, expand_path
from everyframe.core.request import Request
from everyframe.families.registry import all_options

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Name of both files.
FILE = "everyframe.toml"
#: Environment variable of the user's file; ``off`` reads no file at all.
VARIABLE = "EVERYFRAME_CONFIG"
PREFIX = "EVERYFRAME_"
_MOST_BYTES = 1 << 20

#: Setting of the user's file -> its environment variable. These are no options of a video.
SETTINGS = {
    "log": "EVERYFRAME_LOG",
    "runs": "EVERYFRAME_RUNS",
    "run_days": "EVERYFRAME_RUN_DAYS",
    "cache": "EVERYFRAME_CACHE",
    "lora_folder": "EVERYFRAME_LORAS",
}
#: Settings that are folders; a relative one begins at the file.
_FOLDERS = ("runs", "cache", "lora_folder")

#: Variables that are no defaults of options.
OTHER_VARIABLES = (
    VARIABLE, "EVERYFRAME_DISABLE", "EVERYFRAME_WITHOUT", "EVERYFRAME_IN_PROCESS",
    "EVERYFRAME_API_KEYS", "EVERYFRAME_HOST", "EVERYFRAME_PORT", "EVERYFRAME_MODELS",
    "EVERYFRAME_SERVER_DIR", "EVERYFRAME_COMFYUI",
)  # fmt: skip


@dataclass(frozen=True)
class Default:
    """A value, and where it was set: a variable's name or a file with the key."""

    value: Any
    source: str
    is_of_project: bool = False


@dataclass(frozen=True)
class ConfigFile:
    """One configuration file, checked as a whole.

    Attributes:
        path: the file.
        is_own: whether it is the user's rather than a project's.
        options: options of every model, by name.
        models: a model's name -> options for that model alone.
        settings: values of `SETTINGS` as text, by name.
    """

    path: Path
    is_own: bool
    options: Mapping[str, Any]
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)

    def layers(self, model: str) -> Iterator[dict[str, Default]]:
        """Defaults for that model, those of its own table first."""
        for name, options in self.models.items():
            if name.casefold() == model.casefold():
                yield self._defaults_of(options, f"{self.path} [models.{name}]")
        yield self.common()

    def common(self) -> dict[str, Default]:
        """Defaults for every model."""
        return self._defaults_of(self.options, str(self.path))

    def _defaults_of(self, options: Mapping[str, Any], source: str) -> dict[str, Default]:
        return {name: Default(each, source, not self.is_own) for name, each in options.items()}


def user_file() -> Path | None:
    """Path of the user's file, there or not; None if `VARIABLE` switches files off.

    Raises:
        InputError: `VARIABLE` names a file that is not there.
    """
    own = os.environ.get(VARIABLE)
    if own == "off":
        return None
    if own:
        path = expand_path(own, VARIABLE)
        if not path.is_file():
            raise InputError(f"{VARIABLE} names {path}, where there is no file")
        return path
    return config_folder() / FILE


def read_user_file() -> ConfigFile | None:
    """The user's file; None if there is none.

    Raises:
        InputError: it can't be read, or holds something that is no option.
    """
    path = user_file()
    return None if path is None or not path.is_file() else _parse(path, _read(path), is_own=True)


def read_project_file() -> ConfigFile | None:
    """The file of the project that contains the current folder.

    It is ``everyframe.toml``, or ``pyproject.toml`` with a table ``[tool.everyframe]``, in the
    folder or, within a git repository, in the nearest folder above it.

    Raises:
        InputError: as `read_user_file`.
    """
    if os.environ.get(VARIABLE) == "off":
        return None
    for place in _folders(Path.cwd()):
        path = place / FILE
        if path.is_file() and not _is_users(path):
            return _parse(path, _read(path), is_own=False)
        path = place / "pyproject.toml"
        if path.is_file():
            tool = _read(path).get("tool")
            table = tool.get("everyframe") if isinstance(tool, dict) else None
            if table is not None:
                return _parse(path, table, is_own=False)
    return None


def _is_users(path: Path) -> bool:
    """Whether the user's file, the usual one or the one that `VARIABLE` names, is that file."""
    own = (config_folder() / FILE, user_file())
    return any(each is not None and each.is_file() and path.samefile(each) for each in own)


def default_options(model: str | None) -> dict[str, Default]:
    """Options that environment and files set for this model, by name; the embedded one by default.

    Raises:
        InputError: a file or variable holds a wrong value.
    """
    files = [file for file in (read_project_file(), read_user_file()) if file is not None]
    found = _overlaid([environment_options(), *(file.common() for file in files)])
    chosen = model or (found["model"].value if "model" in found else "shapes")
    layers = [environment_options(), *(layer for file in files for layer in file.layers(chosen))]
    return _overlaid(layers)


def without_displaced(defaults: Mapping[str, Default], given: Iterable[str]) -> dict[str, Default]:
    """Defaults that the given options leave: a given ``size`` displaces a default ``height``."""
    gone = replaced_by(given)
    return {name: default for name, default in defaults.items() if name not in gone}


def environment_options() -> dict[str, Default]:
    """Options that ``EVERYFRAME_*`` variables set, such as ``EVERYFRAME_NUM_FRAMES``.

    Raises:
        InputError: a variable holds a wrong value.
    """
    texts = {
        name: text for name in _variable_options() if (text := os.environ.get(variable_of(name)))
    }
    try:
        found = Request(**texts).given()  # together, as some are valid only with others
    except InputError as error:
        wrong = [name for name in texts if str(error).startswith(f"{name} ")] or texts
        raise InputError(f"{', '.join(map(variable_of, wrong))}: {error}") from None
    return {name: Default(found[name], variable_of(name)) for name in texts}


def unknown_variables() -> tuple[str, ...]:
    """Lines about ``EVERYFRAME_*`` variables that nothing reads, each with the nearest name."""
    known = {*map(variable_of, _variable_options()), *SETTINGS.values(), *OTHER_VARIABLES}
    return tuple(
        f"nothing reads the variable {name}{did_you_mean(name, known)}"
        for name in sorted(os.environ)
        if name.startswith(PREFIX) and name not in known
    )


def variable_of(name: str) -> str:
    """Name of an option's environment variable."""
    return f"{PREFIX}{name.upper()}"


def _variable_options() -> Iterator[str]:
    for name in Request.model_fields:
        if name not in REPEATED and _is_default(Request, name):
            yield name


def _is_default(model: type[Options], name: str) -> bool:
    """Whether an option may be set for more than one call."""
    facts = facts_of(model, name)
    return not (facts["python_only"] or facts["names_files"] or facts["call_only"])


def _overlaid(layers: Iterable[Mapping[str, Default]]) -> dict[str, Default]:
    """One of several layers, the first of which goes before the others."""
    found: dict[str, Default] = {}
    for layer in layers:
        found |= without_displaced(layer, found)
    return found


def _folders(folder: Path) -> list[Path]:
    """The folder and, within a git repository, those above it up to the repository's own."""
    above = [folder, *folder.parents]
    for number, place in enumerate(above):
        if (place / ".git").exists():
            return above[: number + 1]
    return [folder]


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise InputError(f"{path} is too large for a configuration: over {_MOST_BYTES:,} bytes")
        found: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        return found
    except OSError as error:
        raise InputError(f"{path} can't be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} is not TOML: {error}") from None
    except (RecursionError, ValueError) as error:  # nested too deeply; a number of many digits
        raise InputError(f"{path} is no usable TOML: {error}") from None


def _parse(path: Path, table: Any, *, is_own: bool) -> ConfigFile:
    """The file's content, each value validated by its own field."""
    if not isinstance(table, dict):
        raise InputError(f"{path}: tool.everyframe must be a table, got {shown(table)}")
    rest = dict(table)
    models, settings = _table(path, rest, "models"), _table(path, rest, "settings")
    if settings and not is_own:
        raise InputError(
            f"{path}: [settings] are of the user's file, {user_file()}, and of no project's"
        )
    found = ConfigFile(path, is_own, {})
    for name, options in models.items():
        if not isinstance(options, dict):
            raise InputError(f"{path}: models.{name} must be a table, got {shown(options)}")
    return replace(
        found,
        options=_options(found, "", rest),
        models={name: _options(found, name, options) for name, options in models.items()},
        settings={name: _localize_setting(path, name, value) for name, value in settings.items()},
    )


def _table(path: Path, rest: dict[str, Any], name: str) -> dict[str, Any]:
    found = rest.pop(name, {})
    if not isinstance(found, dict):
        raise InputError(f"{path}: {name} must be a table, got {shown(found)}")
    return found


def _localize_setting(path: Path, name: str, value: Any) -> str:
    if name not in SETTINGS:
        raise InputError(f"{path}: there is no setting {name!r}{did_you_mean(name, SETTINGS)}")
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise InputError(f"{path}: settings.{name} must be text or a number, got {shown(value)}")
    is_folder = name in _FOLDERS and value != "off"
    return str(path.parent / expand_path(value, name)) if is_folder else str(value)


def _options(file: ConfigFile, model: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a table: a common one, or in a table of `model` also one of its family."""
    where = f"{file.path}: [models.{model}]" if model else str(file.path)
    own: dict[type[Options], dict[str, Any]] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        owner = _owner(where, name)
        facts = facts_of(owner, name)
        if owner is not Request and not model and _is_default(owner, name):
            raise InputError(
                f"{where}: {name} is no option of every model; write it below [models.NAME]"
            )
        if not _is_default(owner, name) or (model and name == "model"):
            raise InputError(f"{where}: {name} belongs to one call; give it there: {flag_of(name)}")
        if facts["person_only"] and not file.is_own:
            raise InputError(
                f"{where}: {name} is no project's to set; write it in {user_file()}, or give it: "
                f"{flag_of(name)} or {variable_of(name)}"
            )
        values = own.setdefault(owner, {})
        if name in values:
            raise InputError(f"{where}: {name} is set twice")
        values[name] = value
    found = {}
    for owner, values in own.items():
        for name, value in _validate(owner, values, where).items():
            found[name] = _localize(file, where, owner, name, value)
    return found


def _owner(where: str, name: str) -> type[Options]:
    """The options that a name is of: `Request`, or the first family that has it."""
    kinds: tuple[type[Options], ...] = (Request, *all_options().values())
    for kind in kinds:
        if name in kind.model_fields:
            return kind
    known = {"models", "settings", *(each for kind in kinds for each in kind.model_fields)}
    raise InputError(f"{where}: there is no option {name!r}{did_you_mean(name, known)}")


def _validate(model: type[Options], values: Mapping[str, Any], where: str) -> dict[str, Any]:
    try:
        return model(**values).given()
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _localize(file: ConfigFile, where: str, owner: type[Options], name: str, value: Any) -> Any:
    """The value with its paths from the file's folder, of which a project's may not lead out."""
    if name == "loras":
        return tuple(_lora(file, where, each) for each in value)
    if name == "components":
        return {key: _path(file, where, name, text) for key, text in value.items()}
    if name == "compiled":
        return _path(file, where, name, value)
    if not facts_of(owner, name)["names_model"]:
        return value
    return ",".join(_model(file, where, name, each.strip()) for each in str(value).split(","))


def _lora(file: ConfigFile, where: str, lora: Lora) -> Lora:
    is_registered = lora.path != Path(lora.file).expanduser()
    return lora if is_registered else replace(lora, file=_path(file, where, "loras", lora.file))


def _model(file: ConfigFile, where: str, name: str, text: str) -> str:
    """A known name as it is; a folder from the file's own; any hub id in the user's file alone."""
    if is_listed(text):
        return text
    path = file.path.parent / expand_path(text, name)
    if path.exists():
        return _path(file, where, name, text)
    if file.is_own:
        return text
    raise InputError(
        f"{where}: {name} = {shown(text)} is no known model and no folder here; a project may name "
        f"those alone. Write it in {user_file()}, or give it: {flag_of(name)}"
    )


def _path(file: ConfigFile, where: str, name: str, text: str) -> str:
    root = file.path.parent
    path = root / expand_path(text, name)
    if not file.is_own and not Path(os.path.realpath(path)).is_relative_to(root.resolve()):
        raise InputError(
            f"{where}: {name} = {shown(text)} leads out of {root}; a project names files of its "
            f"own alone. Give it in the call: {flag_of(name)}"
        )
    return str(path)
