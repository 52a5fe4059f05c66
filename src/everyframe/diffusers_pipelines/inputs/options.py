"""Options of diffusers pipelines: their own parameters by name, and switches. Imports no torch.

`signature.py` reads a pipeline's parameters, and `settings.py` checks the options against them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import field_validator, model_validator

from everyframe.core.errors import InputError
from everyframe.core.options import FamilyOptions
from everyframe.core.options import option as an_option
from everyframe.runtime.shared_options import (
    fit_option,
    source_option,
    strength_option,
    variant_option,
)

#: Options that other families have too, with the parameters that pipelines have in their place.
SHARED: Mapping[str, str] = {"source": "video", "strength": "strength"}

#: What people write for JSON's words on a command line.
_WORDS = {"True": True, "False": False, "None": None}


class PipelineOptions(FamilyOptions):
    """Options of one pipeline: its own parameters, image fitting, tiling, weights, remote code."""

    option: dict[str, Any] = an_option(
        "A parameter that only this pipeline has, as NAME=VALUE; may be given several times. A "
        "video, picture or .npy of numbers is named by its file.",
        default={},
        names_files=True,
        accepts=("Sequence[str]",),
    )
    source: Any = source_option()
    strength: float | None = strength_option()
    fit: str | None = fit_option()
    vae_tiling: bool = an_option(
        "Decode in tiles: far less memory for large frames, and faint seams.", default=False
    )
    variant: str | None = variant_option()
    trust_remote_code: bool = an_option(
        "Run Python code that comes with the checkpoint. Read it first.",
        default=False,
        person_only=True,
        call_only=True,
    )

    @field_validator("option", mode="before")
    @classmethod
    def _accept_texts(cls, given: Any) -> Any:
        """Accept a mapping, or ``NAME=VALUE`` texts whose values are JSON where they parse."""
        return parameters_by_name(given)

    @model_validator(mode="before")
    @classmethod
    def _move_shared(cls, values: Any) -> Any:
        """Put shared options among the pipeline's parameters.

        Raises:
            InputError: the parameter is given as well.
        """
        found = {name: own for name, own in SHARED.items() if values.get(name) is not None}
        option = parameters_by_name(values.get("option", {})) if found else {}
        for name, own in found.items():
            if own in option:
                raise InputError(f"{name} and option {own} are the same; give one of them")
            option[own] = values[name]
        return {**values, "option": option} if found else values


def parameters_by_name(given: Any) -> dict[str, Any]:
    """A pipeline's parameters, given as a mapping or as ``NAME=VALUE`` texts.

    Raises:
        InputError: they are neither.
    """
    if isinstance(given, Mapping):
        return dict(given)
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, (list, tuple)):
        raise InputError(f"option must be a mapping or NAME=VALUE, got {given!r}")
    return dict(_split(text) for text in texts)


def _split(text: Any) -> tuple[str, Any]:
    name, equals, value = str(text).partition("=")
    name = name.strip().replace("-", "_")
    if not equals or not name.isidentifier():
        raise InputError(
            f"option must be NAME=VALUE, for example guidance_rescale=0.7, got {text!r}"
        )
    return name, _value(value.strip())


def _value(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
