"""Speed against decibels: ``python benchmarks/quality.py [--videos 16] [--bars 200]``.

Measures each lossy sampling method on the embedded model `shapes` as ``everyframe calibrate`` does,
against its exact run, and writes a page and, where matplotlib is, a picture beside cache-dit's
published points. What is measured already on this machine is kept. ``--bars`` reads so many clips
at the 32 dB setting by the recipe's own reader. Not here: other models.
"""

from __future__ import annotations

import sys
from pathlib import Path

from measuring import hardware
from result_pages import compose_page, make_parser, page_path, publish

sys.path.insert(0, str(Path(__file__).parents[1]))

from everyframe.core.quality import METHODS
from everyframe.core.request import Request
from everyframe.engine.calibration import calibrate, calibration_of
from everyframe.fast_paths.calibrations import MARGIN_DB, Calibration
from everyframe.hardware.facts import machine_facts

#: Budgets of the goals, with the speed that each is to have.
GOALS = {32.0: 6.0, 37.0: 4.0}

#: cache-dit's own numbers, of FLUX.1-dev on DrawBench (its README): name, speed, PSNR in dB.
CACHE_DIT = (("F8B0 W4MC0 R0.08", 1.80, 33.83), ("F4B0 W4MC4 R0.12", 2.66, 31.53))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--videos", type=int, default=16, help="videos in the set")
    parser.add_argument("--bars", type=int, default=0, help="clips to read at 32 dB")
    parser.add_argument("--methods", default="", help="of these alone, such as abm2,unipc@12")
    parser.add_argument("--name", default="", help="of the page, such as held-guidance")
    parser.add_argument("--note", default="", help="a line for the page")
    args = parser.parse_args()
    found: Calibration | None = None
    for progress in calibrate(
        Request(),
        num_videos=args.videos,
        methods=args.methods.split(",") if args.methods else [*METHODS],
        lowest_db=27.0,
    ):
        print(progress.text, flush=True)
        found = progress.calibration
    found = found or calibration_of(Request(), args.videos)
    facts = machine_facts()
    part = args.name or args.methods.partition(",")[0].partition("@")[0]
    name = "-".join(filter(None, ("quality", part)))
    picture = page_path(name, facts.devices[0]).with_suffix(".png")
    lines = [*_table(found), *_bars(args.bars), "", hardware(facts, facts.devices[0])]
    if args.note:
        lines.append(args.note)
    if args.is_page and _draw(found, picture):
        lines += ["", f"![Speed against decibels]({picture.name})"]
    text = compose_page("Lossy sampling of `shapes`", "\n".join(lines))
    publish(name, text, is_page=args.is_page, device=facts.devices[0])


def _table(found: Calibration) -> list[str]:
    lines = [
        f"{len(found.videos)} prompts, a seed each; 64x64, 17 frames, 30 Euler steps with guidance "
        "1.2 are exact. PSNR",
        "is of the worst frame of each video; `worst` is the smallest of all videos. `denoises` is "
        "how many times",
        "as fast as the exact steps of the same plan (kernels and precision alike), the median of "
        "the videos.",
        "Methods that fell below 27 dB, and bolder ones of their kind, end early and are left out.",
        "",
    ]
    whole = [each for each in found.measured if found.is_whole(each)]
    for budget, goal in GOALS.items():
        best = found.fastest(budget, [*METHODS])
        if best is None:
            lines.append(f"**{budget:g} dB**: no method holds it with {MARGIN_DB:g} dB margin.  ")
            continue
        gain = found.gain(best)
        met = "met" if gain >= goal else "missed"
        lines.append(
            f"**{budget:g} dB**: `{best}`, {found.worst_db(best):.1f} dB at worst, denoises "
            f"{gain:.1f} times as fast; the goal of {goal:g} is {met}.  "
        )
    lines += ["", "| method | worst, dB | median, dB | denoises |", "| --- | ---: | ---: | ---: |"]
    for each in sorted(whole, key=found.gain):
        numbers = (f"{found.worst_db(each):.1f}", f"{found.median_db(each):.1f}")
        lines.append(f"| `{each}` | {' | '.join(numbers)} | {found.gain(each):.2f}x |")
    return lines


def _bars(count: int) -> list[str]:
    """The reader's bars of clips made at 32 dB."""
    if not count:
        return []
    from recipes.shapes import evaluate

    chosen = evaluate.trials(count, validation=False)
    rows = evaluate.measure_prompts(chosen, {"quality": "32dB"}, 1, print)
    return ["", f"{count} clips at `--quality 32dB`, as the recipe reads them:", "",
            evaluate.table(rows)]  # fmt: skip


def _draw(found: Calibration, path: Path) -> bool:
    """The picture, if matplotlib is installed."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no picture")
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for name in METHODS:
        own = [m for m in found.measured if m.partition("@")[0] == name and found.is_whole(m)]
        own.sort(key=found.gain)
        full = [each for each in own if "g" not in each.partition("@")[2]]
        gains = [found.gain(each) for each in full]
        (line,) = axes.plot(gains, [found.worst_db(each) for each in full], "o-", label=name)
        colour = line.get_color()
        axes.plot(gains, [found.median_db(each) for each in full], ":", color=colour)
        part = [each for each in own if each not in full]
        worst = [found.worst_db(each) for each in part]
        axes.plot([found.gain(each) for each in part], worst, "^", color=colour, fillstyle="none")
    for name, gain, decibels in CACHE_DIT:
        axes.plot(gain, decibels, "k*", markersize=10)
        axes.annotate(f"cache-dit {name}", (gain, decibels), fontsize=7, textcoords="offset points",
                      xytext=(6, 4))  # fmt: skip
    for budget in GOALS:
        axes.axhline(budget, color="grey", linewidth=0.5)
    axes.set_xlabel("times as fast as exact denoising")
    axes.set_ylabel("PSNR against the exact video, dB")
    axes.set_title(
        "shapes: worst video (line), median (dotted), half guided (triangle);\n"
        "stars: published averages of another model (FLUX.1-dev)",
        fontsize=9,
    )
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    return True


if __name__ == "__main__":
    main()
