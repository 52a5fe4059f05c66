"""Component files in requests, plans, records and runs; and on the command line."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everyframe
from everyframe.checkpoints.tensor_file import open_checkpoint
from everyframe.core.errors import CheckpointError, InputError
from everyframe.core.events import Step
from everyframe.core.request import Request
from everyframe.core.serialization import from_jsonable, to_jsonable
from helpers.components import originals, stored
from helpers.loras import files as lora_files
from helpers.loras.files import as_lora, factors_for
from helpers.slow_rows import slow_unless
from helpers.tiny_checkpoints import families as tiny_families

#: Pipeline, and the names of its components in `originals`.
PIPELINES = {
    "wan": {"transformer": "wan", "transformer_2": "wan", "text_encoder": "umt5"},
    "ltx": {"transformer": "ltx"},
    "hunyuan": {"transformer": "hunyuan", "vae": "hunyuan_vae", "text_encoder_2": "clip"},
    "cogvideox": {"transformer": "cogvideox"},
}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    opened = open_checkpoint(folder)
    return {name: opened.load(name) for name in opened}


def original(model: Path, component: str, name: str) -> dict[str, torch.Tensor]:
    """The tensors of a model's component by its authors' names."""
    found = originals.OTHER_NAMES[name](tensors_of(model / component))
    return {key: each.contiguous() for key, each in found.items()}


def generate(name: str, **more: Any) -> everyframe.Video:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", everyframe.EveryframeWarning)
        asked = {} if "from_record" in more else tiny_families.asked(name)
        made = everyframe.generate(**{"run_dir": "off", **asked, **more})
    assert isinstance(made, everyframe.Video)
    return made


PARTS = [(name, part) for name, parts in PIPELINES.items() for part in parts]
#: Of the fast set: one of each kind. The names of every network are those of
#: `test_component_files.py`.
FAST = [("wan", "transformer"), ("wan", "text_encoder"), ("hunyuan", "vae"),
        ("cogvideox", "transformer")]  # fmt: skip


@pytest.mark.parametrize(
    ("part", "dtype"),
    [
        pytest.param(
            part, dtype,
            marks=()
            if part in FAST and dtype == ("fp32", "bf16")[FAST.index(part) % 2]
            else pytest.mark.slow,
        )
        for part in PARTS
        for dtype in ("fp32", "bf16")
    ],
)  # fmt: skip
def test_frames_are_those_of_the_folder(
    part: tuple[str, str], dtype: str, tiny_root: Path, tmp_path: Path
) -> None:
    """Bit for bit; a folder without those weights will do."""
    name, component = part
    model = tiny_families.made(name, tiny_root)
    if dtype == "bf16":  # as it is stored: the libraries round float32 islands to bfloat16 first
        model = Path(shutil.copytree(model, tmp_path / "half"))
        for file in (model / component).glob("*.safetensors"):
            stored.write(file, {k: t.bfloat16() for k, t in tensors_of(file).items()})
    tensors = original(model, component, PIPELINES[name][component])
    prefix = "model.diffusion_model." if component.startswith("transformer") else ""
    file = stored.write(tmp_path / "a.safetensors", {prefix + k: t for k, t in tensors.items()})
    less = tmp_path / "less"
    shutil.copytree(model, less)
    for weights in (less / component).glob("*.safetensors*"):
        weights.unlink()
    with pytest.raises(CheckpointError):
        generate(name, model=str(less), dtype=dtype)
    whole = generate(name, model=str(model), dtype=dtype)
    found = generate(name, model=str(less), dtype=dtype, components={component: file})
    assert np.array_equal(found.frames, whole.frames)
    assert found.record is not None
    assert found.record["request"]["components"][component]["file"] == "a.safetensors"
    assert whole.record is not None
    assert found.record["model"]["sha256"] != whole.record["model"]["sha256"]


def test_a_family_of_our_own(tiny_root: Path, tmp_path: Path) -> None:
    name = "opensora-1.2"
    model = tiny_families.made(name, tiny_root)
    whole = generate(name, model=str(model))
    denoiser = tensors_of(model / "model.safetensors")
    file = stored.write(tmp_path / "a.safetensors", {f"module.{k}": t for k, t in denoiser.items()})
    found = generate(name, model=str(model), components=[f"denoiser={file}"])
    assert np.array_equal(found.frames, whole.frames)
    other = {key: each * 0.9 for key, each in denoiser.items()}
    stored.write(file, other)
    assert not np.array_equal(
        generate(name, model=str(model), components=[f"denoiser={file}"]).frames, whole.frames
    )


@pytest.mark.parametrize("name", slow_unless(["svd", "stepvideo"], ["svd", "stepvideo", "inpaint"]))
def test_the_other_families(name: str, tiny_root: Path, tmp_path: Path) -> None:
    model = tiny_families.made(name, tiny_root)
    component = "denoiser" if name == "stepvideo" else "unet"
    folder = model / ("transformer" if name == "stepvideo" else "unet")
    file = stored.write(tmp_path / "a.safetensors", tensors_of(folder))
    plain = tiny_families.asked(name, model=str(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", everyframe.EveryframeWarning)
        plan = everyframe.plan(**plain, components={component: file})
    assert plan.component(component).source == "a.safetensors"
    whole = generate(name, model=str(model))
    found = generate(name, model=str(model), components={component: file})
    assert np.array_equal(found.frames, whole.frames)


def test_a_scaled_file_and_a_lora(tiny_root: Path, tmp_path: Path) -> None:
    """A LoRA is merged into the widened weights."""
    model = tiny_families.made("wan", tiny_root)
    tensors, meant = stored.scaled(original(model, "transformer", "wan"))
    scaled = stored.write(tmp_path / "scaled.safetensors", tensors)
    wide = stored.write(tmp_path / "wide.safetensors", {k: t.float() for k, t in meant.items()})
    state = tensors_of(model / "transformer")
    factors = factors_for(state, lora_files.matrices(state), alpha=0.6)
    lora = lora_files.write(tmp_path / "lora.safetensors", as_lora(factors, "transformer."))
    made = [
        generate("wan", model=str(model), dtype="fp32", components={"transformer": file},
                 loras=[f"{lora}@transformer"])
        for file in (scaled, wide)
    ]  # fmt: skip
    assert np.array_equal(made[0].frames, made[1].frames)
    bare = generate("wan", model=str(model), dtype="fp32", components={"transformer": scaled})
    assert not np.array_equal(made[0].frames, bare.frames)


def test_gguf(tiny_root: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the package that reads GGUF is not installed")
    model = tiny_families.made("wan", tiny_root)
    encoder = original(model, "text_encoder", "umt5_llama_cpp")
    path, meant = stored.write_gguf(tmp_path / "a.gguf", encoder, "Q8_0", "t5encoder")
    wide = stored.write(tmp_path / "wide.safetensors", meant)
    made = [
        generate("wan", model=str(model), dtype="fp32", components={"text_encoder": file})
        for file in (path, wide)
    ]
    assert np.array_equal(made[0].frames, made[1].frames)


# ------------------------------------------------------------------------------ plans and records


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("vae=a.safetensors", {"vae": "a.safetensors"}),
        (["vae=a", "transformer=b=c"], {"vae": "a", "transformer": "b=c"}),
        ({"vae": Path("a")}, {"vae": "a"}),
        ({}, {}),
    ],
)
def test_how_components_are_given(given: Any, wanted: dict[str, str]) -> None:
    request = Request(prompt="x", components=given)
    assert request.components == wanted
    assert from_jsonable(json.loads(json.dumps(to_jsonable(request)))) == request


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (3, "components must be NAME=FILE"),
        ("vae", "components must be NAME=FILE"),
        ("=a", "components must be NAME=FILE"),
        ("vae=", "components must be NAME=FILE"),
        ("../vae=a", "components must be NAME=FILE"),
        ([3], "components must be NAME=FILE"),
        ({"vae": 3}, "components must be NAME=FILE"),
        ({3: "a"}, "components must be NAME=FILE"),
        (None, "components must be NAME=FILE"),
        (["vae=a", "vae=b"], "vae has two files"),
    ],
)
def test_what_is_no_component(given: Any, text: str) -> None:
    with pytest.raises(InputError, match=re.escape(text)):
        Request(prompt="x", components=given)


def test_a_plan_tells_them(
    tiny_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from everyframe.cli.main import main

    model = tiny_families.made("wan", tiny_root)
    tensors, _ = stored.scaled(original(model, "transformer", "wan"))
    file = stored.write(tmp_path / "a.safetensors", tensors)
    asked = ["plan", "a fox", "--model", str(model), "--size", "16x16", "--num-frames", "5"]
    assert main([*asked, "--component", f"transformer={file}"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "the transformer is read from a.safetensors" in printed
    assert "a.safetensors: 26 weights are stored in 8-bit with scales" in printed
    for given, text in (
        (f"tranformer={file}", "has no component 'tranformer' with weights; did you mean"),
        (f"scheduler={file}", "has no component 'scheduler' with weights"),
        (f"vae={file}", "a.safetensors is no file for the vae of"),
        (f"transformer={tmp_path}/none.gguf", "there is no file"),
    ):
        assert main([*asked, "--component", given]) == 2
        (line,) = [each for each in capsys.readouterr().err.splitlines() if each]
        assert text in line


def test_a_record_wants_the_same_file(
    tiny_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = tiny_families.made("wan", tiny_root)
    tensors = original(model, "transformer", "wan")
    stored.write(Path("a.safetensors"), tensors)
    whole = generate("wan", model=str(model), components={"transformer": "a.safetensors"})
    again = generate("wan", from_record=whole, model=str(model))
    assert np.array_equal(again.frames, whole.frames)
    stored.write(Path("a.safetensors"), {key: each + 1 for key, each in tensors.items()})
    with pytest.raises(InputError, match=r"its hash differs.*--component transformer=FILE"):
        generate("wan", from_record=whole, model=str(model))
    Path("a.safetensors").unlink()
    with pytest.raises(InputError, match="not in this folder; give it again"):
        generate("wan", from_record=whole, model=str(model))
    assert whole.record is not None
    for wrong in ("a", {"vae": "a"}, {"vae": {"sha256": "a"}}, {"vae": {"file": "a"}},
                  {"vae": {"file": "../a", "sha256": "0" * 64}}):  # fmt: skip
        record = {**whole.record, "request": {**whole.record["request"], "components": wrong}}
        with pytest.raises(InputError, match="component"):
            generate("wan", from_record=record, model=str(model))


def test_a_run_goes_on_with_the_same_file(
    tiny_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = tiny_families.made("wan", tiny_root)
    tensors = original(model, "transformer", "wan")
    file = stored.write(tmp_path / "a.safetensors", tensors)
    asked = {**tiny_families.asked("wan", model=str(model)), "components": {"transformer": file}}
    whole = generate("wan", **asked)
    for is_changed in (False, True):
        events = everyframe.stream(Request(**asked))
        next(event for event in events if isinstance(event, Step))
        events.close()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", everyframe.EveryframeWarning)
            if not is_changed:
                found = everyframe.resume()
                assert isinstance(found, everyframe.Video)
                assert np.array_equal(found.frames, whole.frames)
                continue
            stored.write(file, {key: each + 1 for key, each in tensors.items()})
            with pytest.raises(InputError, match=r"are not those that|was changed since"):
                everyframe.resume()


def test_a_file_in_the_home_of_nobody_is_wrong_input(tiny_root: Path) -> None:
    model = str(tiny_families.made("wan", tiny_root))
    with pytest.raises(InputError, match=r"^components '~nobody-is-called-so/x' is in the home"):
        everyframe.plan(
            everyframe.Request(
                prompt="a", model=model, components={"transformer": "~nobody-is-called-so/x"}
            )
        )
