"""A small stand-in for the part of ComfyUI's API that the node pack calls; written anew.

`SOURCES` names the file of each function in the real ComfyUI. If one is installed,
`tests/integrations/test_comfyui_api.py` compares the signatures.
"""

from __future__ import annotations

import importlib.util
import inspect
import mimetypes
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from everyframe.media.mp4 import read_audio
from everyframe.media.video import Video

PACK = Path(__file__).parents[2] / "integrations" / "comfyui"


class InterruptProcessingException(Exception):  # noqa: N818 - ComfyUI's name
    """What ComfyUI raises in a node that is interrupted."""


# comfy.utils


class ProgressBar:
    """Remembers what it shows."""

    shown: list[tuple[Any, ...]] = []  # noqa: RUF012 - of all bars, as the page has them

    def __init__(self, total: Any, node_id: Any = None) -> None:
        self.total = total

    def update_absolute(self, value: Any, total: Any = None, preview: Any = None) -> None:
        ProgressBar.shown.append((value, total, preview))


# comfy.model_management


class Interrupt:
    """ComfyUI's interrupt, and a count of its looks at it."""

    is_set = False
    num_unloads = 0


def throw_exception_if_processing_interrupted() -> None:
    if Interrupt.is_set:
        Interrupt.is_set = False
        raise InterruptProcessingException


def unload_all_models() -> None:
    Interrupt.num_unloads += 1


def soft_empty_cache(force: bool = False) -> None: ...


# folder_paths


class Folders:
    """Where the folders are; a test sets `root`."""

    root = Path()


def get_temp_directory() -> str:
    return str(Folders.root / "temp")


def get_input_directory() -> str:
    return str(Folders.root / "input")


def filter_files_content_types(files: Any, content_types: Any) -> list[str]:
    kinds = {name: (mimetypes.guess_type(name)[0] or "").split("/")[0] for name in files}
    return [name for name in files if kinds[name] in content_types]


def get_annotated_filepath(name: str, default_dir: Any = None) -> str:
    return str(Path(default_dir or get_input_directory()) / name)


def exists_annotated_filepath(name: str) -> bool:
    return Path(get_annotated_filepath(name)).exists()


def get_filename_list(folder_name: str) -> list[str]:
    folder = Folders.root / "models" / folder_name
    return sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []


def get_full_path(folder_name: str, filename: str) -> str | None:
    path = Folders.root / "models" / folder_name / filename
    return str(path) if path.is_file() else None


# comfy_api.latest


class ComfyExtension:
    """Base of an extension."""


@dataclass
class VideoComponents:
    images: Any
    frame_rate: Fraction
    audio: Any = None


class VideoFromFile:
    def __init__(self, file: Any) -> None:
        self.file = file

    def get_components(self) -> VideoComponents:
        video = Video.load(self.file)
        sound = read_audio(Path(self.file), video.seconds)
        audio = sound and {"waveform": torch.from_numpy(sound.samples)[None],
                           "sample_rate": sound.rate}  # fmt: skip
        return VideoComponents(torch.from_numpy(video.frames) / 255, video.fps, audio)

    def save_to(self, path: Any) -> None:
        shutil.copyfile(self.file, path)


class VideoFromComponents:
    def __init__(self, components: VideoComponents) -> None:
        self.components = components

    def save_to(self, path: Any) -> None:
        frames = (self.components.images * 255).round().to(torch.uint8).numpy()
        Video(frames, self.components.frame_rate).save(path, sidecar=False)


@dataclass
class Input:
    id: str
    display_name: Any = None
    optional: bool = False
    tooltip: Any = None


@dataclass
class Output:
    id: Any = None
    display_name: Any = None


@dataclass
class StringInput(Input):
    multiline: bool = False
    default: Any = None


@dataclass
class BooleanInput(Input):
    default: Any = None


@dataclass
class IntInput(Input):
    default: Any = None
    min: Any = None
    max: Any = None
    control_after_generate: Any = None


@dataclass
class FloatInput(Input):
    default: Any = None
    min: Any = None
    max: Any = None
    step: Any = None


@dataclass
class ComboInput:
    id: str
    options: Any = None
    display_name: Any = None
    optional: bool = False
    tooltip: Any = None
    default: Any = None
    upload: Any = None


@dataclass
class MultiTypeInput:
    id: Any
    types: Any
    display_name: Any = None
    optional: bool = False
    tooltip: Any = None


@dataclass
class Schema:
    node_id: str
    display_name: Any = None
    category: str = "sd"
    inputs: Any = field(default_factory=list)
    outputs: Any = field(default_factory=list)
    description: str = ""
    is_output_node: bool = False


class NodeOutput:
    def __init__(self, *args: Any, ui: Any = None) -> None:
        self.args, self.ui = args, ui


class ComfyNode:
    """Base of the nodes."""


def _type(name: str, of: type = Input) -> type:
    """A type of ComfyUI with its inputs and outputs."""
    parts = {"Input": type("Input", (of,), {"io_type": name}),
             "Output": type("Output", (Output,), {"io_type": name})}  # fmt: skip
    return type(name, (), {"io_type": name, **parts})


def Custom(io_type: str) -> type:
    return _type(io_type)


class UploadType:
    video = "video_upload"


_IO = {
    "String": _type("STRING", StringInput), "Boolean": _type("BOOLEAN", BooleanInput),
    "Int": _type("INT", IntInput), "Float": _type("FLOAT", FloatInput),
    "Combo": _type("COMBO", ComboInput), "MultiType": _type("MULTI", MultiTypeInput),
    "Image": _type("IMAGE"), "Audio": _type("AUDIO"), "Video": _type("VIDEO"), "Input": Input,
    "Schema": Schema, "NodeOutput": NodeOutput, "ComfyNode": ComfyNode, "Custom": Custom,
    "UploadType": UploadType,
}  # fmt: skip

_LATEST = "comfy_api/latest/_io.py"
_VIDEO = "comfy_api/latest/_input_impl/video_types.py"
#: What the pack calls -> file and name of the real one.
SOURCES: Mapping[Any, tuple[str, str]] = {
    ProgressBar.__init__: ("comfy/utils.py", "ProgressBar.__init__"),
    ProgressBar.update_absolute: ("comfy/utils.py", "ProgressBar.update_absolute"),
    **{
        function: ("comfy/model_management.py", function.__name__)
        for function in (
            throw_exception_if_processing_interrupted, unload_all_models, soft_empty_cache,
        )
    },
    **{
        function: ("folder_paths.py", function.__name__)
        for function in (
            get_temp_directory, get_input_directory, filter_files_content_types,
            get_annotated_filepath, exists_annotated_filepath, get_filename_list, get_full_path,
        )
    },
    VideoComponents: ("comfy_api/latest/_util/video_types.py", "VideoComponents"),
    VideoFromFile.__init__: (_VIDEO, "VideoFromFile.__init__"),
    VideoFromFile.get_components: (_VIDEO, "VideoFromFile.get_components"),
    VideoFromFile.save_to: (_VIDEO, "VideoFromFile.save_to"),
    VideoFromComponents.__init__: (_VIDEO, "VideoFromComponents.__init__"),
    VideoFromComponents.save_to: (_VIDEO, "VideoFromComponents.save_to"),
    Input: (_LATEST, "Input.__init__"),
    Output: (_LATEST, "Output.__init__"),
    StringInput: (_LATEST, "String.Input.__init__"),
    BooleanInput: (_LATEST, "Boolean.Input.__init__"),
    IntInput: (_LATEST, "Int.Input.__init__"),
    FloatInput: (_LATEST, "Float.Input.__init__"),
    ComboInput: (_LATEST, "Combo.Input.__init__"),
    MultiTypeInput: (_LATEST, "MultiType.Input.__init__"),
    Schema: (_LATEST, "Schema"),
    NodeOutput.__init__: (_LATEST, "NodeOutput.__init__"),
    Custom: (_LATEST, "Custom"),
}  # fmt: skip


def modules() -> dict[str, ModuleType]:
    """The modules that the pack imports, by name."""
    found = {
        "comfy": {}, "comfy_api": {},
        "comfy.utils": {"ProgressBar": ProgressBar},
        "comfy.model_management": _functions("comfy/model_management.py"),
        "folder_paths": _functions("folder_paths.py"),
        "comfy_api.latest": {
            "ComfyExtension": ComfyExtension,
            "InputImpl": SimpleNamespace(
                VideoFromFile=VideoFromFile, VideoFromComponents=VideoFromComponents
            ),
            "Types": SimpleNamespace(VideoComponents=VideoComponents),
            "io": SimpleNamespace(**_IO),
        },
    }  # fmt: skip
    made = {}
    for name, content in found.items():
        made[name] = ModuleType(name)
        vars(made[name]).update(content)
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(made[parent], own, made[name])
    return made


def _functions(file: str) -> dict[str, Any]:
    return {name: each for each, (where, name) in SOURCES.items()
            if where == file and inspect.isfunction(each)}  # fmt: skip


def load_pack() -> ModuleType:
    """The pack as ComfyUI loads it: by its path, which is also the module's name."""
    name = str(PACK).replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, PACK / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
