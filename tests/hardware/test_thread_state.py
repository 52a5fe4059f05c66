"""A thread's GPU and streams in another thread, as far as that shows without a GPU."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest
import torch

from everyframe.hardware.thread_state import ThreadState
from everyframe.runtime.alternating_thread import AlternatingThread


@dataclass(frozen=True)
class Stream:
    """A stream of a GPU; number 0 is its default one."""

    device: int
    number: int


class Cards:
    """Three GPUs as torch shows them: the second is current, the third has a stream of its own."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.selected: list[tuple[str, object]] = []
        for name, answer in {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: 3,
            "current_device": lambda: 1,
            "current_stream": lambda card: Stream(card, 5 if card == 2 else 0),
            "default_stream": lambda card: Stream(card, 0),
            "set_device": lambda card: self._select(card),
            "set_stream": lambda stream: self._select(stream),
        }.items():
            patch.setattr(torch.cuda, name, answer)

    def _select(self, what: object) -> None:
        self.selected.append((threading.current_thread().name, what))


def test_no_card_is_selected_that_the_thread_does_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that is selected gets a context of hundreds of MB."""
    cards = Cards(monkeypatch)
    with ThreadState.here().entered():
        pass
    assert [what for _, what in cards.selected] == [Stream(2, 5), 1]


def test_a_call_in_a_thread_has_the_card_of_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = Cards(monkeypatch)
    assert AlternatingThread(lambda: "done", "calls").resume() == "done"
    assert cards.selected == [("calls", 1)]


def test_without_cards_none_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = Cards(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with ThreadState.here().entered():
        pass
    AlternatingThread(lambda: None, "calls").resume()
    assert not cards.selected
