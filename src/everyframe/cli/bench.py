"""``everyframe bench``: measure this machine in a few minutes; ``bench compare A B``: two results.

`everyframe.doctor.benchmark` measures; the file can be shared.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from everyframe.cli.options import command, flag, request_flag, run_flag, several
from everyframe.cli.streams import print_message
from everyframe.cli.table_layout import table
from everyframe.cli.tables import console, counted, json_line, one_line
from everyframe.core.bytes import format_bytes
from everyframe.core.errors import ExitCode, InputError

if TYPE_CHECKING:
    from everyframe.doctor.benchmark.comparison import BenchComparison
    from everyframe.doctor.benchmark.result import BenchResult

_HELP = """Measure this machine: peaks, fast paths, steps, first frame, memory against forecast.

Takes two to five minutes and fetches nothing. -o writes a JSON file without names, paths or tokens.
`everyframe bench compare A.json B.json` compares two such files.
"""


def bench(
    words: tuple[str, ...] = (),
    *,
    output: str | None = None,
    device: str | None = None,
    quick: bool = False,
    json: bool = False,
) -> int:
    """Measure, or compare two results; the exit code."""
    if words:
        if len(words) != 3 or words[0] != "compare":
            raise InputError(f"give nothing, or compare A.json B.json, got {' '.join(words)}")
        return _compare(words[1], words[2], as_json=json)
    # Late import: brings torch.
    from everyframe.doctor.benchmark.machine import benchmark
    from everyframe.doctor.benchmark.result import write_result

    if output is not None and not Path(output).absolute().parent.is_dir():
        raise InputError(f"there is no folder {Path(output).parent} for the result")
    result = benchmark(device or "auto", is_quick=quick, on_progress=_progress)
    if output is not None:
        write_result(result, Path(output))
    if json:
        print(json_line(result.to_json()))
    else:
        print_result(result)
    return int(ExitCode.TROUBLE if result.failed else ExitCode.DONE)


def _progress(line: str) -> None:
    print_message(f"measuring {line}")


def _compare(first: str, second: str, *, as_json: bool) -> int:
    from everyframe.doctor.benchmark.comparison import compare_results
    from everyframe.doctor.benchmark.result import read_result

    one, other = read_result(first), read_result(second)
    found = compare_results(one, other)
    if as_json:
        rows = [vars(row) for row in found.rows]
        print(json_line({"type": "bench_comparison", "rows": rows, "notes": list(found.notes)}))
        return int(ExitCode.DONE)
    print_comparison(found, one.machine.device, other.machine.device)
    return int(ExitCode.DONE)


def print_comparison(found: BenchComparison, first: str, second: str) -> None:
    """Print a row for each measurement; a ratio above 1 is in favour of the second machine."""
    out = console(sys.stdout)
    columns = (("measured", "left"), ("first", "right"), ("second", "right"), ("ratio", "right"))
    rows = table(*columns, wraps="measured")
    for row in found.rows:
        first_text, second_text = (shown(value, row.unit) for value in (row.first, row.second))
        rows.add_row(one_line(row.name), first_text, second_text, f"{row.ratio:.2f}")
    out.print(f"first: {one_line(first)}; second: {one_line(second)}")
    out.print(rows)
    for note in found.notes:
        out.print(f"note: {one_line(note)}")


def print_result(result: BenchResult) -> None:
    """Print a result as tables."""
    out, machine = console(sys.stdout), result.machine
    threads = f"{counted(machine.num_threads, 'thread')} of {machine.processor}"
    memory = format_bytes(machine.memory)
    out.print(f"{machine.device}, {memory}; {threads} ({machine.instructions})", style="bold")
    rows = table(("peak", "left"), ("rate", "right"), wraps="peak")
    for peak in result.peaks:
        unit = "FLOP/s" if peak.kind == "product" else "B/s"
        rows.add_row(
            f"{peak.kind} {peak.name}".replace("copy copy", "copy"), shown(peak.rate, unit)
        )
    out.print(rows)
    if result.fast_paths:
        rows = table(("fast path", "left"), ("verdict", "left"), ("gain", "right"),
                     ("reason", "left"), wraps="reason")  # fmt: skip
        for path in result.fast_paths:
            gain = "" if path.gain is None else f"{path.gain:.2f}x"
            rows.add_row(path.name, path.verdict, gain, one_line(path.reason))
        out.print(rows)
    for each in result.blocks:
        memory = "not reported" if each.peak_bytes is None else format_bytes(each.peak_bytes)
        time = "" if each.forecast_seconds is None else f" (forecast {each.forecast_seconds:.3g} s)"
        out.print(f"{each.work}, {each.precision}: {each.seconds:.3g} s a step, "
                  f"{each.plain_seconds:.3g} s by plain torch{time}; memory {memory} "
                  f"(forecast {format_bytes(each.forecast_bytes)})")  # fmt: skip
    if result.video is not None:
        video = result.video
        out.print(f"{video.work}, {video.precision}: {video.steps_per_second:.2f} steps a second; "
                  f"first frame after {video.first_frame_seconds:.2f} s; a video in "
                  f"{video.warm_seconds:.2f} s")  # fmt: skip
    for part, how in result.failed.items():
        out.print(f"failed: {one_line(part)}: {one_line(how)}", style="red")


def shown(value: float, unit: str) -> str:
    """A number with its unit, in thousands where it is large."""
    if unit == "s":
        return f"{value:.3g} s"
    if unit == "B":
        return format_bytes(int(value))
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.3g} {letter}{unit}"
    return f"{value:.3g} {unit}"


COMMAND = command(
    bench,
    (
        several("words", "compare A.json B.json, for two results."),
        flag("output", Path, "Write the result to this JSON file.", alias="-o"),
        request_flag("device"),
        flag("quick", bool, "The smallest blocks alone, and no fast paths."),
        run_flag("json"),
        run_flag("log_level"),
    ),
    _HELP,
)
