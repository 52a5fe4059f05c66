"""Step-Video's runs as formulas, with the modules as plain modules.

Texts go through sentencepiece and transformers, guidance is one doubled batch, Euler's step is the
paper's, and `StepVAE.decode` decodes. Nothing of the engine, the stages or the sampler is used
except the definition of the noise.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from sentencepiece import SentencePieceProcessor
from torch import Tensor
from transformers import BertModel, BertTokenizer

from everyframe.families.stepvideo.config import StepLLMConfig, StepVideoModelConfig
from everyframe.families.stepvideo.llm import StepLLM
from everyframe.families.stepvideo.model import StepVideoModel
from everyframe.families.stepvideo.settings import NEG_MAGIC, POS_MAGIC
from everyframe.families.stepvideo.vae import StepVAE
from everyframe.samplers import noise
from helpers.tiny_checkpoints import stepvideo as tiny_stepvideo

PROMPT = "a red circle moves 红色的气球"
#: Two pieces, so that there is a seam; not square.
SIZES: dict[str, Any] = {"height": 16, "width": 32, "num_frames": 18, "num_inference_steps": 3}
LATENTS = (2, 4, 1, 2)


def _shards(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def text_states(folder: Path, texts: list[str]) -> tuple[Tensor, Tensor, Tensor]:
    """Both encoders' states and the mask, the texts as one batch as upstream has them."""
    pieces = SentencePieceProcessor(model_file=str(folder / "step_llm/step1_chat_tokenizer.model"))
    rows, mask = torch.full((len(texts), 320), 2), torch.zeros(len(texts), 320)
    for row, text in enumerate(texts):
        ids = [1, *pieces.encode(text)[:318], 2]
        rows[row, : len(ids)] = torch.tensor(ids)
        mask[row, : len(ids)] = 1
    llm = StepLLM(StepLLMConfig.from_json(tiny_stepvideo.LLM)).eval()
    llm.load_state_dict(_shards(folder / "step_llm"))
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


def frames_of(
    folder: Path,
    *,
    steps: int = SIZES["num_inference_steps"],
    prompt: str = PROMPT + POS_MAGIC,
    negative: str = NEG_MAGIC,
    guidance: float = 9.0,
    shift: float = 13.0,
) -> np.ndarray[Any, Any]:
    """Float frames of one video with seed 5."""
    model = StepVideoModel(StepVideoModelConfig.from_json(tiny_stepvideo.DENOISER)).eval()
    model.load_state_dict(_shards(folder / "transformer"))
    vae = StepVAE(tiny_stepvideo.VAE).eval()
    state = load_file(folder / "vae/vae_v2.safetensors")
    vae.load_state_dict({
        name.replace("decoder.conv_out.", "decoder.conv_out.conv."): tensor
        for name, tensor in state.items()
    })  # fmt: skip
    llm, clip, mask = text_states(folder, [prompt, negative])
    z = noise.start_noise(5, LATENTS)[None]
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
