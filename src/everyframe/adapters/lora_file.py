"""Read a LoRA file strictly: each tensor belongs to a change of one module, or an error names it.

It reads headers, and the tensors that hold one number (alpha). `patches` finds the modules that the
names mean, which depend on the model.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from everyframe.adapters.factor_shapes import kind_of, rank_of
from everyframe.adapters.key_schemes import split_key, why_not_read
from everyframe.adapters.weight_sites import Shape
from everyframe.checkpoints.digest import digest, known_digest
from everyframe.checkpoints.folder import read_json
from everyframe.checkpoints.safetensors_header import read_header
from everyframe.checkpoints.tensor_file import TensorFile, open_checkpoint
from everyframe.core.errors import CheckpointError, InputError
from everyframe.core.lora import Lora
from everyframe.core.options import shown

#: Key of diffusers' metadata in a safetensors header.
_METADATA = "lora_adapter_metadata"
#: PEFT's own file, which leaves alpha to the config beside it.
_PEFT_FILE, _PEFT_CONFIG = "adapter_model", "adapter_config.json"
#: Kind -> name of its alpha in PEFT's config.
_PEFT_ALPHA: Mapping[str, str] = {"lora": "lora_alpha", "loha": "alpha", "lokr": "alpha"}
#: PEFT's initial factors (``init_lora_weights``) that it subtracts from the base weights.
_OTHER_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
#: Regular expressions of a file that may take exponential time: repeated groups, many repetitions.
_REPEATED_GROUP, _REPEATS, _MOST_REPEATS = re.compile(r"\)[*+?{]"), re.compile(r"[*+{]"), 2

#: Problems that one message shows.
_MOST_SHOWN = 3


@dataclass(frozen=True)
class ModuleChange:
    """All tensors of a file for one module.

    Attributes:
        stem: the module's name in the file, with prefixes.
        kind: see `factor_shapes`; empty if only the bias changes.
        keys: tensor name by role.
        shapes: shape by role.
        scale: factor of the change, alpha over rank.
    """

    stem: str
    kind: str
    keys: Mapping[str, str]
    shapes: Mapping[str, Shape]
    scale: float


@dataclass(frozen=True)
class LoraFile:
    """A LoRA file whose header was read."""

    path: Path
    tensors: TensorFile
    modules: tuple[ModuleChange, ...]

    def check_values(self) -> None:
        """Read every tensor once.

        Raises:
            CheckpointError: a tensor holds NaN or infinity, or the file is truncated.
        """
        for name in self.tensors:
            if not torch.isfinite(self.tensors.load(name, dtype=torch.float32)).all():
                raise CheckpointError(
                    f"{self.path.name}: {name!r} holds values that are not finite; the file is "
                    "broken, or its training diverged"
                )


def lora_digest(path: Path) -> str:
    """sha256 of a LoRA file, together with that of PEFT's config if it has one.

    Raises:
        CheckpointError: the file can't be read.
    """
    return digest(_files(path))


def known_lora_digest(path: Path) -> str | None:
    """`lora_digest` from the cache; None if a file was never hashed or has changed."""
    return known_digest(_files(path))


def _files(path: Path) -> list[Path]:
    config = _config_beside(path)
    return [path] if config is None else [path, config]


def check_recorded(lora: Lora) -> None:
    """Raise `InputError` if a record has another hash of the file."""
    if lora.sha256 is None:
        return
    again = f"give it again: --lora FILE:{lora.strength:g}"
    if not lora.path.is_file():
        raise InputError(
            f"the video was made with the LoRA {lora.name!r}, which is not in this folder; {again}"
        )
    if lora_digest(lora.path) != lora.sha256:
        raise InputError(
            f"{lora.name!r} in this folder is not the LoRA that the video was made with (its hash "
            f"differs); {again}"
        )


def read_lora(path: Path) -> LoraFile:
    """Open a LoRA file: safetensors, or a pickle of tensors.

    Raises:
        CheckpointError: another kind of file, truncated, or tensors that form no change of a
            module; the text names them.
    """
    if not path.is_file():
        raise CheckpointError(f"there is no LoRA file {path}")
    tensors = open_checkpoint(path)
    modules: dict[str, dict[str, str]] = {}
    problems: list[str] = []
    for key in tensors:
        problem = _sort_in(key, tensors, modules)
        if problem:
            problems.append(problem)
    alphas = _Alphas(path, tensors)
    changes = []
    for stem, keys in modules.items():
        kind, problem = kind_of(keys)
        if problem:
            problems.append(f"{stem!r} {problem}")
            continue
        shapes = {role: _shape(tensors, role, key) for role, key in keys.items()}
        if not problems:
            changes.append(ModuleChange(stem, kind, keys, shapes, alphas.scale(stem, kind, keys)))
    if problems:
        raise CheckpointError(f"{path.name} is no LoRA that can be read: {join_problems(problems)}")
    if not changes:
        raise CheckpointError(f"{path.name} holds no tensors")
    return LoraFile(path, tensors, tuple(changes))


def _shape(tensors: TensorFile, role: str, key: str) -> Shape:
    """Shape of a tensor, with PEFT's DoRA magnitudes as vectors of one number per output channel.

    PEFT stores a convolution's as (1, out, 1, 1), which in LyCORIS is one per input channel.
    """
    shape = tensors.shape(key)
    is_pefts = role == "dora" and not key.endswith(".dora_scale")
    return tuple(size for size in shape if size != 1) or (1,) if is_pefts else shape


def join_problems(problems: Sequence[str]) -> str:
    """Join the first problems of a file for one message, with the number of further ones."""
    more = len(problems) - _MOST_SHOWN
    return "; ".join(problems[:_MOST_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def _sort_in(key: str, tensors: TensorFile, modules: dict[str, dict[str, str]]) -> str:
    """Sort one tensor into its module; returns a problem, or an empty text."""
    why = why_not_read(key)
    if why:
        return f"{key!r} is not read: {why}"
    found = split_key(key)
    if found is None:
        return f"{key!r} is no tensor of any known kind of LoRA"
    if not tensors.dtype(key).is_floating_point and found[1] != "alpha":
        return f"{key!r} is of {tensors.dtype(key)}, expected floating-point numbers"
    stem, role = found
    own = modules.setdefault(stem, {})
    if role in own:
        return f"{own[role]!r} and {key!r} are the same tensor of two adapters"
    own[role] = key
    return ""


class _Alphas:
    """Scales of a file's changes: from its alpha tensors, its metadata, or PEFT's config."""

    def __init__(self, path: Path, tensors: TensorFile) -> None:
        self._path, self._tensors = path, tensors
        self._configs = _configs(path)

    def scale(self, stem: str, kind: str, keys: Mapping[str, str]) -> float:
        """Alpha over rank, or over its square root if the file says so; 1 without alpha."""
        rank = rank_of(kind, {role: self._tensors.shape(key) for role, key in keys.items()})
        if "alpha" in keys:
            return self._alpha(keys["alpha"]) / rank if rank else 1.0
        for prefix, config in self._configs:
            if kind in _PEFT_ALPHA and stem.startswith(prefix):
                self._check_base(config)
                name = stem[len(prefix) :]
                alpha = self._number(config, "alpha_pattern", _PEFT_ALPHA[kind], name)
                # Only the config has the rank of a LoKr with two full factors.
                divisor = rank or self._number(config, "rank_pattern", "r", name)
                if alpha is not None and divisor:
                    return alpha / (math.sqrt(divisor) if config.get("use_rslora") else divisor)
        return 1.0

    def _check_base(self, config: Mapping[str, Any]) -> None:
        """Raise `CheckpointError` for factors that PEFT subtracts from the base weights first."""
        start = config.get("init_lora_weights")
        if isinstance(start, str) and start.lower().startswith(_OTHER_BASE):
            raise CheckpointError(
                f"{self._path.name}: its factors began as {shown(start)}, which changes the base "
                "weights too; save the adapter again with PEFT's "
                "path_initial_model_for_weight_conversion"
            )

    def _number(
        self, config: Mapping[str, Any], patterns: str, plain: str, name: str
    ) -> float | None:
        """A module's value by PEFT's patterns, which match ends of names; None if none matches."""
        key, value = plain, config.get(plain)
        by_pattern = config.get(patterns)
        for pattern, own in by_pattern.items() if isinstance(by_pattern, Mapping) else ():
            if len(_REPEATS.findall(pattern)) > _MOST_REPEATS or _REPEATED_GROUP.search(pattern):
                raise CheckpointError(
                    f"{self._path.name}: {patterns} {shown(pattern)} repeats a group, or more than "
                    f"{_MOST_REPEATS} times, which may never end; name the modules"
                )
            try:
                is_match = re.match(rf"(.*\.)?({pattern})$", name)
            except (re.error, OverflowError, RecursionError) as error:
                raise CheckpointError(
                    f"{self._path.name}: {patterns} {shown(pattern)} can't be read: {error}"
                ) from error
            if is_match:
                key, value = patterns, own
                break
        if value is None:
            return None
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 < abs(value) <= sys.float_info.max:
            raise CheckpointError(
                f"{self._path.name}: its {key} is {shown(value)}, expected a finite number other "
                "than 0"
            )
        return float(value)

    def _alpha(self, key: str) -> float:
        if math.prod(self._tensors.shape(key)) != 1:
            raise CheckpointError(
                f"{self._path.name}: {key!r} has shape {self._tensors.shape(key)}, expected one "
                "number"
            )
        value = float(self._tensors.load(key, dtype=torch.float32).reshape(()))
        if not math.isfinite(value) or value == 0:
            raise CheckpointError(
                f"{self._path.name}: {key!r} is {value}, expected a finite number other than 0"
            )
        return value


def _configs(path: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """(prefix of stems, PEFT's config) from the header's metadata or the file beside."""
    beside = _config_beside(path)
    if beside is not None:
        return [("base_model.model.", read_json(beside)), ("", read_json(beside))]
    if path.suffix != ".safetensors":
        return []
    text = read_header(path).metadata.get(_METADATA)
    if text is None:
        return []
    try:
        metadata = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name}: its {_METADATA} is no JSON: {error}") from error
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{path.name}: its {_METADATA} is no JSON object")
    found: dict[str, dict[str, Any]] = {}
    for key, value in metadata.items():
        component, dot, name = str(key).partition(".")
        found.setdefault(f"{component}." if dot else "", {})[name if dot else component] = value
    return sorted(found.items(), key=lambda each: -len(each[0]))


def _config_beside(path: Path) -> Path | None:
    config = path.parent / _PEFT_CONFIG
    return config if path.stem == _PEFT_FILE and config.is_file() else None
