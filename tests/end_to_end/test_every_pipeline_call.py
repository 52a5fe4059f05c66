"""Diffusers' own arguments of a call, given to each of its video pipelines in memory.

What comes back is compared bit for bit with what the pipeline gives by itself, under torch's own
attention. The whole sweep runs with ``--slow``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import everyframe
from everyframe.diffusers_pipelines.inputs.signature import of_pipeline
from helpers.references.diffusers_pipeline import built, leaves, theirs
from helpers.tiny_checkpoints.diffusers import CASES
from helpers.tiny_checkpoints.diffusers.cases import SEED

#: What is tried of each, where it has the parameter.
VARIED: tuple[dict[str, Any], ...] = (
    {"output_type": "np"}, {"output_type": "pt"}, {"output_type": "pil"},
    {"output_type": "latent"}, {"num_videos_per_prompt": 2}, {"num_images_per_prompt": 2},
)  # fmt: skip


def ours(pipe: Any, asked: dict[str, Any], varied: dict[str, Any]) -> Any:
    """What a run gives."""
    taken = of_pipeline(pipe)
    sides = ("height", "width") if taken.name_of("height") is None else ()
    given = {name: value for name, value in asked.items() if name not in sides}
    option = {**given.pop("option", {}), **varied}
    given |= {"seed": SEED} if taken.name_of("seed") else {}
    return everyframe.run(pipe, output="float", option=option, **given)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_it_gives_what_the_pipeline_gives(name: str) -> None:
    case = CASES[name]
    with case.within():
        pipe, asked = built(case)
        taken = of_pipeline(pipe).parameters
        num_compared = 0
        for varied in VARIED:
            if not varied.keys() <= taken.keys():
                continue
            try:
                wanted = list(leaves(theirs(pipe, asked, varied)))
            except (ValueError, RuntimeError, AssertionError):
                # Diffusers itself can't; many pipelines are never called for several videos.
                with pytest.raises(everyframe.EveryframeError):
                    ours(pipe, asked, varied)
                continue
            found = list(leaves(ours(pipe, asked, varied)))
            assert len(found) == len(wanted), varied
            for one, other in zip(found, wanted, strict=True):
                assert np.array_equal(one, other), (varied, np.abs(one - other).max())
            num_compared += 1
        assert num_compared >= 3, "np, pt and pil are of every pipeline"
