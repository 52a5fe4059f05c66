"""Tiny random checkpoints in upstream's own layouts, written to disk for tests.

They go through the same finding, loading and running code as real ones; only their sizes differ.
Layouts: hpcaitech/Open-Sora v1.0.0 (a flat pickle) and v1.2.0 (config.json and safetensors),
diffusers' autoencoder folder, DeepFloyd's T5 folder.
"""

from __future__ import annotations

import io
import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from everyframe.families.opensora.components import build_model
from everyframe.families.opensora.config import STDiT3Config, STDiTConfig
from everyframe.families.opensora.vae import ImageVAE, VideoVAE
from everyframe.families.opensora.vae_config import ImageVAEConfig, VideoVAEConfig

CAPTION_CHANNELS = 16
MAX_LENGTH = 24
SENTENCE_PIECES = 60
WORDS = [
    "a", "the", "red", "blue", "circle", "square", "moves", "to", "right", "left", "on",
    "background", "and", "aesthetic", "score",
]  # fmt: skip

AUTOENCODER = {
    "in_channels": 3,
    "out_channels": 3,
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [8, 8, 8, 8],
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 4,
    "sample_size": 32,
}
TEMPORAL = {"filters": 4, "num_res_blocks": 1, "channel_multipliers": [1, 1, 2, 2], "num_groups": 2}


def opensora_1_2(
    folder: Path, *, seed: int = 0, vae: Mapping[str, Any] | None = None, **sizes: Any
) -> Path:
    """A folder with an Open-Sora 1.2 of tiny sizes: denoiser, vae/, text_encoder/.

    `sizes` of the denoiser and `vae`, arguments of `video_vae`, make it larger.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["STDiT3"],
        "model_type": "STDiT3",
        "input_size": [None, None, None],
        "input_sq_size": 512,
        "in_channels": 4,
        "patch_size": [1, 2, 2],
        "hidden_size": 32,
        "depth": 2,
        "num_heads": 2,
        "caption_channels": CAPTION_CHANNELS,
        "model_max_length": MAX_LENGTH,
        "qk_norm": True,
        "enable_flash_attn": True,
        "torch_dtype": "float32",
        **sizes,
    }
    model = build_model(STDiT3Config.from_json(config))
    tensors = randomised(model, seed)
    tensors["rope.freqs"] = torch.zeros(config["hidden_size"] // config["num_heads"] // 2)
    _write(folder, config, tensors)
    video_vae(folder / "vae", seed=seed + 1, **vae or {})
    text_encoder(folder / "text_encoder", seed=seed + 2)
    return folder


def opensora_1_0(folder: Path, *, seed: int = 0) -> Path:
    """A pickle of tiny 1.0 weights with its sizes beside it, and its parts; the pickle's path."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "STDiT",
        "input_size": [16, 4, 4],
        "in_channels": 4,
        "hidden_size": 32,
        "depth": 2,
        "num_heads": 2,
        "caption_channels": CAPTION_CHANNELS,
        "model_max_length": MAX_LENGTH,
        "space_scale": 0.5,
    }
    tensors = randomised(build_model(STDiTConfig.from_json(config)), seed)
    tensors["pos_embed"] = torch.zeros(1, 4, 32)
    tensors["pos_embed_temporal"] = torch.zeros(1, 16, 32)
    path = folder / "OpenSora-v1-HQ-16x256x256.pth"
    torch.save(tensors, path)
    (folder / "config.json").write_text(json.dumps(config))
    image_vae(folder / "vae", seed=seed + 1)
    text_encoder(folder / "text_encoder", seed=seed + 2)
    return path


def video_vae(
    folder: Path,
    *,
    seed: int = 1,
    spatial: Mapping[str, Any] = AUTOENCODER,
    temporal: Mapping[str, Any] = TEMPORAL,
) -> Path:
    """1.2's autoencoder in its own layout, with the spatial sizes written along."""
    config = {
        "architectures": ["VideoAutoencoderPipeline"],
        "model_type": "VideoAutoencoderPipeline",
        "micro_frame_size": 17,
        "vae_2d": {
            "type": "VideoAutoencoderKL",
            "from_pretrained": "PixArt-alpha/pixart_sigma_sdxlvae_T5_diffusers",
            "subfolder": "vae",
            "micro_batch_size": 4,
            "config": dict(spatial),
        },
        "vae_temporal": {"type": "VAE_Temporal_SD", "from_pretrained": None, **temporal},
        "shift": [-0.10, 0.34, 0.27, 0.98],
        "scale": [3.85, 2.32, 2.33, 3.06],
    }
    module = VideoVAE(VideoVAEConfig.from_json(config))
    _write(folder, config, randomised(module, seed))
    return folder


def image_vae(folder: Path, *, seed: int = 1) -> Path:
    """An autoencoder as diffusers saves it."""
    config = {"_class_name": "AutoencoderKL", "_diffusers_version": "0.25.0", **AUTOENCODER}
    tensors = randomised(ImageVAE(ImageVAEConfig.from_json(config)), seed)
    plain = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    _write(folder, config, plain, "diffusion_pytorch_model.safetensors")
    return folder


def text_encoder(folder: Path, *, seed: int = 2) -> Path:
    """T5 and its tokenizer in one folder, as transformers saves them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

    vocabulary = {word: index for index, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", vocabulary["</s>"])]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    fast.save_pretrained(folder)
    config = T5Config(
        vocab_size=len(vocabulary), d_model=CAPTION_CHANNELS, d_kv=8, d_ff=32, num_layers=1,
        num_heads=2, feed_forward_proj="gated-gelu", tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(seed)
    T5EncoderModel(config).save_pretrained(folder)
    return folder


def deepfloyd_t5(folder: Path, *, seed: int = 2) -> Path:
    """T5 as DeepFloyd/t5-v1_1-xxl has it: two pickled shards of the encoder, and spiece.model."""
    text_encoder(folder, seed=seed)
    for file in folder.iterdir():
        if "token" in file.name:
            file.unlink()
    sentence_pieces(folder / "spiece.model")
    config = json.loads((folder / "config.json").read_text())
    encoder = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(SENTENCE_PIECES, CAPTION_CHANNELS, generator=generator)
    encoder["shared.weight"] = encoder["encoder.embed_tokens.weight"] = rows
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": len(rows)}))
    (folder / "model.safetensors").unlink()
    shards(folder, encoder, "pytorch_model", "bin")
    return folder


def sentence_pieces(path: Path) -> None:
    """A small sentencepiece model with T5's special tokens, trained on `WORDS`."""
    import sentencepiece

    shuffled = random.Random(0)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(" ".join(shuffled.choices(WORDS, k=8)) for _ in range(300)),
        model_writer=model, vocab_size=SENTENCE_PIECES, hard_vocab_limit=False,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2,
    )  # fmt: skip
    path.write_bytes(model.getvalue())


def shard(folder: Path) -> None:
    """Turns ``model.safetensors`` into two shards and their index."""
    whole = folder / "model.safetensors"
    tensors = load_file(whole)
    whole.unlink()
    shards(folder, tensors, "model", "safetensors")


def shards(folder: Path, tensors: dict[str, torch.Tensor], stem: str, suffix: str) -> None:
    """Two files of tensors, and the index that names them."""
    names = list(tensors)
    half = len(names) // 2
    table: dict[str, str] = {}
    for number, part in enumerate((names[:half], names[half:]), start=1):
        file = f"{stem}-{number:05}-of-00002.{suffix}"
        table |= dict.fromkeys(part, file)
        chosen = {name: tensors[name].clone() for name in part}
        if suffix == "bin":
            torch.save(chosen, folder / file)
        else:
            save_file(chosen, folder / file)
    index = folder / f"{stem}.{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": table}))


def old_attention_names(file: Path) -> None:
    """Renames the attention of a diffusers autoencoder to what it was called before 0.18."""
    new = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    tensors = load_file(file)
    renamed = {}
    for name, tensor in tensors.items():
        for now, before in new.items():
            if ".attentions." in name:
                name = name.replace(f".{now}.", f".{before}.")
        renamed[name] = tensor
    assert renamed.keys() != tensors.keys()
    save_file(renamed, file)


def randomise(module: nn.Module, seed: int) -> None:
    """Set every parameter of the module to that of `randomised`."""
    with torch.no_grad():
        state = randomised(module, seed)
        for name, parameter in module.named_parameters():
            parameter.copy_(state[name])


def randomised(module: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """The module's state with every parameter drawn anew, small enough to stay finite.

    Zero-initialised layers would hide whatever is wrong before them.
    """
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, torch.Tensor] = {}
    parameters = {name for name, _ in module.named_parameters()}
    for name, tensor in module.state_dict().items():
        if name not in parameters:
            state[name] = tensor
        elif tensor.ndim == 1 and name.endswith("weight"):
            state[name] = 1 + 0.1 * torch.randn(tensor.shape, generator=generator)
        else:
            fan_in = max(tensor[0].numel(), 1) if tensor.ndim > 1 else 100
            state[name] = torch.randn(tensor.shape, generator=generator) * fan_in**-0.5
    return state


def _write(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    name: str = "model.safetensors",
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / name)


def overflowing(folder: Path, place: Path) -> Path:
    """A copy of a 1.2 checkpoint that overflows in float16, in the first block's feed-forward."""
    shutil.copytree(folder, place)
    weights = load_file(place / "model.safetensors")
    weight = weights["spatial_blocks.0.mlp.fc1.weight"]
    weight.mul_(6e4 / weight.abs().max())
    save_file(weights, place / "model.safetensors", metadata={"format": "pt"})
    return place
