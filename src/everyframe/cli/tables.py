"""Format plans, records and lists of models for people, in 80 columns."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from everyframe.cli.table_layout import pairs, table
from everyframe.core.bytes import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from everyframe.core.parallel_plan import ParallelPlan
    from everyframe.core.plan import ComponentPlan, Plan
    from everyframe.planning.find_model import ModelRow

#: Characters that control a terminal: control characters except tab and newline (escape sequences
#: begin with one), bidirectional controls, other line separators, invisible tags.
_STEERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff\U000e0000-\U000e007f]"
)

#: Longest word of a message that is shown in full.
_LONGEST = 1000
#: Least columns of a console: cyclopts breaks lines into fewer without end.
_NARROWEST = 20


def printable(text: str) -> str:
    """Escape characters that control a terminal, as in ``\\x1b``.

    Prompts, names and messages come from untrusted files.
    """
    return _STEERS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """The same on one line, so that no part of it looks like a message of ours."""
    return printable(text.replace("\n", "\\n"))


def error_line(text: str) -> str:
    """A message as one line; words longer than a path may be are truncated."""
    words = (word if len(word) <= _LONGEST else f"{word[:80]}..." for word in text.split())
    return one_line(" ".join(words))


def json_line(value: Mapping[str, Any]) -> str:
    """One line of ASCII JSON."""
    line = json.dumps(value, allow_nan=False, separators=(", ", ": "))
    return line.replace("\x7f", "\\u007f")


def clock(seconds: float) -> str:
    """``"0:07"``, ``"12:30"``, ``"1:02:03"``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def duration(seconds: float) -> str:
    """``"0.3 s"``, ``"42 s"``, ``"12:30"``."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return clock(seconds)


def shortened(text: str, length: int) -> str:
    """The text on one line, truncated to `length`."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1] + "…"


def counted(number: int, thing: str) -> str:
    """``"1 frame"``, ``"17 frames"``."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def console(file: IO[str]) -> Console:
    """A console that prints text literally: no markup in prompts, control characters escaped."""
    from rich.console import Console
    from rich.text import Text

    class Plain(Console):
        def render_str(self, text: str, **how: Any) -> Text:
            return super().render_str(printable(text), **how)

    made = Plain(file=file, highlight=False, markup=False, emoji=False)
    if made.width < _NARROWEST:
        made.width = _NARROWEST
    return made


def headline(plan: Plan) -> tuple[str, str]:
    """Two lines about what is about to run."""
    parts = dict(_settings_rows(plan.to_json()["settings"]))
    parts.pop("prompt", None)
    dtypes = "/".join(dict.fromkeys(str(part.precision) for part in plan.components))
    memory = f"{format_bytes(plan.peak_bytes)} of {format_bytes(plan.device.free_memory)} free"
    return (
        f"{plan.model}: {parts['video']}; {parts['sampling']}",
        f"{plan.device.torch_name}, {dtypes}, {counted(plan.num_threads, 'thread')}; "
        f"needs about {memory}",
    )


def print_plan(plan: Plan, file: IO[str]) -> None:
    """Print the whole plan: settings, components, downloads, notes and the verdict."""
    # Late import: it takes most of the command's start, and `--help` prints no plan.
    from everyframe.planning.dry_runs import describe_findings

    out = console(file)
    out.print(f"{plan.model}: {plan.title}", style="bold")
    out.print()
    rows = _settings_rows(plan.to_json()["settings"])
    if plan.profile is not None:
        rows += [("planned as", f"{plan.profile}, not this machine")]
    rows += [("lora", str(lora)) for lora in plan.loras]
    rows += [("quality", str(plan.quality))] if plan.quality is not None else []
    out.print(pairs([*rows, ("device", _device(plan.to_json()))]))
    out.print()
    out.print(_components(plan.components))
    if plan.stages:
        out.print()
        out.print(_stages(plan))
    if plan.parallel is not None:
        out.print()
        out.print(f"{counted(len(plan.parallel.ranks), 'device')}: {plan.parallel}")
        out.print(_ranks(plan.parallel))
    for line in (*_islands(plan.components), *_paths(plan.components)):
        out.print(line, style="dim")
    out.print()
    for line in plan.downloads:
        out.print(f"to fetch: {line}", style="cyan")
    for note in plan.notes:
        out.print(f"note: {note}", style="yellow")
    for clash in plan.dtype_errors:
        out.print(f"clash: {clash}", style="red")
    if plan.stages and not plan.dtype_errors:
        out.print(f"Dry run: {describe_findings(plan)}.", style="green")
    if plan.infeasible is None:
        largest = max(plan.components, key=lambda part: part.peak_bytes)
        needs = f"the {largest.stage} stage needs the most memory, about"
        have = f"of {format_bytes(plan.device.free_memory)} free"
        out.print(f"Fits: {needs} {format_bytes(plan.peak_bytes)} {have}.", style="green")
    else:
        out.print("Can't be done here.", style="red")


def _ranks(division: ParallelPlan) -> Table:
    """Each rank's share of one video's denoising, and what it sends."""
    keeps = any(rank.weight_bytes for rank in division.ranks)
    shown = table(
        ("rank", "left"),
        ("device", "left"),
        ("videos", "right"),
        ("tokens", "right"),
        ("attention", "right"),
        ("sends a step", "right"),
        *((("of weights", "right"),) if keeps else ()),
    )
    for number, rank in enumerate(division.ranks):
        shown.add_row(
            str(number),
            rank.device,
            str(division.videos_per_group[rank.group]),
            f"{rank.token_share:.1%}",
            f"{rank.attention_share:.1%}",
            _sent(rank.sent_bytes),
            *((_sent(rank.weight_bytes),) if keeps else ()),
        )
    return shown


def _sent(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else "nothing"


def print_record(record: Mapping[str, Any], file: IO[str]) -> None:
    """Print what made a video. A record is untrusted; missing values are left out."""
    out = console(file)
    model, plan = _mapping(record, "model"), _mapping(record, "plan")
    rows = _settings_rows(_mapping(record, "settings"))
    digest = str(model.get("sha256", ""))
    rows += [("model", f"{model.get('name', '?')} (sha256 {digest[:16]})" if digest else "")]
    rows += [("device", _device(plan)), ("precision", _precisions(plan))]
    versions = _mapping(record, "versions")
    rows += [("versions", ", ".join(f"{name} {text}" for name, text in versions.items()))]
    made_by = f"everyframe {record['everyframe']}" if "everyframe" in record else ""
    asked = _mapping(record, "request")
    words = ", ".join(f"{name} {value}" for name, value in asked.items() if name != "prompt")
    rows += [("asked for", words), ("made by", made_by)]
    out.print(pairs([(name, value) for name, value in rows if value]))


def print_models(rows: Sequence[ModelRow], file: IO[str]) -> None:
    """Print one row per model and its description below."""
    from rich.padding import Padding

    out = console(file)
    heads = ("model", "on disk", "memory", "here")
    lines = [(row.name, _on_disk(row), format_bytes(row.needs_bytes), _here(row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]

    def laid_out(cells: Sequence[str]) -> str:
        return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))

    out.print(laid_out(heads).rstrip(), style="bold")
    for row, line in zip(rows, lines, strict=True):
        out.print(laid_out(line).rstrip())
        licence = f"licence of the weights: {row.licence}"
        about = "; ".join(text for text in (row.title, row.note, licence) if text)
        out.print(Padding(about, (0, 0, 0, 2)), style="dim")


def _on_disk(row: ModelRow) -> str:
    if row.on_disk:
        return "yes"
    return "no" if not row.download_bytes else f"{format_bytes(row.download_bytes)} to fetch"


def _here(row: ModelRow) -> str:
    return "fits" if row.fits else "too large"


def _settings_rows(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    get = settings.get
    video = [f"{get('width', '?')}x{get('height', '?')}"]
    frames, fps, chain = get("num_frames"), get("fps"), get("chain", 1)
    if isinstance(frames, int) and isinstance(fps, (int, float)) and fps > 0:
        video += [f"{counted(frames, 'frame')} at {fps:g} fps ({frames / fps:.1f} s)"]
    if chain != 1:
        video += [f"{chain} clips, one after the other"]
    sampling = [counted(get("num_inference_steps", "?"), "step")]
    guidance = get("guidance_scale")
    sampling += [f"guidance {guidance:g}"] if guidance is not None else []
    sampling += [_seeds(settings)]
    options = [
        f"{name} {value}" for name, value in get("options", ()) if value not in (None, False)
    ]
    given = [str(name) for name in get("given_frames", ())]
    if given and settings.get("edit_strength"):
        # 0, which keeps them, goes without saying, and means nothing to most families.
        given += [f"edit strength {settings['edit_strength']:g}"]
    rows = [
        ("prompt", str(get("prompt", ""))),
        ("not", str(get("negative_prompt") or "")),
        ("video", ", ".join(video)),
        ("sampling", ", ".join(sampling)),
        ("options", ", ".join(options)),
        ("given", ", ".join(given)),
    ]
    return [(name, value) for name, value in rows if value]


def _seeds(settings: Mapping[str, Any]) -> str:
    seed, count = settings.get("seed", "?"), settings.get("num_videos", 1)
    if isinstance(seed, int) and isinstance(count, int) and count > 1:
        return f"seeds {seed} to {seed + count - 1}"
    if seed is None:  # the noise came of a generator that somebody gave
        return "a seed that is not known"
    return f"seed {seed}"


def _device(plan: Mapping[str, Any]) -> str:
    device = _mapping(plan, "device")
    if not device:
        return ""
    words = [str(device.get("name", "?"))]
    if "free_memory" in device and "memory" in device:
        free, whole = format_bytes(device["free_memory"]), format_bytes(device["memory"])
        words += [f"{free} of {whole} free"]
    if isinstance(plan.get("num_threads"), int):
        words += [counted(plan["num_threads"], "thread")]
    return ", ".join(words)


def _precisions(plan: Mapping[str, Any]) -> str:
    parts = [part for part in plan.get("components", ()) if isinstance(part, Mapping)]
    named = [(part.get("name", "?"), _mapping(part, "precision")) for part in parts]
    return ", ".join(
        f"{name} {precision['compute']}"
        + (f" with {precision['weight_dtype']} weights" if precision.get("weight_dtype") else "")
        for name, precision in named
        if precision.get("compute")
    )


def _islands(parts: Sequence[ComponentPlan]) -> Iterator[str]:
    """What stays in float32, one line per group of components that agree."""
    keepers: dict[tuple[str, ...], list[str]] = {}
    for part in parts:
        if part.precision.islands and part.precision.compute != "float32":
            keepers.setdefault(part.precision.islands, []).append(part.name)
    for islands, names in keepers.items():
        yield f"in float32 in {', '.join(names)}: {', '.join(islands)}"


def _paths(parts: Sequence[ComponentPlan]) -> Iterator[str]:
    """Fast paths, one line per group of components that agree."""
    alike: dict[str, list[str]] = {}
    for part in parts:
        weighed = {choice.path: choice for choice in part.choices}
        if part.fast_paths:
            names = [
                f"{name} (not tried here yet)" if weighed[name].verdict == "expected" else name
                for name in part.fast_paths
            ]
            alike.setdefault(", ".join(names), []).append(part.name)
    for listed, components in alike.items():
        yield f"fast paths of {', '.join(components)}: {listed}"


def _components(parts: Sequence[ComponentPlan]) -> Table:
    shown = table(
        ("stage", "left"),
        ("component", "left"),
        ("device", "left"),
        ("precision", "left"),
        ("weights", "right"),
        ("work", "right"),
        ("peak", "right"),
    )
    for part in parts:
        shown.add_row(
            part.stage,
            part.title,
            part.device,
            part.precision.compute,
            _weights(part),
            format_bytes(part.working_bytes),
            format_bytes(part.peak_bytes),
        )
    return shown


def _weights(part: ComponentPlan) -> str:
    size = format_bytes(part.weight_bytes)
    return f"{size} {part.precision.weight_dtype}" if part.precision.weight_dtype else size


def _stages(plan: Plan) -> Table:
    shown = table(
        ("stage", "left"),
        ("computes", "right"),
        ("about", "right"),
    )
    for stage in plan.stages:
        shown.add_row(stage.name, _operations(stage.operations), _duration(stage.seconds))
    if plan.seconds is not None:
        total = _operations(sum(stage.operations for stage in plan.stages))
        shown.add_row(f"one video ({plan.rates})", total, _duration(plan.seconds))
    return shown


def _operations(count: float) -> str:
    for unit, size in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e6:.3g} MFLOP"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 90:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def _mapping(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = value.get(name)
    return found if isinstance(found, Mapping) else {}
