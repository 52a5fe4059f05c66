"""The store of calibrations, and what it says is the fastest."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from everyframe.core.quality import METHODS
from everyframe.fast_paths.calibrations import (
    LEAST_VIDEOS,
    MARGIN_DB,
    Calibration,
    Measurement,
    load_calibration,
    nearest_calibration,
    path_of,
    save_calibration,
)

VIDEOS = tuple((f"prompt {number}", number) for number in range(LEAST_VIDEOS))
SIZE = (17, 64, 64)


def measured(worst: float, gain: float, count: int = LEAST_VIDEOS, estimate: float | None = 0.01):  # type: ignore[no-untyped-def]
    """So many videos, one of them with the worst PSNR."""
    usual = [Measurement(worst + 8, estimate, gain)] * (count - 1)
    return (Measurement(worst, estimate, gain), *usual)


def calibration(key: str = "key", **by_method: object) -> Calibration:
    named = {name.replace("_", "@"): each for name, each in by_method.items()}
    return Calibration(key, SIZE, VIDEOS, named, 60.0, 2.0)  # type: ignore[arg-type]


def test_the_fastest_that_holds_with_the_margin_is_taken() -> None:
    found = calibration(
        unipc_15=measured(47, 2.0), ab2_10=measured(35.1, 3.0), ab2_8=measured(34.5, 3.7)
    )
    assert found.fastest(32, [*METHODS]) == "ab2@10"
    assert found.fastest(34.5 - MARGIN_DB, [*METHODS]) == "ab2@8"
    assert found.fastest(32, ["unipc"]) == "unipc@15"
    assert found.fastest(45, [*METHODS]) is None


def test_a_method_whose_milder_one_fails_holds_by_luck() -> None:
    found = calibration(
        ab2_12=measured(30, 2.6), ab2_10=measured(36, 3.1), unipc_12=measured(36, 2.5)
    )
    assert found.fastest(32, [*METHODS]) == "unipc@12"
    assert found.fastest(30, [*METHODS]) == "ab2@10"
    alone = calibration(ab2_12g50=measured(30, 2.6), ab2_10=measured(36, 3.1))
    assert alone.fastest(32, [*METHODS]) == "ab2@10", "guidance makes another kind"


def products(**by_method: object) -> Calibration:
    """A calibration of an int8 product alone (`exact`) and with methods."""
    named = {name.replace("_", "@"): each for name, each in by_method.items()}
    quantized = {f"{name.removesuffix('q')}+int8-dynamic": named.pop(name)
                 for name in [*named] if name.endswith("q")}  # fmt: skip
    return replace(calibration(), measured={**named, **quantized})


def test_products_in_eight_bits_are_chosen_where_they_are_measured_together() -> None:
    allowed = [*METHODS, "int8-dynamic"]
    found = products(
        exactq=measured(44, 1.4), ab2_10=measured(40, 3.0), ab2_8=measured(36, 3.5),
        ab2_10q=measured(37, 4.1),
    )  # fmt: skip
    assert found.fastest(32, allowed) == "ab2@10+int8-dynamic"
    assert found.fastest(35, allowed) == "ab2@10", "the errors of both add up"
    assert found.fastest(41, allowed) == "exact+int8-dynamic"
    assert found.fastest(32, [*METHODS]) == "ab2@8", "switched off, or not to be had"
    assert found.fastest(32, ["int8-dynamic"]) == "exact+int8-dynamic"


def test_products_hold_by_luck_where_either_loss_alone_does_not() -> None:
    allowed = ["ab2", "int8-dynamic"]
    holds, fails = measured(37, 4.1), measured(30, 3.0)
    assert products(exactq=fails, ab2_10q=holds).fastest(32, allowed) is None
    assert products(ab2_10=fails, ab2_10q=holds).fastest(32, allowed) is None
    assert products(ab2_12q=fails, ab2_10q=holds).fastest(32, allowed) is None
    assert products(unipc_12q=fails, ab2_10q=holds).fastest(32, allowed) == "ab2@10+int8-dynamic"


def test_what_is_no_faster_is_not_chosen() -> None:
    slow = products(exactq=measured(44, 0.9))
    assert slow.fastest(32, ["int8-dynamic"]) is None


def test_few_videos_certify_nothing() -> None:
    assert calibration(ab2_8=measured(45, 3.7, LEAST_VIDEOS - 1)).fastest(32, [*METHODS]) is None
    few = replace(calibration(ab2_8=measured(45, 3.7, 3)), videos=VIDEOS[:3])
    assert few.fastest(32, [*METHODS]) is None


def test_no_calibrated_video_passes_the_limit() -> None:
    rows = (Measurement(40, 0.01, 3.0), Measurement(34, 0.03, 3.0), Measurement(45, 0.05, 3.0))
    found = calibration(ab2_8=rows)
    limit = found.limit("ab2@8", 32)
    assert limit == pytest.approx(0.05)
    # 34 dB at 0.03 are 30 dB at 0.03 x 10^(4/20), and a lower budget allows as much more.
    steep = calibration(ab2_8=(Measurement(34, 0.03, 3.0),))
    assert steep.limit("ab2@8", 30) == pytest.approx(0.03 * 10 ** (4 / 20))
    assert calibration(ab2_8=measured(34, 3.0, estimate=None)).limit("ab2@8", 30) is None


def test_what_is_saved_is_read_again() -> None:
    found = calibration("round", ab2_8=measured(40, 3.7), taylor1_12=measured(30, 2.5, 2, None))
    both = {"exact+int8-dynamic": measured(40, 1.3), "ab2@8+int8-dynamic": measured(35, 4.2)}
    found = replace(found, measured={**found.measured, **both})  # type: ignore[arg-type]
    save_calibration(found)
    assert load_calibration("round", SIZE) == found
    assert load_calibration("round", (17, 64, 128)) is None


def test_a_smaller_size_stands_in_and_a_larger_one_does_not() -> None:
    save_calibration(calibration("sizes", ab2_8=measured(40, 3.7)))
    larger = nearest_calibration("sizes", (17, 128, 128))
    assert larger is not None
    assert larger.size == SIZE
    assert nearest_calibration("sizes", (17, 32, 32)) is None


def damaged(**changes: object) -> str:
    """A calibration of one method, whose rows or fields are others."""
    row = {name: changes.pop(name, 40.0) for name in ("psnr_db", "estimate", "gain")}
    whole = {
        "schema": "everyframe.calibrations/1", "key": "bad", "size": SIZE, "videos": VIDEOS,
        "measured": {"ab2@8": [row] * LEAST_VIDEOS}, "seconds": 1, "exact_seconds": 1,
    }  # fmt: skip
    return json.dumps({**whole, **changes})


@pytest.mark.parametrize(
    "damage",
    [
        "", "[]", "{}", '{"schema": "other"}',
        json.dumps({"schema": "everyframe.calibrations/1", "key": "bad", "size": [1, 2, 3],
                    "videos": [], "measured": {"rm -rf": []}, "seconds": 0, "exact_seconds": 0}),
        damaged(measured=[1]), damaged(size=[1, math.inf, 3]), damaged(size=[17, -64, -64]),
        damaged(measured={"ab2@9": []}),
        damaged(psnr_db=math.nan), damaged(psnr_db=1e300), damaged(estimate=-1.0),
        damaged(estimate=math.nan), damaged(gain=0), damaged(gain=math.nan),
        damaged(seconds=math.nan), damaged(exact_seconds=math.inf),
    ],
)  # fmt: skip
def test_a_damaged_file_counts_as_none(damage: str) -> None:
    path = path_of("bad", SIZE)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(damage)
    assert load_calibration("bad", SIZE) is None
    save_calibration(calibration("bad"))
    assert load_calibration("bad", SIZE) == calibration("bad")


def test_frames_without_a_difference_are_measured() -> None:
    found = calibration("equal", ab2_8=measured(math.inf, 3.7))
    save_calibration(found)
    assert load_calibration("equal", SIZE) == found
    assert found.fastest(50, [*METHODS]) == "ab2@8"
    assert found.limit("ab2@8", 50) == math.inf


def test_a_copied_file_is_for_nobody_else() -> None:
    save_calibration(calibration("mine"))
    theirs = path_of("theirs", SIZE)
    theirs.parent.mkdir(parents=True, exist_ok=True)
    theirs.write_bytes(path_of("mine", SIZE).read_bytes())
    assert load_calibration("theirs", SIZE) is None
    assert nearest_calibration("theirs", SIZE) is None
