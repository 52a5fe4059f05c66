"""T5 and its tokenizer: a prompt becomes hidden states and a mask.

Upstream: `opensora/models/text_encoder/t5.py` (`DeepFloyd/t5-v1_1-xxl`, padded to the model's
length, attention mask given). The classes come from transformers. Read next: `prompts.py` for what
happens to the words before, `stages.py` for who calls this.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from everyframe.checkpoints.config_errors import foreign_errors
from everyframe.checkpoints.folder import describe_missing
from everyframe.core.errors import CheckpointError, InputError
from everyframe.core.plan import Settings
from everyframe.families.opensora.prompts import check_not_lost, clean, with_affixes


@dataclass(frozen=True)
class TextEmbedding:
    """Hidden states (1, L, D) of T5 and which of the L tokens are real (1, L), bool."""

    hidden: Tensor
    mask: Tensor


def t5_config(data: Mapping[str, Any]) -> Any:
    """transformers' `T5Config` from a checkpoint's config.json."""
    from transformers import T5Config

    kind = data.get("model_type", "t5")
    if kind != "t5":
        raise CheckpointError(f"the text encoder's config.json is of a {kind!r} model, expected t5")
    return T5Config.from_dict(dict(data))


def build_encoder(data: Mapping[str, Any]) -> nn.Module:
    """An untrained `T5EncoderModel` of those sizes; build it under ``torch.device("meta")``."""
    from transformers import T5EncoderModel

    encoder: nn.Module = T5EncoderModel(t5_config(data))
    return encoder


class PieceTokenizer:
    """T5's tokenizer from its ``spiece.model`` alone, called like one of transformers.

    DeepFloyd's repository holds nothing else, and transformers reads such a file only with a
    protobuf package beside it. The pieces of the text, then the end mark.
    """

    def __init__(self, path: Path) -> None:
        from sentencepiece import SentencePieceProcessor

        self._pieces = SentencePieceProcessor(model_file=str(path))
        self.pad_token_id = max(self._pieces.pad_id(), 0)

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = [int(index) for index in self._pieces.encode(text)]
        return {"input_ids": [*ids, self._pieces.eos_id()] if add_special_tokens else ids}

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of these pieces."""
        special = {self._pieces.eos_id(), self.pad_token_id} if skip_special_tokens else set()
        return str(self._pieces.decode([index for index in ids if index not in special]))


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer that lies in `folder` (`tokenizer.json` or `spiece.model`); never fetches."""
    from transformers import AutoTokenizer

    files = ["tokenizer.json", "spiece.model"]
    there = [name for name in files if (folder / name).is_file()]
    # Of a folder with neither, transformers makes a tokenizer that knows no word, without a word.
    if not there:
        raise CheckpointError(f"no tokenizer: {describe_missing(folder, files)}")
    with foreign_errors(f"{folder} holds no usable tokenizer"):
        if there == ["spiece.model"]:
            return PieceTokenizer(folder / "spiece.model")
        # What is too long is told by `tokenize`; the tokenizer's own limit (T5's 512) would print
        # a warning of indexing errors that can't come.
        return AutoTokenizer.from_pretrained(
            str(folder),
            local_files_only=True,
            trust_remote_code=False,
            model_max_length=sys.maxsize,
        )


def tokens_of(
    tokenizer: Any, settings: Settings, max_length: int
) -> list[tuple[Tensor, Tensor, str]]:
    """Prompt and, where there is one, negative prompt as T5 gets them; see `tokenize`.

    Raises `InputError` also for a prompt of which cleaning leaves nothing.
    """
    # Scores say how the video should be; on both sides guidance would cancel them.
    prompts = [(settings.prompt, with_affixes(settings.prompt, settings))]
    if settings.negative_prompt is not None:
        prompts.append((settings.negative_prompt, settings.negative_prompt))
    for prompt, _ in prompts:
        check_not_lost(prompt)
    truncate = bool(settings.option("truncate_prompt"))
    return [tokenize(tokenizer, clean(each), max_length, truncate=truncate) for _, each in prompts]


def tokenize(
    tokenizer: Any, prompt: str, max_length: int, *, truncate: bool
) -> tuple[Tensor, Tensor, str]:
    """Token ids and mask, (1, max_length) each, and the words that were cut ("" if none).

    Raises `InputError` for a prompt that is too long unless `truncate`; it says what would be cut.
    """
    ids = tokenizer(prompt, add_special_tokens=True)["input_ids"]
    cut = ""
    if len(ids) > max_length:
        # The last token is the end mark, which the cut prompt needs too.
        cut = tokenizer.decode(ids[max_length - 1 : -1], skip_special_tokens=True).strip()
        if not truncate:
            raise InputError(
                f"the prompt has {len(ids)} tokens, this model reads {max_length}; shorten it, or "
                f"go on without its end by --truncate-prompt, which cuts: {_shortened(cut)!r}"
            )
        ids = [*ids[: max_length - 1], ids[-1]]
    padding = max_length - len(ids)
    pad_id = tokenizer.pad_token_id or 0
    row = torch.tensor([list(ids) + [pad_id] * padding])
    mask = torch.tensor([[True] * len(ids) + [False] * padding])
    return row, mask, cut


def _shortened(text: str, limit: int = 200) -> str:
    return text if len(text) <= limit else f"{text[:limit]}…"


def embed(
    encoder: nn.Module, ids: Tensor, mask: Tensor, device: str | torch.device = "cpu"
) -> TextEmbedding:
    """T5's last hidden states for token ids (1, L) and mask (1, L); float32, on the CPU.

    `device` is where the encoder computes, which need not be where its weights lie.
    """
    answer = encoder(input_ids=ids.to(device), attention_mask=mask.to(device, torch.long))
    hidden = answer.last_hidden_state
    return TextEmbedding(hidden.to("cpu", torch.float32), mask)
