"""The list of known models, and the refusal of prompts that the embedded one can't draw."""

from __future__ import annotations

from dataclasses import replace

import pytest

from everyframe.core.errors import InputError
from everyframe.core.facts import DeviceFacts, MachineFacts
from everyframe.core.request import Request
from everyframe.planning import find_model as model_finder
from everyframe.planning.find_model import find_model
from everyframe.planning.resolve import resolve

CPU = DeviceFacts("made-up processor", "cpu", None, 64 * 10**9, 64 * 10**9)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, CPU)


def machine(monkeypatch: pytest.MonkeyPatch, device: DeviceFacts) -> None:
    monkeypatch.setattr(model_finder, "machine_facts", lambda: MachineFacts((device,), 2, {}))


@pytest.mark.usefixtures("free")
def test_every_known_model_is_listed() -> None:
    rows = {row.name: row for row in model_finder.list_models()}
    assert list(rows) == [
        "shapes", "opensora-1.2", "opensora-1.0-16x256x256", "opensora-1.0-16x512x512",
        "opensora-2.0", "opensora-2.0-dcae",
        "svd", "svd-xt", "svd-xt-1.1", "svd-image-decoder", "svd-xt-image-decoder",
        "stepvideo-t2v", "stepvideo-t2v-turbo", "sd-1.5-inpaint", "sd-1.5",
    ]  # fmt: skip
    big = rows["opensora-1.2"]
    assert not big.on_disk
    assert big.licence == "Apache-2.0"
    assert all(row.licence for row in rows.values())
    assert big.needs_bytes == 4_762_310_656 * 4  # T5 alone, in float32
    assert big.download_bytes == 4 * (4_762_310_656 + 1_207_643_972 + 393_341_007)
    assert big.fits


def test_fast_bf16_halves_the_need(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, replace(CPU, has_fast_bf16=True, free_memory=10 * 10**9))
    rows = {row.name: row for row in model_finder.list_models()}
    assert rows["opensora-1.2"].needs_bytes == 4_762_310_656 * 2
    assert not rows["opensora-1.2"].fits


@pytest.mark.usefixtures("free")
def test_what_the_embedded_model_draws() -> None:
    model_finder.refuse_if_not_drawable(
        Request(prompt="a red circle moves to the right on a blue background")
    )


@pytest.mark.usefixtures("free")
@pytest.mark.parametrize("prompt", ["a cat on a sofa", "a red hexagon on a blue background"])
def test_what_it_does_not_draw_is_refused_with_what_would(prompt: str) -> None:
    with pytest.raises(InputError) as error:
        model_finder.refuse_if_not_drawable(Request(prompt=prompt))
    text = str(error.value)
    assert "can't draw this" in text
    assert "circle, square, triangle, star" in text
    assert "opensora-1.2 (19.0 GB of memory, 25.5 GB to fetch)" in text
    assert "--model shapes tries anyway" in text


def test_models_that_do_not_fit_are_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, replace(CPU, free_memory=10**9))
    with pytest.raises(InputError, match="fit this machine: none of the known ones"):
        model_finder.refuse_if_not_drawable(Request(prompt="a cat"))


def test_no_prompt_at_all() -> None:
    with pytest.raises(InputError, match="give a prompt"):
        find_model(Request(), may_fetch=False)


def test_a_size_that_can_not_be_is_reported_before_a_prompt_that_it_does_not_draw() -> None:
    with pytest.raises(InputError, match="height must be a multiple of 8, got 63"):
        resolve(Request(prompt="a cat", size="63x63"))
    with pytest.raises(InputError, match="does not know the word 'cat'"):
        resolve(Request(prompt="a cat", size="64x64"))
