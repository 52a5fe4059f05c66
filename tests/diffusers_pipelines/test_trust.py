"""A model's folder is data: what its files name is never imported, and nothing outside is read."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import everyframe
from everyframe.core.errors import CheckpointError, EveryframeError, InputError
from everyframe.core.events import Step
from everyframe.core.request import Request
from everyframe.diffusers_pipelines.files.checkpoint import is_library
from everyframe.engine.run import stream
from everyframe.engine.workers.launcher import run_in_workers
from everyframe.engine.workers.worker_process import WorkerJob
from everyframe.runs.checksummed_json import read_json, write_json
from everyframe.runs.folder import RunFolder, all_runs
from everyframe.runs.run_state import EVERY_STEP, SaveOptions
from helpers.tiny_checkpoints import pipelines as tiny_pipelines

SMALL: dict[str, Any] = {
    "prompt": "a fox", "num_inference_steps": 1, "seed": 1,
    **tiny_pipelines.CALLS["cogvideox"],
}  # fmt: skip

#: Writes that it ran beside the folder that it lies in.
PAYLOAD = "import pathlib; pathlib.Path(__file__).parents[1].joinpath('ran').touch()\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny-cog"
    tiny_pipelines.cogvideox(path)
    return path


@pytest.fixture
def copy(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to change, in the current folder, which is on the path as in a notebook."""
    root = Path(shutil.copytree(folder, tmp_path / "evilmodel"))
    tokenizer = "class Tok:\n    def from_pretrained(*args, **more): raise OSError('none')\n"
    (root / "payload.py").write_text(PAYLOAD + tokenizer, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return root


def edit(file: Path, **values: Any) -> None:
    known = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**known, **values}), encoding="utf-8")


NAMES: dict[str, list[Any]] = {
    "a module of the folder": ["evilmodel.payload", "Tok"],
    "a module of the standard library": ["this", "x"],
    "a function of it": ["os", "system"],
    "nothing": ["", "x"],
    "what climbs": ["../payload", "Tok"],
    "no class of diffusers": ["diffusers", "logging"],
    "no component of diffusers": ["diffusers", "load_image"],
    "a pipeline, which has an index of its own": ["diffusers", "DiffusionPipeline"],
    "what reads such an index": ["diffusers", "AutoPipelineForText2Image"],
    "blocks, which have code": ["diffusers", "ModularPipelineBlocks"],
    "what reads pickles and places": ["transformers", "RagRetriever"],
    "what reads tokenizers of its own": ["transformers", "RagTokenizer"],
    "a config": ["transformers", "T5Config"],
    "another config": ["transformers", "GenerationConfig"],
    "no class of transformers": ["transformers", "pipeline"],
    "a private name": ["transformers", "__class__"],
    "no module of a pipeline": ["TYPE_CHECKING", "x"],
}


@pytest.mark.parametrize("what", NAMES)
def test_an_index_names_components_of_libraries_alone(
    copy: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(copy / "model_index.json", tokenizer=NAMES[what])
    with pytest.raises(CheckpointError) as caught:
        everyframe.plan(model="./evilmodel", **SMALL)
    assert "\n" not in str(caught.value)
    assert not (copy.parent / "ran").exists()
    assert "this" not in sys.modules
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["AutoPipelineForText2Image", "ModularPipelineBlocks"])
def test_what_has_an_index_or_code_of_its_own_is_no_component(copy: Path, name: str) -> None:
    """Earlier versions of diffusers imported what the index of an inner pipeline named."""
    edit(copy / "model_index.json", tokenizer=["diffusers", name])
    inner = {"_class_name": "StableDiffusionPipeline", "unet": ["evilmodel.payload", "Tok"]}
    (copy / "tokenizer" / "model_index.json").write_text(json.dumps(inner), encoding="utf-8")
    with pytest.raises(CheckpointError, match="which is no component of a pipeline"):
        everyframe.generate(model="./evilmodel", **SMALL)
    assert not (copy.parent / "ran").exists()


def test_what_was_allowed_is_imported(copy: Path) -> None:
    """Else the tests above would hold of a payload that can't run at all."""
    edit(copy / "model_index.json", tokenizer=["evilmodel.payload", "Tok"])
    with pytest.raises(EveryframeError):
        everyframe.generate(model="./evilmodel", trust_remote_code=True, **SMALL)
    assert (copy.parent / "ran").exists()


def test_a_pipeline_is_a_pipeline(copy: Path) -> None:
    edit(copy / "model_index.json", _class_name="logging")
    with pytest.raises(CheckpointError, match="which is no pipeline"):
        everyframe.plan(model=str(copy), **SMALL)


def test_a_component_is_no_number(tmp_path: Path) -> None:
    """In an index beside components there are values, which a pipeline is given as they are."""
    tiny_pipelines.wan(tmp_path / "wan")
    for value in (7, [1], "x"):
        edit(tmp_path / "wan" / "model_index.json", transformer_2=value)
        for make in (everyframe.plan, everyframe.generate):
            with pytest.raises(CheckpointError, match="can't be made of its components"):
                make(model=str(tmp_path / "wan"), **{**SMALL, **tiny_pipelines.CALLS["wan"]})


@pytest.mark.parametrize("place", ["/absolute", "../outside", "vae/../../outside"])
def test_a_component_does_not_lie_elsewhere(copy: Path, folder: Path, place: str) -> None:
    name = place.replace("/absolute", str(folder / "vae"))
    shutil.copytree(folder / "vae", copy.parent / "outside")
    index = json.loads((copy / "model_index.json").read_text(encoding="utf-8"))
    index[name] = index.pop("vae")
    (copy / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(CheckpointError, match="outside of its own folder"):
        everyframe.plan(model=str(copy), **SMALL)


def linked_folder(copy: Path, folder: Path) -> None:
    shutil.rmtree(copy / "vae")
    (copy / "vae").symlink_to(folder / "vae")


def linked_weights(copy: Path, folder: Path) -> None:
    name = "diffusion_pytorch_model.safetensors"
    (copy / "vae" / name).unlink()
    (copy / "vae" / name).symlink_to(folder / "vae" / name)


def linked_config(copy: Path, folder: Path) -> None:
    (copy / "scheduler" / "scheduler_config.json").unlink()
    (copy / "scheduler" / "scheduler_config.json").symlink_to("/etc/passwd")


def linked_template(copy: Path, folder: Path) -> None:
    (copy / "tokenizer" / "additional_chat_templates").mkdir()
    (copy / "tokenizer" / "additional_chat_templates" / "a.jinja").symlink_to("/etc/passwd")


def index_that_climbs(copy: Path, folder: Path) -> None:
    weights = {"a": "../../tiny-cog/vae/diffusion_pytorch_model.safetensors"}
    text = json.dumps({"metadata": {}, "weight_map": weights})
    (copy / "vae" / "diffusion_pytorch_model.safetensors.index.json").write_text(text)


def tokenizer_that_climbs(copy: Path, folder: Path) -> None:
    edit(copy / "tokenizer" / "tokenizer_config.json", vocab_file="/etc/passwd")


@pytest.mark.parametrize(
    "change",
    [
        linked_folder,
        linked_weights,
        linked_config,
        linked_template,
        index_that_climbs,
        tokenizer_that_climbs,
    ],
)
def test_nothing_outside_of_the_folder_is_read(
    copy: Path, folder: Path, change: Callable[[Path, Path], None]
) -> None:
    change(copy, folder)
    with pytest.raises(CheckpointError, match=r"a link out of|outside its own folder"):
        everyframe.plan(model=str(copy), **SMALL)


def test_the_hubs_own_cache_is_made_of_links(folder: Path, tmp_path: Path) -> None:
    """Also one that is not this user's: its snapshots lead into the blobs beside them."""
    repository = tmp_path / "models--o--n"
    snapshot = repository / "snapshots" / "0123"
    shutil.copytree(folder, snapshot)
    (repository / "blobs").mkdir()
    for number, file in enumerate(sorted(snapshot.rglob("*.*"))):
        blob = repository / "blobs" / str(number)
        file.rename(blob)
        file.symlink_to(os.path.relpath(blob, file.parent))
    assert everyframe.plan(model=str(snapshot), **SMALL).infeasible is None


def test_a_tokenizers_code_is_not_asked_for(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would ask on the terminal, and run it on a y."""

    def ask(*given: object) -> str:
        (copy.parent / "asked").touch()
        return "y"

    monkeypatch.setattr("builtins.input", ask)
    edit(copy / "model_index.json", tokenizer=["transformers", "AutoTokenizer"])
    edit(
        copy / "tokenizer" / "tokenizer_config.json",
        tokenizer_class="Mine", auto_map={"AutoTokenizer": ["payload.Tok", None]},
    )  # fmt: skip
    shutil.copy(copy / "payload.py", copy / "tokenizer" / "payload.py")
    (copy / "tokenizer" / "config.json").unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match="its tokenizer can't be read"):
        everyframe.generate(model=str(copy), **SMALL)
    assert not (copy.parent / "asked").exists()
    assert not (copy / "ran").exists()


def test_a_config_inside_of_a_config_asks_for_no_code(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers makes such a model by its `Auto` classes, which would ask on the terminal."""
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("asked"))
    edit(copy / "model_index.json", text_encoder=["transformers", "LlavaForConditionalGeneration"])
    inner = {
        "model_type": "blip_text_model",
        "auto_map": {"AutoModel": "stranger/code--code.Model"},
    }
    edit(copy / "text_encoder" / "config.json", model_type="llava", text_config=inner)
    with pytest.raises(CheckpointError, match="code that comes with it: the config of text_enc"):
        everyframe.plan(model=str(copy), **SMALL)


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize(
    "kernel", ["stranger/kernel", "flash_attention_2", {"": "stranger/kernel"}]
)
def test_a_config_names_no_kernel_of_the_hub(copy: Path, key: str, kernel: Any) -> None:
    """transformers fetches it as native code and runs it, where the package kernels is there."""
    config = copy / "text_encoder" / "config.json"
    for values in ({key: kernel}, {"text_config": {key: kernel}}):
        edit(config, **values)
        with pytest.raises(CheckpointError, match="which transformers fetches as code"):
            everyframe.plan(model=str(copy), **SMALL)
    edit(config, text_config=None, **{key: "sdpa"})
    assert everyframe.plan(model=str(copy), **SMALL).infeasible is None


@pytest.mark.parametrize("file", ["processor_config.json", "audio_tokenizer_config.json"])
def test_a_processor_names_no_other_model(copy: Path, file: str) -> None:
    """transformers would load it from anywhere on this machine, and ask to run its code."""
    named = {
        "audio_tokenizer_class": "AutoModel", "audio_tokenizer_name_or_path": str(copy.parent)
    }  # fmt: skip
    is_own = file == "audio_tokenizer_config.json"
    text = json.dumps(named if is_own else {"audio_tokenizer": named})
    (copy / "tokenizer" / file).write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match="names an audio_tokenizer, a model that lies else"):
        everyframe.plan(model=str(copy), **SMALL)


@pytest.mark.parametrize("name", ["num_train_timesteps", "solver_order"])
def test_a_scheduler_builds_no_table_of_a_billion(copy: Path, name: str) -> None:
    edit(copy / "scheduler" / "scheduler_config.json", **{name: 10**9})
    with pytest.raises(CheckpointError, match=f"{name} is 1000000000; at most"):
        everyframe.plan(model=str(copy), **SMALL)


def test_an_adapter_is_no_component(copy: Path) -> None:
    file = copy / "text_encoder" / "adapter_config.json"
    file.write_text(json.dumps({"base_model_name_or_path": "stranger/model"}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="is an adapter for a model that lies elsewhere"):
        everyframe.plan(model=str(copy), **SMALL)


@pytest.mark.parametrize(
    ("name", "known"),
    [("diffusers", True), ("transformers", True), ("ltx2", True), ("stable_diffusion", True),
     ("evilmodel.payload", False), ("pipelines", False), ("..", False), ("os", False)],
)  # fmt: skip
def test_libraries_of_an_index(name: str, known: bool) -> None:
    assert is_library(name) is known


def test_a_runs_folder_does_not_allow_code(copy: Path, tmp_path: Path) -> None:
    """Whoever resumes it has to allow it again; the folder may have come from elsewhere."""
    code = PAYLOAD + "from diffusers import CogVideoXPipeline\nclass Mine(CogVideoXPipeline): ...\n"
    (copy / "my_code.py").write_text(code, encoding="utf-8")
    edit(copy / "model_index.json", _class_name=["my_code", "Mine"])
    request = Request(model=str(copy), trust_remote_code=True, **SMALL)
    with closing(stream(request, keep=SaveOptions(tmp_path / "runs", pace=EVERY_STEP))) as events:
        for event in events:
            if isinstance(event, Step):
                break
    run = next(all_runs(tmp_path / "runs"))
    with pytest.raises(InputError, match="allow it again: --trust-remote-code"):
        everyframe.resume(run.path)
    with pytest.raises(InputError, match="allow it again: --trust-remote-code"):
        list(run_in_workers(WorkerJob(run=run.path)))
    again = shutil.copytree(run.path, run.path.with_name("again"))
    video = everyframe.resume(run.path, trust_remote_code=True)
    assert isinstance(video, everyframe.Video)
    says = "allow it again: --trust-remote-code"
    with everyframe.load(copy) as engine, pytest.raises(InputError, match=says):
        engine.resume(again)
    with everyframe.load(copy, trust_remote_code=True) as engine:  # which is where it is allowed
        assert isinstance(engine.resume(again), everyframe.Video)


def test_a_runs_folder_fetches_no_model(folder: Path, tmp_path: Path) -> None:
    request = Request(model=str(folder), **SMALL)
    with closing(stream(request, keep=SaveOptions(tmp_path / "runs", pace=EVERY_STEP))) as events:
        for event in events:
            if isinstance(event, Step):
                break
    run = next(all_runs(tmp_path / "runs"))
    written = json.dumps(read_json(run.path / "run.json"))
    changed = written.replace(json.dumps(str(folder)), '"stranger/model"')
    assert changed != written
    write_json(run.path / "run.json", json.loads(changed))
    with pytest.raises(InputError, match=r"--model FOLDER \(it was 'stranger/model'\)"):
        everyframe.resume(run.path)
    RunFolder(run.path).write_run(read_json(run.path / "run.json") or {})  # as if it were ours
    with pytest.raises(EveryframeError, match="stranger/model is not on this disk"):
        everyframe.resume(run.path)


@pytest.mark.parametrize(
    "entry",
    [[None, None, {"type_hint": ["evilmodel.payload", "Tok"]}],
     [5, 5, {"type_hint": ["evilmodel.payload", "Tok"]}],
     ["diffusers", "AutoencoderKLWan", {"type_hint": ["evilmodel.payload", "Tok"]}],
     ["diffusers", "AutoencoderKLWan", {"type_hint": "os"}]],
)  # fmt: skip
def test_a_modular_indexs_hints_are_not_imported(copy: Path, entry: list[Any]) -> None:
    index = {"_class_name": "WanModularPipeline", "vae": entry}
    (copy / "modular_model_index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(CheckpointError, match="wants to run Python code that comes with it"):
        everyframe.plan(model="./evilmodel", **SMALL)
    assert not (copy.parent / "ran").exists()
