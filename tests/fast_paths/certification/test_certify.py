"""What is wrong, slow, or deadly is refused with its reason, and what is right is certified."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from everyframe.core.facts import DeviceFacts, OpShape
from everyframe.core.plan import Precision
from everyframe.fast_paths import certificates
from everyframe.fast_paths.benchmark import Comparison, relative_error, run_comparisons
from everyframe.fast_paths.certification import certify as certifying
from everyframe.fast_paths.certification import trials
from everyframe.fast_paths.certification.attention_trial import _operands
from everyframe.fast_paths.certification.certify import CertifyResult, certify
from everyframe.fast_paths.certification.target import CertificationTarget
from everyframe.fast_paths.registry import CATALOGUE
from everyframe.hardware.isolation import ProcessResult
from everyframe.ops.native import library
from helpers import fake_fast_paths

#: Trials take some hundredths of a second each; a busy machine may take a hundred times as long.
PATIENCE = 120.0

CPU = DeviceFacts("a processor", "cpu", None, 10**9, 10**9)
SUBJECT = CertificationTarget("denoiser", CPU, 1, Precision("float32", "float32"), "plan", "device")
NAMES = ("crashes", "wrong", "nearly", "slow", "not_finite", "another_shape", "raises", "right")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> CertifyResult:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVERYFRAME_CACHE", str(tmp_path_factory.mktemp("cache")))
        return certify(SUBJECT, [fake_fast_paths.planted(name) for name in NAMES], PATIENCE)


@pytest.mark.parametrize(
    ("name", "verdict", "reason"),
    [
        ("right", "certified", "right, and faster"),
        ("wrong", "refused", "exponentials is off by 1.0e-03, allowed 1.0e-05 of float32"),
        ("nearly", "refused", "exponentials is off by 2.4e-07, and may not differ in a bit"),
        ("slow", "refused", "no faster than the plain way"),
        ("not_finite", "refused", "exponentials is not finite, allowed 1.0e-05 of float32"),
        ("another_shape", "refused", "exponentials is not finite, allowed 1.0e-05 of float32"),
        ("raises", "refused", "no kernel image is available for execution on the device"),
        ("crashes", "refused", "died of SIGFPE"),
    ],
)
def test_the_verdict_and_its_reason(
    made: CertifyResult, name: str, verdict: str, reason: str
) -> None:
    certificate = {each.what: each for each in made.certificates}[name]
    assert (certificate.verdict, certificate.reason) == (verdict, reason)
    assert (certificate.device, certificate.plan) == ("device", "plan")
    if name == "right":
        assert certificate.error == 0
        assert certificate.gain is not None
        assert certificate.gain > 2
    if name == "slow":
        assert certificate.gain is not None
        assert certificate.gain < 1


def test_a_hang_is_cut_off_and_what_comes_after_it_is_tried(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERYFRAME_CACHE", str(tmp_path))
    paths = [fake_fast_paths.planted("hangs"), fake_fast_paths.planted("right")]
    made = certify(SUBJECT, paths, 1.0, grace=0.5)
    assert made.certificates[0].reason == "did not end, 0 s after its time was over"
    # The time is up with the first.
    assert made.untried == {"right": "there was no time to try it"}
    # It is kept, so that nobody waits for it again.
    assert certificates.find("device", "plan")["hangs"].verdict == "refused"


def test_a_kernel_that_loses_the_device_alone_is_refused(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes after it is tried in another process, where the device is well again."""
    monkeypatch.setenv("EVERYFRAME_CACHE", str(tmp_path))
    made = certify(SUBJECT, [fake_fast_paths.planted(n) for n in ("faulty", "right")], PATIENCE)
    assert [each.verdict for each in made.certificates] == ["refused", "certified"]
    assert made.certificates[0].reason == "CUDA error: an illegal memory access was encountered"


def test_no_path_is_refused_for_a_broken_card(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERYFRAME_CACHE", str(tmp_path))
    names = ("on_a_broken_card", "right")
    made = certify(SUBJECT, [fake_fast_paths.planted(name) for name in names], PATIENCE)
    assert not made.certificates
    assert made.untried.keys() == set(names)
    assert "uncorrectable ECC" in made.untried["right"]


@pytest.mark.parametrize(("name", "signal"), [("killed", "SIGKILL"), ("terminated", "SIGTERM")])
def test_a_path_whose_process_was_ended_from_outside_is_not_refused_for_good(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch, name: str, signal: str
) -> None:
    monkeypatch.setenv("EVERYFRAME_CACHE", str(tmp_path))
    made = certify(SUBJECT, [fake_fast_paths.planted(n) for n in (name, "right")], PATIENCE)
    assert [each.what for each in made.certificates] == ["right"], "what comes after it is tried"
    assert made.untried == {name: f"the process that tried it was ended by {signal}"}
    assert name not in certificates.find("device", "plan")


def test_no_path_is_refused_for_memory_that_others_had(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal is for good, and a card that is full now is not full for good."""
    monkeypatch.setenv("EVERYFRAME_CACHE", str(tmp_path))
    names = ("out_of_memory", "right")
    made = certify(SUBJECT, [fake_fast_paths.planted(name) for name in names], PATIENCE)
    assert [each.what for each in made.certificates] == ["right"], "what comes after it is tried"
    assert made.untried.keys() == {"out_of_memory"}
    assert "CUDA out of memory" in made.untried["out_of_memory"]
    assert "out_of_memory" not in certificates.find("device", "plan")


@pytest.fixture
def patience(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Trials run in this process; the seconds that others would have had."""
    given: list[float] = []

    def run_here(run: Any, orders: trials.TrialRequest, *, seconds: float) -> ProcessResult:
        given.append(seconds)
        run(orders)
        return ProcessResult()

    monkeypatch.setenv("EVERYFRAME_CACHE", str(tmp_path))
    monkeypatch.setattr(certifying, "run_isolated", run_here)
    return given


def test_time_begins_when_the_kernels_are_compiled(
    patience: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process on a machine compiles them for longer than a trial may take."""
    clock = [0.0]
    monkeypatch.setattr(library, "load", lambda: clock.append(clock.pop() + library.PATIENCE))
    monkeypatch.setattr(trials.time, "monotonic", lambda: clock[0])
    path, other = fake_fast_paths.planted("right"), fake_fast_paths.planted("right")
    for each in (replace(path, needs_c=True), replace(path, group="precision"), other):
        (certificate,) = certify(SUBJECT, [each], PATIENCE / 2).certificates
        assert certificate.verdict == "certified"
    assert patience == [patience[2] + library.PATIENCE] * 2 + [patience[2]]
    assert clock == [2 * library.PATIENCE], "it is not needed for the last one"


def test_no_path_is_refused_for_a_compiler_that_fails(
    patience: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its modules would be found no faster than plain ones, as they are plain ones then."""

    def fail() -> None:
        raise library.NoLibraryError("no headers")

    monkeypatch.setattr(library, "load", fail)
    slow, *others = map(fake_fast_paths.planted, ("slow", "compiler_fails", "right"))
    made = certify(SUBJECT, [replace(slow, needs_c=True), *others], PATIENCE)
    assert [each.what for each in made.certificates] == ["right"], "what needs none is tried"
    assert made.untried == {"slow": "no headers", "compiler_fails": "no headers"}


@pytest.mark.parametrize(
    ("gigabytes", "tokens"),
    [(80, 9216), (8, 9216), (8, 118_800)],
    ids=["large card", "small card", "long video"],
)
def test_attention_is_tried_in_the_memory_that_is_free(gigabytes: int, tokens: int) -> None:
    """The plain ways write all scores out, of which a long video has more than any card holds."""
    shape = (28, 5, tokens, 64)
    product = OpShape("attention", "float16", (shape, shape, shape))
    card = DeviceFacts("a card", "meta", None, gigabytes * 10**9, gigabytes * 10**9)
    precision = Precision("float16", "float16")
    subject = CertificationTarget("denoiser", card, 1, precision, "plan", "device")
    q, k, v, _, cut = _operands(product, subject)
    scores = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    assert k.shape[2] == v.shape[2] == tokens, "keys are all there, or it is another computation"
    # In float16, then in float32 before and after the softmax.
    assert scores * (2 + 4 + 4) < 0.5 * card.free_memory
    assert scores > 10**8, "enough of them for a card to be busy"
    assert cut == 1 / (scores * 2 * (64 + 64))


def test_attention_of_the_request_is_tried_with_keys_as_large_as_they_come(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERYFRAME_CACHE", str(tmp_path))
    shapes = ((2, 4, 200, 64), (2, 4, 200, 64), (2, 4, 200, 64))
    products = (
        (OpShape("attention", "bfloat16", shapes), 1e9),
        (OpShape("attention", "bfloat16", shapes, ("masked",)), 1e9),
    )
    precision = Precision("bfloat16", "bfloat16")
    subject = CertificationTarget(
        "denoiser", CPU, 1, precision, "plan", "device", products=products
    )
    made = certify(subject, [CATALOGUE["attention-flash"]], PATIENCE)
    (certificate,) = made.certificates
    assert certificate.error is not None
    assert certificate.limit is not None
    # Whether it is faster is this processor's affair; that it is right is torch's.
    assert 0 < certificate.error < certificate.limit < 0.05


def convolving(dtype: str) -> CertificationTarget:
    """A component that computes a 3D convolution in that dtype."""
    shapes = ((2, 8, 5, 40, 40), (16, 8, 3, 3, 3))
    options = ((1, 1, 1), (1, 1, 1), (1, 1, 1), False, (0, 0, 0), 1)
    products = ((OpShape("convolution", dtype, shapes, options), 1e9),)
    return CertificationTarget(
        "vae", CPU, 1, Precision(dtype, dtype), "plan", "device", products=products
    )


def test_a_precision_is_tried_by_its_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, so that a kernel that is wrong in that dtype alone can be planted."""
    path, subject = CATALOGUE["bf16"], convolving("bfloat16")
    outcome = run_comparisons(trials.precision(subject, path), "cpu", time.monotonic() + PATIENCE)
    assert outcome.is_right
    assert 5e-4 < outcome.error < 6e-3
    assert outcome.worst == "convolution of 2x8x5x40x40 by 16x8x3x3x3 in bfloat16"
    right = trials._convolve

    def wrong(options: tuple[Any, ...], x: Tensor, weight: Tensor) -> Tensor:
        out = right(options, x, weight)
        if x.dtype == torch.bfloat16:
            out[:, :, -1] = 0  # the end of a large output, as with cuDNN 9.8
        return out

    monkeypatch.setattr(trials, "_convolve", wrong)
    outcome = run_comparisons(trials.precision(subject, path), "cpu", time.monotonic() + PATIENCE)
    assert not outcome.is_right
    assert outcome.error > 0.3


def large_convolution(*sides: int) -> OpShape:
    """One that Winograd's algorithm repays in."""
    ones = (1,) * len(sides)
    shapes = ((2, 64, *sides), (32, 64, *(3 for _ in sides)))
    options = (ones, ones, ones, False, (0,) * len(ones), 1)
    return OpShape("convolution", "bfloat16", shapes, options)


@pytest.mark.skipif(bool(missing := library.why_not()), reason=str(missing))
@pytest.mark.parametrize("sides", [(24, 20), (3, 24, 20)])
def test_a_convolution_is_tried_as_a_run_computes_it(
    monkeypatch: pytest.MonkeyPatch, sides: tuple[int, ...]
) -> None:
    """Both dtypes by Winograd's algorithm if that is faster; torch's own is tried nonetheless."""
    subject = replace(convolving("bfloat16"), products=((large_convolution(*sides), 1e9),))
    compared: dict[str, list[Comparison]] = {}
    for faster in ("usual", "other"):
        chosen = {"usual": lambda usual, _: usual, "other": lambda _, other: other}[faster]
        monkeypatch.setattr(trials, "_faster", chosen)
        with torch.inference_mode():
            compared[faster] = [*trials.precision(subject, CATALOGUE["bf16"])]
    assert [each.weight > 0 for each in compared["usual"]] == [True]
    assert [each.weight > 0 for each in compared["other"]] == [False, True]
    (usual,), (error_alone, other) = compared.values()
    assert torch.equal(error_alone.fast(), usual.fast())
    with torch.inference_mode():
        for name, allowed in (("plain", 1e-5), ("fast", 2e-2)):
            found, torchs = (getattr(each, name)() for each in (other, usual))
            assert found.dtype == torchs.dtype
            assert not torch.equal(found, torchs)
            assert relative_error(found, usual.truth()) < allowed


def test_the_faster_implementation_is_chosen() -> None:
    slow: Any = partial(time.sleep, 0.01)
    fast: Any = int
    assert trials._faster(slow, None) is slow
    assert trials._faster(slow, fast) is trials._faster(fast, slow) is fast


def test_a_strided_convolution_is_never_winograds() -> None:
    ones, x = (1, 1), torch.ones(1, 64, 24, 24)
    shapes = ((1, 64, 24, 24), (64, 64, 3, 3))
    for strides, is_transposed in (((2, 2), False), (ones, True)):
        options = (strides, ones, ones, is_transposed, (0, 0), 1)
        product = OpShape("convolution", "float32", shapes, options)
        assert trials._by_winograd(product, x, torch.ones(64, 64, 3, 3)) is None


def test_few_places_are_never_winograds() -> None:
    """They would be computed, and timed, as torch's own twice."""
    ones, weight = (1, 1), torch.ones(64, 64, 3, 3)
    for side, is_tried in ((6, False), (24, True)):
        x = torch.ones(1, 64, side, side)
        shapes = (tuple(x.shape), tuple(weight.shape))
        product = OpShape("convolution", "float32", shapes, (ones, ones, ones, False, (0, 0), 1))
        assert (trials._by_winograd(product, x, weight) is not None) == is_tried


def test_a_large_convolution_is_tried_on_less_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_CPU_OPERATIONS", 1e6)
    (contest,) = trials.precision(convolving("bfloat16"), CATALOGUE["bf16"])
    assert isinstance(contest.fast, partial)
    given = contest.fast.args[-2]
    assert given.shape == (1, 8, 5, 6, 6)
    assert contest.weight == pytest.approx(1e9 / (2 * 180 * 16 * 8 * 27))


def test_a_precision_is_tried_by_its_products(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERYFRAME_CACHE", str(tmp_path))
    products = ((OpShape("product", "bfloat16", ((96, 256), (256, 192))), 1e9),)
    precision = Precision("bfloat16", "bfloat16")
    subject = CertificationTarget(
        "denoiser", CPU, 1, precision, "plan", "device", products=products
    )
    (certificate,) = certify(subject, [CATALOGUE["bf16"]], PATIENCE).certificates
    assert certificate.error is not None
    # Three roundings to 8 bits, each about 2^-9 in the mean square.
    assert 5e-4 < certificate.error < 6e-3
    assert certificate.gain is not None
