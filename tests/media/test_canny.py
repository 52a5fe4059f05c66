"""Canny's edges against those of OpenCV, which is what the ControlNets were trained on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from everyframe.media.canny import canny

GOLDEN = Path(__file__).parents[1] / "golden" / "canny_opencv" / "canny.npz"


@pytest.mark.parametrize(
    ("name", "thresholds"), [("edges", (100, 200)), ("more", (20, 60.5)), ("edges", (200, 100))]
)
def test_every_pixel_is_that_of_opencv(name: str, thresholds: tuple[float, float]) -> None:
    """Whole numbers throughout, so nothing may differ. The lower threshold may be given second."""
    golden = np.load(GOLDEN)
    assert 0.05 < (golden[name] > 0).mean() < 0.5
    assert np.array_equal(canny(golden["picture"], *thresholds), golden[name])


def test_a_weak_edge_stays_where_it_hangs_on_a_strong_one() -> None:
    """A step of 60 grey levels, weak by itself; in one of two such lines a part of it is strong."""
    picture = np.full((24, 40, 3), 100, np.uint8)
    picture[:, 10:20] = 130
    picture[:, 30:] = 130
    picture[:4, 10:20] = 220
    edges = canny(picture, 100, 300)
    assert edges[6:20, 9:11].any(axis=1).all()
    assert not edges[:, 28:32].any()
