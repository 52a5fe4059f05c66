"""T5 in checkpoints, for the families that read prompts with it: keys, sizes, tokens. No torch.

Without torch, a plan can report truncation before anything is loaded. The encoder is in
`t5_encoder`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from everyframe.checkpoints.config_errors import foreign_errors
from everyframe.checkpoints.folder import describe_missing, read_json
from everyframe.checkpoints.key_map import KeyMap
from everyframe.core.errors import CheckpointError
from everyframe.runtime.request_checks import too_long_prompt

#: Only T5's encoder is loaded; its embedding may have either name.
T5_KEYS = KeyMap(
    ignore=(r"decoder\..*", r"lm_head\..*"),
    tied=(("shared.weight", "encoder.embed_tokens.weight"),),
)
#: Config of T5 v1.1 XXL's encoder, for plans made before download.
T5_XXL: Mapping[str, Any] = {
    "model_type": "t5", "d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_heads": 64,
    "num_layers": 24, "vocab_size": 32128, "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}  # fmt: skip
T5_ISLANDS = ("*layer_norm",)
#: T5's `wo` overflows fp16; transformers runs it in float32 for the same reason.
T5_RANGE_ISLANDS = ("*.wo",)

_CONFIG = "tokenizer_config.json"
#: Keys of tokenizer_config.json without effect here: names of special tokens, which tokenizer.json
#: has too, and an unused length limit.
_SAYS_NOTHING = frozenset(
    {
        "backend", "clean_up_tokenization_spaces", "eos_token", "model_max_length", "pad_token",
        "tokenizer_class", "unk_token",
    }
)  # fmt: skip
#: Files that add tokens to those of ``tokenizer.json``.
_ADDED = ("added_tokens.json", "special_tokens_map.json")


class PieceTokenizer:
    """T5 tokenizer from ``spiece.model`` alone, with the call interface of transformers.

    DeepFloyd's repository has no other tokenizer file, and transformers needs a protobuf package to
    read this one. Returns the pieces of the text, then the end token.
    """

    def __init__(self, path: Path) -> None:
        from sentencepiece import SentencePieceProcessor

        self._pieces = SentencePieceProcessor(model_file=str(path))
        self.pad_token_id = max(self._pieces.pad_id(), 0)

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = [int(index) for index in self._pieces.encode(text)]
        return {"input_ids": [*ids, self._pieces.eos_id()] if add_special_tokens else ids}

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        special = {self._pieces.eos_id(), self.pad_token_id} if skip_special_tokens else set()
        return str(self._pieces.decode([index for index in ids if index not in special]))


class FileTokenizer:
    """Tokenizer from ``tokenizer.json`` alone, with the call interface of transformers.

    It uses the `tokenizers` package directly; transformers would do the same after a second of
    imports.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # that package has no error of its own
            raise ValueError(str(error)) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        pad = read_json(folder / _CONFIG).get("pad_token")
        self.pad_token_id = self._tokenizer.token_to_id(pad) if isinstance(pad, str) else None

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        encoded = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": list(encoded.ids)}

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))


def _is_whole(folder: Path) -> bool:
    """Whether ``tokenizer.json`` is complete: the config beside it changes nothing.

    The tokenizer class named there uses the file unchanged, while T5's classes rebuild theirs, and
    no other entry affects how text is read.
    """
    if not (folder / _CONFIG).is_file():
        return False
    config = read_json(folder / _CONFIG)
    return (
        config.get("tokenizer_class") == "PreTrainedTokenizerFast"
        and config.get("clean_up_tokenization_spaces") is False
        and set(config) <= _SAYS_NOTHING
        and not any((folder / name).exists() for name in _ADDED)
    )


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer in `folder` (`tokenizer.json` or `spiece.model`); never downloads."""
    files = ["tokenizer.json", "spiece.model"]
    there = [name for name in files if (folder / name).is_file()]
    # From a folder with neither, transformers silently builds an empty tokenizer.
    if not there:
        raise CheckpointError(f"no tokenizer: {describe_missing(folder, files)}")
    with foreign_errors(f"{folder} holds no usable tokenizer"):
        if there == ["spiece.model"]:
            return PieceTokenizer(folder / "spiece.model")
        if "tokenizer.json" in there and _is_whole(folder):
            return FileTokenizer(folder)
        from transformers import AutoTokenizer

        # `read_prompt` reports truncation; the tokenizer's own limit (T5's 512) would warn of
        # indexing errors that can't happen.
        return AutoTokenizer.from_pretrained(
            str(folder),
            local_files_only=True,
            trust_remote_code=False,
            model_max_length=sys.maxsize,
        )


def read_prompt(
    tokenizer: Any, prompt: str, max_length: int, *, truncate: bool
) -> tuple[list[int], str]:
    """Token ids, at most `max_length`, and the words that were cut ("" if none).

    Raises `InputError` for a prompt that is too long unless `truncate`; names the words to cut.
    """
    ids = list(tokenizer(prompt, add_special_tokens=True)["input_ids"])
    if len(ids) <= max_length:
        return ids, ""
    # The last token is the end mark, which the cut prompt needs too.
    cut = tokenizer.decode(ids[max_length - 1 : -1], skip_special_tokens=True).strip()
    if not truncate:
        raise too_long_prompt(len(ids), max_length, cut)
    return [*ids[: max_length - 1], ids[-1]], cut
