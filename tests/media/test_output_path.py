"""Checks before a run, and names of outputs."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import datetime
from fractions import Fraction
from pathlib import Path

import pytest

from everyframe.core.errors import InputError, MediaError
from everyframe.media.output_path import (
    OutputFormat,
    check_output,
    default_output,
    exact_fps,
    kind_of,
    number_path,
    sidecar_of,
    slug,
)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("a/clip.mp4", OutputFormat.MP4),
        ("CLIP.MP4", OutputFormat.MP4),
        ("clip.gif", OutputFormat.GIF),
        ("clip.webp", OutputFormat.WEBP),
        ("clip.png", OutputFormat.PNG),
        ("clip", OutputFormat.FRAMES),
        ("clip/", OutputFormat.FRAMES),
        ("v1.2/", OutputFormat.FRAMES),
    ],
)
def test_the_ending_tells_the_kind(path: str, kind: OutputFormat) -> None:
    assert kind_of(path) is kind


def test_unknown_ending_lists_what_is_allowed_and_the_nearest() -> None:
    with pytest.raises(MediaError, match=r"unknown ending '.mp3'.*\.gif.*did you mean '.mp4'"):
        kind_of("clip.mp3")


@pytest.mark.parametrize(
    ("path", "width", "height", "message"),
    [
        ("missing/clip.mp4", 64, 64, "does not exist"),
        ("file.txt/clip.mp4", 64, 64, "is a file"),
        ("folder.mp4", 64, 64, "is a folder"),
        ("full", 64, 64, "'holiday.jpg'"),
        ("file", 64, 64, "a file of that name exists"),
        ("clip.mp4", 63, 64, "try 62x64 or 64x64"),
        ("clip.mp4", 63, 65, "try 62x64 or 64x66"),
        ("clip.mp4", 0, 64, "at least 1"),
        ("clip.webp", 20000, 64, "16383"),
        ("taken.mp4", 64, 64, "'taken.json'"),
        (".", 64, 64, "folder you are in"),
        ("", 64, 64, "folder you are in"),
        ("-", 64, 64, "not written to standard output"),
    ],
)
def test_refused_before_the_run_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, width: int, height: int,
    message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for name in ("file.txt", "file"):
        (tmp_path / name).touch()
    for name in ("folder.mp4", "full"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "holiday.jpg").touch()
    (tmp_path / "taken.json").write_text('{"schema": "somebody/1"}')
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(MediaError) as caught:
        check_output(path, width, height)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_refuses_lengths_and_rates_that_a_kind_cannot_have(tmp_path: Path) -> None:
    with pytest.raises(MediaError, match="one frame, and 17"):
        check_output(tmp_path / "clip.png", 64, 64, num_frames=17)
    with pytest.raises(MediaError, match="at most 50 frames a second"):
        check_output(tmp_path / "clip.gif", 64, 64, fps=60)
    # Told before the run, for any kind: it would fail at the first frame.
    with pytest.raises(InputError, match="fps must be"):
        check_output(tmp_path / "clip.mp4", 64, 64, fps=1e-9)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_no_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(MediaError, match="no permission"):
            check_output(tmp_path / "clip.mp4", 64, 64)
    finally:
        tmp_path.chmod(0o700)


def test_odd_sizes_are_fine_where_the_kind_allows_them(tmp_path: Path) -> None:
    assert check_output(tmp_path / "clip.gif", 63, 65, num_frames=3, fps=24) is OutputFormat.GIF
    assert check_output(f"{tmp_path}/v1.2/", 63, 65) is OutputFormat.FRAMES


def test_fps_is_exact() -> None:
    assert exact_fps(24000 / 1001) == Fraction(24000, 1001)
    assert exact_fps("30000/1001") == Fraction(30000, 1001)
    assert exact_fps(7.5) == Fraction(15, 2)
    assert exact_fps("2.5e1") == 25
    # The last ones come from records: a number with millions of digits takes hours to be read.
    hours = ("1e999999999", "1e-999999999", "9" * 70, "1E+0999999999")
    for bad in (0, -1, float("nan"), float("inf"), 1001, "fast", "1/0", *hours):
        with pytest.raises(InputError, match="fps must be"):
            exact_fps(bad)


def test_a_name_too_long_for_its_record_is_refused(tmp_path: Path) -> None:
    check_output(tmp_path / f"{'a' * 250}.mp4")
    with pytest.raises(InputError, match=r"the record of output .* can't be .*too long"):
        check_output(tmp_path / f"{'a' * 251}.mp4")


def test_sidecar_names() -> None:
    assert sidecar_of("a/clip.mp4") == Path("a/clip.json")
    assert sidecar_of("a/clip/") == Path("a/clip/record.json")


def test_names_of_several_videos() -> None:
    assert number_path("a/clip.mp4", 7) == "a/clip-7.mp4"
    assert number_path("a.b/clip/", 7) == "a.b/clip-7/"
    assert number_path("clip", 7) == "clip-7"


def test_slug_is_short_plain_ascii() -> None:
    assert slug('A "Red" Café, déjà vu!') == "a-red-cafe-deja-vu"
    assert slug("一只猫") == ""
    long = slug("word " * 50)
    assert len(long) <= 60
    assert long.endswith("word")
    assert slug("x" * 100) == "x" * 60


def test_default_output_takes_the_next_free_name(tmp_path: Path) -> None:
    now = datetime(2026, 11, 21, 9, 5, 7)

    def name() -> str:
        return default_output(tmp_path, "/home/me/My Model/", "一只猫", 7, now=now).name

    assert name() == "20261121-090507_my-model_video_7.mp4"
    (tmp_path / name()).touch()
    assert name() == "20261121-090507_my-model_video_7-2.mp4"
    # The sidecar's name must be free, too.
    (tmp_path / "20261121-090507_my-model_video_7-2.json").touch()
    assert name() == "20261121-090507_my-model_video_7-3.mp4"


def test_checks_need_no_heavy_package() -> None:
    code = (
        "import sys, everyframe.media.output_path, everyframe.media.record\n"
        "print(sorted({'numpy', 'av', 'PIL', 'torch'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
