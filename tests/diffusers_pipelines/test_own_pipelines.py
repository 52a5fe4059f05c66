"""Pipelines of the user's own, by diffusers' two conventions, run as they do without us."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.modular_pipelines.modular_pipeline import ModularPipelineBlocks
from diffusers.modular_pipelines.modular_pipeline_utils import InputParam, OutputParam
from diffusers.modular_pipelines.wan.modular_blocks_wan import WanBlocks

import everyframe
from everyframe.core.errors import InputError

CALL: dict[str, Any] = {"num_frames": 5, "height": 16, "width": 16, "num_inference_steps": 2}

#: A pipeline's file as `custom_pipeline` names it, with a parameter of its own.
CUSTOM = """
from diffusers import WanPipeline

class DarkerPipeline(WanPipeline):
    def __call__(self, prompt=None, brightness=1.0, **kwargs):
        done = super().__call__(prompt, **kwargs)
        done.frames = [frames * brightness for frames in done.frames]
        return done
"""


class Scale(ModularPipelineBlocks):  # type: ignore[misc]  # diffusers has no types
    """A block before the decoder, with a parameter of its own."""

    model_name = "wan"

    @property
    def inputs(self) -> list[InputParam]:
        return [InputParam("latents", required=True), InputParam("factor", default=1.0)]

    @property
    def intermediate_outputs(self) -> list[OutputParam]:
        return [OutputParam("latents")]

    def __call__(self, components: Any, state: Any) -> tuple[Any, Any]:
        block = self.get_block_state(state)
        block.latents = block.latents * block.factor
        self.set_block_state(state, block)
        return components, state


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


@pytest.fixture(scope="module")
def folder(tiny_models: Callable[[str], Path]) -> Path:
    return tiny_models("wan")


def test_custom_pipeline_makes_the_frames_that_it_makes_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "pipeline.py").write_text(CUSTOM)
    pipe = diffusers.DiffusionPipeline.from_pretrained(
        folder, custom_pipeline=str(tmp_path), trust_remote_code=True
    )
    own = {**CALL, "brightness": 0.5}
    alone = pipe("a fox", **own, generator=generator(), output_type="np").frames[0]
    video = everyframe.run(pipe, "a fox", **own, seed=7, output="float")
    assert alone.max() <= 0.5
    assert (video.frames == alone).all()
    with pytest.raises(InputError, match="brightness"):
        everyframe.run(pipe, "a fox", **CALL, brightnes=0.5, seed=7)


def test_block_of_the_users_own_takes_part(folder: Path) -> None:
    blocks = WanBlocks()
    blocks.sub_blocks.insert("scale", Scale(), list(blocks.sub_blocks).index("decode"))
    pipe, standard = blocks.init_pipeline(), diffusers.WanPipeline.from_pretrained(folder)
    known = {name: part for name, part in standard.components.items() if name in pipe.components}
    pipe.update_components(**known)
    alone, plain = (
        pipe(prompt="a fox", **CALL, factor=factor, generator=generator(), output="videos",
             output_type="np")[0]
        for factor in (0.5, 1.0)
    )  # fmt: skip
    video = everyframe.run(pipe, "a fox", **CALL, factor=0.5, seed=7, output="float")
    assert (alone != plain).any()
    assert (video.frames == alone).all()
