"""What do several devices send to each other, how evenly do they work, and what is that worth?

    python benchmarks/parallel.py               bytes, shares and a model of a step's time; a page
    python benchmarks/parallel.py --two         two workers of one thread against one, on this CPU

Every family that can share a video is asked for its released sizes, and each rank of 1 to 8 runs
one step dry, by the code that runs it: bytes are those that its group counts, operations those that
the dry run counts. A step of blocks that are alike is counted with one block and with two. Bytes
are held against the family's own formula and against what others send for the same model: Open-Sora
1.0 and 1.2 as upstream, and Ulysses, all of which need numbers that divide. A unit is
tokens * width * bytes * (P - 1) / P**2 for all branches of guidance.

The model of a step's time is the slowest rank's: its operations at the rates of the device, and
after them its bytes at the given bandwidth; nothing overlaps, and latency is not in it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import two_workers
from result_pages import compose_page, make_parser, page_path, publish

from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import Settings
from everyframe.families.registry import family_names
from everyframe.hardware.profiles import find_profile
from everyframe.parallel.communicator import FakeCommunicator, ParallelContext
from everyframe.planning.dry_runs import DryRun, call_seconds, dry_run
from everyframe.precision.policy import choose
from everyframe.runtime.interface import ShardableSpec, VideoGroup
from helpers import config_only_models

NUMBERS = range(1, 9)
BYTES = 2  # of a number in bfloat16
#: Bytes a second out of a device and into it: what each way gives large messages.
WAYS = {"NVLink 3": 250e9, "PCIe 4": 22e9, "Ethernet 10G": 1.1e9}


@dataclass(frozen=True)
class Case:
    """A released model and a usual video of it.

    ``model(blocks)`` has so many of its `blocks`; None is a model whose blocks differ. `width` is
    that of its tokens, of which ``tokens(model, settings)`` counts those of all branches, `others`
    the units that others send a block, and `way` one of the model's ways to exchange.
    """

    family: str
    model: Callable[[int | None], Any]
    settings: Settings
    blocks: int | None = None
    width: int | None = None
    tokens: Callable[[Any, Settings], int] | None = None
    others: Mapping[str, float] = field(default_factory=dict)
    way: str = ""


def opensora(version: str) -> Callable[[int | None], Any]:
    """Open-Sora of that version at its released sizes, with so many blocks."""
    from everyframe.families.opensora.components import OpenSoraBuilder
    from everyframe.families.opensora.config import OpenSoraConfig, STDiT3Config, STDiTConfig
    from everyframe.families.opensora.vae_config import ImageVAEConfig, VideoVAEConfig
    from everyframe.families.t5_tokenizer import T5_XXL

    def made(blocks: int | None) -> Any:
        model = config_only_models.opensora(version)
        denoiser: Any = STDiTConfig() if version == "1.0" else STDiT3Config()
        vae: Any = ImageVAEConfig() if version == "1.0" else VideoVAEConfig()
        denoiser = replace(denoiser, depth=blocks or denoiser.depth)
        config = OpenSoraConfig(version, denoiser, vae, T5_XXL, square=32)
        return replace(model, builder=OpenSoraBuilder(config))

    return made


def stepvideo(blocks: int | None) -> Any:
    """Step-Video at its released sizes, with so many blocks."""
    from everyframe.families.stepvideo.components import StepVideoBuilder
    from everyframe.families.stepvideo.config import (
        HUNYUAN_CLIP,
        StepLLMConfig,
        StepVideoConfig,
        StepVideoModelConfig,
    )
    from everyframe.families.stepvideo.vae_config import StepVAEConfig

    denoiser = StepVideoModelConfig()
    denoiser = replace(denoiser, num_layers=blocks or denoiser.num_layers)
    config = StepVideoConfig(denoiser, StepLLMConfig(), HUNYUAN_CLIP, StepVAEConfig())
    return replace(config_only_models.stepvideo(), builder=StepVideoBuilder(config))


def opensora_tokens(model: Any, settings: Settings) -> int:
    """Patches of all branches."""
    from everyframe.families.opensora.components import token_sizes

    return int(model.num_branches(settings) * prod(token_sizes(model.config, settings)))


def stepvideo_tokens(model: Any, settings: Settings) -> int:
    """Patches of all branches."""
    from everyframe.families.stepvideo.components import token_grid
    from everyframe.families.stepvideo.settings import latent_shape

    latents = latent_shape(model.config, settings)
    grid = token_grid(model.config, latents, model.num_branches(settings))
    return int(grid.samples * grid.places)


def svd(blocks: int | None) -> Any:
    """Stable Video Diffusion at its released sizes."""
    from everyframe.families.svd.components import SVDBuilder
    from everyframe.families.svd.config import SVDConfig, released

    builder = SVDBuilder(SVDConfig.from_json("released", released()))
    return replace(config_only_models.svd(), builder=builder)


def cases() -> dict[str, Case]:
    """Cases of every family whose videos several devices can share, in each of its ways."""
    sized = config_only_models.settings
    known = {
        "Open-Sora 1.0, 16 frames of 512x512": Case(
            "opensora", opensora("1.0"), sized(512, 512, 16, guidance=7.0), 28, 1152,
            opensora_tokens, {"Open-Sora 1.0": 10, "Ulysses": 4},
        ),
        "Open-Sora 1.2, 102 frames of 640x360": Case(
            "opensora", opensora("1.2"), sized(360, 640, 102, guidance=7.0), 28, 1152,
            opensora_tokens, {"Open-Sora 1.2": 6, "Ulysses": 4},
        ),
        "Step-Video, 136 frames of 992x544": Case(
            "stepvideo", stepvideo, sized(544, 992, 136, guidance=9.0), 48, 6144,
            stepvideo_tokens, {"Ulysses": 4},
        ),
        "SVD, 14 frames of 1024x576": Case("svd", svd, sized(576, 1024, 14)),
    }  # fmt: skip
    assert {case.family for case in known.values()} <= set(family_names())
    found: dict[str, Case] = {}
    for name, case in known.items():
        model = case.model(1)
        for way in model.sequence_backends if isinstance(model, ShardableSpec) else ():
            found[f"{name}, {way}" if way else name] = replace(case, way=way)
    return found


@dataclass(frozen=True)
class Part:
    """One rank's part of a step: what it sends, its operations and their seconds."""

    sent: float
    operations: float
    seconds: float

    def of_blocks(self, two: Part, blocks: int) -> Part:
        """That of so many blocks, where `self` is that of one and `two` of two."""
        mine, other = ((each.sent, each.operations, each.seconds) for each in (self, two))
        return Part(*(a + (blocks - 1) * (b - a) for a, b in zip(mine, other, strict=True)))


def part_of(case: Case, rank: int, size: int, device: DeviceFacts) -> Part:
    """One rank's part of a step of all blocks."""
    if case.blocks is None:
        return counted(case, None, rank, size, device)
    one, two = (counted(case, blocks, rank, size, device) for blocks in (1, 2))
    return one.of_blocks(two, case.blocks)


def counted(case: Case, blocks: int | None, rank: int, size: int, device: DeviceFacts) -> Part:
    """One rank's part of a step, run dry."""
    model, group = case.model(blocks), FakeCommunicator(rank, (1.0,) * size)
    steps = model.dry_run_calls(case.settings, ParallelContext(group, group, 1, case.way))
    step = next(each for each in steps if each.stage == "denoise")
    parts = model.components(case.settings)
    needs = next(each.needs for each in parts if each.name == step.component)
    precision, _ = choose(device, "bfloat16", needs)
    run = dry_run(step, {step.component: precision}, device)
    assert isinstance(run, DryRun)
    work = run.found.work
    assert device.rates is not None
    return Part(sum(group.sent.values()), work.operations, call_seconds(work, device.rates))


def formula(case: Case, rank: int, size: int) -> int:
    """The bytes that the family's own formula forecasts for that rank, as plans show them."""
    video_group = VideoGroup((1.0,) * size, 1, case.way)
    part = case.model(case.blocks).rank_part(case.settings, video_group, rank, BYTES)
    return int(part.sent_bytes)


def unit(case: Case, size: int) -> float:
    """Bytes of a unit of one block."""
    assert case.width is not None
    assert case.tokens is not None
    tokens = case.tokens(case.model(1), case.settings)
    return float(tokens * case.width * BYTES * (size - 1) / size**2)


def others(case: Case, size: int) -> dict[str, float]:
    """Bytes a step and rank of what others do with the same model."""
    if case.width is None or case.blocks is None:
        return {}
    return {name: n * case.blocks * unit(case, size) for name, n in case.others.items()}


@dataclass(frozen=True)
class Row:
    """What one number of devices comes to: all ranks' parts, and bytes by formula and of others."""

    parts: tuple[Part, ...]
    formula: int
    others: dict[str, float]

    @property
    def sent(self) -> float:
        """Bytes of the rank that sends most."""
        return max(part.sent for part in self.parts)

    @property
    def imbalance(self) -> float:
        """The most operations of a rank over the mean."""
        most = max(part.operations for part in self.parts)
        return most * len(self.parts) / sum(part.operations for part in self.parts)

    def seconds(self, bandwidth: float, sent: float | None = None) -> float:
        """The slowest rank's step; with `sent` as if each sent that."""
        return max(
            part.seconds + (part.sent if sent is None else sent) / bandwidth for part in self.parts
        )


@cache
def row(name: str, size: int, device: DeviceFacts) -> Row:
    """So many devices on that case."""
    case = cases()[name]
    parts = tuple(part_of(case, rank, size, device) for rank in range(size))
    return Row(parts, max(formula(case, rank, size) for rank in range(size)), others(case, size))


def table(name: str, device: DeviceFacts) -> list[str]:
    """The rows of one case as a table."""
    rows = {size: row(name, size, device) for size in NUMBERS}
    rivals = list(rows[2].others)
    heads = ["devices", "sends, MB", "by formula", *rivals, "imbalance"]
    heads += [f"{way}: faster" for way in WAYS]
    lines = [f"## {name}", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for size, found in rows.items():
        cells = [str(size), _mb(found.sent), _mb(found.formula)]
        cells += [_mb(found.others[rival]) for rival in rivals]
        cells += [f"{found.imbalance:.3f}"]
        cells += [f"{rows[1].seconds(way) / found.seconds(way):.2f}" for way in WAYS.values()]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _mb(number: float) -> str:
    return f"{number / 1e6:.1f}" if number < 1e8 else f"{number / 1e6:.0f}"


def page(device: DeviceFacts, names: Sequence[str]) -> str:
    """The result page."""
    assert device.rates is not None
    head = (
        "Bytes leave a rank at each step, those "
        "of the rank that sends most; `by formula` is what plans forecast; the columns after it "
        "are what others send for the same model. Imbalance is the largest share of operations "
        "over the mean. The last columns are a model, not a measurement: how many times faster a "
        f"step is than on one device, for {device.name} ({device.rates.source}), its bytes over "
        + ", ".join(f"{way} ({rate / 1e9:g} GB/s)" for way, rate in WAYS.items())
        + "."
    )
    image = f"![A step's speed by devices]({page_path('parallel').stem}.png)"
    tables = "\n".join(line for name in names for line in table(name, device))
    return compose_page("Several devices", head, image, tables)


# ---------------------------------------------------------------- the picture

_WIDTH, _HEIGHT, _MARGIN = 460, 330, 46
_COLOURS = {"NVLink 3": "#1b7837", "PCIe 4": "#2166ac", "Ethernet 10G": "#b2182b"}


def picture(device: DeviceFacts, names: Sequence[str]) -> Image.Image:
    """A panel for each case: how many times faster a step is, by devices and by the way between."""
    image = Image.new("RGB", (2 * _WIDTH, (len(names) + 1) // 2 * _HEIGHT + 34), "white")
    for number, name in enumerate(names):
        place = (number % 2 * _WIDTH, number // 2 * _HEIGHT)
        image.paste(_panel(name, device), place)
    legend = "full lines: ours; dashed: the same work with the bytes of upstream, else of Ulysses"
    ImageDraw.Draw(image).text((_MARGIN, image.height - 26), legend, "#444444", _font(13))
    return image


def _panel(name: str, device: DeviceFacts) -> Image.Image:
    panel = Image.new("RGB", (_WIDTH, _HEIGHT), "white")
    draw = ImageDraw.Draw(panel)
    draw.text((_MARGIN, 10), name, "black", _font(14))
    for size in NUMBERS:
        draw.line([_at(1, size), _at(8, size)], "#e5e5e5")
        draw.text((_MARGIN - 18, _at(1, size)[1] - 8), str(size), "#444444", _font(12))
        draw.text((_at(size, 0)[0] - 4, _HEIGHT - 36), str(size), "#444444", _font(12))
    draw.text((_WIDTH - 76, _HEIGHT - 20), "devices", "#444444", _font(12))
    draw.line([_at(1, 1), _at(8, 8)], "#bbbbbb")
    one = row(name, 1, device)
    for number, (way, rate) in enumerate(WAYS.items()):
        found = {size: row(name, size, device) for size in NUMBERS}
        ours = [_at(n, one.seconds(rate) / each.seconds(rate)) for n, each in found.items()]
        rival = next(iter(found[2].others), None)
        if rival is not None:
            theirs = [
                _at(n, one.seconds(rate) / each.seconds(rate, each.others[rival]))
                for n, each in found.items()
            ]
            _dashed(draw, theirs, _COLOURS[way])
        draw.line(ours, _COLOURS[way], 3)
        # Above the line of as many times as devices, where no curve comes.
        draw.text((_MARGIN + 10, 34 + 18 * number), way, _COLOURS[way], _font(12))
    return panel


def _at(devices: float, faster: float) -> tuple[float, float]:
    across = (devices - 1) / 7 * (_WIDTH - _MARGIN - 30)
    return _MARGIN + across, _HEIGHT - 42 - faster / 8 * (_HEIGHT - 84)


def _dashed(draw: ImageDraw.ImageDraw, points: Sequence[tuple[float, float]], colour: str) -> None:
    for (x, y), (to_x, to_y) in pairwise(points):
        for start in range(0, 10, 2):
            ends = [(x + (to_x - x) * t / 10, y + (to_y - y) * t / 10) for t in (start, start + 1)]
            draw.line(ends, colour, 2)


def _font(size: int) -> Any:
    return ImageFont.load_default(size)


def main() -> None:
    """Count, draw and write; or measure."""
    parser = make_parser(__doc__)
    parser.add_argument("--as", dest="profile", default="cuda-sm80", help="a profile's name")
    parser.add_argument("--two", action="store_true", help="two workers against one, on this CPU")
    parser.add_argument("--turns", type=int, default=3, help="of --two")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    args = parser.parse_args()
    if args.two:
        publish("parallel-two", two_workers.page(args.turns), is_page=args.is_page)
        return
    device = find_profile(args.profile).machine().devices[0]
    names = [name for name in cases() if args.only in name]
    publish("parallel", page(device, names), is_page=args.is_page)
    if args.is_page:
        picture(device, names).save(page_path("parallel").with_suffix(".png"))


if __name__ == "__main__":
    main()
