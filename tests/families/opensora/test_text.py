"""The tokenizer from either kind of file against sentencepiece itself; cutting; padding."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from torch import Tensor
from transformers import AutoTokenizer, T5EncoderModel

from everyframe.checkpoints.folder import package_folder
from everyframe.core.errors import CheckpointError, InputError
from everyframe.families.opensora.text import embed
from everyframe.families.t5_encoder import build_encoder, pad
from everyframe.families.t5_tokenizer import (
    FileTokenizer,
    _is_whole,
    load_tokenizer,
    read_prompt,
)
from helpers.tiny_checkpoints import opensora as tiny_opensora


def tokenize(
    tokenizer: Any, prompt: str, most: int, *, truncate: bool
) -> tuple[Tensor, Tensor, str]:
    """Ids and mask of a prompt, and what of it was cut."""
    ids, cut = read_prompt(tokenizer, prompt, most, truncate=truncate)
    return (*pad(tokenizer, ids, most), cut)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pieces")
    tiny_opensora.sentence_pieces(folder / "spiece.model")
    return folder


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_opensora.text_encoder(tmp_path_factory.mktemp("words") / "t5")


def test_spiece_model_alone_is_a_tokenizer(pieces: Path) -> None:
    prompt = "a red  circle moves to the right, zebra"
    reference = sentencepiece.SentencePieceProcessor(model_file=str(pieces / "spiece.model"))
    expected = [*reference.encode(prompt), 1]  # 1 is T5's end mark
    ids, mask, cut = tokenize(load_tokenizer(pieces), prompt, 40, truncate=False)
    assert ids[0, : len(expected)].tolist() == expected
    assert ids[0, len(expected) :].eq(0).all()
    assert mask.tolist() == [[True] * len(expected) + [False] * (40 - len(expected))]
    assert cut == ""


@pytest.mark.parametrize("kind", ["pieces", "words"])
def test_a_long_prompt_is_refused_or_cut(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer = load_tokenizer(request.getfixturevalue(kind))
    prompt = "a red circle moves to the right on the blue background"
    with pytest.raises(InputError, match=r"this model reads 6; shorten it.*--truncate-prompt"):
        tokenize(tokenizer, prompt, 6, truncate=False)
    ids, mask, cut = tokenize(tokenizer, prompt, 6, truncate=True)
    whole, _, _ = tokenize(tokenizer, prompt, 60, truncate=False)
    assert ids[0, :5].tolist() == whole[0, :5].tolist()
    assert ids[0, 5] == 1  # the end mark stays
    assert mask.all()
    assert prompt.endswith(cut)
    assert cut


def test_only_we_say_that_a_prompt_is_too_long(
    words: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(words, tmp_path / "t5"))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_max_length": 8}))
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with pytest.raises(InputError, match="this model reads 6"):
        tokenize(load_tokenizer(folder), "a red circle " * 9, 6, truncate=False)
    assert not caplog.records


SHAPES = package_folder("checkpoints/shapes/tokenizer")


@pytest.mark.parametrize(
    "prompt",
    [
        "", " ", "a red circle moves to the right on a blue background", "Zebra; 猫 12.5",
        "a  red\tcircle\n", "</s> a <pad> red <unk> circle</s>", "red " * 200, "👍🏽 e\u0301 ﬁ",
    ],
)  # fmt: skip
def test_a_whole_file_is_read_as_transformers_reads_it(prompt: str) -> None:
    ours, theirs = load_tokenizer(SHAPES), AutoTokenizer.from_pretrained(str(SHAPES))
    assert isinstance(ours, FileTokenizer)
    assert ours.pad_token_id == theirs.pad_token_id
    for special in (True, False):
        ids = ours(prompt, add_special_tokens=special)["input_ids"]
        assert ids == theirs(prompt, add_special_tokens=special)["input_ids"]
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer_class": "T5Tokenizer"}, {"clean_up_tokenization_spaces": True},
        {"additional_special_tokens": ["<x>"]}, {"do_lower_case": True},
    ],
)  # fmt: skip
def test_a_file_that_is_not_all_there_is_to_it_is_left_to_transformers(
    change: dict[str, object], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(SHAPES, tmp_path / "tokenizer"))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    assert not _is_whole(folder)


@pytest.mark.parametrize("text", ["", "{}", '{"model": 3}', "[" * 1000])
def test_a_broken_file_is_reported(text: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(SHAPES, tmp_path / "tokenizer"))
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match="holds no usable tokenizer"):
        load_tokenizer(folder)


def test_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(CheckpointError, match=r"no tokenizer: .* looked for tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "spiece.model").write_bytes(b"no model")
    with pytest.raises(CheckpointError, match="holds no usable tokenizer"):
        load_tokenizer(tmp_path)


def test_states_are_transformers_own_and_padding_is_masked(words: Path) -> None:
    tokenizer = load_tokenizer(words)
    encoder = T5EncoderModel.from_pretrained(words).eval().requires_grad_(False)
    ids, mask, _ = tokenize(tokenizer, "a red circle", 24, truncate=False)
    found = embed(encoder, ids, mask)
    assert found.hidden.shape == (1, 24, tiny_opensora.CAPTION_CHANNELS)
    assert found.hidden.dtype == torch.float32
    alone = encoder(ids[:, :4], attention_mask=torch.ones(1, 4)).last_hidden_state
    # Sums over masked zeros in another order.
    torch.testing.assert_close(found.hidden[:, :4], alone, rtol=1e-4, atol=1e-5)


def test_an_encoder_of_another_kind_is_refused() -> None:
    with pytest.raises(CheckpointError, match="'bert' model, expected t5"):
        build_encoder({"model_type": "bert"})
