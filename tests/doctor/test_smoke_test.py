"""The small validation of new hardware: right frames pass; wrong, dead and late ones do not."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from everyframe.core.facts import DeviceFacts, MachineFacts
from everyframe.doctor import smoke_test as smoking
from everyframe.doctor.checks import DoctorInput
from everyframe.doctor.diagnose import diagnose
from everyframe.fast_paths.modules import cpu_modules
from everyframe.fast_paths.registry import CATALOGUE
from everyframe.hardware.isolation import ProcessResult
from everyframe.media.video import Video

CPU = DeviceFacts("a processor", "cpu", None, 1 << 34, 1 << 34)
CARD = DeviceFacts("a card", "cuda", 0, 1 << 34, 1 << 34, (9, 0), has_fast_bf16=True)
ON_CARD = DoctorInput(MachineFacts((CARD, CPU), 4))
FRAMES = np.full((3, 8, 8, 3), 100, np.uint8)


def plant(
    monkeypatch: pytest.MonkeyPatch, took: float = 10.0, **answers: Any
) -> list[tuple[str, str]]:
    """Answers in place of videos, by dtype or path on the card; gives what was asked."""
    asked: list[tuple[str, str]] = []

    def run(
        function: object, device: str, dtype: str, path: str | None, *, seconds: float
    ) -> ProcessResult:
        asked.append((device, path or dtype))
        answer = FRAMES if device == "cpu" else answers.get(path or dtype, FRAMES)
        return (
            answer
            if isinstance(answer, ProcessResult)
            else ProcessResult(answer.tolist(), seconds=took)
        )

    monkeypatch.setattr(smoking, "run_isolated", run)
    return asked


def test_every_precision_is_compared_with_float32_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = plant(monkeypatch, bfloat16=FRAMES + 2)
    check = smoking.smoke(ON_CARD)
    assert check.mark == "fine"
    assert asked == [
        ("cpu", "float32"), ("cuda:0", "float32"), ("cuda:0", "bfloat16"), ("cuda:0", "float16"),
        ("cuda:0", "attention-flash"), ("cuda:0", "attention-efficient"),
        ("cuda:0", "attention-cudnn"),
    ]  # fmt: skip
    assert "cuda:0 in bfloat16: off by 2.00 of 255 at most" in check.details


def one_bad_frame() -> np.ndarray[Any, Any]:
    frames = FRAMES.copy()
    frames[2] = 0  # black
    return frames


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (one_bad_frame(), "is off by 100.0 of 255 in a frame"),
        (FRAMES[:2], "is off by inf"),
        (ProcessResult(signal="SIGFPE", seconds=1.0), "died of SIGFPE"),
        (ProcessResult(error="NumericsError: not finite", seconds=1.0), "not finite"),
    ],
)
def test_what_is_wrong_is_reported_by_precision(
    answer: object, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, float16=answer)
    check = smoking.smoke(ON_CARD)
    (finding,) = check.findings
    assert (check.mark, finding.mark) == ("error", "error")
    assert "on cuda:0 in float16" in finding.message
    assert text in finding.message


def test_a_path_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, **{"attention-cudnn": one_bad_frame()})
    (finding,) = smoking.smoke(ON_CARD).findings
    assert "on cuda:0 in bfloat16 by attention-cudnn is off by 100.0" in finding.message


def test_on_a_processor_every_path_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = plant(monkeypatch, took=5.0)  # all of them within the limit
    smoking.smoke(DoctorInput(MachineFacts((CPU,), 4)))
    paths = [
        path.name
        for path in CATALOGUE.values()
        if "cpu" in path.kinds and path.group not in ("precision", "products", "compile")
    ]
    assert {"attention-flash", "linear-gelu", "cached-constants", *cpu_modules.KINDS} <= {*paths}
    assert asked == [("cpu", way) for way in ("float32", "bfloat16", *paths)]


def test_the_path_that_has_its_turn_is_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    import everyframe.api

    seen: list[dict[str, tuple[str, ...] | None]] = []

    def generate(**asked: Any) -> Video:
        made = everyframe.plan(**asked)
        seen.append({part.name: part.fast_paths for part in made.components})
        return Video(FRAMES, Fraction(8), {}, None)

    monkeypatch.setattr(everyframe.api, "generate", generate)
    for path in (None, "attention-flash", "linear-gelu", "onednn-linear", "kept-embeddings"):
        assert smoking.frames_of("cpu", "float32", path) == FRAMES.tolist()
    denoisers = [each["denoiser"] for each in seen]
    assert denoisers == [
        (), ("attention-flash",), ("linear-gelu",), ("onednn-linear",), ("kept-embeddings",),
    ]  # fmt: skip


def test_two_minutes_are_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    flash = CATALOGUE["attention-flash"]
    monkeypatch.setattr(smoking, "for_device", lambda device: (flash,))
    plant(monkeypatch, float32=ProcessResult(FRAMES.tolist(), seconds=102.0))
    check = smoking.smoke(ON_CARD)
    assert check.mark == "note"
    assert [finding.message.split(":")[0] for finding in check.findings] == [
        "no time was left for bfloat16", "no time was left for float16",
        "no time was left for bfloat16 by attention-flash",
    ]  # fmt: skip


def test_what_hangs_is_distinguished_from_what_had_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoking, "for_device", lambda device: ())
    plant(monkeypatch, float32=ProcessResult(timed_out=True, seconds=105.0))
    check = smoking.smoke(ON_CARD)
    assert check.findings[0].mark == "error"
    assert "did not end within 105 s" in check.findings[0].message
    # The reference takes 10 s; here 15 are left when it is the turn of float16.
    plant(monkeypatch, bfloat16=ProcessResult(FRAMES.tolist(), seconds=80.0),
          float16=ProcessResult(timed_out=True, seconds=15.0))  # fmt: skip
    check = smoking.smoke(ON_CARD)
    assert check.mark == "note"
    assert "float16 did not end within 15 s, which were left" in check.findings[0].message


def test_a_model_narrows_to_its_plan() -> None:
    report = diagnose(["devices"], profile="v100-oneflow", model="shapes")
    check = next(check for check in report.checks if check.name == "model")
    assert check.mark in ("fine", "note")
    assert "shapes" in check.message
    assert "needs about" in check.message


def test_a_model_that_is_not_there_is_a_note() -> None:
    report = diagnose(["devices"], profile="cpu", model="nobody/has-this")
    check = next(check for check in report.checks if check.name == "model")
    assert check.findings[0].mark == "note"
    assert "nobody/has-this" in check.findings[0].message
    assert check.findings[0].fix[0].command == "everyframe plan PROMPT --model nobody/has-this"


@pytest.mark.slow
def test_this_machine() -> None:
    report = diagnose(["devices"], smoke=True)
    check = next(check for check in report.checks if check.name == "smoke")
    assert check.details, "nothing was compared"
    assert check.mark in ("fine", "note"), check.findings  # a busy machine may be out of time
