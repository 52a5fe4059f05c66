"""Which of diffusers' transformers several ranks can share, and where their tokens are cut: data.

In some modules of such a transformer all tokens look at all; everywhere else a token needs itself
and the text alone. So each rank can hold some tokens through all blocks. Where they are cut, and
where they are gathered, is told in the class's own names; diffusers says the same of some of its
classes (`_cp_plan`, for equal parts), which a test holds this against. A class is here if it was
held against itself on one device; pipelines of others are made by one device each.

Numbers and names only, no tensors. Read next: `sharding.py`, which puts it on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everyframe.core.plan import Settings
from everyframe.families.family import Crew, RankPart
from everyframe.families.pipeline.sizes import Sizes
from everyframe.parallel.grid import Deal, Grid, Parted
from everyframe.parallel.heads import HeadDeal, sent_vectors
from everyframe.parallel.partition import shares

#: Bytes of a number of the answer, which a denoiser's last layer gives in float32.
ANSWER_BYTES = 4


@dataclass(frozen=True)
class Cut:
    """The argument of a submodule whose tokens lie along `dim`; of all tensors in it, if several.

    The empty name is the transformer itself.
    """

    module: str
    argument: str
    dim: int = 1


@dataclass(frozen=True)
class Cuts:
    """How the tokens of a transformer class are dealt out.

    `tokens` are the places where its streams are cut, in the order in which they lie beside each
    other in attention; `video` is the number of that which is gathered, once `last` has made of it
    what the model answers. `beside` are arguments of which each token has a part of its own, where
    they have that dimension, and `tables` submodules whose results have it, with the dimension. All
    tokens look at all in the modules `attention`, whose names may hold a ``*``.

    `text` is how many tokens of a text there are unless ``max_sequence_length`` says it, or the key
    of its config that does; None if they are not among those that are cut. A config that has any of
    `unlike` is of a variant that can't be cut so.
    """

    tokens: tuple[Cut, ...]
    attention: tuple[str, ...]
    beside: tuple[Cut, ...] = ()
    tables: tuple[tuple[str, int], ...] = ()
    last: str = "proj_out"
    video: int = 0
    text: str | int | None = None
    unlike: tuple[tuple[str, Any], ...] = ()

    def fits(self, config: Mapping[str, Any]) -> bool:
        """Whether a transformer of that config can be cut so."""
        return not any(config.get(key) == value for key, value in self.unlike)

    def num_tokens(self, sizes: Sizes, settings: Settings) -> tuple[int, ...]:
        """How many tokens a video of those settings has of each kind."""
        config = sizes.denoiser
        deep, *sides = patch_of(config)
        frames = math.ceil(((settings.num_frames - 1) // (sizes.temporal_factor or 1) + 1) / deep)
        rows, columns = (
            side // sizes.spatial_factor // patch
            for side, patch in zip((settings.height, settings.width), sides, strict=True)
        )
        found = []
        if self.text is not None:
            most = self.text if isinstance(self.text, int) else config[self.text]
            found = [int(dict(settings.options).get("max_sequence_length", most))]
        found.insert(self.video, frames * rows * columns)
        return tuple(found)

    def part(
        self, sizes: Sizes, settings: Settings, crew: Crew, rank: int, width: int, batch: int
    ) -> RankPart:
        """What that rank does of a call of so many samples, with products in numbers of `width`
        bytes."""
        config = sizes.denoiser
        streams = [shares(n, crew.weights) for n in self.num_tokens(sizes, settings)]
        deal = dealt(streams, batch * int(config["num_attention_heads"]), crew.weights)
        heads, tokens = HeadDeal(deal), len(deal.columns[rank])
        held = tokens / deal.grid.places
        looks = held if crew.way == "ring" else heads.share(rank)
        vectors = sent_vectors(deal, rank) if crew.way == "ring" else heads.moved(rank)
        blocks = int(config["num_layers"]) + int(config.get("num_single_layers") or 0)
        sent = vectors * blocks * int(config["attention_head_dim"]) * width
        channels = int(config.get("out_channels") or config["in_channels"])
        answer = streams[self.video][rank] * math.prod(patch_of(config)) * channels * ANSWER_BYTES
        sent += batch * answer * (len(crew.weights) - 1)
        idle = "" if tokens else "there are fewer tokens than devices"
        if looks and not tokens:
            idle += ": it works in attention alone"
        return RankPart(held, looks, sent, idle)


#: By the name of the class.
CUTS: Mapping[str, Cuts] = {
    "WanTransformer3DModel": Cuts(
        tokens=(Cut("blocks.0", "hidden_states"),),
        attention=("blocks.*.attn1",),
        # Wan 2.2 of a picture gives each token a timestep of its own.
        beside=(Cut("", "timestep"),),
        tables=(("rope", 1),),
    ),
    "LTXVideoTransformer3DModel": Cuts(
        tokens=(Cut("", "hidden_states"),),
        attention=("transformer_blocks.*.attn1",),
        beside=(Cut("", "timestep"),),
        tables=(("rope", 1),),
    ),
    "CogVideoXTransformer3DModel": Cuts(
        tokens=(
            Cut("transformer_blocks.0", "encoder_hidden_states"),
            Cut("transformer_blocks.0", "hidden_states"),
        ),
        attention=("transformer_blocks.*.attn1",),
        beside=(Cut("", "image_rotary_emb", 0),),
        video=1,
        text="max_text_seq_length",
    ),
    "HunyuanVideoTransformer3DModel": Cuts(
        tokens=(
            Cut("transformer_blocks.0", "hidden_states"),
            Cut("transformer_blocks.0", "encoder_hidden_states"),
        ),
        attention=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
        tables=(("rope", 0),),
        text=256,
        # Its blocks know the tokens of the first frame by their number.
        unlike=(("image_condition_type", "token_replace"),),
    ),
}


def dealt(streams: Sequence[Sequence[int]], heads: int, weights: tuple[float, ...]) -> Deal:
    """The attention among tokens of which the ranks hold so many of each kind.

    Samples of a batch are heads: every rank has the same tokens of all of them.
    """
    lengths = tuple(map(sum, zip(*streams, strict=True)))
    return Parted(Grid(1, heads, sum(lengths)), weights, lengths=lengths)


def patch_of(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Latent frames, rows and columns of a token."""
    patch = config.get("patch_size") or 1
    if isinstance(patch, (list, tuple)):
        deep, high, wide = patch
        return int(deep), int(high), int(wide)
    return int(config.get("patch_size_t") or 1), int(patch), int(patch)
