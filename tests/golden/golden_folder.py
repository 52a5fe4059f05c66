"""A golden folder as the kinds of `check.py` read it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from everyframe.checkpoints.key_map import KeyMap
from everyframe.checkpoints.strict_load import load_strictly
from everyframe.checkpoints.tensor_file import open_checkpoint
from everyframe.core.errors import InputError

Outputs = Iterator[tuple[str, Tensor]]


class Golden:
    """One folder's content; what is missing or broken raises `InputError` naming it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.is_dir():
            raise InputError(f"{folder} is not a folder")
        try:
            self.config: dict[str, Any] = json.loads(self._file("config.json").read_text("utf-8"))
        except ValueError as error:
            raise InputError(f"{folder / 'config.json'} is not JSON: {error}") from error
        try:
            self.tensors: dict[str, Tensor] = load_file(self._file("io.safetensors"))
        except SafetensorError as error:
            raise InputError(f"{folder / 'io.safetensors'} can't be read: {error}") from error

    def _file(self, name: str) -> Path:
        path = self.folder / name
        if not path.is_file():
            raise InputError(f"{self.folder} has no file {name}")
        return path

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise InputError(f"{self.folder / 'io.safetensors'} has no tensor {name!r}")
        tensor = self.tensors[name]
        # The parts are built in float32, in whatever numbers a golden is stored.
        return tensor.float() if tensor.is_floating_point() else tensor

    def setting(self, name: str) -> Any:
        if name not in self.config:
            raise InputError(f"{self.folder / 'config.json'} has no setting {name!r}")
        return self.config[name]

    def only(self, name: str, supported: object) -> None:
        """Raise `InputError` where the config sets `name` to another than the supported value."""
        refuse_other(self.folder, self.config, name, supported)

    def load(self, module: nn.Module, keys: KeyMap | None = None) -> None:
        """Fill `module` with the folder's weights: none missing, left over or misshapen."""
        load_strictly(module, open_checkpoint(self._file("weights.safetensors")), keys=keys)
        module.eval()


def refuse_other(folder: Path, config: dict[str, Any], name: str, supported: object) -> None:
    """Raise `InputError` where `config` sets `name` to another than the supported value."""
    given = config.get(name, supported)
    if given != supported:
        raise InputError(f"{folder}: {name} must be {supported!r}, got {given!r}")


#: What a config says of how the golden was made, beside the sizes.
_NOTES = (
    "upstream_class", "seed", "call", "fp32_vs_fp64_max_abs", "suggested_atol", "suggested_rtol",
)  # fmt: skip


def constructor(golden: Golden) -> dict[str, Any]:
    """What upstream's class was made with, as its config.json would say it.

    It stands under a name of its own, or is the whole config.
    """
    name = next((key for key in golden.config if key.startswith("constructor")), None)
    given: dict[str, Any] = golden.config if name is None else golden.config[name]
    return {key: value for key, value in given.items() if key not in _NOTES}
