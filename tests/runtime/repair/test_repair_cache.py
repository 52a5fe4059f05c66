"""What is remembered of repairs: by weights and device, in the cache folder, and only a memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from everyframe.checkpoints.folder import cache_folder
from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import PLAIN, Precision, Repair
from everyframe.precision.islands import weight_bytes
from everyframe.runtime.repair.repair_cache import (
    delete_repairs,
    key_of,
    load_repairs,
    repairs_for,
    save_repair,
)

pytestmark = pytest.mark.usefixtures("own_cache")

CARD = DeviceFacts("a card", "cuda", 0, 10**10, 10**10, (8, 0))
VERSIONS = {"python": "3.11", "torch": "2.13", "cudnn": "91900"}
INNER = Repair("unet", "blocks.1.to_q", "float32", "float16")
OTHER = Repair("unet", "blocks.10", "float32", "float16")
OUTER = Repair("unet", "blocks.1", "float32", "float16")
WHOLE = Repair("unet", "", "float32", "float16")


KEY = key_of("ab" * 32, CARD, VERSIONS)


def test_nothing_is_remembered_at_first() -> None:
    assert load_repairs(KEY) == ()
    assert delete_repairs(KEY) == 0


def test_repairs_come_back_in_their_order_until_they_are_forgotten() -> None:
    for repair in (INNER, OTHER, replace(OTHER, to=PLAIN)):
        save_repair(KEY, repair)
    assert load_repairs(KEY) == (INNER, OTHER, replace(OTHER, to=PLAIN))
    assert delete_repairs(KEY) == 3
    assert load_repairs(KEY) == ()


def test_what_holds_another_takes_its_place() -> None:
    for repair in (INNER, OTHER, INNER, OUTER):
        save_repair(KEY, repair)
    assert load_repairs(KEY) == (OTHER, OUTER), "blocks.10 is not inside of blocks.1"
    save_repair(KEY, replace(WHOLE, to="bfloat16"))
    assert len(load_repairs(KEY)) == 3, "a narrower one holds nothing"
    save_repair(KEY, WHOLE)
    assert load_repairs(KEY) == (replace(WHOLE, to="bfloat16"), WHOLE)


@pytest.mark.parametrize(
    "other",
    [
        key_of("cd" * 32, CARD, VERSIONS),
        key_of("ab" * 32, replace(CARD, name="another"), VERSIONS),
        key_of("ab" * 32, replace(CARD, capability=(7, 5)), VERSIONS),
        key_of("ab" * 32, CARD, {**VERSIONS, "torch": "2.14"}),
    ],
    ids=["weights", "card", "capability", "torch"],
)
def test_nothing_is_remembered_of_others(other: object) -> None:
    save_repair(KEY, INNER)
    assert load_repairs(other) == ()  # type: ignore[arg-type]
    assert key_of("ab" * 32, replace(CARD, free_memory=1), {**VERSIONS, "python": "3.12"}) == KEY


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"schema": "x"}', '{"schema": "everyframe.repairs/1", "repairs": [{"a": 1}]}',
     '{"schema": "everyframe.repairs/1", "repairs": ["a"]}',
     '{"schema": "everyframe.repairs/1", "repairs": [null]}'],
)  # fmt: skip
def test_a_damaged_file_is_no_memory(text: str) -> None:
    save_repair(KEY, INNER)
    (file,) = cache_folder().glob("repairs/*/*.json")
    file.write_text(text)
    assert load_repairs(KEY) == ()
    save_repair(KEY, OTHER)
    assert load_repairs(KEY) == (OTHER,)


def test_where_nothing_can_be_written_the_run_goes_on(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EVERYFRAME_CACHE", str(tmp_path / "file"))
    save_repair(KEY, INNER)
    assert "a repair is not remembered" in caplog.text


def test_repairs_are_for_one_component_in_one_dtype() -> None:
    assert repairs_for("unet", "float16", (INNER, OTHER)) == (INNER, OTHER)
    assert repairs_for("unet", "bfloat16", (INNER,)) == ()
    assert repairs_for("vae", "float16", (INNER,)) == ()


def test_repaired_weights_take_the_memory_that_they_take() -> None:
    count = {"blocks.1.to_q.weight": 10, "blocks.10.to_q.weight": 100, "norm.weight": 1000}
    half = Precision("float16", "float16", ("norm",))
    assert weight_bytes(count, half) == 2 * 110 + 4 * 1000
    assert weight_bytes(count, half, (OUTER,)) == 4 * 10 + 2 * 100 + 4 * 1000
    assert weight_bytes(count, half, (replace(OUTER, to=PLAIN),)) == 2 * 110 + 4 * 1000
    assert weight_bytes(count, half, (WHOLE,)) == 4 * 1110
