"""Read a diffusers folder: its index and components, and reasons to refuse it. Reads no weights.

``model_index.json`` describes a plain pipeline, ``modular_model_index.json`` a modular one. Each
component has a folder of its own with weights as safetensors. Refused with `CheckpointError`:
pickled weights, missing components, quantized components, and remote code that was not allowed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from everyframe.checkpoints.config_errors import inner_configs
from everyframe.checkpoints.folder import check_inside, is_plain_name, read_json, without_notes
from everyframe.checkpoints.locate import Location
from everyframe.checkpoints.refuse_pickles import refuse_pickled
from everyframe.core.errors import CheckpointError

if TYPE_CHECKING:
    from everyframe.checkpoints.patched_file import Patches
    from everyframe.checkpoints.tensor_file import TensorFile
    from everyframe.runtime.sampling_preset import SamplingPreset

INDEX = "model_index.json"
MODULAR_INDEX = "modular_model_index.json"

#: Libraries that an index may name, beside the modules of diffusers' own pipelines. Any other name
#: would be imported from the first match on the path, which may be the current folder.
LIBRARIES = ("diffusers", "transformers", "cosmos_guardrail")

#: Marks a component's folder whose weights `everyframe save` wrote from another form; our loader
#: reads them.
OWN_WEIGHTS = "everyframe_weights.json"

#: Keys of a tokenizer's config that name files.
_NAMED_FILES = ("tokenizer_file", "vocab_file", "merges_file", "spm_file", "sp_model_file")

#: Weight variant in a file name, as in ``diffusion_pytorch_model.fp16.safetensors``; diffusers
#: takes any word.
_VARIANT = re.compile(r"\.(?P<name>[A-Za-z]\w*)(-\d+-of-\d+)?\.safetensors$")


@dataclass(frozen=True)
class ComponentFolder:
    """One component: the library and class that the index names, and its folder.

    Attributes:
        name: the component's name in the index.
        library: library or pipeline module of its class.
        class_name: its class.
        folder: its folder.
        weights: its safetensors files; empty for schedulers, tokenizers and the like.
        variant: diffusers' variant name of these files; None for the plain ones.
        is_trusted: code that comes with the checkpoint may run.
        patches: patches of its parameters, merged as they are loaded.
        tensors: its tensors by the names of its module, if they are in a file of another form.
    """

    name: str
    library: str
    class_name: str
    folder: Path
    weights: tuple[Path, ...] = ()
    variant: str | None = None
    is_trusted: bool = False
    patches: Patches = field(default_factory=dict, compare=False, repr=False)
    tensors: TensorFile | None = field(default=None, compare=False, repr=False)

    def config(self) -> Mapping[str, Any]:
        """The component's config; empty if it has none."""
        names = ("config.json", "guider_config.json")
        file = next((self.folder / name for name in names if (self.folder / name).is_file()), None)
        return {} if file is None else read_json(file)

    def scheduler_config(self) -> Mapping[str, Any]:
        """The config of a scheduler; empty if there is none."""
        file = self.folder / "scheduler_config.json"
        return read_json(file) if file.is_file() else {}


@dataclass(frozen=True)
class PipelineFiles:
    """The files of a pipeline checkpoint.

    Attributes:
        where: its name for messages and records.
        folder: its folder.
        class_name: the pipeline's class.
        parts: its components.
        is_modular: it is a modular pipeline.
        code_file: file with the pipeline's own code, or with the map to it; None if it has none.
        values: index entries that are not components, such as the boundary between two experts.
        left_out: components that it was saved without.
        preset: settings of a step-distilled model, whose sampler replaces the scheduler.
    """

    where: str
    folder: Path
    class_name: str
    parts: tuple[ComponentFolder, ...]
    is_modular: bool
    code_file: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    preset: SamplingPreset | None = None

    @property
    def models(self) -> tuple[ComponentFolder, ...]:
        """The components that have weights."""
        return tuple(part for part in self.parts if part.weights)

    @property
    def scheduler(self) -> ComponentFolder | None:
        """The component of that name; a preset may replace it."""
        return next((part for part in self.parts if part.name == "scheduler"), None)


def find_files(
    location: Location, *, trust_remote_code: bool = False, variant: str | None = None
) -> PipelineFiles | None:
    """The pipeline at that location, None if there is none; `variant` selects the set of weights.

    Raises:
        CheckpointError: the pipeline can't be loaded; one line with the reason and what to do.
    """
    if location.path is not None:
        folder, where = location.path, location.path.name or location.asked
    elif location.known is None and location.parts and location.parts[0].is_complete:
        assert location.parts[0].folder is not None
        folder, where = location.parts[0].folder, location.asked
    else:
        return None
    for name in (MODULAR_INDEX, INDEX):
        if (folder / name).is_file():
            return _read(where, folder, name, trust_remote_code, variant, location.components)
    return None


def _read(
    where: str,
    folder: Path,
    index_name: str,
    trust: bool,
    variant: str | None,
    replaced: Collection[str],
) -> PipelineFiles:
    index, is_modular = read_json(folder / index_name), index_name == MODULAR_INDEX
    given = index.get("_class_name")
    code_file = None
    if isinstance(given, list) and len(given) == 2:
        code_file, given = f"{given[0]}.py", given[1]
    if is_modular and (folder / "modular_config.json").is_file():
        maps_code = _maps_code(read_json(folder / "modular_config.json"))
        code_file = "modular_config.json" if maps_code else None
    if not isinstance(given, str):
        raise CheckpointError(f"{folder / index_name} names no pipeline class (_class_name)")
    if code_file is not None and not trust:
        raise _trust_error(where, f"its pipeline is code of its own ({code_file})")
    if not trust:
        _check_hints(where, index)
    public = without_notes(index)
    entries = {name: value for name, value in public.items() if _is_component(value)}
    check_inside(folder, folder.iterdir())
    parts = {
        name: _part(where, folder, name, entry, trust, variant, is_replaced=name in replaced)
        for name, entry in entries.items()
    }
    if variant is not None and all(
        part is None or part.variant != variant for part in parts.values()
    ):
        raise CheckpointError(
            f"{where} has no weights in the variant {variant!r}: no *.{variant}.safetensors in it; "
            "leave --variant out"
        )
    return PipelineFiles(
        where,
        folder,
        given,
        tuple(part for part in parts.values() if part is not None),
        is_modular,
        code_file,
        values={name: value for name, value in public.items() if name not in entries},
        left_out=tuple(name for name, part in parts.items() if part is None),
    )


def _is_component(value: Any) -> bool:
    """``[library, class]``; a modular index adds a third entry, how the component is loaded."""
    if not isinstance(value, list) or len(value) not in (2, 3):
        return False
    return all(each is None or isinstance(each, str) for each in value[:2])


def _maps_code(config: Mapping[str, Any]) -> bool:
    return bool(config.get("auto_map"))


def _trust_error(where: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{where} wants to run Python code that comes with it: {what}. Read that code; if you "
        "trust it, allow it with --trust-remote-code (trust_remote_code=True)"
    )


def _part(
    where: str,
    root: Path,
    name: str,
    entry: list[Any],
    trust: bool,
    variant: str | None,
    *,
    is_replaced: bool = False,
) -> ComponentFolder | None:
    """A component of the index; None for one that the pipeline was saved without.

    Of one that is replaced the config alone counts.
    """
    library, class_name = entry[:2]
    spec = entry[2] if len(entry) == 3 and isinstance(entry[2], dict) else {}
    if library is not None and not trust and not is_library(library):
        raise _trust_error(where, f"{name} is a {class_name} of {library!r}")
    if library is None or class_name is None:
        return None
    folder = root / _subfolder(where, name, spec.get("subfolder"))
    if not folder.is_dir():
        elsewhere = spec.get("pretrained_model_name_or_path")
        hint = f"; its index has it in {elsewhere}" if elsewhere and len(entry) == 3 else ""
        raise CheckpointError(
            f"{where} lacks its component {name!r} ({class_name}): there is no folder "
            f"{folder.name}/ in it{hint}; get the whole checkpoint"
        )
    if (folder / f"{library}.py").is_file() and not trust:
        raise _trust_error(where, f"{name} is {library}.py")
    _check_files(where, root, name, folder)
    weights, found = ((), None) if is_replaced else _weights(where, name, folder, variant)
    part = ComponentFolder(name, str(library), str(class_name), folder, weights, found, trust)
    if weights and (folder / OWN_WEIGHTS).is_file():
        from everyframe.checkpoints.scaled_file import with_scales
        from everyframe.checkpoints.tensor_file import open_checkpoint

        part = replace(part, tensors=with_scales(open_checkpoint(weights[0]))[0])
    part.scheduler_config()  # diffusers reads it, and builds tables of all that it counts
    # transformers makes what an inner config describes by its `Auto` classes, which ask on the
    # terminal whether to run code; the class of the component itself is named and looks for none.
    if not trust and any(map(_maps_code, inner_configs(part.config()))):
        what = f"the config of {name} has an auto_map"
        raise _trust_error(where, what)
    if part.config().get("quantization_config"):
        raise CheckpointError(
            f"{where}: its {name} is quantized, which is not supported; take the checkpoint "
            "in bfloat16 or float32"
        )
    return part


def _check_hints(where: str, index: Mapping[str, Any]) -> None:
    """Raise for a type hint of a modular index whose library diffusers would import."""
    for name, entry in index.items():
        spec = entry[2] if isinstance(entry, list) and len(entry) == 3 else None
        hint = spec.get("type_hint") if isinstance(spec, dict) else None
        if hint is None:
            continue
        library = hint[0] if isinstance(hint, list) and len(hint) == 2 else hint
        if library is not None and not (isinstance(library, str) and is_library(library)):
            raise _trust_error(where, f"{name} is of {library!r}")


def is_library(name: str) -> bool:
    """Whether an index may take classes from it: one of `LIBRARIES`, or a pipeline's module."""
    if name in LIBRARIES:
        return True
    spec = find_spec("diffusers")
    places = spec.submodule_search_locations if spec is not None else None
    named = [Path(place, "pipelines", name, "__init__.py") for place in places or ()]
    return name.isidentifier() and any(place.is_file() for place in named)


def _subfolder(where: str, name: str, given: Any) -> str:
    """Path of a component in the pipeline's folder: its own name, or as the index gives it."""
    place = str(given or name)
    parts = PurePosixPath(place).parts
    if not name.isidentifier() or not parts or not all(is_plain_name(each) for each in parts):
        raise CheckpointError(
            f"{where}: its index has the component {name!r} in {place!r}, which is outside of its "
            "own folder; a component lies in a folder below the index"
        )
    return place


def _check_files(where: str, root: Path, name: str, folder: Path) -> None:
    """Raise `CheckpointError` for a component that would read files outside its folder."""
    files = sorted(folder.iterdir())
    check_inside(root, (folder, *folder.rglob("*")))  # which follows no links
    for file in files:
        if ".index." in file.name and file.suffix == ".json":
            shards = read_json(file).get("weight_map")
            named = shards.values() if isinstance(shards, dict) else ()
            outside = [each for each in named if not is_plain_name(str(each))]
            if outside:
                raise CheckpointError(
                    f"{file} names a shard outside its own folder: {outside[0]!r}"
                )
        elif file.name == "tokenizer_config.json":
            config = read_json(file)
            for key in _NAMED_FILES:
                other = folder / str(config.get(key) or "")
                # Many say where they lay when they were saved, which is nowhere here.
                if other.is_file() and not other.resolve().is_relative_to(folder.resolve()):
                    raise CheckpointError(f"{file} names a {key} outside its own folder: {other}")
        elif _names_sound_model(file):
            raise CheckpointError(
                f"{where}: its {name} names an audio_tokenizer, a model that lies elsewhere "
                f"({file.name}), which is not supported; remove it"
            )
        elif file.name == "adapter_config.json":
            raise CheckpointError(
                f"{where}: its {name} is an adapter for a model that lies elsewhere "
                f"({file.name}); merge it and save the whole model"
            )


def _names_sound_model(file: Path) -> bool:
    """Whether transformers would load a model by the place that a processor's file names."""
    if file.name == "processor_config.json":
        return "audio_tokenizer" in read_json(file)
    return file.name == "audio_tokenizer_config.json"


def _weights(
    where: str, name: str, folder: Path, asked: str | None
) -> tuple[tuple[Path, ...], str | None]:
    """The safetensors files to read, and their variant.

    Prefers the requested variant, then plain files. A folder with other variants only uses the
    first of them by name.
    """
    by_variant: dict[str, list[Path]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        match = _VARIANT.search(file.name)
        by_variant.setdefault(match["name"] if match else "", []).append(file)
    if by_variant:
        variant = next((each for each in (asked, "") if each in by_variant), min(by_variant))
        return tuple(by_variant[variant]), variant or None
    refuse_pickled(where, name, folder)
    return (), None
