"""The changed files of a model of our own families, for `runtime.saved_checkpoint`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from everyframe.checkpoints.key_map import KeyMap
from everyframe.checkpoints.tensor_file import TensorFile, open_checkpoint
from everyframe.core.errors import InputError
from everyframe.core.plan import Precision
from everyframe.precision.islands import WORTH, is_in_island, weight_bytes
from everyframe.precision.quantization import rows
from everyframe.runtime.model_spec import NativeModelSpec
from everyframe.runtime.saved_checkpoint import ChangedFile

#: The precision in which 8 bits save least.
_WIDTH = ("bfloat16", "bfloat16")
_SAFETENSORS = ".safetensors"


@dataclass(frozen=True)
class SavableNative:
    """A model of our own families as a `SavableSpec`."""

    spec: NativeModelSpec[Any, Any, Any]

    def saved_from(self) -> Path:
        """See `SavableSpec`."""
        folder = Path(self.spec.name).expanduser()
        if not folder.is_dir():
            raise InputError(
                f"{self.spec.title} is in no folder of its own, so it can't be saved; give the "
                "folder that holds all of it"
            )
        return folder

    def changed_files(self, quantize: str) -> Sequence[ChangedFile]:
        """See `SavableSpec`."""
        spec = self.spec
        found = []
        for need, title, _ in spec.builder.needs():
            name = need.name
            opened, keys = spec.patched_weights(name)
            quantized = {} if need.prefers == "float32" else self._layers(name, quantize)
            patched = spec.patched.patches.get(name, {})
            if not patched and not quantized and name not in spec.replaced.tensors:
                continue
            path, replaced = self._places(name, title)
            found.append(
                ChangedFile(
                    path,
                    opened,
                    self._find_changed(name, opened, keys),
                    {key: quantize for key in opened if keys.target(key) in quantized},
                    {key for key in opened if is_in_island(keys.target(key) or "", need.islands)},
                    replaced,
                )
            )
        if quantize and not any(each.quantized for each in found):
            raise InputError(f"quantize has no effect on {spec.title}: nothing of it is quantized")
        return found

    def _places(self, name: str, title: str) -> tuple[Path, tuple[Path, ...]]:
        """Path of a component's new file, and the files that it replaces, in the model's folder.

        Raises:
            InputError: one lies outside of the folder, or holds another component too.
        """
        spec, root = self.spec, self.saved_from().resolve()
        stored = open_checkpoint(spec.weights(name)[0])
        places = [file.resolve() for file in (stored.source, *stored.files)]
        if not all(place.is_relative_to(root) for place in places):
            raise InputError(f"the {title} of {spec.title} lies outside of its folder {root}")
        others = [each for each in spec.builder.component_names if each != name]
        if any({*stored.files} & {*open_checkpoint(spec.weights(o)[0]).files} for o in others):
            raise InputError(
                f"{spec.title} has all of its weights in one file, which can't be saved in parts; "
                "take the folder of the model"
            )
        within = [place.relative_to(root) for place in places]
        is_own = within[0].suffix == _SAFETENSORS
        path = within[0] if is_own else within[0].with_name(f"model{_SAFETENSORS}")
        return path, tuple({*within})

    def _find_changed(self, component: str, opened: TensorFile, keys: KeyMap) -> set[str]:
        """Names in the file of tensors that are not as a file stores them."""
        patched = self.spec.patched.patches.get(component, {})
        groups = {name: group for group in keys.tied for name in group}
        return {
            name
            for name in opened
            for target in [keys.target(name) or ""]
            if any(each in patched for each in groups.get(target, (target,)))
            or opened.dtype(name) != opened.entry(name).dtype
        }

    def _layers(self, component: str, kind: str) -> set[str]:
        """Names in the module of the weights that get eight bits."""
        need = next(each for each, _, _ in self.spec.builder.needs() if each.name == component)
        count, whole = self.spec.builder.num_elements[component], Precision(*_WIDTH, need.islands)
        found = rows(self.spec.builder.empty(component), replace(whole, weight_dtype=kind))
        # As a plan decides; weights that it would not quantize are unchanged anyway.
        is_worth = weight_bytes(count, whole, rows=found) < WORTH * weight_bytes(count, whole)
        return {*found} if kind and is_worth else set()
