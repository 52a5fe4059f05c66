"""Import the classes of a pipeline and its components by the names in its index.

The only module that imports diffusers for planning (a few seconds). Code that comes with a
checkpoint is imported here too, if and only if it was allowed.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from everyframe.core.errors import CheckpointError, MissingPackageError
from everyframe.diffusers_pipelines.files.checkpoint import (
    LIBRARIES,
    ComponentFolder,
    PipelineFiles,
)
from everyframe.diffusers_pipelines.inputs import defaults
from everyframe.diffusers_pipelines.inputs.signature import CallSignature, of_blocks, of_class

#: Start of the modules of transformers' `Auto` classes.
_AUTO = "transformers.models.auto."
#: Libraries of `LIBRARIES` whose components have no base class in common.
_OF_NO_BASE = ("cosmos_guardrail",)

_SUPPORTED = (
    "every diffusers video pipeline that makes a video of a text, a picture or a video, "
    "StableVideoDiffusionPipeline and StableDiffusionControlNetInpaintPipeline"
)


def pipeline_class(files: PipelineFiles) -> Any:
    """The pipeline's class.

    Raises:
        CheckpointError: this diffusers has no such class, or the class is no pipeline.
        MissingPackageError: packages that the class needs are not installed.
    """
    import diffusers

    if files.code_file is not None and not files.is_modular:
        return _own_code(files.folder, files.code_file, files.class_name)
    found = getattr(diffusers, files.class_name, None)
    if found is None:
        raise CheckpointError(
            f"{files.where} is a {files.class_name}, which diffusers {diffusers.__version__} does "
            "not have; a newer diffusers may (pip install -U diffusers)"
        )
    needed = getattr(found, "_backends", None)
    if needed:  # diffusers' stand-in for a class whose packages are not installed
        raise MissingPackageError(
            f"{files.class_name} needs packages that are not all installed: {', '.join(needed)}"
        )
    bases = (diffusers.DiffusionPipeline, diffusers.ModularPipeline)
    if not isinstance(found, type) or not issubclass(found, bases):
        raise CheckpointError(f"{files.where} is a {files.class_name}, which is no pipeline")
    return found


def interface_of(files: PipelineFiles, empty: Any = None) -> CallSignature:
    """The call signature of a pipeline; `empty` is a modular pipeline without weights.

    Raises:
        CheckpointError: it is no video pipeline, or supports nothing that a request can hold.
    """
    if empty is not None:
        return checked(of_blocks(files.class_name, empty.blocks, empty.config))
    return checked(of_class(pipeline_class(files)))


def checked(interface: CallSignature) -> CallSignature:
    """The same signature, if the pipeline makes a video from a text, an image or a video.

    Raises:
        CheckpointError: it has another output, or needs another input.
    """
    if not interface.makes_video:
        raise CheckpointError(
            f"{interface.class_name} is not a video pipeline; supported are {_SUPPORTED}"
        )
    if not {"prompt", "image", "video"} & set(interface.parameters):
        raise CheckpointError(
            f"{interface.class_name} makes no video of a text, a picture or a video; supported are "
            f"{_SUPPORTED}"
        )
    earlier = defaults.of(defaults.GOES_ON, interface.class_name)
    if earlier is not None:
        raise CheckpointError(
            f"{interface.class_name} continues latents that a call of {earlier} left in memory; "
            "call both in diffusers"
        )
    return interface


def empty_modular(files: PipelineFiles) -> Any:
    """A modular pipeline without weights: its blocks, and components made from configs alone."""
    cls: Any = pipeline_class(files)
    return cls.from_pretrained(
        str(files.folder),
        local_files_only=True,
        # Asked for and checked in `checkpoint`.
        trust_remote_code=files.code_file is not None,
    )


def component_class(part: ComponentFolder) -> Any:
    """The class of a component, from diffusers, transformers, a pipeline's module or its own code.

    Raises:
        CheckpointError: the library has no such class, or the class is no component.
        MissingPackageError: the library is not installed.
    """
    if (part.folder / f"{part.library}.py").is_file():
        return _own_code(part.folder, f"{part.library}.py", part.class_name)
    library = _library(part)
    found = getattr(library, part.class_name, None)
    if found is None and part.library == "transformers":
        # Names of before transformers 5: slow and fast tokenizers and image processors were two.
        found = getattr(library, part.class_name.removesuffix("Fast"), None)
    if found is None:
        version = getattr(library, "__version__", "")
        raise CheckpointError(
            f"{part.name} is a {part.class_name}, which {part.library} {version} does not have; "
            f"a newer one may (pip install -U {part.library})"
        )
    if not part.is_trusted and not _is_component(found):
        raise CheckpointError(
            f"{part.name} is a {part.class_name} of {part.library}, which is no component of a "
            "pipeline: a model, scheduler, tokenizer or processor"
        )
    return found


def _library(part: ComponentFolder) -> Any:
    """The module that holds a component's class; unlisted ones were allowed in `checkpoint`."""
    import diffusers

    own = None if part.library in LIBRARIES else getattr(diffusers.pipelines, part.library, None)
    if isinstance(own, ModuleType) and own.__name__ == f"diffusers.pipelines.{part.library}":
        return own
    if part.library not in LIBRARIES and not part.is_trusted:
        raise CheckpointError(
            f"{part.name} is a {part.class_name} of {part.library!r}, which is neither diffusers "
            "nor transformers"
        )
    try:
        return import_module(part.library)
    except ImportError as error:
        raise MissingPackageError(
            f"{part.name} needs the package {part.library!r}: pip install {part.library}"
        ) from error


def _is_component(found: Any) -> bool:
    """Whether it is a class of what a component may be, which loads from its folder alone.

    A pipeline inside a pipeline has an index of its own, which diffusers would trust, also where
    `AutoPipelineFor...` reads it; blocks have code, a retriever reads pickles and an index that lie
    anywhere.
    """
    if not isinstance(found, type) or not callable(getattr(found, "from_pretrained", None)):
        return False
    library = found.__module__.partition(".")[0]
    if getattr(found, "_backends", None):  # a stand-in for a class whose packages are not there
        return library in LIBRARIES
    is_auto = found.__module__.startswith(_AUTO)
    return library in _OF_NO_BASE or is_auto or issubclass(found, _component_bases())


@cache
def _component_bases() -> tuple[type, ...]:
    """Base classes of models, schedulers, guiders, tokenizers and processors."""
    import diffusers
    import transformers

    return (
        diffusers.ModelMixin,
        diffusers.SchedulerMixin,
        diffusers.AutoModel,
        diffusers.BaseGuidance,
        transformers.PreTrainedModel,
        transformers.PreTrainedTokenizerBase,
        transformers.ProcessorMixin,
        transformers.ImageProcessingMixin,
        transformers.FeatureExtractionMixin,
    )


def is_module(part: ComponentFolder) -> bool:
    """Whether a component is a module, which has weights."""
    from torch import nn

    cls = component_class(part)
    return isinstance(cls, type) and issubclass(cls, nn.Module)


def asks_for_code(cls: Any) -> bool:
    """Whether a class may look for remote code and needs an explicit `trust_remote_code`.

    transformers' `Auto` classes prompt on the terminal without one, and processors load their
    tokenizers through them.
    """
    import diffusers
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    if isinstance(cls, type) and issubclass(
        cls, (PreTrainedTokenizerBase, ProcessorMixin, diffusers.AutoModel)
    ):
        return True
    return str(getattr(cls, "__module__", "")).startswith(_AUTO)


def empty_component(part: ComponentFolder) -> Any:
    """The module of a component, built from its config with uninitialised weights; best on meta."""
    cls = component_class(part)
    if hasattr(cls, "load_config"):  # diffusers
        return cls.from_config(cls.load_config(str(part.folder)))
    return cls(cls.config_class.from_pretrained(str(part.folder), local_files_only=True))


def _own_code(folder: Path, file: str, class_name: str) -> Any:
    from diffusers.utils.dynamic_modules_utils import get_class_from_dynamic_module

    return get_class_from_dynamic_module(
        str(folder), module_file=file, class_name=class_name, trust_remote_code=True
    )
