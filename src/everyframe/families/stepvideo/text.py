"""Tokenizers and encoders of Step-Video's two text models: prompt to ids, masks and hidden states.

Step-LLM reads up to 320 pieces from one sentencepiece file; CLIP (a BERT of transformers) reads up
to 77 tokens of its own vocabulary. `Tokens.cut` reports what does not fit. The Step-LLM module is
in `llm`. Upstream: stepvideo/text_encoder/tokenizer.py and clip.py.
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
from everyframe.core.errors import CheckpointError, first_line
from everyframe.parallel.communicator import broadcastable

#: Maximum tokens of Step-LLM and CLIP, including begin and end tokens.
LLM_LENGTH, CLIP_LENGTH = 320, 77
LLM_TOKENIZER = "step1_chat_tokenizer.model"
#: Begin and end tokens in Step-LLM's vocabulary; the end token is also the padding.
_BEGIN, _END = 1, 2


@dataclass(frozen=True)
class Tokens:
    """Ids and mask (1, L) of one text as an encoder reads it; `cut` are ids that did not fit."""

    ids: Tensor
    mask: Tensor
    cut: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the whole text, including the cut ones."""
        return int(self.mask.sum()) + len(self.cut)


def with_special_tokens(
    ids: Sequence[int], length: int, begin: int = _BEGIN, end: int = _END, pad: int = _END
) -> Tokens:
    """Add begin and end tokens to a text's pieces, and pad to `length`."""
    kept, cut = list(ids[: length - 2]), tuple(ids[length - 2 :])
    row = [begin, *kept, end]
    padding = length - len(row)
    return Tokens(
        torch.tensor([row + [pad] * padding]),
        torch.tensor([[True] * len(row) + [False] * padding]),
        cut,
    )


class StepTokenizer:
    """Step-LLM's tokenizer: a sentencepiece file."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        """`vocabulary` is the number of embeddings of the model.

        Raises `CheckpointError` for a file that is missing, broken or another model's.
        """
        from sentencepiece import SentencePieceProcessor

        path = folder / LLM_TOKENIZER
        if not path.is_file():
            raise CheckpointError(f"no tokenizer: {describe_missing(folder, [LLM_TOKENIZER])}")
        try:
            self._pieces = SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"{path} is no sentencepiece file: {first_line(error)}"
            ) from error
        marks = (self._pieces.bos_id(), self._pieces.eos_id())
        if marks != (_BEGIN, _END):
            raise CheckpointError(
                f"{path} does not belong to Step-LLM: its begin and end tokens are {marks}, "
                f"those of the model {(_BEGIN, _END)}"
            )
        _check_vocabulary(path, self._pieces.get_piece_size(), vocabulary, "Step-LLM")

    def tokens(self, text: str) -> Tokens:
        return with_special_tokens([int(index) for index in self._pieces.encode(text)], LLM_LENGTH)

    def words(self, ids: Sequence[int]) -> str:
        return str(self._pieces.decode(list(ids)))


class ClipTokenizer:
    """CLIP's tokenizer: transformers' BERT tokenizer."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        """Same arguments as `StepTokenizer`."""
        from transformers import BertTokenizer

        files = ["vocab.txt", "tokenizer.json"]
        if not any((folder / name).is_file() for name in files):
            raise CheckpointError(f"no tokenizer: {describe_missing(folder, files)}")
        with foreign_errors(f"{folder} holds no usable tokenizer"):
            # We report a text that is too long; the tokenizer's own warning cannot apply.
            self._words = BertTokenizer.from_pretrained(
                str(folder), local_files_only=True, model_max_length=sys.maxsize
            )
        _check_vocabulary(folder, len(self._words), vocabulary, "CLIP")

    def tokens(self, text: str) -> Tokens:
        # Without special tokens, so that the tokenizer doesn't warn of lengths.
        words = self._words
        ids = words.convert_tokens_to_ids(words.tokenize(text))
        return with_special_tokens(
            ids, CLIP_LENGTH, words.cls_token_id, words.sep_token_id, words.pad_token_id
        )

    def words(self, ids: Sequence[int]) -> str:
        return str(self._words.decode(list(ids)))


@broadcastable
@dataclass(frozen=True)
class TextStates:
    """Hidden states of one text for the denoiser, on the CPU.

    Attributes:
        llm: Step-LLM's states (1, 320, D), float32.
        llm_mask: mask of its tokens.
        clip: CLIP's states (1, 77, D); None until CLIP has run.
    """

    llm: Tensor
    llm_mask: Tensor
    clip: Tensor | None = None

    @property
    def clip_states(self) -> Tensor:
        """CLIP's states; CLIP must have run."""
        assert self.clip is not None, "the stage of CLIP comes before"
        return self.clip

    @property
    def mask(self) -> Tensor:
        """Mask of both texts (1, 397), CLIP's first.

        All CLIP tokens count, including padding, as in upstream's code and training.
        """
        whole = torch.ones(self.clip_states.shape[:2], dtype=torch.bool)
        return torch.cat((whole, self.llm_mask), dim=1)


def llm_states(model: nn.Module, tokens: Tokens, device: str | torch.device = "cpu") -> Tensor:
    """Step-LLM's states of one text, float32 on the CPU; `device` is where it computes."""
    states: Tensor = model(tokens.ids.to(device))
    return states.to("cpu", torch.float32)


def clip_states(model: nn.Module, tokens: Tokens, device: str | torch.device = "cpu") -> Tensor:
    """CLIP's states of one text, float32 on the CPU; `device` is where it computes."""
    ids, mask = tokens.ids.to(device), tokens.mask.to(device, torch.long)
    states: Tensor = model(input_ids=ids, attention_mask=mask).last_hidden_state
    return states.to("cpu", torch.float32)


def build_clip(data: Mapping[str, Any]) -> nn.Module:
    """Build an untrained `BertModel` of those sizes, without the unused pooler."""
    from transformers import BertConfig, BertModel

    kind = data.get("model_type", "bert")
    if kind != "bert":
        raise CheckpointError(f"CLIP's config.json is of a {kind!r} model, expected bert")
    model: Any = BertModel(BertConfig.from_dict(dict(data)), add_pooling_layer=False)
    # Tables that no checkpoint holds: not built on meta.
    embeddings = model.embeddings
    positions = torch.arange(model.config.max_position_embeddings, device="cpu")[None]
    embeddings.register_buffer("position_ids", positions, persistent=False)
    embeddings.register_buffer("token_type_ids", torch.zeros_like(positions), persistent=False)
    made: nn.Module = model
    return made


def _check_vocabulary(path: Path, pieces: int, embeddings: int, model: str) -> None:
    """Raise if there are more pieces than embeddings, or fewer than half (another model's file)."""
    if pieces > embeddings or 2 * pieces < embeddings:
        raise CheckpointError(
            f"{path} does not belong to {model}: it has {pieces} pieces, the model {embeddings}"
        )
