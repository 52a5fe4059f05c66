"""Whole runs against the same formulas written out here, with the modules as plain modules.

Texts through sentencepiece and transformers directly, guidance as one doubled batch, Euler from the
paper, frames by `StepVAE.decode`: nothing of the engine, the stages or the sampler is used, but the
definition of the noise.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sentencepiece import SentencePieceProcessor
from torch import Tensor
from transformers import BertModel, BertTokenizer

import everyframe
import tiny_step
from everyframe.cli.main import main
from everyframe.core.errors import InputError
from everyframe.core.events import ComponentLoaded, FramesDecoded, Note, StageDone, VideoDone
from everyframe.core.plan import Plan
from everyframe.core.request import Request
from everyframe.families.registry import stages_of
from everyframe.families.stepvideo.config import StepLLMConfig, StepVideoModelConfig
from everyframe.families.stepvideo.llm import StepLLM
from everyframe.families.stepvideo.model import StepVideoModel
from everyframe.families.stepvideo.settings import NEG_MAGIC, POS_MAGIC
from everyframe.families.stepvideo.vae import StepVAE
from everyframe.planning.resolve import prepare
from everyframe.runtime.interface import VideoState
from everyframe.samplers import noise

PROMPT = "a red circle moves 红色的气球"
#: Two pieces, so that there is a seam; not square.
SIZES: dict[str, Any] = {"height": 16, "width": 32, "num_frames": 18, "num_inference_steps": 3}
LATENTS = (2, 4, 1, 2)
#: For questions that one frame answers.
SHORT: dict[str, Any] = {**SIZES, "num_frames": 1}
#: Float32 sums in another order (one batch or two) over 3 steps and a decoder; 4e-6 measured.
CLOSE = 4e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_step.stepvideo(tmp_path_factory.mktemp("models") / "tiny-step")


def run(model: Path, prompt: str = PROMPT, **options: Any) -> np.ndarray[Any, Any]:
    """Float frames (T, H, W, 3) of one video."""
    given = {**SIZES, "seed": 5, **options}
    video = everyframe.generate(prompt, model=str(model), output="float", **given)
    assert isinstance(video, everyframe.Video)
    return video.frames


def shards(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def texts_by_hand(folder: Path, texts: list[str]) -> tuple[Tensor, Tensor, Tensor]:
    """Both encoders' states and the mask, the texts as one batch as upstream has them."""
    pieces = SentencePieceProcessor(model_file=str(folder / "step_llm/step1_chat_tokenizer.model"))
    rows, mask = torch.full((len(texts), 320), 2), torch.zeros(len(texts), 320)
    for row, text in enumerate(texts):
        ids = [1, *pieces.encode(text)[:318], 2]
        rows[row, : len(ids)] = torch.tensor(ids)
        mask[row, : len(ids)] = 1
    llm = StepLLM(StepLLMConfig.from_json(tiny_step.LLM)).eval()
    llm.load_state_dict(shards(folder / "step_llm"))
    tokenizer = BertTokenizer.from_pretrained(folder / "hunyuan_clip/tokenizer")
    read = tokenizer(
        texts, max_length=77, padding="max_length", truncation=True, return_tensors="pt"
    )
    bert = BertModel.from_pretrained(
        folder / "hunyuan_clip/clip_text_encoder", add_pooling_layer=False
    ).eval()
    with torch.no_grad():
        states = bert(read["input_ids"], attention_mask=read["attention_mask"]).last_hidden_state
        return llm(rows), states, torch.cat([torch.ones(len(texts), 77), mask], dim=1)


def by_hand(
    folder: Path,
    *,
    prompt: str = PROMPT + POS_MAGIC,
    negative: str = NEG_MAGIC,
    guidance: float = 9.0,
    shift: float = 13.0,
) -> np.ndarray[Any, Any]:
    """Float frames of one video with seed 5."""
    model = StepVideoModel(StepVideoModelConfig.from_json(tiny_step.DENOISER)).eval()
    model.load_state_dict(shards(folder / "transformer"))
    vae = StepVAE(tiny_step.VAE).eval()
    state = load_file(folder / "vae/vae_v2.safetensors")
    vae.load_state_dict({
        name.replace("decoder.conv_out.", "decoder.conv_out.conv."): tensor
        for name, tensor in state.items()
    })  # fmt: skip
    llm, clip, mask = texts_by_hand(folder, [prompt, negative])
    z = noise.start_noise(5, LATENTS)[None]
    steps = SIZES["num_inference_steps"]
    grid = [1 - i / steps for i in range(steps + 1)]
    sigmas = [1 - shift * s / (1 + (shift - 1) * s) for s in grid]
    with torch.no_grad():
        context = model.context(llm, clip, mask)
        for now, after in pairwise(sigmas):
            cond, uncond = model(torch.cat([z, z]), torch.tensor([now, now]), context)
            z = z + (uncond + guidance * (cond - uncond))[None] * (after - now)
        pixels = vae.decode(z)[0]
    frames: np.ndarray[Any, Any] = pixels.permute(1, 2, 3, 0).numpy() / 2 + 0.5
    return frames.clip(0, 1)


def test_a_run_is_what_the_parts_make_by_hand(folder: Path) -> None:
    found = run(folder)
    assert found.shape == (18, 16, 32, 3)
    np.testing.assert_allclose(found, by_hand(folder), rtol=0, atol=CLOSE)
    assert found.std() > 0.05


@pytest.mark.slow
def test_options_reach_the_run(folder: Path) -> None:
    asked = {"time_shift": 3.0, "pos_magic": "", "negative_prompt": "blue", "guidance_scale": 2.0}
    wanted = by_hand(folder, prompt=PROMPT, negative="blue", guidance=2.0, shift=3.0)
    np.testing.assert_allclose(run(folder, **asked), wanted, rtol=0, atol=CLOSE)
    # Each of them matters; the bias of the text's places too.
    same = run(folder, **SHORT)
    for name, value in (*asked.items(), ("llm_bias", "none"), ("seed", 6)):
        other = run(folder, **{**SHORT, name: value})
        assert np.abs(other - same).max() > 20 * CLOSE, name


@pytest.mark.slow
def test_without_guidance_there_is_one_branch(folder: Path) -> None:
    other = run(folder, **SHORT, guidance_scale=1)
    assert np.abs(other - run(folder, **SHORT)).max() > 100 * CLOSE
    with pytest.raises(InputError, match="no effect with guidance_scale 1"):
        run(folder, guidance_scale=1, negative_prompt="blue")


def test_stages_free_what_they_loaded(folder: Path) -> None:
    request = Request(prompt=PROMPT, model=str(folder), seed=1, num_videos=2, **SHORT)
    events = list(everyframe.stream(request))
    order = [event.component if isinstance(event, ComponentLoaded) else "done"
             for event in events if isinstance(event, (ComponentLoaded, StageDone))]  # fmt: skip
    assert order == ["step_llm", "done", "clip", "done", "denoiser", "done", "vae", "done"]


@pytest.mark.slow
def test_bfloat16_is_within_its_budget(folder: Path) -> None:
    """A denoiser of three layers over three steps under guidance of 9, decoded in bfloat16."""
    narrow, wide = (run(folder, **SHORT, dtype=dtype) for dtype in ("bf16", "fp32"))
    assert np.sqrt(np.mean((narrow - wide) ** 2)) < 0.05


@pytest.mark.parametrize("streams", [False, True])
def test_weights_that_come_block_by_block_give_the_same_frames(folder: Path, streams: bool) -> None:
    """From the host's memory or out of upstream's own files, CLIP's pickle among them."""
    prepared = prepare(Request(prompt=PROMPT, model=str(folder), seed=5, **SHORT))
    parts = prepared.plan.components

    def frames(plan: Plan) -> np.ndarray[Any, Any]:
        take, made = VideoState(5), []
        with torch.inference_mode():
            for stage in stages_of(prepared.model, plan, 0):
                take.begin_stage()
                made += [
                    each.frames for each in stage.run([take]) if isinstance(each, FramesDecoded)
                ]
        return np.concatenate(made)

    offloaded = tuple(replace(part, offload=True, streams=streams) for part in parts)
    changed = frames(replace(prepared.plan, components=offloaded))
    assert np.array_equal(changed, frames(prepared.plan))


def test_text_in_mp4_out(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.mp4"
    words = ["--size", "32x16", "--num-frames", "18", "--steps", "2", "--seed", "1", "-o", str(out)]
    assert main(["generate", "一只红色的气球 a balloon", "--model", str(folder), *words]) == 0
    with av.open(str(out)) as container:
        stream = container.streams.video[0]
        assert (stream.width, stream.height, float(stream.average_rate)) == (32, 16, 25.0)
        assert sum(1 for _ in container.decode(stream)) == 18
    assert out.with_suffix(".json").is_file()


def notes(folder: Path, prompt: str, **options: Any) -> list[str]:
    request = Request(prompt=prompt, model=str(folder), **{**SHORT, "num_inference_steps": 1},
                      **options)  # fmt: skip
    return [event.text for event in everyframe.stream(request) if isinstance(event, Note)]


def test_what_an_encoder_does_not_read_is_told(folder: Path) -> None:
    fits = notes(folder, "a red circle", pos_magic="", negative_prompt="blue")
    assert not [note for note in fits if "CLIP" in note]
    long = "a red circle on a blue background " * 12
    request = Request(prompt=long, model=str(folder), pos_magic="超高清", negative_prompt="blue",
                      **{**SHORT, "num_inference_steps": 1})  # fmt: skip
    events = list(everyframe.stream(request))
    told = [event.text for event in events if isinstance(event, Note)]
    (cut,) = [note for note in told if "of the prompt's 89 tokens CLIP reads 77, and not" in note]
    done = events[-1]
    assert isinstance(done, VideoDone)
    assert done.record["notes"] == [cut]


def test_a_prompt_beyond_step_llm_is_refused_or_cut_as_asked(folder: Path) -> None:
    long = "a red circle on a blue background " * 60
    with pytest.raises(InputError, match=r"Step-LLM reads 320; shorten it.*--truncate-prompt") as e:
        run(folder, long)
    assert len(str(e.value)) < 500
    told = notes(folder, long, truncate_prompt=True)
    with pytest.raises(InputError, match="Step-LLM reads 320"):
        everyframe.plan(long, model=str(folder), **SHORT)
    planned = everyframe.plan(long, model=str(folder), truncate_prompt=True, **SHORT).notes
    for found in (told, planned):
        assert sum("too long for Step-LLM; its end is cut" in note for note in found) == 1
    with pytest.raises(InputError, match="the negative prompt has"):
        run(folder, negative_prompt=long)
