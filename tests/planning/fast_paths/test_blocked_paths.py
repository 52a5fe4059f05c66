"""Known issues of a machine are avoided where that is possible, and noted elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

import everyframe
from everyframe.core.facts import DeviceFacts, MachineFacts, OpShape, SoftwareFacts
from everyframe.core.plan import Precision
from everyframe.fast_paths.apply import applies_to
from everyframe.fast_paths.registry import CATALOGUE, OF_LAYERS
from everyframe.planning.fast_paths.blocked_paths import (
    BlockedPaths,
    BlockReason,
    find_blocked,
    tags_of,
)
from everyframe.planning.fast_paths.choose_fast_paths import FastPathChooser, FastPathOptions
from everyframe.planning.fast_paths.fast_path_notes import fast_path_notes
from everyframe.precision.policy import ComponentNeeds

CARD = DeviceFacts("a card", "cuda", 0, 10**10, 10**10, (9, 0), True, True)
CPU = DeviceFacts("a processor", "cpu", None, 10**10, 10**10)


SIZES: dict[str, Any] = {"size": "16x16", "num_frames": 3, "num_inference_steps": 2, "seed": 5}


class Run:
    """As much of a dry run as is asked for: the products of a component."""

    def __init__(self, component: str, *shapes: tuple[int, ...], kind: str = "convolution") -> None:
        product = OpShape(kind, "bfloat16", shapes)
        work = {"products": ((product, 1.0),), "operations": 1.0}
        self.found = type("", (), {"work": type("", (), work)})
        self.stage_call = type("", (), {"component": component, "key": component, "num_calls": 1})

    def has_place(self, path: str, *, is_quantized: bool) -> bool:
        return applies_to(path, nn.Identity()) and not (is_quantized and path in OF_LAYERS)


VAE: Any = Run("vae", (1, 8, 4, 16, 16), (8, 8, 3, 3, 3))
DENOISER: Any = Run("denoiser", (64, 8), (8, 8), kind="product")


def machine(device: DeviceFacts, **software: Any) -> MachineFacts:
    return MachineFacts((device, CPU), 2, {}, SoftwareFacts(system="linux", **software))


def found(device: DeviceFacts, **software: Any) -> Mapping[str, Any]:
    return {
        path: blocked
        for path in CATALOGUE
        if (blocked := find_blocked(machine(device, **software), device).against(path, ()))
        is not None
    }


def test_a_compiler_that_cannot_run_on_a_card_is_avoided() -> None:
    old = replace(CARD, capability=(6, 1))
    assert found(old)["compile"].startswith("known issue triton-needs-sm70: ")
    assert found(CARD) == {}


def test_nothing_is_known_of_a_processor() -> None:
    facts = MachineFacts((CPU,), 2, {})
    assert find_blocked(facts, CPU, is_here=False).paths == {}
    assert find_blocked(facts, CPU).rest == ()


def component(name: str, **more: Any) -> Any:
    """What the chooser asks of a component."""
    needs = more.pop("needs", ComponentNeeds(name, 1))
    return SimpleNamespace(**{"name": name, "has_precision": None, "needs": needs, **more})


def test_what_is_about_an_operation_is_avoided_where_that_is_computed() -> None:
    """cuDNN 9.8 gets 3D convolutions in bfloat16 wrong; a denoiser without any keeps its dtype."""
    sick = machine(CARD, packages={"torch": "2.8.0"}, libraries={"cudnn": "9.10.2"})
    assert tags_of("vae", [VAE, DENOISER]) == {"component:vae", "op:conv3d"}
    assert tags_of("denoiser", [VAE, DENOISER]) == {"component:denoiser"}
    chooser = FastPathChooser(CARD, known=find_blocked(sick, CARD))
    bf16 = Precision("bfloat16", "bfloat16")

    def chosen(run: Any) -> tuple[str, str]:
        part: Any = component(run.stage_call.component)
        dtype, (choice,) = chooser.dtype(part, bf16, [run])
        return dtype, choice.verdict

    assert chosen(VAE) == ("float32", "avoided")
    assert chosen(DENOISER) == ("bfloat16", "expected")
    well = machine(CARD, packages={"torch": "2.8.0"}, libraries={"cudnn": "9.15.0"})
    chooser = FastPathChooser(CARD, known=find_blocked(well, CARD))
    assert chosen(VAE) == ("bfloat16", "expected")


@pytest.mark.parametrize(
    ("name", "dtype"), [("h20-cublas12.1", "float32"), ("h20-cublas12.5.2.13", "bfloat16")]
)
def test_a_library_that_kills_bfloat16_has_it_avoided(name: str, dtype: str, model: str) -> None:
    plan = everyframe.plan("a red circle", model=model, profile=name, **SIZES)
    denoiser = plan.component("denoiser")
    assert denoiser.precision.compute == dtype
    notes = [note for note in plan.notes if "h20-cublas121-sigfpe" in note]
    assert len(notes) == (2 if dtype == "float32" else 0), "a line for each part that has it"
    for note in notes:
        assert "float32, as bf16 is avoided here" in note
        assert note.endswith("pip install nvidia-cublas-cu12==12.5.2.13)")
    # And in the record, with the same words.
    choices = plan.to_json()["components"][1]["choices"]
    assert [each["verdict"] for each in choices if each["path"] == "bf16"] == [
        "avoided" if dtype == "float32" else "expected"
    ]


def test_what_is_asked_for_by_name_is_done_and_the_issue_reported(model: str) -> None:
    asked = {"model": model, "profile": "h20-cublas12.1", "dtype": "bf16", **SIZES}
    plan = everyframe.plan("a red circle", **asked)
    assert plan.component("denoiser").precision.compute == "bfloat16"
    notes = [note for note in plan.notes if "h20-cublas121-sigfpe" in note]
    titles = [part.title for part in plan.components if part.precision.compute == "bfloat16"]
    assert [note.partition(":")[0] for note in notes] == titles
    for note in notes:
        assert ": bfloat16, by --dtype bf16, in spite of known issue h20-cublas121-sigfpe" in note
        assert note.endswith("pip install nvidia-cublas-cu12==12.5.2.13)")
    (choice,) = (c for c in plan.component("denoiser").choices if c.path == "bf16")
    assert (choice.verdict, choice.despite is None) == ("pinned", False)
    assert not [note for note in everyframe.plan("a", **{**asked, "dtype": "fp32"}).notes
                if "h20" in note]  # fmt: skip


def test_a_loaded_components_dtype_is_kept_and_the_issue_reported() -> None:
    sick = machine(CARD, packages={"torch": "2.8.0"}, libraries={"cudnn": "9.10.2"})
    chooser = FastPathChooser(CARD, known=find_blocked(sick, CARD))
    bf16 = Precision("bfloat16", "bfloat16")
    for run, is_reported in ((VAE, True), (DENOISER, False)):
        name = run.stage_call.component
        part = component(name, has_precision=bf16)
        dtype, choices = chooser.dtype(part, bf16, [run])
        assert dtype == "bfloat16"
        assert bool(choices) == is_reported
        for note in fast_path_notes("Its vae", choices, bf16):
            assert note.startswith("Its vae: bfloat16, as it was loaded, in spite of known issue")


def test_a_kernel_asked_for_by_name_is_used_and_the_issue_reported() -> None:
    sick = BlockedPaths(
        {"attention-flash": (BlockReason("known issue planted: it lies (leave it)"),)}
    )
    attention: Any = Run("denoiser", *((1, 2, 8, 8),) * 3, kind="attention")
    half = Precision("float16", "float16")
    for kernel, verdict in ((None, "avoided"), ("flash", "pinned")):
        choices = FastPathChooser(CARD, FastPathOptions(kernel=kernel), known=sick).choices(
            "denoiser", half, [attention]
        )
        found = {choice.path: choice for choice in choices}
        assert found["attention-flash"].verdict == verdict
        (note,) = fast_path_notes("Denoiser", choices, half)
        assert "planted" in note
        assert note.startswith("Denoiser: attention-flash, by --attention flash, in spite of") == (
            kernel is not None
        )


def test_what_can_not_be_tried_is_still_avoided_and_turned_off() -> None:
    """A pipeline that no dry run follows: nothing to certify on, but what is known counts."""
    bf16, part = Precision("bfloat16", "bfloat16"), component("x")
    sick = BlockedPaths({"bf16": (BlockReason("known issue planted: it lies (leave it)"),)})

    def chosen(chooser: FastPathChooser) -> tuple[str, list[str]]:
        dtype, choices = chooser.dtype(part, bf16, (), may_try=False)  # type: ignore[arg-type]
        return dtype, [choice.verdict for choice in choices]

    assert chosen(FastPathChooser(CARD)) == ("bfloat16", [])
    assert chosen(FastPathChooser(CARD, known=sick)) == ("float32", ["avoided"])
    assert chosen(FastPathChooser(CARD, FastPathOptions(off=frozenset({"bf16"})))) == (
        "float32",
        ["off"],
    )
    assert chosen(FastPathChooser(CARD, FastPathOptions(dtype="bfloat16"), known=sick)) == (
        "bfloat16",
        ["pinned"],
    )
    # A decoder that was made for float32 needs a certificate.
    part.needs = ComponentNeeds("vae", 1, prefers="float32", decoder_islands=("encoder",))
    assert chosen(FastPathChooser(CPU)) == ("float32", [])


def test_what_no_path_avoids_is_reported_with_what_mends_it() -> None:
    new = replace(CARD, capability=(12, 0))
    sick = find_blocked(machine(new, packages={"torch": "2.6.0"}, cuda="12.6", driver="575.1"), new)
    (note,) = sick.notes([DENOISER])
    assert note.startswith("known issue blackwell-needs-cu128: ")
    assert "pip install -U torch" in note
    assert not [
        *find_blocked(machine(new, packages={"torch": "2.9.0"}, cuda="12.8"), new).notes([])
    ]
    apple = replace(CARD, kind="mps", index=None, capability=None)
    old = find_blocked(machine(apple, packages={"torch": "2.2.0"}), apple)
    assert [*old.notes([DENOISER])] == []
    assert "mps-conv3d" in next(old.notes([VAE, DENOISER]))


def test_other_systems_packages_are_not_ours() -> None:
    theirs = {"oneflow": "0.9.1", "nexfort": "0.1", "imaginairy": "14.3.0", "opensora": "1.2"}
    turing = replace(CARD, capability=(7, 5))
    for device in (CARD, turing):
        blocked = find_blocked(machine(device, packages={"torch": "2.11.0", **theirs}), device)
        assert not any("onediff" in each or "nexfort" in each for each in blocked.notes([VAE]))
        assert [*blocked.notes([VAE])] == []


def test_a_machine_that_is_not_here_is_judged_by_its_own_facts() -> None:
    alone = MachineFacts((CARD,), 2, {})
    assert find_blocked(alone, CARD, is_here=False).against("bf16", {"op:conv3d"}) is None
