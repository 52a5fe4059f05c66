"""The gallery: videos of the embedded model with their settings, read from their own records."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from api_pages import NOTE

GALLERY = Path(__file__).parent / "gallery"


def gallery_page() -> str:
    """A picture, the command that makes it again, and what the record says of it."""
    lines = [
        "# Gallery",
        "",
        NOTE,
        "",
        "Videos of the embedded model, each with the command that makes it again. What it draws",
        "and how it was trained is in its model card and in `recipes/shapes`. Beside each lies",
        "its record; `everyframe generate --from circle.gif` repeats it.",
    ]
    for path in sorted(GALLERY.glob("*.json")):
        lines += ["", *_entry(json.loads(path.read_text(encoding="utf-8")), path.stem)]
    return "\n".join(lines) + "\n"


def command_of(record: dict[str, Any], name: str) -> str:
    """The command line that makes the video again."""
    request = record["request"]
    words = ["everyframe", "generate", request["prompt"]]
    for option in ("size", "num_frames", "seed"):
        if option in request:
            words += [f"--{option.replace('_', '-')}", str(request[option])]
    return f"{shlex.join(words)} -o {name}.gif".replace("'", '"')


def _entry(record: dict[str, Any], name: str) -> list[str]:
    settings, plan = record["settings"], record["plan"]
    denoiser = next(part for part in plan["components"] if part["name"] == "denoiser")
    precision, device = denoiser["precision"]["compute"], plan["device"]["name"]
    about = (
        f"{settings['width']}x{settings['height']}, {settings['num_frames']} frames at "
        f"{settings['fps']:g} fps, {settings['num_inference_steps']} steps, guidance "
        f"{settings['guidance_scale']:g}, seed {settings['seed']}; {precision} on {device}, "
        f"Everyframe {record['everyframe']}."
    )
    return [f"## {settings['prompt']}", "", f"![{settings['prompt']}](gallery/{name}.gif)", "",
            about, "", "```text", command_of(record, name), "```"]  # fmt: skip
