"""Table of diffusers transformers that support sequence parallelism, and their token split points.

In some modules of such a transformer all tokens attend to all; elsewhere a token needs only itself
and the text. So each rank can hold some tokens through all blocks. Split and gather points use the
class's own names. diffusers has the same data for some classes (`_cp_plan`, equal shares only), and
a test compares the two. A class is listed once its split result was compared with one device;
pipelines of other classes run on one device per video. Numbers and names only, no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from everyframe.core.plan import Settings
from everyframe.diffusers_pipelines.inputs.defaults import PipelineDefaults
from everyframe.parallel.cfg_groups import CfgGroups
from everyframe.parallel.head_partition import HeadPartition, sent_vectors
from everyframe.parallel.token_partition import TokenGrid, TokenPartition, UnevenTokenPartition
from everyframe.parallel.uneven_split import uneven_sizes
from everyframe.runtime.interface import RankShare, VideoGroup

if TYPE_CHECKING:
    from everyframe.diffusers_pipelines.parallel.cfg_detection import CfgBranches

#: Bytes per value of a denoiser's output: its last layer computes in float32.
ANSWER_BYTES = 4


@dataclass(frozen=True)
class TokenSplit:
    """An argument of a submodule with tokens along `dim`; a container is split tensor by tensor.

    An empty module name is the transformer itself.
    """

    module: str
    argument: str
    dim: int = 1


@dataclass(frozen=True)
class TransformerSplit:
    """Where the tokens of a transformer class are split and gathered.

    Attributes:
        tokens: split points of its streams, in their order in attention.
        attention: modules with full self-attention; names may contain ``*``.
        beside: arguments with one entry per token, split where they have that dimension.
        tables: submodules whose results have one entry per token, and that dimension.
        last: the module after which the video stream is gathered.
        video: index of the video stream in `tokens`.
        text: number of text tokens unless ``max_sequence_length`` is given, or the config key that
            has it; None if text tokens are not split.
        unlike: config values of variants that can't be split this way.
    """

    tokens: tuple[TokenSplit, ...]
    attention: tuple[str, ...]
    beside: tuple[TokenSplit, ...] = ()
    tables: tuple[tuple[str, int], ...] = ()
    last: str = "proj_out"
    video: int = 0
    text: str | int | None = None
    unlike: tuple[tuple[str, Any], ...] = ()

    def fits(self, config: Mapping[str, Any]) -> bool:
        """Whether a transformer with that config can be split."""
        return not any(config.get(key) == value for key, value in self.unlike)

    def num_tokens(self, sizes: PipelineDefaults, settings: Settings) -> tuple[int, ...]:
        """Tokens per stream for a video of these settings."""
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
            found = [int(settings.option("max_sequence_length", most))]
        found.insert(self.video, frames * rows * columns)
        return tuple(found)

    def part(
        self,
        sizes: PipelineDefaults,
        settings: Settings,
        video_group: VideoGroup,
        rank: int,
        width: int,
        batch: int,
    ) -> RankShare:
        """A rank's share of a call with `batch` samples; `width` is bytes per value in products."""
        config = sizes.denoiser
        streams = [uneven_sizes(n, video_group.weights) for n in self.num_tokens(sizes, settings)]
        partition = stream_partition(
            streams, batch * int(config["num_attention_heads"]), video_group.weights
        )
        heads, tokens = HeadPartition(partition), len(partition.columns[rank])
        held = tokens / partition.grid.places
        looks = held if video_group.backend == "ring" else heads.share(rank)
        vectors = (
            sent_vectors(partition, rank) if video_group.backend == "ring" else heads.num_sent(rank)
        )
        blocks = int(config["num_layers"]) + int(config.get("num_single_layers") or 0)
        sent = vectors * blocks * int(config["attention_head_dim"]) * width
        channels = int(config.get("out_channels") or config["in_channels"])
        answer = streams[self.video][rank] * math.prod(patch_of(config)) * channels * ANSWER_BYTES
        sent += batch * answer * (len(video_group.weights) - 1)
        idle = "" if tokens else "there are fewer tokens than devices"
        if looks and not tokens:
            idle += ": it works in attention alone"
        return RankShare(held, looks, sent, idle)


#: Splits by transformer class name.
CUTS: Mapping[str, TransformerSplit] = {
    "WanTransformer3DModel": TransformerSplit(
        tokens=(TokenSplit("blocks.0", "hidden_states"),),
        attention=("blocks.*.attn1",),
        # Wan 2.2 of a picture gives each token a timestep of its own.
        beside=(TokenSplit("", "timestep"),),
        tables=(("rope", 1),),
    ),
    "LTXVideoTransformer3DModel": TransformerSplit(
        tokens=(TokenSplit("", "hidden_states"),),
        attention=("transformer_blocks.*.attn1",),
        beside=(TokenSplit("", "timestep"),),
        tables=(("rope", 1),),
    ),
    "CogVideoXTransformer3DModel": TransformerSplit(
        tokens=(
            TokenSplit("transformer_blocks.0", "encoder_hidden_states"),
            TokenSplit("transformer_blocks.0", "hidden_states"),
        ),
        attention=("transformer_blocks.*.attn1",),
        beside=(TokenSplit("", "image_rotary_emb", 0),),
        video=1,
        text="max_text_seq_length",
    ),
    "HunyuanVideoTransformer3DModel": TransformerSplit(
        tokens=(
            TokenSplit("transformer_blocks.0", "hidden_states"),
            TokenSplit("transformer_blocks.0", "encoder_hidden_states"),
        ),
        attention=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
        tables=(("rope", 0),),
        text=256,
        # Its blocks know the tokens of the first frame by their number.
        unlike=(("image_condition_type", "token_replace"),),
    ),
}


def stream_partition(
    streams: Sequence[Sequence[int]], heads: int, weights: tuple[float, ...]
) -> TokenPartition:
    """Partition of attention for ranks with these token counts per stream.

    Samples of a batch count as heads: every rank has the same tokens of all of them.
    """
    lengths = tuple(map(sum, zip(*streams, strict=True)))
    return UnevenTokenPartition(TokenGrid(1, heads, sum(lengths)), weights, lengths=lengths)


def patch_of(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Patch size: latent frames, rows and columns per token."""
    patch = config.get("patch_size") or 1
    if isinstance(patch, (list, tuple)):
        deep, high, wide = patch
        return int(deep), int(high), int(wide)
    return int(config.get("patch_size_t") or 1), int(patch), int(patch)


#: (video group, rank, batch) -> the rank's share of a call.
Cutting = Callable[[VideoGroup, int, int], RankShare]


def rank_share(
    branches: CfgBranches, cutting: Cutting | None, video_group: VideoGroup, rank: int, title: str
) -> RankShare:
    """A rank's share of all guidance branches of a step, and the bytes it sends.

    Without `cutting` tokens can't be split.
    """
    groups = CfgGroups.of(video_group.weights, branches.count, video_group.num_cfg_groups)
    number = groups.number_of(rank)
    group, share = groups.ranks[number], groups.loads[number] / branches.count
    # Of a batch some of the samples; else some of the calls.
    batch, calls = branches.batch, branches.num_calls * share
    if branches.is_together:
        batch, calls = round(batch * share), branches.num_calls
    if cutting is not None:
        inside = VideoGroup(
            video_group.weights[group.start : group.stop], backend=video_group.backend
        )
        part = cutting(inside, rank - group.start, batch)
    elif rank == group.start:
        part = RankShare(1.0, 1.0, 0)
        groups, rank = groups.firsts, number
    else:
        return RankShare(0.0, 0.0, 0, _idle(branches, len(groups.ranks), title), works=False)
    exchanged = sum(groups.sent(_lengths(branches, groups), rank))
    # Of calls, each group answers one before they are exchanged.
    times = branches.num_calls / (1 if branches.is_together else len(groups.ranks))
    return replace(
        part,
        tokens=part.tokens * share,
        attention=part.attention * share,
        sent_bytes=round(part.sent_bytes * calls + exchanged * times),
    )


def _lengths(branches: CfgBranches, groups: CfgGroups) -> list[int]:
    """Bytes of each group's result in an exchange."""
    whole = sum(map(math.prod, branches.answer)) * ANSWER_BYTES
    if not branches.is_together:
        return [whole] * len(groups.loads)
    return [whole // branches.count * load for load in groups.loads]


def _idle(branches: CfgBranches, num_groups: int, title: str) -> str:
    """Why a rank has no work at all."""
    why = branches.why if branches.count == 1 else ""
    if branches.count > num_groups:
        why = f"cfg={branches.count} has its branches of guidance apart"
    where = "one device" if num_groups == 1 else f"{num_groups} devices, a branch each"
    return f"{title} makes each video on {where}" + (f": {why}" if why else "")
