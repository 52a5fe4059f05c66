"""What T5 gets to read: pinned examples, of upstream's answers too, and diffusers' own function."""

from __future__ import annotations

import random
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from bs4 import BeautifulSoup
from diffusers.pipelines.latte.pipeline_latte import LattePipeline

from everyframe.core.errors import InputError
from everyframe.core.plan import Settings
from everyframe.families.opensora.prompts import (
    _PLAIN,
    _REMOVED,
    check_not_lost,
    clean,
    loses_all,
    with_affixes,
)

SETTINGS = Settings(
    prompt="", negative_prompt=None, height=8, width=8, num_frames=1, fps=24.0,
    num_inference_steps=1, guidance_scale=1.0, seed=0,
)  # fmt: skip
ALL = {"aesthetic": 6.5, "motion_score": 5.0, "camera_motion": "pan left"}
SUFFIX = " aesthetic score: 6.5. motion score: 5.0. camera motion: pan left."


def affixed(prompt: str, **options: Any) -> str:
    none: dict[str, Any] = dict.fromkeys(ALL)
    return with_affixes(prompt, replace(SETTINGS, options=tuple({**none, **options}.items())))


@pytest.mark.parametrize(
    ("prompt", "cleaned"),
    [
        ("A Red   Circle", "a red circle"),
        ("a cat, see https://example.org/cat.html", "a cat, see html"),
        ("<b>bold</b> cat", "bold cat"),
        ("a red circle aesthetic score: 6.5.", "a red circle aesthetic score: 6.5."),
        ("“quoted” cat — running", '"quoted" cat - running'),
        ("红色 a cat", "a cat"),
        ("红色的猫", ""),
    ],
)
def test_cleaning(prompt: str, cleaned: str) -> None:
    assert clean(prompt) == cleaned


@pytest.mark.parametrize("prompt", ["* - : a cat", "*-; a cat", "a cat,: *", "红色 - : a cat"])
def test_what_surrounds_a_prompt_is_removed_as_upstream_does(prompt: str) -> None:
    """`text_preprocessing` of v1.2.0 answers "a cat"; diffusers' copy leaves ":", ";" or ","."""
    assert clean(prompt) == "a cat"


@pytest.mark.parametrize(
    "prompt", ["A (nice) cat!!! #cool @you 1920x1080", "ﬁve “cats”&amp;amp; dogs", "x"]
)
def test_cleaning_is_diffusers_twice(prompt: str) -> None:
    stand_in = SimpleNamespace(bad_punct_regex=LattePipeline.bad_punct_regex)
    once = LattePipeline._clean_caption(stand_in, prompt)
    assert clean(prompt) == LattePipeline._clean_caption(stand_in, once)


def test_plain_words_are_cleaned_as_diffusers_does() -> None:
    """They are not handed to it; each of its own words is, wherever it stands."""
    words = [
        "a", "x", "red", "circle", "page", "www", "http", "com", "mp", "person", "free",
        "worldwide", "clicks", "images", "pngs", "apks", "downloads", *_REMOVED,
    ]  # fmt: skip
    stand_in = SimpleNamespace(bad_punct_regex=LattePipeline.bad_punct_regex)
    draw = random.Random(1)
    num_plain = 0
    for _ in range(3000):
        number = draw.randint(1, 6)
        prompt = "".join(
            draw.choice(words) + draw.choice([" ", " ", ", ", ",", ". ", "  ", "", " FREE "])
            for _ in range(number)
        ) + draw.choice(["", ".", ",", "red", "red.", " "])
        once = LattePipeline._clean_caption(stand_in, prompt)
        assert clean(prompt) == LattePipeline._clean_caption(stand_in, once), repr(prompt)
        num_plain += bool(_PLAIN.fullmatch(prompt.strip().lower()))
    assert num_plain > 500


def test_affixes_stand_in_upstreams_order() -> None:
    assert affixed("a cat", **ALL) == "a cat" + SUFFIX
    assert affixed("a cat", camera_motion="tilt up") == "a cat camera motion: tilt up."
    assert affixed("a cat") == "a cat"


@pytest.mark.parametrize(
    "own", ["aesthetic score: 4.", "motion score: 9.", "camera motion: static."]
)
def test_what_the_prompt_says_itself_is_not_repeated(own: str) -> None:
    prompt = f"a cat {own}"
    label = own.partition(":")[0]
    assert affixed(prompt, **ALL).count(label) == 1
    assert affixed(prompt, **ALL).count(":") == 3


def test_scripts_that_cleaning_removes() -> None:
    assert loses_all("红色的猫, 123")
    assert not loses_all("红色 cat")
    assert not loses_all("123")


@pytest.mark.parametrize("prompt", ["红色的猫", "https://example.org/a", "圆"])
def test_a_prompt_does_not_become_empty_in_silence(prompt: str) -> None:
    assert clean(prompt) == ""
    with pytest.raises(InputError, match=r"nothing is left of the prompt .*say it in English"):
        check_not_lost(prompt)


def test_an_empty_negative_prompt_is_meant_to_be_empty() -> None:
    check_not_lost("")
    check_not_lost("a cat")


def test_cleaning_leaves_the_warnings_of_the_process_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt like a file's name is cleaned without a warning, and without a filter of them."""
    warned: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(warnings, "warn", lambda *given, **_: warned.append(given))
        for name in ("catch_warnings", "simplefilter"):
            patch.setattr(warnings, name, None)
        assert clean("B.html") == "b. html"
        assert not warned
        BeautifulSoup("b.html", features="html.parser")
    assert warned, "it warns no more by itself"
