"""The record comes back from every kind of file, whatever the prompt."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from everyframe.core.errors import MediaError
from everyframe.media.read import read_video
from everyframe.media.record import embedded_record, read_record
from everyframe.media.write import write

FRAME = np.full((1, 16, 16, 3), 77, np.uint8)
PROMPTS = {
    "plain": "a red circle",
    "quotes": "he said \"no\", 'yes' = ; # \\ \\n {json: [1]} <b>&amp;</b>",
    "lines": "one\ntwo\r\n\tthree\x00\x1f",
    "chinese": "一只猫在雨中跳舞 😀 Ünïcödé",
    "long": "长 prompt " * 2500,  # over 20 kB
    "surrogate": "broken \udce9 input",
}
FILES = ["clip.mp4", "clip.gif", "clip.webp", "clip.png", "clip/"]


def record_for(prompt: str) -> dict[str, Any]:
    return {"request": {"prompt": prompt, "seed": 2**63 - 1, "scale": 0.1, "image": None}}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS.keys())
def test_comes_back_from_the_file_and_the_sidecar(tmp_path: Path, name: str, prompt: str) -> None:
    target = f"{tmp_path}/{name}"
    record = record_for(prompt)
    write(target, [FRAME], "24000/1001", record)
    ours = {"schema": "everyframe.record/2", "fps": "24000/1001", "num_frames": 1}
    assert read_record(target) == {**ours, **record}
    if name == "clip/":
        assert read_record(tmp_path / "clip" / "record.json") == {**ours, **record}
        return
    assert embedded_record(tmp_path / name) == {**ours, **record}
    assert read_record(tmp_path / "clip.json") == {**ours, **record}


def test_the_sidecar_is_readable_and_optional(tmp_path: Path) -> None:
    write(tmp_path / "clip.mp4", [FRAME], 24, record_for("一只猫"))
    assert "一只猫" in (tmp_path / "clip.json").read_text("utf-8")
    write(tmp_path / "bare.mp4", [FRAME], 24, record_for("x"), sidecar=False)
    assert not (tmp_path / "bare.json").exists()
    assert read_record(tmp_path / "bare.mp4")["request"]["prompt"] == "x"


def test_the_files_own_record_wins(tmp_path: Path) -> None:
    write(tmp_path / "clip.mp4", [FRAME], 24, record_for("mp4"))
    write(tmp_path / "clip.gif", [FRAME], 24, record_for("gif"))  # takes clip.json over
    assert read_record(tmp_path / "clip.mp4")["request"]["prompt"] == "mp4"
    # A video without a record does not take up the one that an older video left beside it.
    write(tmp_path / "clip.mp4", [FRAME], 24)
    assert "request" not in read_record(tmp_path / "clip.mp4")


def test_a_stripped_file_falls_back_on_its_sidecar(tmp_path: Path) -> None:
    write(tmp_path / "clip.png", [FRAME], 24, record_for("kept"))
    Image.fromarray(FRAME[0]).save(tmp_path / "clip.png")
    assert embedded_record(tmp_path / "clip.png") is None
    assert read_record(tmp_path / "clip.png")["request"]["prompt"] == "kept"


def test_a_record_known_only_at_the_end(tmp_path: Path) -> None:
    notes: list[int] = []

    def pieces() -> Any:
        for index in range(3):
            notes.append(index)
            yield FRAME

    write(tmp_path / "clip.mp4", pieces(), 24, lambda: {"notes": list(notes)})
    assert read_record(tmp_path / "clip.mp4")["notes"] == [0, 1, 2]
    assert read_record(tmp_path / "clip.json")["notes"] == [0, 1, 2]


@pytest.mark.parametrize("comment", ["", "hello", "[1, 2]", '{"prompt": "other"}', "[" * 50000])
def test_a_foreign_video_has_no_record(tmp_path: Path, comment: str) -> None:
    path = tmp_path / "foreign.mp4"
    with av.open(str(path), "w") as container:
        container.metadata["comment"] = comment
        stream = container.add_stream("libx264", rate=24)
        stream.width = stream.height = 16
        container.mux(stream.encode(av.VideoFrame.from_ndarray(FRAME[0])))
        container.mux(stream.encode())
    with pytest.raises(MediaError, match=r"neither it nor 'foreign\.json' holds a record"):
        read_record(path)


def test_what_is_no_video_says_so(tmp_path: Path) -> None:
    with pytest.raises(MediaError, match="no such file"):
        read_record(tmp_path / "missing.mp4")
    (tmp_path / "text.mp4").write_text("hello")
    with pytest.raises(MediaError, match=r"'\S+' is neither a video nor a picture: [^\[']+$"):
        read_record(tmp_path / "text.mp4")
    (tmp_path / "other.json").write_text(json.dumps({"a": 1}))
    for place in ("other.json", "."):
        with pytest.raises(MediaError, match="holds no record of Everyframe"):
            read_record(tmp_path / place)


def test_records_move_with_their_files(tmp_path: Path) -> None:
    for name in FILES[:4]:
        write(tmp_path / name, [FRAME], 24, record_for(name))
        moved = tmp_path / f"elsewhere-{name}"
        shutil.move(tmp_path / name, moved)
        assert read_record(moved)["request"]["prompt"] == name


@pytest.mark.parametrize("byte", [b"\x80", b"\xff"])
def test_a_tag_that_is_no_text_hides_no_frames(tmp_path: Path, byte: bytes) -> None:
    place = tmp_path / "clip.mp4"
    write(place, [FRAME], 24, record_for("x"), sidecar=False)
    place.write_bytes(place.read_bytes().replace(b'"schema"', b'"' + byte + b'chema"'))
    with pytest.raises(MediaError, match="does not say what made it"):
        read_record(place)
    assert len(read_video(place)[0]) == 1
