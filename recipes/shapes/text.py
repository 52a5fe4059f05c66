"""The word tokenizer and the small T5 of `shapes`, both in transformers' own layout.

The vocabulary is the words of `shapes_prompts` and the caption templates; any other word is
``<unk>``. Upper case and punctuation are dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everyframe.checkpoints import shapes_prompts as words
from everyframe.checkpoints.shapes_prompts import Scene
from recipes.shapes import captions, world

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
MAX_LENGTH = 40
T5_SIZES: dict[str, Any] = {
    "d_model": 128,
    "d_kv": 32,
    "d_ff": 256,
    "num_layers": 2,
    "num_heads": 4,
    "feed_forward_proj": "gated-gelu",
    "relative_attention_num_buckets": 16,
    "relative_attention_max_distance": 32,
    "dropout_rate": 0.0,
    "is_encoder_decoder": False,
    "use_cache": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "tie_word_embeddings": False,
}


def vocabulary() -> list[str]:
    """Special tokens, then every word in alphabetical order."""
    phrases = [
        *(p for table in (words.SHAPES, words.COLOURS, words.BACKGROUNDS, words.MOTIONS)
          for known in table.values() for p in known),
        *words.BACKGROUND_NOUNS, *words.PREPOSITIONS, *words.FILLERS, *captions.TEMPLATES,
    ]  # fmt: skip
    found = {word for phrase in phrases for word in re.findall(r"[\w'-]+", phrase.lower())}
    return [PAD, END, UNKNOWN, *sorted(found - {"o", "m", "g", "c", "s", "b", "p"})]


def tokenizer() -> Any:
    """A fast tokenizer of whole words that ends each text with ``</s>``, as T5's does."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(vocabulary())}, unk_token=UNKNOWN)
    )
    inner.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace(Regex(r"[^\w\s'-]"), " ")]
    )
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=PAD, eos_token=END, unk_token=UNKNOWN,
        model_max_length=MAX_LENGTH, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def save_tokenizer(folder: Path) -> None:
    """In a form that transformers 4 reads too: 5 writes a name of its class that 4 doesn't know."""
    tokenizer().save_pretrained(str(folder))
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def encoder() -> Any:
    """An untrained `T5EncoderModel`."""
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(vocab_size=len(vocabulary()), **T5_SIZES))


def tokenize(texts: list[str], with_tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Ids and mask (B, L), padded to the longest of the batch."""
    rows = with_tokenizer(texts, truncation=True, max_length=MAX_LENGTH)["input_ids"]
    length = max(len(row) for row in rows)
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    mask = torch.tensor([[True] * len(row) + [False] * (length - len(row)) for row in rows])
    return ids, mask


class Wordings:
    """Tokenized captions of scenes, many of each, drawn once: a batch of them is an index away.

    Some captions have an unknown word in them.
    """

    def __init__(self, scenes: Sequence[Scene], count: int, seed: int, device: str = "cpu") -> None:
        rng, texts = np.random.default_rng(seed), []
        for scene in scenes:
            for _ in range(count):
                words = captions.caption(scene, rng).split()
                if rng.random() < 0.08:
                    words.insert(int(rng.integers(len(words) + 1)), "qqq")
                texts.append(" ".join(words))
        ids, _ = tokenize(texts, tokenizer())
        self.ids_SKL = ids.unflatten(0, (len(scenes), count)).to(device)
        self.rows = {scene: row for row, scene in enumerate(scenes)}

    def rows_of(self, scenes: Sequence[Scene]) -> Tensor:
        """(B,): where each scene's wordings are."""
        return torch.tensor([self.rows[s] for s in scenes], device=self.ids_SKL.device)

    def draw(self, rows_B: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Ids and mask (B, L) of one wording each."""
        which = rng.integers(self.ids_SKL.shape[1], size=len(rows_B))
        ids = self.ids_SKL[rows_B, world.sent(torch.from_numpy(which), rows_B.device)]
        return ids, ids != 0
