"""Previews: colours of latents, known and fitted, as small pictures and events of a run."""

from __future__ import annotations

import errno
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import everyframe
from everyframe.core.events import Event, FramesDecoded, Note, Preview, Step, VideoDone
from everyframe.core.plan import PreviewPlan
from everyframe.engine import output_files
from everyframe.engine.output_files import OutputFiles
from everyframe.media.preview_picture import encode_preview
from everyframe.runtime.previews.latent_previews import Previewer, middle_frames, scale_frame
from everyframe.runtime.previews.latent_space import LatentColors, LatentSpace
from everyframe.runtime.previews.preview_fit import ColorFit

PROMPT = "a red circle moves to the left"


def space(**more: object) -> LatentSpace:
    return LatentSpace("AutoencoderKL", 4, 0.18215, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layout", "shape"),
    [("b c t h w", (2, 4, 5, 6, 7)), ("b t c h w", (2, 5, 4, 6, 7)), ("t c h w", (5, 4, 6, 7))],
)
def test_the_middle_frame_of_each_layout(layout: str, shape: tuple[int, ...]) -> None:
    axes = dict(zip(layout.split(), range(len(shape)), strict=True))
    latents = torch.zeros(shape).index_fill_(axes["t"], torch.tensor(2), 1.0)
    frame = middle_frames(latents, layout)[:, 0]
    assert frame.shape == (4, 6, 7)
    assert torch.all(frame == 1)


@pytest.mark.parametrize(("height", "width"), [(1080, 1920), (1920, 1080), (64, 64), (8, 4096)])
def test_pictures_are_small(height: int, width: int) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    frame = scale_frame(torch.from_numpy(noise)).numpy()
    data, (h, w) = encode_preview(frame), frame.shape[:2]
    assert len(data) <= 20_000
    assert max(w, h) == 256
    with Image.open(io.BytesIO(data)) as picture:
        assert (picture.format, picture.size) == ("JPEG", (w, h))


def test_published_colours_are_those_of_the_source() -> None:
    colors = LatentSpace("AutoencoderKLWan", 16).colors()
    assert colors is not None
    assert colors.factors[6] == (-0.3477, -0.4059, -0.2925)
    assert colors.bias == (-0.1835, -0.0868, -0.3360)
    five = LatentSpace("AutoencoderKLWan", 48).colors()
    assert five is not None
    assert "2.2" in five.source
    assert LatentSpace("AutoencoderKL", 4, 0.2).colors() is None
    assert LatentSpace("AutoencoderKLMochi", 16).colors() is None


def test_a_preview_has_the_colours_of_its_latents() -> None:
    previewer = Previewer(PreviewPlan(3, "published"), space())
    colors = space().colors()
    assert colors is not None
    wanted = torch.tensor([0.5, -0.5, 0.0])
    factors = torch.tensor(colors.factors)
    latent = torch.linalg.lstsq(factors.T, wanted[:, None]).solution[:, 0]
    latents = latent.reshape(1, 4, 1, 1, 1).expand(1, 4, 3, 6, 10)
    assert previewer.preview(7, 2, 10, lambda: latents) is None
    preview = previewer.preview(7, 3, 10, lambda: latents)
    assert preview is not None
    assert (preview.seed, preview.step, preview.num_steps) == (7, 3, 10)
    assert (preview.width, preview.height) == (256, 154)
    assert "image" not in preview.to_json()
    with Image.open(io.BytesIO(preview.image)) as picture:
        seen = np.asarray(picture, dtype=float).mean((0, 1)) / 255
    assert np.allclose(seen, [0.75, 0.25, 0.5], atol=0.02)


def test_a_preview_of_values_that_are_not_finite_is_a_picture() -> None:
    previewer = Previewer(PreviewPlan(1, "published"), space())
    assert previewer.preview(0, 1, 2, lambda: torch.full((1, 4, 1, 4, 4), torch.nan)) is not None


def planted(num_latents: int = 5) -> tuple[LatentColors, torch.Tensor, np.ndarray]:
    """A map, latents (1, 4, t, 4, 4) and the frames that it makes of them, 4 for each after one."""
    rng = np.random.default_rng(3)
    factors, bias = rng.normal(size=(4, 3)) * 0.2, rng.normal(size=3) * 0.2
    latents = rng.normal(size=(num_latents, 4, 4, 4))
    colors = np.einsum("tchw,cr->thwr", latents, factors) + bias
    frames = np.repeat(np.repeat(colors, 8, 1), 8, 2) / 2 + 0.5
    frames = np.concatenate([frames[:1], np.repeat(frames[1:], 4, 0)])
    # The last frame of each four stands for their latent.
    rows = tuple((r, g, b) for r, g, b in factors.tolist())
    known = LatentColors(rows, tuple(bias.tolist()), "planted")
    return known, torch.tensor(latents, dtype=torch.float32).permute(1, 0, 2, 3)[None], frames


def test_a_planted_map_is_found_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERYFRAME_CACHE", str(tmp_path / "cache"))
    weights = tmp_path / "vae.safetensors"
    weights.write_bytes(b"weights")
    mine = LatentSpace("VideoVAE", 4, files=(str(weights),))
    assert mine.colors(reads=True) is None
    wanted, latents, frames = planted()
    fit = ColorFit(mine, latents, len(frames))
    for piece in np.array_split(frames.astype(np.float32), 3):
        fit.add(piece)
    (note,) = fit.finish()
    assert "100%" in note.text
    found = mine.colors(reads=True)
    assert found is not None
    np.testing.assert_allclose(found.factors, wanted.factors, atol=1e-5)
    np.testing.assert_allclose(found.bias, wanted.bias, atol=1e-5)
    # Other weights are another autoencoder.
    weights.write_bytes(b"others")
    assert mine.colors(reads=True) is None


def test_small_weights_are_known_before_they_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedded model's colours come with it: its first run on a machine has previews too."""
    monkeypatch.setenv("EVERYFRAME_CACHE", str(tmp_path / "cache"))
    plan = everyframe.plan(PROMPT, preview=True)
    assert plan.preview is not None
    assert plan.preview.source.startswith("factors fitted")
    # Large ones are hashed by the run alone, which then knows them.
    monkeypatch.setenv("EVERYFRAME_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr("everyframe.runtime.previews.latent_space._READ_AT_ONCE", 0)
    unread = everyframe.plan(PROMPT, num_inference_steps=3, preview=True)
    assert unread.preview == PreviewPlan(1, "")
    events, _ = run(preview=True)
    assert sum(isinstance(each, Preview) for each in events) == 3
    assert not any("next runs" in each.text for each in events if isinstance(each, Note))
    assert not (tmp_path / "other" / "latent_colors").exists()


def test_what_no_map_explains_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERYFRAME_CACHE", str(tmp_path / "cache"))
    mine = LatentSpace("VideoVAE", 4, own_digest=lambda: "ab")
    _, latents, frames = planted()
    fit = ColorFit(mine, latents, len(frames))
    fit.add(np.random.default_rng(0).random(frames.shape, dtype=np.float32))
    (note,) = fit.finish()
    assert note.text.startswith("no previews of this autoencoder yet")
    assert mine.colors(reads=True) is None


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"schema": "other"}', '{"schema": "everyframe.latent_colors/1", "factors": 3}',
     '{"schema": "everyframe.latent_colors/1", "factors": [[1, 2, NaN]], "bias": [0, 0, 0],'
     ' "source": ""}'],
)  # fmt: skip
def test_a_damaged_file_of_colours_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("EVERYFRAME_CACHE", str(tmp_path))
    (tmp_path / "latent_colors").mkdir()
    (tmp_path / "latent_colors" / "ab.json").write_text(text)
    assert LatentSpace("VideoVAE", 1, own_digest=lambda: "ab").colors(reads=True) is None


def run(**options: object) -> tuple[list[Event], np.ndarray]:
    events: list[Event] = []
    video = everyframe.generate(
        PROMPT, seed=1, num_inference_steps=3, run_dir="off", on_event=events.append, **options
    )
    assert isinstance(video, everyframe.Video)
    return events, np.asarray(video.frames)


def test_a_run_shows_itself_and_keeps_its_bits() -> None:
    plain, frames = run()
    assert not any(isinstance(each, Preview) for each in plain)
    events, shown = run(preview=True)
    assert np.array_equal(frames, shown)
    previews = [each for each in events if isinstance(each, Preview)]
    assert [each.step for each in previews] == [1, 2, 3]
    for each in previews:  # right after its step
        before = events[events.index(each) - 1]
        assert isinstance(before, Step)
        assert before.step == each.step
    assert any(isinstance(each, Note) and "previews each step" in each.text for each in events)


@pytest.mark.slow
def test_previews_take_under_a_hundredth_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the fastest steps that there are, those of the embedded model on one thread."""
    import time

    spent = []
    make = Previewer.preview

    def timed(self: Previewer, *given: Any) -> Preview | None:
        began = time.thread_time()
        made = make(self, *given)
        spent.append((time.thread_time() - began, made is not None))
        return made

    monkeypatch.setattr(Previewer, "preview", timed)
    events: list[Event] = []
    everyframe.generate(PROMPT, seed=1, num_inference_steps=24, preview=True, run_dir="off",
                        on_event=events.append)  # fmt: skip
    assert sum(is_made for _, is_made in spent) >= 12
    steps = sum(each.seconds for each in events if isinstance(each, Step))
    assert sum(seconds for seconds, _ in spent) < 0.01 * steps


@pytest.mark.slow
def test_previews_come_out_of_a_worker() -> None:
    here, _ = run(preview=True)
    there, _ = run(preview=True, isolate=True)
    pictures = [[each for each in some if isinstance(each, Preview)] for some in (here, there)]
    assert len(pictures[0]) == 3
    assert pictures[0] == pictures[1]


def test_the_file_is_next_to_the_video_until_that_is_there(tmp_path: Path) -> None:
    paths = {1: f"{tmp_path}/clip-1.mp4", 2: f"{tmp_path}/clip-2/"}
    files = [tmp_path / "clip-1.preview.jpg", tmp_path / "clip-2.preview.jpg"]
    frames = np.zeros((2, 16, 16, 3), dtype=np.float32)
    with OutputFiles(paths, 8) as sink:
        for seed, file in zip(paths, files, strict=True):
            for image in (b"first", b"second"):
                sink.show_preview(Preview(seed, 1, 2, 16, 16, image))
                assert file.read_bytes() == image
            sink.add(FramesDecoded(seed, 2, frames))
            sink.finish(VideoDone(seed, 2, {"seed": seed}))
            assert not file.exists()
    assert not [*tmp_path.glob("*.jpg*")]


def test_a_full_disk_ends_the_previews_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    frames = np.zeros((2, 16, 16, 3), dtype=np.float32)
    with OutputFiles({1: f"{tmp_path}/clip.mp4"}, 8) as sink:
        with monkeypatch.context() as disk:
            disk.setattr(output_files, "replace_file", full)
            note = sink.show_preview(Preview(1, 1, 2, 16, 16, b"first"))
        assert note is not None
        assert "No space left on device" in note
        assert sink.show_preview(Preview(1, 2, 2, 16, 16, b"second")) is None
        sink.add(FramesDecoded(1, 2, frames))
        sink.finish(VideoDone(1, 2, {"seed": 1}))
    assert {path.name for path in tmp_path.iterdir()} == {"clip.mp4", "clip.json"}


def test_a_file_that_is_no_preview_stays(tmp_path: Path) -> None:
    mine = tmp_path / "clip.preview.jpg"
    frame = np.zeros((16, 16, 3), dtype=np.uint8)
    event = Preview(1, 1, 2, 16, 16, encode_preview(frame))
    for content, is_replaced in ((b"a picture of mine", False), (event.image, True)):
        mine.write_bytes(content)
        with OutputFiles({1: f"{tmp_path}/clip.mp4"}, 8) as sink:
            note = sink.show_preview(event)
            assert (note is None) == is_replaced
            sink.add(FramesDecoded(1, 1, frame[None].astype(np.float32)))
            sink.finish(VideoDone(1, 1, {"seed": 1}))
        assert mine.exists() != is_replaced


def interrupted(path: Path) -> None:
    with OutputFiles({1: f"{path}/clip.mp4"}, 8) as sink:
        sink.show_preview(Preview(1, 1, 2, 16, 16, b"picture"))
        raise KeyboardInterrupt


def test_an_interrupted_run_leaves_no_preview(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path)
    assert not [*tmp_path.iterdir()]
