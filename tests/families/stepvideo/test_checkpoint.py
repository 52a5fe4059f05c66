"""Upstream's folder as it is, what is wrong with one, and models that are not on this disk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import everyframe
from everyframe.checkpoints.locate import locate
from everyframe.core.errors import CheckpointError, EveryframeError, InputError
from everyframe.core.request import Request
from everyframe.families.stepvideo.family import STEP_VIDEO, StepVideoSpec
from everyframe.families.stepvideo.options import StepVideoOptions
from helpers.tiny_checkpoints import stepvideo as tiny_stepvideo

GIVEN = {"size": "32x16", "num_frames": 1, "num_inference_steps": 1, "seed": 0}
SHARD = "transformer/diffusion_pytorch_model-00002-of-00002.safetensors"


@pytest.fixture(scope="module")
def sound(tiny_models: Callable[[str], Path]) -> Path:
    return tiny_models("stepvideo")


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "tiny-step"))


def found(name: str | Path, **options: str) -> StepVideoSpec:
    model = STEP_VIDEO.recognise(locate(str(name)), StepVideoOptions(**options))
    assert isinstance(model, StepVideoSpec)
    return model


def test_upstream_s_folder_is_recognised(copy: Path) -> None:
    model = found(copy)
    assert model.title == "Step-Video-T2V (tiny-step)"
    assert model.missing() == ()
    assert model.config.vae == tiny_stepvideo.VAE
    files = {Path(file).relative_to(copy).as_posix() for file in model.weight_files()}
    assert len(files) == 6
    assert "vae/vae_v2.safetensors" in files
    assert "vae/vae.safetensors" not in files
    # Without the index as well, as some download it; and never another family's.
    (copy / "model_index.json").unlink()
    assert found(copy).title == model.title
    (copy / "transformer/config.json").write_text('{"_class_name": "FluxTransformer2DModel"}')
    assert STEP_VIDEO.recognise(locate(str(copy)), StepVideoOptions()) is None


def test_released_models_are_planned_before_they_are_fetched() -> None:
    base, turbo = found("stepvideo-t2v"), found("stepfun-ai/stepvideo-t2v-turbo")
    assert base.title.startswith("Step-Video-T2V, up to")
    assert (base.config.is_turbo, turbo.config.is_turbo) == (False, True)
    wanted = base.missing()
    assert [line.split(":")[0] for line in wanted] == ["stepfun-ai/stepvideo-t2v"] * 4
    assert "about 58.7 GB" in wanted[0]
    assert "about 39.2 GB" in wanted[1]
    # Turbo is a denoiser; all else is the base model's.
    assert [line.split(":")[0] for line in turbo.missing()] == [
        "stepfun-ai/stepvideo-t2v-turbo", *["stepfun-ai/stepvideo-t2v"] * 3
    ]  # fmt: skip
    assert sum(c.needs.num_parameters for c in base.components(settings(base))) == 49_771_884_355


def settings(model: StepVideoSpec) -> object:
    return model.resolve(Request(prompt="a"), 0)[0]


def test_turbo_s_folder_takes_the_rest_from_the_base(copy: Path, tmp_path: Path) -> None:
    turbo = tmp_path / "stepvideo-t2v-turbo"
    turbo.mkdir()
    for name in ("transformer", "scheduler", "model_index.json"):
        shutil.move(copy / name, turbo / name)
    model = found(turbo, base=str(copy))
    assert model.config.is_turbo
    assert model.title == "Step-Video-T2V Turbo (stepvideo-t2v-turbo)"
    assert model.missing() == ()
    video = everyframe.generate("a red circle", model=str(turbo), base=str(copy), **GIVEN)
    assert video.record["settings"]["guidance_scale"] == 5.0
    # Without it, they are the hub's.
    assert len(found(turbo).missing()) == 3
    with pytest.raises(InputError, match=r"base: .* lacks step_llm, hunyuan_clip, vae"):
        found(turbo, base=str(turbo))
    with pytest.raises(InputError, match="base must be a folder or a hub id"):
        found(turbo, base="nowhere")


def _config(path: str, **change: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / path
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))

    return edit


def _remove(path: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        place = folder / path
        shutil.rmtree(place) if place.is_dir() else place.unlink()

    return edit


def _tensors(
    path: str, change: Callable[[dict[str, torch.Tensor]], None]
) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / path)
        change(tensors)
        save_file(tensors, folder / path)

    return edit


def _vocabulary(size: int) -> Callable[[Path], None]:
    """A Step-LLM with so many pieces, in its config and in its weights."""

    def edit(folder: Path) -> None:
        _config("step_llm/config.json", padded_vocab_size=size)(folder)
        name = "tok_embeddings.word_embeddings.weight"
        for path in (folder / "step_llm").glob("*.safetensors"):
            tensors = load_file(path)
            if name in tensors:
                tensors[name] = torch.zeros(size, tensors[name].shape[1])
                save_file(tensors, path)

    return edit


def _bytes(path: str, content: Callable[[], bytes]) -> Callable[[Path], None]:
    return lambda folder: (folder / path).write_bytes(content()) and None


def _other_vae(folder: Path) -> None:
    shutil.copy(folder / "vae/vae.safetensors", folder / "vae/vae_v2.safetensors")


def _t5() -> bytes:
    return tiny_stepvideo.sentencepiece(pad_id=0, eos_id=1, unk_id=2, bos_id=-1)


SENTENCES = "step_llm/step1_chat_tokenizer.model"


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (_remove(SHARD), r"lacks 1 of 2 shards.*model-00002-of-00002"),
        (
            _tensors(SHARD, lambda t: t.__delitem__("proj_out.bias")),
            r"promises 1 tensors that its shards do not hold: proj_out\.bias",
        ),
        (_config("transformer/config.json", num_layers=4), "lacks .*transformer_blocks.3"),
        (_config("transformer/config.json", in_channels=3), "autoencoder has 2 latent channels"),
        (_config("step_llm/config.json", hidden_size=48), "Step-LLM has 48 channels.*takes 24"),
        (_config("hunyuan_clip/clip_text_encoder/config.json", model_type="clip"), "'clip' model"),
        (_config("scheduler/scheduler_config.json", reverse=True), "reverse to True; supported"),
        (_remove("step_llm/config.json"), r"looked for config\.json"),
        (_remove("transformer"), r"lacks transformer/|no checkpoint"),
        (_other_vae, "no autoencoder of Step-Video; wanted is version 2"),
        (_remove("vae/vae_v2.safetensors"), r"there is no file .*vae_v2\.safetensors"),
        (_remove(SENTENCES), r"no tokenizer: .*step1_chat_tokenizer\.model"),
        (_bytes(SENTENCES, lambda: b"short"), "is no sentencepiece file"),
        (_bytes(SENTENCES, _t5), r"begin and end tokens are \(-1, 1\)"),
        (_vocabulary(2048), "has 460 pieces, the model 2048"),
        (_vocabulary(400), "has 460 pieces, the model 400"),
        (
            _config("step_llm/config.json", padded_vocab_size=2048),
            r"word_embeddings\.weight' has shape \(\d+, 24\), expected \(2048, 24\)",
        ),
        (_remove("hunyuan_clip/tokenizer/vocab.txt"), r"no tokenizer: .*vocab\.txt"),
        (_bytes("hunyuan_clip/tokenizer/vocab.txt", lambda: b"a\nb\n"), "does not belong to CLIP"),
    ],
)
def test_what_is_wrong_is_named(copy: Path, edit: Callable[[Path], None], says: str) -> None:
    edit(copy)
    with pytest.raises((CheckpointError, InputError), match=says) as caught:
        everyframe.generate("a red circle", model=str(copy), **GIVEN)
    assert isinstance(caught.value, EveryframeError)
    assert len(str(caught.value).splitlines()) == 1


def test_a_shard_of_another_model_is_named(copy: Path, tmp_path: Path) -> None:
    """Two shards that each are whole, and do not belong together."""
    other = tiny_stepvideo.stepvideo(tmp_path / "other", seed=9)
    name = "diffusion_pytorch_model-00001-of-00002.safetensors"
    tensors = load_file(other / "transformer" / name)
    tensors["transformer_blocks.0.attn1.wqkv.weight"] = torch.zeros(192, 64)
    save_file(tensors, copy / "transformer" / name)
    with pytest.raises(CheckpointError, match=r"'transformer_blocks\.0\.attn1\.wqkv\.weight' has"):
        everyframe.generate("a red circle", model=str(copy), **GIVEN)


def test_clip_s_other_names_load_too(copy: Path) -> None:
    """As transformers saves it now, without the prefix; and as BERT's norms were once called."""
    same = everyframe.generate("a red circle", model=str(copy), **GIVEN).frames
    folder = copy / "hunyuan_clip/clip_text_encoder"
    stored = torch.load(folder / "pytorch_model.bin", weights_only=True)
    (folder / "pytorch_model.bin").unlink()
    plain = {
        name.removeprefix("bert.")
        .replace("LayerNorm.weight", "LayerNorm.gamma")
        .replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in stored.items()
    }
    save_file(plain, folder / "model.safetensors")
    assert (everyframe.generate("a red circle", model=str(copy), **GIVEN).frames == same).all()


def test_the_tiny_folder_is_upstream_s_layout(sound: Path) -> None:
    files = {path.relative_to(sound).as_posix() for path in sound.rglob("*") if path.is_file()}
    assert "hunyuan_clip/clip_text_encoder/pytorch_model.bin" in files
    assert "transformer/diffusion_pytorch_model.safetensors.index.json" in files
    assert set(load_file(sound / "vae/vae_v2.safetensors")) >= {"decoder.conv_out.weight"}
