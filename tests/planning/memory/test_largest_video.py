"""The largest video that fits is found, and with few tries, as each is a dry run."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from everyframe.core.errors import InputError
from everyframe.core.plan import Settings
from everyframe.planning.memory.largest_video import TRIES, largest_first, largest_fit
from helpers import config_only_models

#: Model, its request, and how many smaller videos there are.
ASKED: dict[str, tuple[Any, Settings, int]] = {
    "svd": (config_only_models.svd(), config_only_models.settings(1024, 1024, 32), 34),
    "opensora": (
        config_only_models.opensora("1.2"),
        config_only_models.settings(1024, 1024, 102),
        29,
    ),
    "stepvideo": (config_only_models.stepvideo(), config_only_models.settings(544, 992, 204), 27),
    "inpaint": (config_only_models.inpaint(9), config_only_models.settings(1024, 1024, 64), 10),
}


def pixels(settings: Settings) -> int:
    return settings.num_frames * settings.height * settings.width


def needs(settings: Settings, of_picture: float, of_attention: float) -> float:
    """What a video of that size takes: some for all frames, some for a picture, some squared."""
    area = settings.height * settings.width
    return pixels(settings) + of_picture * area + of_attention * settings.num_frames * area**2


@pytest.mark.parametrize("of_attention", [0, 1e-6, 1e-4])
@pytest.mark.parametrize("of_picture", [0.1, 10, 1000])
@pytest.mark.parametrize("name", ASKED)
def test_none_that_fits_is_larger(name: str, of_picture: float, of_attention: float) -> None:
    """Also where frames of a shorter video fit that are too large in a longer one of less."""
    model, settings, count = ASKED[name]
    candidates = list(model.smaller(settings))
    assert len(candidates) == count
    for exponent in range(14, 44):
        tried: list[Settings] = []

        def fits(each: Settings, room: int = 2**exponent, tried: Any = tried) -> bool:
            tried.append(each)
            return needs(each, of_picture, of_attention) <= room

        found = largest_first(candidates, fits)
        assert len(tried) <= TRIES
        assert found == sorted(found, key=pixels, reverse=True)
        largest = max(map(pixels, filter(fits, candidates)), default=0)
        assert (pixels(found[0]) if found else 0) == largest


def test_of_very_many_something_is_found() -> None:
    """A request far beyond what devices hold: what is found fits, and little more would."""
    candidates = list(
        config_only_models.opensora("1.2").smaller(config_only_models.settings(1080, 1920, 408))
    )
    for exponent in range(17, 30):
        room = 2**exponent

        def fits(each: Settings, room: int = room) -> bool:
            return needs(each, 100, 0) <= room

        possible = [pixels(each) for each in candidates if fits(each)]
        found = largest_first(candidates, fits)
        assert bool(found) == bool(possible)
        assert not found or pixels(found[0]) > 0.6 * max(possible)
    assert largest_first([], lambda _: math.nan > 0) == []


def test_a_size_that_a_pipeline_refuses_is_passed_over() -> None:
    """In place of an error about a size that nobody asked for."""
    model, settings, _ = ASKED["opensora"]
    refused = list[Settings]()

    def fit(each: Settings) -> Any:
        if not refused:
            refused.append(each)
            raise InputError("no")
        return SimpleNamespace(settings=each, fits=True)

    found = largest_fit(model.smaller(settings), lambda each: pixels(each) < 9e7, fit)
    assert found is not None
    assert pixels(found.settings) < pixels(refused[0]) < 9e7
