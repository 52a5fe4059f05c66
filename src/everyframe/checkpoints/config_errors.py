"""Check a checkpoint's configs, and convert errors that they cause in foreign code.

Configs are passed to constructors of transformers, diffusers and torch, which raise whatever a bad
value causes (TypeError, IndexError, ZeroDivisionError, validation errors of their own).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from everyframe.core.errors import CheckpointError, EveryframeError, did_you_mean
from everyframe.core.options import shown
from everyframe.core.torch_import import explain_import

#: Released models have about 100 layers at most; building one on meta takes milliseconds.
MAX_LAYERS = 2_000
#: The longest texts of released encoders have about 10 million tokens; prompts are padded to some.
MAX_TOKENS = 1 << 24
#: Keys of a transformers config that choose an implementation, and those that are its own.
_CHOICE = re.compile("_?(attn|experts)_implementation(_internal)?")
_OWN_KERNELS = ("eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")
#: Most of what a config counts, by how its name ends. Schedulers are trained on 1000 timesteps, and
#: build tables of all of them, some in Python: 300 million take minutes and 11 GB.
_MOST = {
    ("layers", "blocks", "depth", "layers_per_block"): MAX_LAYERS,
    ("train_timesteps",): 100_000,
    ("solver_order",): 100,
    ("position_embeddings",): MAX_TOKENS,
}


@contextmanager
def config_errors(where: str) -> Iterator[None]:
    """Context: raise `CheckpointError` for any error but our own and the system's."""
    try:
        yield
    except (EveryframeError, OSError, MemoryError):
        raise
    except Exception as error:
        if isinstance(explained := explain_import(error), EveryframeError):
            raise explained from error
        message = next(iter(str(error).splitlines()), "")
        raise CheckpointError(
            f"{where} can't be used: its configs or files lead to {type(error).__name__}"
            f"{': ' + message[:300] if message else ''}; compare them with the released ones, and "
            "report it if they are the same"
        ) from error


@contextmanager
def foreign_errors(message: str) -> Iterator[None]:
    """Context: raise `CheckpointError` with `message` for errors of a library's loader."""
    try:
        yield
    except (EveryframeError, MemoryError):
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:400] or type(error).__name__
        raise CheckpointError(f"{message}: {text}") from error


def _leaves(value: Any) -> Iterator[Any]:
    """What is in a list and in the lists in it, such as the layers of each block of a UNet."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, list):
            left += each
        else:
            yield each


def inner_configs(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The configs inside a config and in its lists, at any depth."""
    left = [config]
    while left:
        for value in left.pop().values():
            inner = [each for each in _leaves(value) if isinstance(each, Mapping)]
            yield from inner
            left += inner


def check_counts(config: Mapping[str, Any], where: str) -> None:
    """Raise `CheckpointError` for counts beyond any real model, which take hours to build."""
    for name, value in _entries(config):
        most = next((most for ends, most in _MOST.items() if name.endswith(ends)), None)
        if most is None:
            continue
        for each in _leaves(value):
            if isinstance(each, int) and each > most:
                raise CheckpointError(f"{where}: {name} is {each}; at most {most} are supported")


def check_kernels(config: Mapping[str, Any], where: str) -> None:
    """Raise `CheckpointError` for attention or experts that transformers fetches from the hub.

    It takes their names from a config, at any depth, and runs what it fetches as native code.
    """
    for name, value in _entries(config):
        if not _CHOICE.fullmatch(name):
            continue
        for kernel in value.values() if isinstance(value, Mapping) else (value,):
            if kernel is not None and kernel not in _OWN_KERNELS:
                raise CheckpointError(
                    f"{where}: {name} is {shown(kernel)}, which transformers fetches as code; "
                    f"supported are {', '.join(_OWN_KERNELS)}; take it out of that file"
                )


def _entries(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and values of a config and of those inside it."""
    return (entry for each in (config, *inner_configs(config)) for entry in each.items())


def config_values(
    config: type[Any], data: Mapping[str, Any], ignored: Collection[str], where: str
) -> dict[str, Any]:
    """Keyword arguments for a config dataclass from a JSON file; lists become tuples.

    Raises `CheckpointError` for a key that is neither a field nor `ignored`.
    """
    known = {field.name for field in fields(config)}
    for name in data:
        if name not in known and name not in ignored:
            raise CheckpointError(
                f"{where} has an unknown key: {name!r}{did_you_mean(name, known)}"
            )
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in data.items()
        if name in known
    }


def check_classes(
    source: str,
    configs: Mapping[str, Mapping[str, Any]],
    allowed: Mapping[str, Sequence[str]],
    joined: str,
) -> None:
    """Raise `CheckpointError` for a component whose config names a class that is not `allowed`."""
    for name, classes in allowed.items():
        found = configs[name].get("_class_name")
        if found not in classes:
            raise CheckpointError(
                f"{source}: the {name} is of class {found!r}, expected {joined.join(classes)}"
            )


def check_positive(config: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    """Raise `CheckpointError` for present values that are not positive numbers or lists of them."""
    for name in names:
        given = config.get(name)
        for each in given if isinstance(given, (list, tuple)) else (given,):
            is_number = isinstance(each, (int, float)) and not isinstance(each, bool)
            if given is not None and not (is_number and 0 < each < math.inf):
                raise CheckpointError(f"{where}: its {name} must be positive, got {given!r:.100}")
