"""The page of diffusers' video pipeline classes: which of them run, and why others don't.

``python -m helpers.tiny_checkpoints.diffusers.table`` in ``tests/`` writes
``docs/reference/pipelines.md``;
`tests/end_to_end/test_every_pipeline.py` holds it to the checkpoints that are there, and
to the installed diffusers.
"""

from __future__ import annotations

from pathlib import Path

from everyframe.diffusers_pipelines.inputs.clip_continuation import CONTINUATIONS
from helpers.tiny_checkpoints.diffusers import CASES
from helpers.tiny_checkpoints.diffusers.cases import Case, Clip, Still

PAGE = Path(__file__).parents[4] / "docs" / "reference" / "pipelines.md"

#: Modular pipelines whose tiny checkpoints are in `pipelines.py`.
MODULAR = ("LTX25ModularPipeline", "MiniMaxH3ModularPipeline")

#: What each can't do, or where else it is done.
NOT_HERE = {
    "StableVideoDiffusionPipeline": "run by a family of its own: `--model svd`",
    "I2VGenXLPipeline": "refused by `plan`: diffusers asks transformers 5 for what it has no more",
    "EasyAnimateControlPipeline": "refused by `plan`: diffusers calls a function of its own with "
    "an argument that it doesn't take",
    "EasyAnimateInpaintPipeline": "refused by `plan` where its autoencoder's config has no "
    "`cache_mag_vae`, which diffusers reads",
    "LTX2DFRTemporalRefinePipeline": "refused: it continues latents that a call of "
    "LTX2DFRPipeline left in memory",
    "LTX2VideoDiffusionDecodePipeline": "refused: it decodes latents, and makes nothing of a text, "
    "a picture or a video",
}
#: What has to be known beside that.
REMARKS = {
    "AllegroPipeline": "needs `--vae-tiling`, and frames no smaller than a tile (320x320)",
    "AnyFlowPipeline": "refused on mps: its schedule is in float64 there",
    "AnyFlowFARPipeline": "refused on mps, too",
    "Cosmos3DistilledModularPipeline": "its checkpoint fixes the number of steps",
    "EasyAnimatePipeline": "without a negative prompt it is given an empty one",
    "HeliosModularPipeline": "draws its own progress bar",
    "HeliosPyramidDistilledModularPipeline": "draws its own progress bar; refused on mps: its "
    "scheduler is in float64",
    "HeliosPyramidModularPipeline": "draws its own progress bar",
    "SanaWMPipeline": "`plan` forecasts it roughly: its dry run ends in the transformer",
    "WanAnimate2DistilledModularPipeline": "draws its own progress bar; refused on mps, too",
    "WanAnimate2ModularPipeline": "draws its own progress bar; refused on mps: its positions are "
    "in float64",
    "LTX2HDRPipeline": 'frames beyond white are cut off in files; `output="float"` keeps them',
}
_GUARDED = "needs the packages cosmos_guardrail and torchvision"
_HEAD = """# Every video pipeline of diffusers

All of diffusers 0.42. *Runs* means: a tiny random checkpoint of it, in diffusers' own layout,
was planned for an RTX 2080 Ti and an Apple GPU, made a video in float32 twice with the same bits,
and gave what the pipeline's own call gives with the same seed, to 1e-4 of a frame's range
(22 November 2026; `make test ARGS="--slow tests/end_to_end/test_every_pipeline.py"`).

*Given* are its inputs beside the text: `--image` and `--last-image`, `--extend` with a clip that is
continued, or `--option NAME=FILE`, as in [run any pipeline](../how-to/pipeline.md).

| pipeline | runs | given |
|---|---|---|
"""


def page() -> str:
    """The whole page."""
    rows = {name: f"yes{_remark(name)} | {_given(case)}" for name, case in CASES.items()}
    rows |= {name: f"yes | {_extend(name)}" for name in MODULAR}
    rows |= {name: f"no: {why} | " for name, why in NOT_HERE.items()}
    lines = (f"| `{name}` | {rows[name]} |" for name in sorted(rows))
    return _HEAD + "\n".join(lines) + "\n"


def _remark(name: str) -> str:
    remark = REMARKS.get(name, "")
    if CASES[name].within.__name__ == "with_packages":
        remark = _GUARDED
    return f"; {remark}" if remark else ""


def _given(case: Case) -> str:
    """Options that are pictures and videos."""
    named = [f"`--{name}`" for name in ("image", "last_image") if name in case.asked]
    named += [_extend(case.class_name)] if _extend(case.class_name) else []
    for name, value in case.asked.get("option", {}).items():
        if any(isinstance(each, (Clip, Still)) for each in _inside(value)):
            named.append(f"`--option {name}=`")
    return ", ".join(named)


def _extend(name: str) -> str:
    return "`--extend`" if name in CONTINUATIONS else ""


def _inside(value: object) -> list[object]:
    if isinstance(value, dict):
        return [each for inner in value.values() for each in _inside(inner)]
    if isinstance(value, list):
        return [each for inner in value for each in _inside(inner)]
    return [value]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
