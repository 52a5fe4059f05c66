"""Options of a request from the values of a node's inputs. Needs neither ComfyUI nor torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

#: Name of a node's input -> name of Everyframe's option, and the value that leaves it out.
INPUTS: Mapping[str, tuple[str, Any]] = {
    "prompt": ("prompt", ""),
    "model": ("model", ""),
    "negative": ("negative_prompt", ""),
    "width": ("width", 0),
    "height": ("height", 0),
    "frames": ("num_frames", 0),
    "fps": ("fps", 0),
    "steps": ("num_inference_steps", 0),
    "guidance": ("guidance_scale", -1),
    "seed": ("seed", None),
}

_BY_INPUT = "connect the node's own input instead"
_NOT_IN_WORKFLOWS = "workflows come from others, so it is not taken from one"
#: Options that the JSON may not hold -> why.
REFUSED: Mapping[str, str] = {
    **{option: f"use the node's input {name}" for name, (option, _) in INPUTS.items()},
    **dict.fromkeys(("image", "last_image", "extend", "loras"), _BY_INPUT),
    **dict.fromkeys(("trust_remote_code", "compiled", "report"), _NOT_IN_WORKFLOWS),
    # `paths` and `remedies` are earlier names, still read. `family_options` holds any other option,
    # `trust_remote_code` too.
    **dict.fromkeys(
        ("fast_paths", "paths", "quantized", "repairs", "remedies", "method", "family_options"),
        "it is set in Python alone; give each option by its own name",
    ),
    "latents": "start noise can't be written as JSON; use the node's input seed",
    "num_videos": "a node makes one video; raise ComfyUI's batch count",
    "preview": "previews are always on",
}


def parse_options(text: str) -> dict[str, Any]:
    """Parse the JSON of the input ``options``.

    Raises:
        ValueError: it is no JSON object, or holds an option of `REFUSED`.
    """
    if not text.strip():
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f'options must be a JSON object such as {{"quality": "32dB"}}: {error}'
        ) from None
    if not isinstance(found, dict):
        raise ValueError(
            f'options must be a JSON object such as {{"quality": "32dB"}}, got {text.strip()[:80]}'
        )
    for name in found:
        if name in REFUSED:
            raise ValueError(f"options can't hold {name}: {REFUSED[name]}")
    return found


def check_options(text: str) -> str | None:
    """What is wrong with the input ``options``, or None.

    Names and values are checked where Everyframe is installed; a server checks them itself.
    """
    try:
        given = parse_options(text)
        try:
            from everyframe.core.request import Request
            from everyframe.families.registry import check_option_names
        except ImportError:
            return None
        check_option_names(Request(**given))
    except ValueError as error:  # Everyframe's InputError is one
        return str(error)
    return None


def build_options(inputs: Mapping[str, Any], options: str) -> dict[str, Any]:
    """Options of a request: the inputs that are set, then those of the JSON.

    Raises:
        ValueError: see `parse_options`.
    """
    found = {
        option: inputs[name]
        for name, (option, unset) in INPUTS.items()
        if name in inputs and inputs[name] != unset
    }
    return {**found, **parse_options(options)}
