"""Runs whose decoder is certified in bfloat16: near float32, or float32 again where it isn't.

This CPU's flags are made up, its arithmetic is not: what is compared is what the frames are.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import everyframe
from everyframe.cli.main import main
from everyframe.core.events import Event, Planned, Repaired, VideoDone
from everyframe.core.plan import ComponentPlan
from everyframe.core.request import Request
from everyframe.engine.resumption.resume import resume_run
from everyframe.fast_paths import certificates
from everyframe.hardware import cpu as cpu_module
from everyframe.numerics.psnr import frame_psnr
from everyframe.planning.resolve import PreparedPlan, prepare
from everyframe.precision import policy
from helpers import fake_cpus
from helpers.events import frames_of
from helpers.interrupted_runs import interrupt
from helpers.plans import certificates_of
from helpers.slow_rows import slow_unless
from helpers.tiny_checkpoints import families as tiny_families

PATH = "bf16-decoder"
#: What the piece of the check has, less what other pieces of the same video may differ by.
LEAST_DB = 38.0

#: All of a family's autoencoders. One of ours and one of a pipeline run always;
#: `runtime/stages/test_decoder_check.py` has SVD's.
FAST = ("opensora-1.2", "cogvideox")
CASES = slow_unless(
    FAST,
    (*(each for each in tiny_families.OURS if each != "inpaint"), "cogvideox", "ltx", "hunyuan",
     "mochi"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Takes this processor for one with these flags, at first AMX; small components count."""

    def plant(name: str) -> None:
        monkeypatch.setattr(cpu_module, "_PROC", fake_cpus.proc_with(name, tmp_path / name))

    monkeypatch.setenv("EVERYFRAME_CACHE", str(tmp_path / "cache"))
    for variable in ("ONEDNN_MAX_CPU_ISA", "EVERYFRAME_DISABLE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(policy, "CPU_BF16_PARAMETERS", 0)
    plant("amx")
    return plant


class Model:
    """A tiny checkpoint and what is asked of it."""

    def __init__(self, name: str, root: Path) -> None:
        self.folder = tiny_families.made(name, root)
        pickles = list(self.folder.glob("*.pth"))
        self.asked: dict[str, Any] = {
            "model": str(pickles[0] if pickles else self.folder), "device": "cpu",
            **tiny_families.asked(name),
        }  # fmt: skip

    def prepared(self, *, will_run: bool = False, **more: Any) -> PreparedPlan:
        return prepare(Request(**{**self.asked, **more}), will_run=will_run)

    def vae(self, **more: Any) -> ComponentPlan:
        return self.prepared(**more).plan.component("vae")

    def certify(self) -> None:
        """The decoder in bfloat16 is certified, and nothing else that is tried at once."""
        shown = self.prepared()
        certificates.keep(certificates_of(shown, "refused", "bf16"))
        certificates.keep(certificates_of(shown, "certified", PATH))

    def events(self, **more: Any) -> list[Event]:
        return list(everyframe.stream(Request(**{**self.asked, **more})))

    def exactly(self, *paths: str) -> dict[str, Any]:
        """Options with which its autoencoder runs by these paths, and all else plainly."""
        names = [part.name for part in self.prepared(dtype="fp32").plan.components]
        return {"fast_paths": {**dict.fromkeys(names, ()), "vae": paths}, "force": True}


def repairs_of(events: list[Event]) -> list[Repaired]:
    return [event for event in events if isinstance(event, Repaired)]


def coarse(folder: Path) -> None:
    """Plant what bfloat16 rounds away, before the last norm, which takes it off again."""
    file = folder / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    place = "decoder.up_blocks.3.resnets.1.spatial_res_block.conv2.bias"
    tensors[place] += 1e3
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("name", CASES)
def test_frames_are_near_those_in_float32(name: str, tmp_path: Path) -> None:
    model = Model(name, tmp_path)
    wide = frames_of(model.events(**model.exactly()))
    events = model.events(**model.exactly(PATH))
    (planned,) = (event.plan for event in events if isinstance(event, Planned))
    precisions = {part.name: part.precision for part in planned.components}
    assert {n for n, each in precisions.items() if each.compute == "bfloat16"} == {"vae"}
    assert any("encoder" in each for each in precisions["vae"].islands)
    assert not repairs_of(events)
    found = frame_psnr(frames_of(events), wide)
    assert LEAST_DB <= found.min() < 80, "near, and not the same"


def test_a_decoder_that_bfloat16_gets_wrong_runs_in_float32_and_so_do_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model("svd", tmp_path)
    coarse(model.folder)
    wide = frames_of(model.events(**model.exactly()))
    events = model.events(**model.exactly(PATH), num_videos=2)
    repairs = repairs_of(events)
    assert [(each.component, each.cause, each.to) for each in repairs] == [
        ("vae", "coarse", "float32")
    ] * 2
    assert "dB against float32, and 40 are wanted" in repairs[0].text
    assert np.array_equal(frames_of(events)[: len(wide)], wide), "true float32, to the bit"
    record = next(event.record for event in events if isinstance(event, VideoDone))
    assert [each["cause"] for each in record["repairs"]] == ["coarse"]
    # Saved: the next plan begins with it, says so, and checks nothing.
    plan = model.prepared(**model.exactly(PATH)).plan
    assert any(note.startswith("vae runs in float32: in bfloat16 an") for note in plan.notes)
    monkeypatch.setattr("everyframe.runtime.stages.decoder_check.psnr_to_float32", None)
    again = model.events(**model.exactly(PATH))
    assert not repairs_of(again)
    assert np.array_equal(frames_of(again), wide)


@pytest.mark.parametrize("is_coarse", slow_unless([True], [False, True]))
def test_a_resumed_run_decodes_as_the_unbroken_one(tmp_path: Path, *, is_coarse: bool) -> None:
    model = Model("svd" if is_coarse else "opensora-1.2", tmp_path)
    if is_coarse:
        coarse(model.folder)
    options = {**model.asked, **model.exactly(PATH), "forget_repairs": True}
    whole = list(everyframe.stream(Request(**options)))
    assert len(repairs_of(whole)) == is_coarse
    again = list(resume_run(interrupt(tmp_path, 1, **options)))
    assert len(repairs_of(again)) == is_coarse
    assert np.array_equal(frames_of(again), frames_of(whole))


@pytest.mark.parametrize("name", ["svd", "cogvideox"])
def test_only_a_certificate_brings_it_and_each_name_takes_it_away(
    name: str, tmp_path: Path, cpu: Callable[[str], None]
) -> None:
    model = Model(name, tmp_path)
    shown = model.vae()
    assert (shown.precision.compute, shown.choices[0].verdict) == ("bfloat16", "expected")
    model.certify()
    vae = model.vae(will_run=True)
    assert (vae.precision.compute, vae.choices[0].path) == ("bfloat16", PATH)
    assert PATH in (vae.fast_paths or ())
    # Weights of the decoder are in memory twice, for the check.
    assert vae.weight_bytes > model.vae(dtype="fp32").weight_bytes
    for off in (PATH, "bf16"):
        assert model.vae(disable=[off]).precision.compute == "float32"
    assert model.vae(dtype="fp32").precision.compute == "float32"
    asked = model.vae(dtype="bf16")  # all of it, unchecked, as for any component
    assert (asked.precision.compute, PATH in (asked.fast_paths or ())) == ("bfloat16", False)
    assert "encoder" not in asked.precision.islands
    for flags in ("avx2", "avx512"):
        cpu(flags)
        assert PATH not in {each.path for each in model.vae().choices}
        assert model.vae().precision.compute == "float32"


@pytest.mark.slow
def test_its_trial_decides_on_this_processor(tmp_path: Path) -> None:
    """Which has none of the instructions that its flags promise, or is as fast as they say."""
    model = Model("svd", tmp_path)
    plan = model.prepared(will_run=True).plan
    vae = plan.component("vae")
    choice = next(each for each in vae.choices if each.path == PATH)
    is_certified = choice.verdict == "certified"
    assert vae.precision.compute == ("bfloat16" if is_certified else "float32")
    if choice.verdict == "refused":
        note = "video autoencoder: float32, as bf16-decoder was refused here"
        assert any(each.startswith(note) for each in plan.notes)


def test_without_such_a_processor_nothing_changes(
    tmp_path: Path, cpu: Callable[[str], None]
) -> None:
    model = Model("svd", tmp_path)
    model.certify()  # of another processor
    cpu("avx512")
    events = model.events()
    assert np.array_equal(frames_of(events), frames_of(model.events(dtype="fp32")))


def test_a_plan_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Model("opensora-1.2", tmp_path)
    command = ["plan", "a red circle", "--model", str(model.folder), "--size", "32x32",
               "--num-frames", "5", "--as", "cpu-bf16"]  # fmt: skip
    assert main(command) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "fast paths of vae: bf16-decoder (not tried here yet)" in text
    assert "in float32 in vae: spatial_vae.module.encoder" in text
    assert main([*command, "--disable", PATH]) == 0
    assert PATH not in capsys.readouterr().out
