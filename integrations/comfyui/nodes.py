"""The nodes: Generate, Plan, LoRA, Server and Load Record.

Read next: `run_loop.py` (progress and interrupt), `local_run.py` and `server_run.py` (jobs).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import folder_paths
from comfy_api.latest import InputImpl, io

from .local_run import LocalPlan, LocalRun, free_memory
from .media import data_url, file_of, picture_of, record_of
from .request_options import INPUTS, build_options, check_options
from .run_loop import run_job
from .server_client import Connection, check_url
from .server_run import ServerPlan, ServerRun

CATEGORY = "Everyframe"
#: Largest values of Everyframe's options, from `everyframe.core.limits`.
_MAX_SEED, _MAX_SIDE, _MAX_FRAMES = 2**53 - 1, 16384, 100_000

ServerType = io.Custom("EVERYFRAME_SERVER")
LorasType = io.Custom("EVERYFRAME_LORAS")

_UNLISTED = "(other_name)"


def _request_inputs() -> list[io.Input]:
    """Inputs that Generate and Plan share."""
    return [
        io.String.Input("prompt", multiline=True, default="a red circle moves to the right",
            tooltip="What the video shows."),
        io.String.Input("model", default="",
            tooltip="Name, folder or hub id; on a server one of its names. Empty is the default."),
        io.String.Input("negative", multiline=True, default="",
            tooltip="What it should not show."),
        io.Int.Input("width", default=0, min=0, max=_MAX_SIDE,
            tooltip="Pixels; 0 is the model's own."),
        io.Int.Input("height", default=0, min=0, max=_MAX_SIDE,
            tooltip="Pixels; 0 is the model's own."),
        io.Int.Input("frames", default=0, min=0, max=_MAX_FRAMES,
            tooltip="Length; 0 is the model's own."),
        io.Float.Input("fps", default=0.0, min=0.0, max=1000.0, step=0.01,
            tooltip="Frames per second of the video; 0 is the model's own."),
        io.Int.Input("steps", default=0, min=0, max=10_000,
            tooltip="Steps of the sampler; 0 is the model's own."),
        io.Float.Input("guidance", default=-1.0, min=-1.0, max=1000.0, step=0.1,
            tooltip="How strongly the prompt steers; 1 is off, -1 is the model's own."),
        io.Int.Input("seed", default=0, min=0, max=_MAX_SEED, control_after_generate=True,
            tooltip="The same seed gives the same video."),
        io.Image.Input("image", optional=True, tooltip="First frame."),
        io.Image.Input("last_image", optional=True, tooltip="Last frame."),
        io.MultiType.Input("extend", types=[io.Video, io.Image], optional=True,
            tooltip="Video, or frames, to continue."),
        LorasType.Input("loras", optional=True),
        ServerType.Input("server", optional=True,
            tooltip="Without one, a worker process of this machine works."),
        io.String.Input("options", default="", multiline=True, optional=True,
            tooltip='Every other option as a JSON object, such as {"quality": "32dB"}.'),
    ]  # fmt: skip


class EveryframeGenerate(io.ComfyNode):
    """Make a video."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="EveryframeGenerate",
            display_name="Everyframe Generate",
            category=CATEGORY,
            description="Make a video in a worker process of this machine, or on a server.",
            inputs=[
                *_request_inputs(),
                io.Boolean.Input("keep_loaded", default=True, optional=True,
                    tooltip="Keep the model in memory for the next video, for ten minutes. "
                    "No effect on a server."),
            ],
            outputs=[
                io.Image.Output(display_name="frames"),
                io.Audio.Output(display_name="audio"),
                io.Float.Output(display_name="fps"),
                io.Video.Output(display_name="video"),
                io.String.Output(display_name="record"),
            ],
        )  # fmt: skip

    @classmethod
    def validate_inputs(cls, options: str | None = None) -> bool | str:
        # One parameter: ComfyUI repeats the text for each, and checks no range of those named.
        return check_options(options or "") or True

    @classmethod
    def execute(
        cls,
        server: Connection | None = None,
        options: str = "",
        keep_loaded: bool = True,
        **inputs: Any,
    ) -> io.NodeOutput:
        """Make the video; see `Everyframe Generate`'s outputs."""
        asked = _asked(inputs, options, server)
        if server is None:
            job: Any = LocalRun(asked, stays_loaded=keep_loaded)
            free_memory()
        else:
            job = ServerRun(server, asked)
        made = run_job(job)
        video = InputImpl.VideoFromFile(str(made.file))
        return io.NodeOutput(made.frames, made.audio, made.fps, video, made.record)


class EveryframePlan(io.ComfyNode):
    """Say what a video would take."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="EveryframePlan",
            display_name="Everyframe Plan",
            category=CATEGORY,
            description="Say what would run, with how much memory and about how long. Nothing is "
            "loaded; what can't run here is refused.",
            inputs=_request_inputs(),
            outputs=[io.String.Output(display_name="plan")],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(cls, options: str | None = None) -> bool | str:
        return check_options(options or "") or True

    @classmethod
    def execute(
        cls, server: Connection | None = None, options: str = "", **inputs: Any
    ) -> io.NodeOutput:
        """Plan; the text is also shown on the node."""
        asked = _asked(inputs, options, server)
        text = run_job(LocalPlan(asked) if server is None else ServerPlan(server, asked))
        return io.NodeOutput(text, ui={"text": (text,)})


class EveryframeLora(io.ComfyNode):
    """Add a LoRA."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        listed = folder_paths.get_filename_list("loras")
        return io.Schema(
            node_id="EveryframeLora",
            display_name="Everyframe LoRA",
            category=CATEGORY,
            description="Add a LoRA to those of another node; they are merged into the weights.",
            inputs=[
                io.Combo.Input("name", options=[_UNLISTED, *listed],
                    tooltip="A file of ComfyUI's folder models/loras."),
                io.Float.Input("strength", default=1.0, min=-100.0, max=100.0, step=0.05),
                io.String.Input("component", default="", optional=True,
                    tooltip="The component that it changes, such as transformer_2; empty where "
                    "the file or the model leaves no choice."),
                io.String.Input("other_name", default="", optional=True,
                    tooltip="With the name (other_name): the name of a LoRA on the server."),
                LorasType.Input("loras", optional=True),
            ],
            outputs=[LorasType.Output(display_name="loras")],
        )  # fmt: skip

    @classmethod
    def execute(
        cls,
        name: str,
        strength: float,
        component: str = "",
        other_name: str = "",
        loras: tuple[dict[str, Any], ...] = (),
    ) -> io.NodeOutput:
        """The LoRAs with this one at the end."""
        if (name == _UNLISTED) != bool(other_name):
            raise ValueError(
                f"choose a name of the list, or the name {_UNLISTED} and give other_name; got "
                f"{name!r} and {other_name!r}"
            )
        is_listed = name != _UNLISTED
        lora = {"name": name if is_listed else other_name, "is_listed": is_listed,
                "strength": strength, "component": component}  # fmt: skip
        return io.NodeOutput((*loras, lora))


class EveryframeServer(io.ComfyNode):
    """Name a server."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="EveryframeServer",
            display_name="Everyframe Server",
            category=CATEGORY,
            description="A server that `everyframe serve` runs, on this machine or another.",
            inputs=[
                io.String.Input("url", default="http://127.0.0.1:8000"),
                io.String.Input("key_name", default="", optional=True,
                    tooltip="Name of the server's key. The key itself is in ComfyUI's environment: "
                    'COMFYUI_EVERYFRAME_KEY_STUDIO="http://host:8000 KEY" for studio.'),
            ],
            outputs=[ServerType.Output(display_name="server")],
        )  # fmt: skip

    @classmethod
    def validate_inputs(cls, url: str | None = None) -> bool | str:
        return True if url is None else check_url(url) or True

    @classmethod
    def execute(cls, url: str, key_name: str = "") -> io.NodeOutput:
        """The connection. Raises `ValueError` if its key is missing."""
        connection = Connection(url, key_name)
        connection.key()
        return io.NodeOutput(connection)


class EveryframeLoadRecord(io.ComfyNode):
    """Read what made a video."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        folder = folder_paths.get_input_directory()
        files = [each.name for each in Path(folder).iterdir() if each.is_file()]
        return io.Schema(
            node_id="EveryframeLoadRecord",
            display_name="Everyframe Load Record",
            category=CATEGORY,
            description="Read from a video of Everyframe what it was made with. Connect the "
            "outputs to Everyframe Generate to make it again.",
            inputs=[
                io.Combo.Input(
                    "file",
                    options=sorted(folder_paths.filter_files_content_types(files, ["video"])),
                    upload=io.UploadType.video,
                )
            ],
            outputs=[
                io.String.Output(display_name="record"),
                *(_OUTPUTS[name].Output(display_name=name) for name in INPUTS),
            ],
        )

    @classmethod
    def validate_inputs(cls, file: str | None = None) -> bool | str:
        if file is None or folder_paths.exists_annotated_filepath(file):
            return True
        return f"file must be a video of ComfyUI's input folder, and {file!r} is not there"

    @classmethod
    def fingerprint_inputs(cls, file: str) -> float:
        return os.path.getmtime(folder_paths.get_annotated_filepath(file))

    @classmethod
    def execute(cls, file: str) -> io.NodeOutput:
        """The record, and the values of Generate's inputs in their order."""
        record = record_of(Path(folder_paths.get_annotated_filepath(file)))
        request, settings = record["request"], record["settings"]
        values = []
        for name, (option, unset) in INPUTS.items():
            value = request.get(option) if name == "model" else settings.get(option)
            values.append((unset if unset is not None else "") if value is None else value)
        return io.NodeOutput(json.dumps(record), *values)


_OUTPUTS = {
    "prompt": io.String, "model": io.String, "negative": io.String, "width": io.Int,
    "height": io.Int, "frames": io.Int, "fps": io.Float, "steps": io.Int, "guidance": io.Float,
    "seed": io.Int,
}  # fmt: skip

NODES = (
    EveryframeGenerate,
    EveryframePlan,
    EveryframeLora,
    EveryframeServer,
    EveryframeLoadRecord,
)


def _asked(inputs: dict[str, Any], options: str, server: Connection | None) -> dict[str, Any]:
    """Options of the request, with its pictures, videos and LoRAs as the job takes them."""
    asked = build_options(inputs, options)
    for name in ("image", "last_image"):
        if inputs.get(name) is not None:
            picture = picture_of(inputs[name])
            asked[name] = picture if server is None else data_url(picture)
    if inputs.get("extend") is not None:
        file = file_of(inputs["extend"], inputs["fps"])
        asked["extend"] = str(file) if server is None else data_url(file)
    if inputs.get("loras"):
        asked["loras"] = [_lora(each, server) for each in inputs["loras"]]
    return asked


def _lora(lora: dict[str, Any], server: Connection | None) -> Any:
    """A LoRA as a worker takes it, by its path, or as a server does, by its own name."""
    name, strength, component = lora["name"], lora["strength"], lora["component"]
    if server is not None:
        at = f"@{component}" if component else ""
        return f"{Path(name).stem if lora['is_listed'] else name}:{strength!r}{at}"
    if not lora["is_listed"]:
        raise ValueError(
            f"the LoRA {name!r} is named for a server; choose a file of the list, or connect an "
            "Everyframe Server node"
        )
    path = folder_paths.get_full_path("loras", name)
    if path is None:
        raise ValueError(f"the LoRA {name!r} is not in ComfyUI's folder models/loras any more")
    return {"file": str(path), "strength": strength, "component": component}
