"""An encoder's answers as they come to other ranks: the same kind, the same bits.

Whole runs among ranks are in `end_to_end/test_pipelines_distributed.py`; here one process is both,
by a tape between.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from everyframe.core.errors import CannotRunError
from everyframe.diffusers_pipelines.calls.module_calls import (
    EncodeOnLeadRank,
    encoders,
    without_weights,
)
from everyframe.diffusers_pipelines.files.checkpoint import ComponentFolder
from everyframe.parallel.communicator import FakeCommunicator
from helpers.tiny_checkpoints.pipeline_components import made, t5


class Taped(FakeCommunicator):
    """Rank 0 writes what it tells on the tape, another reads it."""

    def __init__(self, rank: int, tape: list[Any]) -> None:
        super().__init__(rank, (1.0, 1.0))
        self._tape = tape

    def broadcast_object(self, value: Any, source: int, what: str) -> Any:
        if self.is_lead:
            self._tape.append(json.dumps(value))
        return json.loads(self._tape[-1] if self.is_lead else self._tape.pop(0))

    def broadcast(self, x: Tensor, source: int, what: str) -> Tensor:
        if self.is_lead:
            self._tape.append(x.clone())
            return x
        found: Tensor = self._tape.pop(0)
        return found


def both(module: nn.Module, *args: Any, other: nn.Module | None = None, **kwargs: Any) -> list[Any]:
    """What the first rank's module answers, and what another rank gets."""
    tape: list[Any] = []
    with torch.no_grad(), EncodeOnLeadRank({"text_encoder": module}, Taped(0, tape), "cpu"):
        mine = module(*args, **kwargs)
    theirs = copy.deepcopy(module) if other is None else other
    with EncodeOnLeadRank({"text_encoder": theirs}, Taped(1, tape), "cpu"):
        return [mine, theirs(*args, **kwargs)]


def test_an_encoder_without_weights_answers_as_the_first_ranks(tmp_path: Path) -> None:
    encoder = t5()
    encoder.save_pretrained(tmp_path)
    part = ComponentFolder("text_encoder", "transformers", type(encoder).__name__, tmp_path)
    empty = without_weights(part, torch.bfloat16)
    assert all(each.is_meta for each in empty.parameters())
    assert empty.dtype == torch.bfloat16
    ids = torch.arange(6)[None]
    kind = type(empty)
    with EncodeOnLeadRank({"text_encoder": empty}, Taped(1, []), "cpu"):
        assert empty.device == torch.device("cpu"), "EasyAnimate puts the tokens there"
    mine, theirs = both(encoder, ids, other=empty, output_hidden_states=True)
    assert type(empty) is kind
    assert type(theirs) is type(mine)
    assert list(theirs) == list(mine)
    assert torch.equal(theirs[0], mine.last_hidden_state)
    assert isinstance(theirs.hidden_states, tuple)
    for a, b in zip(theirs.hidden_states, mine.hidden_states, strict=True):
        assert torch.equal(a, b)


class Answers(nn.Module):
    """Gives back what it is given."""

    def forward(self, answer: Any) -> Any:
        return answer


class SomeCache:
    """A language model's memory."""


def test_other_answers_come_as_they_are_or_are_refused() -> None:
    given = (torch.ones(2), None, {"a": [3, torch.zeros(1, dtype=torch.bool)]}, SomeCache())
    _, theirs = both(Answers(), given)
    assert torch.equal(theirs[0], given[0])
    assert theirs[1:] == (None, {"a": [3, torch.zeros(1, dtype=torch.bool)]}, None)
    with pytest.raises(CannotRunError, match="answers with a object"):
        both(Answers(), object())


def test_a_language_model_answers_without_its_cache() -> None:
    """An output of transformers leaves out what is None; Sana-Video's text encoder has one."""
    model = made(
        transformers.LlamaModel(
            transformers.LlamaConfig(
                hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1,
                vocab_size=8, pad_token_id=0,
            )
        )
    )  # fmt: skip
    mine, theirs = both(model, torch.arange(6)[None], output_hidden_states=True)
    assert mine.past_key_values is not None
    assert theirs.past_key_values is None
    assert torch.equal(theirs.last_hidden_state, mine.last_hidden_state)
    assert all(map(torch.equal, theirs.hidden_states, mine.hidden_states))


def test_which_components_encode() -> None:
    names = ("vae", "text_encoder", "text_encoder_2", "transformer", "image_encoder", "tokenizer")
    assert encoders(names) == ("text_encoder", "text_encoder_2", "image_encoder")
