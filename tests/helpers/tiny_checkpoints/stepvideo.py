"""A tiny random Step-Video in upstream's own folder layout, written to disk for tests.

It goes through the same finding, loading and running code as a real one; only its sizes differ:
sharded transformer/ and step_llm/, vae/vae_v2.safetensors with the name that upstream gives its
last convolution, hunyuan_clip/ with the pickle that it is, both tokenizers, scheduler/.
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from everyframe.families.stepvideo.config import StepLLMConfig, StepVideoModelConfig
from everyframe.families.stepvideo.llm import StepLLM
from everyframe.families.stepvideo.model import StepVideoModel
from everyframe.families.stepvideo.text import build_clip
from everyframe.families.stepvideo.vae import StepVAE
from everyframe.families.stepvideo.vae_config import StepVAEConfig
from helpers.tiny_checkpoints import opensora as tiny_opensora

DENOISER: dict[str, Any] = {
    "_class_name": "StepVideoModel",
    "_diffusers_version": "0.31.0",
    "num_attention_heads": 3,
    "attention_head_dim": 16,
    "in_channels": 2,
    "out_channels": 2,
    "num_layers": 3,
    "patch_size": 1,
    "caption_channels": [24, 16],
    "dropout": 0.0,
    "norm_type": "ada_norm_single",
    "norm_elementwise_affine": False,
    "norm_eps": 1e-6,
    "use_additional_conditions": False,
    "attention_type": "parallel",
}
LLM: dict[str, Any] = {
    "model_type": "step1",
    "hidden_size": 24,
    "num_attention_heads": 6,
    "num_attention_groups": 2,
    "num_layers": 2,
    "ffn_hidden_size": 40,
    "seq_length": 64,
    "padded_vocab_size": 512,
    "layernorm_epsilon": 1e-5,
    "use_flash_attn": True,
    "params_dtype": "torch.bfloat16",
}
CLIP: dict[str, Any] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 80,
    "vocab_size": 64,
    "hidden_dropout_prob": 0.1,
}
VAE = StepVAEConfig(
    z_channels=2,
    encoder_widths=(32, 32, 32, 64),
    encoder_blocks=1,
    decoder_widths=(32, 32, 32, 64),
    decoder_blocks=0,
)
SENTENCES = (
    "a red circle moves to the right on a blue background",
    "a blue square moves to the left and the camera follows it",
    "一只红色的气球在蓝色的天空中慢慢向右飘动",
    "超高清、HDR 视频、环境光、杜比全景声、画面稳定、流畅动作、逼真的细节、专业级构图、超现实主义",
    "自然、生动、超细节、清晰。画面暗、低分辨率、不良手、文本、缺少手指、多余的手指、裁剪、低质量",
    "颗粒状、签名、水印、用户名、模糊。",
)


def stepvideo(folder: Path, *, seed: int = 0) -> Path:
    """The whole folder; give it a name with turbo in it for the other variant."""
    index = {
        "_class_name": "StepVideoPipeline",
        "_diffusers_version": "0.31.0",
        "scheduler": ["stepvideo", "FlowMatchDiscreteScheduler"],
        "transformer": ["stepvideo", "StepVideoModel"],
    }
    _write_json(folder / "model_index.json", index)
    scheduler = {"_class_name": "FlowMatchDiscreteScheduler", "reverse": False, "solver": "euler"}
    _write_json(folder / "scheduler" / "scheduler_config.json", scheduler)
    denoiser(folder / "transformer", seed=seed)
    step_llm(folder / "step_llm", seed=seed + 1)
    clip(folder / "hunyuan_clip", seed=seed + 2)
    vae(folder / "vae", seed=seed + 3)
    return folder


def denoiser(folder: Path, *, seed: int = 0) -> None:
    """Two shards and their index, as diffusers saves them."""
    _write_json(folder / "config.json", DENOISER)
    tensors = tiny_opensora.randomised(
        StepVideoModel(StepVideoModelConfig.from_json(DENOISER)), seed
    )
    tiny_opensora.shards(folder, _brought(tensors), "diffusion_pytorch_model", "safetensors")


def step_llm(folder: Path, *, seed: int = 1) -> None:
    """Two shards and the sentencepiece file."""
    _write_json(folder / "config.json", LLM)
    tensors = tiny_opensora.randomised(StepLLM(StepLLMConfig.from_json(LLM)), seed)
    tiny_opensora.shards(folder, tensors, "model", "safetensors")
    (folder / "step1_chat_tokenizer.model").write_bytes(sentencepiece())


def sentencepiece(pieces: int = 460, **fields: Any) -> bytes:
    """A vocabulary of single characters and bytes, with the marks where Step-LLM's are."""
    from sentencepiece import SentencePieceTrainer

    written = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES), model_writer=written, vocab_size=pieces,
        model_type="bpe", byte_fallback=True, hard_vocab_limit=False, minloglevel=2,
        character_coverage=1.0, **{"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1, **fields},
    )  # fmt: skip
    return written.getvalue()


def clip(folder: Path, *, seed: int = 2) -> None:
    """The encoder as a pickle with what else is in upstream's file, and a vocabulary."""
    encoder, tokenizer = folder / "clip_text_encoder", folder / "tokenizer"
    _write_json(encoder / "config.json", CLIP)
    tensors = tiny_opensora.randomised(build_clip(CLIP), seed)
    stored = {f"bert.{name}": tensor for name, tensor in tensors.items()}
    stored["visual.conv1.weight"] = torch.zeros(2, 3, 2, 2)
    stored["logit_scale"] = torch.zeros(())
    torch.save(stored, encoder / "pytorch_model.bin")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words += sorted(set(re.findall(r"[a-z]+", " ".join(SENTENCES))))
    words += sorted(set("".join(SENTENCES)) - set(" " + "".join(words)))[: 64 - len(words)]
    tokenizer.mkdir(parents=True, exist_ok=True)
    (tokenizer / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    _write_json(
        tokenizer / "tokenizer_config.json",
        {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 77},
    )


def vae(folder: Path, *, seed: int = 3) -> None:
    """The one file that upstream's pipeline reads, and the first version's beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = tiny_opensora.randomised(StepVAE(VAE), seed)
    for kind in ("weight", "bias"):
        last = tensors.pop(f"decoder.conv_out.conv.{kind}")
        tensors[f"decoder.conv_out.{kind}"] = last
    save_file(tensors, folder / "vae_v2.safetensors")
    save_file({"decoder.conv_in.weight": torch.zeros(1)}, folder / "vae.safetensors")


def _brought(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Modulation strong enough that every part shows in the result."""
    return {name: tensor * (3 if "table" in name else 1) for name, tensor in tensors.items()}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")
