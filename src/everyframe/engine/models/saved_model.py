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
        spec, root = self.spec, self.saved_from().resolve()
        found = []
        for need, title, _ in spec.builder.needs():
            name = need.name
            opened, keys = spec.patched_weights(name)
            quantized = {} if need.prefers == "float32" else self._layers(name, quantize)
            patched = spec.patched.patches.get(name, {})
            if not patched and not quantized and name not in spec.replaced.tensors:
                continue
            before = open_checkpoint(spec.weights(name)[0])
            places = [file.resolve() for file in (before.source, *before.files)]
            if not all(place.is_relative_to(root) for place in places):
                raise InputError(f"the {title} of {spec.title} lies outside of its folder {root}")
            if any(
                {*before.files} & {*open_checkpoint(spec.weights(other)[0]).files}
                for other in spec.builder.component_names
                if other != name
            ):
                raise InputError(
                    f"{spec.title} has all of its weights in one file, which can't be saved in "
                    "parts; take the folder of the model"
                )
            source = places[0]
            own = source.suffix == _SAFETENSORS
            path = source if own else source.with_name(f"model{_SAFETENSORS}")
            found.append(
                ChangedFile(
                    path.relative_to(root),
                    opened,
                    self._find_changed(name, opened, keys),
                    {key: quantize for key in opened if keys.target(key) in quantized},
                    {key for key in opened if is_in_island(keys.target(key) or "", need.islands)},
                    tuple(place.relative_to(root) for place in {*places}),
                )
            )
        if quantize and not any(each.quantized for each in found):
            raise InputError(f"quantize has no effect on {spec.title}: nothing of it is quantized")
        return found

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
