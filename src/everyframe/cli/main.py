"""Entry point of the command line: dispatch a command and map its outcome to an exit code.

Results go to standard output, everything else to standard error. With ``--json`` an error is also
the last line of standard output. Modules that are slow to import are imported by commands only.

Read next: `generate.py`; `everyframe.core.errors` for the table of exit codes.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import TYPE_CHECKING, Any

from everyframe._version import __version__
from everyframe.cli.streams import is_of_output, mute_output, prepare_streams, print_message
from everyframe.cli.tables import console, error_line, json_line, printable
from everyframe.core.errors import EveryframeError, ExitCode, InputError, did_you_mean
from everyframe.core.import_logs import mute_torchao_imports
from everyframe.core.torch_import import explain_import
from everyframe.engine.workers import worker_start
from everyframe.engine.workers.torchrun import Terminated, after_others, under_torchrun

if TYPE_CHECKING:
    from cyclopts import App

LEVELS = ("debug", "info", "warning", "error")
VARIABLE = "EVERYFRAME_LOG"


class _ToStandardError(logging.Handler):
    """Log to the current standard error, which a progress bar may replace."""

    def emit(self, record: logging.LogRecord) -> None:
        print_message(printable(self.format(record)))


def set_up(asked: str | None) -> None:
    """Set the requested log level, else the environment's, else warnings. Raises `InputError`."""
    source = "--log-level" if asked is not None else VARIABLE
    level = (asked if asked is not None else os.environ.get(VARIABLE) or "warning").lower()
    if level not in LEVELS:
        raise InputError(
            f"{source} must be one of {', '.join(LEVELS)}, got {level!r}"
            f"{did_you_mean(level, LEVELS)}"
        )
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _ToStandardError)]:
        root.removeHandler(handler)
    handler = _ToStandardError()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    root.addHandler(handler)
    logging.getLogger("everyframe").setLevel(level.upper())
    mute_torchao_imports()
    logging.captureWarnings(True)


def is_debug() -> bool:
    """Whether to show tracebacks."""
    return logging.getLogger("everyframe").isEnabledFor(logging.DEBUG)


#: Command -> (location, line in the list of commands). Imported only when called.
COMMANDS = {
    "generate": ("everyframe.cli.generate:COMMAND", "Make a video from a prompt."),
    "resume": ("everyframe.cli.resume:COMMAND", "Resume an interrupted run."),
    "serve": ("everyframe.cli.serve:COMMAND", "Serve videos over HTTP from a durable queue."),
    "plan": ("everyframe.cli.plan:COMMAND", "Show what would run; nothing is loaded or fetched."),
    "compile": ("everyframe.cli.compile:COMMAND", "Compile a model's blocks ahead of its runs."),
    "fast-paths": ("everyframe.cli.fast_paths:COMMAND", "List fast paths and their certificates."),
    "calibrate": ("everyframe.cli.calibrate:COMMAND", "Measure what lossy methods cost in dB."),
    "doctor": ("everyframe.cli.doctor:COMMAND", "Check this machine, and name the fixes."),
    "bench": ("everyframe.cli.bench:COMMAND", "Measure this machine, and compare two."),
    "save": ("everyframe.cli.save:COMMAND", "Write a model with merged or quantized weights."),
    "inspect": ("everyframe.cli.inspect:COMMAND", "Show how a video was made."),
    "pull": ("everyframe.cli.pull:COMMAND", "Fetch and verify what a model needs."),
    "models": ("everyframe.cli.models:COMMAND", "List known models and what they need."),
    "completion": ("everyframe.cli.completion:COMMAND", "Print a shell's completion script."),
    "cache list": ("everyframe.cli.cache:LIST", "List what is on this disk, with sizes."),
    "cache remove": ("everyframe.cli.cache:REMOVE", "Remove one entry, or all of a kind."),
    "config show": ("everyframe.cli.config:SHOW", "Show what is configured, and where."),
    "trace record": ("everyframe.cli.trace:RECORD", "Run, and record what every module computes."),
    "trace diff": ("everyframe.cli.trace:DIFF", "Name the first module where two runs differ."),
}

#: First word of two-word commands -> line in the list of commands.
GROUPS = {
    "cache": "See what is on this disk, and remove it.",
    "config": "Show what environment and files set.",
    "trace": "Record what every module computes, and compare two runs.",
}

#: Earlier names of commands.
ALIASES = {"paths": "fast-paths"}

#: Flags with which ``generate`` and ``resume`` make nothing on this machine.
_WITHOUT_WORKER = {
    "--help", "-h", "--version", "--dry-run", "--as", "--executor", "--list", "--forget",
}  # fmt: skip

#: Placeholder for a lone ``-`` during parsing, which would treat it as an option. No word of a real
#: command line can contain a NUL.
_DASH = "\0-"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (None: this process's own); return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    words[:1] = [ALIASES.get(word, word) for word in words[:1]]
    ranks = under_torchrun()
    if ranks is not None and ranks.rank and not {"generate", "resume"} & {*words[:1]}:
        return int(ExitCode.DONE)  # rank 0 does it for all
    # Looked for before parsing, because parsing itself can fail.
    as_json = "--json" in words
    restore = _leave_orderly()
    prepare_streams()
    try:
        _start_worker(words)
        command, values = _parse(words)
        with _settings_of(command):
            set_up(values.pop("log_level", None))
            code = command(**values)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as stop:
        text = str(stop) or "interrupted; nothing unfinished was left behind"
        return _print_error(stop, text, int(ExitCode.INTERRUPTED), as_json)
    except BrokenPipeError:
        mute_output()  # whoever read it has gone
        return int(ExitCode.TROUBLE)
    except Terminated as stop:
        number = int(stop.args[0])
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # now for good, so that the caller sees by which signal
        return 128 + number
    except EveryframeError as error:
        _debug_traceback()
        return _print_error(error, str(error), int(error.exit_code), as_json)
    except MemoryError as error:
        _debug_traceback()
        text = "out of memory; try a smaller --size or --num-frames (`everyframe plan` forecasts)"
        return _print_error(error, text, int(ExitCode.CANNOT_RUN_HERE), as_json)
    except OSError as error:
        _debug_traceback()
        if is_of_output(error):
            mute_output()
            text = f"standard output can't be written to: {_of_the_system(error)}"
            return _print_error(error, text, int(ExitCode.TROUBLE), as_json=False)
        text = _why_no_folder() or _of_the_system(error)
        return _print_error(error, text, int(ExitCode.WRONG_INPUT), as_json)
    except Exception as error:  # noqa: BLE001 - the last line of defence, and it tells all
        return _bug(error, as_json)
    finally:
        worker_start.end_unused()
        restore()


def _start_worker(words: Sequence[str]) -> None:
    """Start the worker of a run, which imports for seconds, before this process has read `words`.

    Where the words turn out to be wrong, or to need none, it ends unused.
    """
    flags = {word.partition("=")[0] for word in words}
    makes = words[:1] in (["generate"], ["resume"]) and not flags & _WITHOUT_WORKER
    if not makes or not worker_start.is_possible():
        return
    _check_current_folder()
    from everyframe.cli.config import applied_settings

    with applied_settings():
        worker_start.start_ahead()


def _parse(words: list[str]) -> tuple[Callable[..., int], dict[str, Any]]:
    """The command and its arguments; help and version are printed here."""
    from cyclopts import CycloptsError

    from everyframe.cli import help_format

    set_up(None)
    app = build_app()
    try:
        command, bound, *_ = app.parse_args(
            [_DASH if word == "-" else word for word in words],
            print_error=False,
            exit_on_error=False,
        )
    except CycloptsError as error:
        help_format.raise_usage_error(error, words, tuple(COMMANDS))
    values = {key: "-" if value == _DASH else value for key, value in bound.arguments.items()}
    if _is_own(command):
        return command, values
    command(*bound.args, **bound.kwargs)  # help or version
    return _nothing, {}


def _nothing() -> int:
    return int(ExitCode.DONE)


def _settings_of(command: Callable[..., int]) -> AbstractContextManager[None]:
    """Context: the settings of the user's file, for a command that reads any."""
    if command is _nothing:
        return nullcontext()
    _check_current_folder()
    from everyframe.cli.config import applied_settings

    return applied_settings()


def _check_current_folder() -> None:
    """Raise `InputError` if it was removed: no path leads on from there, and no worker starts."""
    if why := _why_no_folder():
        raise InputError(why)


def _why_no_folder() -> str:
    """What to do if the current folder was removed; empty if it is there."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return "the folder that you are in was removed; change to one that is there (cd)"
    return ""


def build_app() -> App:
    """The command line: every command, imported once it is named."""

    from cyclopts import App

    from everyframe.cli.help_format import formatter

    app = App(
        name="everyframe",
        help="Video diffusion that comes out right on every device, then fast.",
        version=f"everyframe {__version__}",
        version_format="plaintext",
        help_format="plaintext",
        help_formatter=formatter(),
        help_epilogue='everyframe generate "a red circle moves to the right" -o clip.mp4',
        console=console(sys.stdout),
    )
    groups = {name: App(name=name, help=help_text) for name, help_text in GROUPS.items()}
    for name, (place, help_text) in COMMANDS.items():
        *group, own = name.split()
        (groups[group[0]] if group else app).command(place, name=own, help=help_text)
    for group_app in groups.values():
        app.command(group_app)
    return app


def _is_own(command: Callable[..., Any]) -> bool:
    """Whether it is a command of ours rather than help or version."""
    return getattr(command, "is_command", False)


def _leave_orderly() -> Callable[[], None]:
    """Make SIGTERM and SIGHUP unwind the stack as Ctrl-C does; return a function that undoes it.

    Signals that are deliberately ignored (``nohup``) stay ignored.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise Terminated(number)

    changed = []
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is None or signal.getsignal(number) is not signal.SIG_DFL:
            continue
        try:
            signal.signal(number, stop)
        except ValueError:  # called from Python in another thread: there signals can't be set
            return lambda: None
        changed.append(number)

    def restore() -> None:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)

    return restore


def _print_error(error: BaseException, text: str, code: int, as_json: bool) -> int:
    """Print an error as one line; return its exit code."""
    ranks = under_torchrun()
    if ranks is not None:
        if code == ExitCode.INTERRUPTED and ranks.rank:
            return code
        text = after_others(ranks, error, text)
    line = error_line(text)
    prefix = "" if code == ExitCode.INTERRUPTED else "error: "
    print_message(f"{prefix}{line}")
    try:
        if as_json:
            print(json_line({"type": "error", "code": code, "message": line}))
        sys.stdout.flush()  # also of what was printed before
    except OSError:
        mute_output()
    return code


def _of_the_system(error: OSError) -> str:
    what = error.strerror or str(error) or type(error).__name__
    return f"{what}: {error.filename!r}" if error.filename else what


def _debug_traceback() -> None:
    if is_debug():
        _print_traceback()


def _print_traceback() -> None:
    import traceback

    print(printable(traceback.format_exc()), end="", file=sys.stderr)


def _bug(error: Exception, as_json: bool) -> int:
    explained = explain_import(error)
    if isinstance(explained, EveryframeError):
        _debug_traceback()
        return _print_error(explained, str(explained), int(explained.exit_code), as_json)
    _print_traceback()
    text = f"this is a bug in everyframe: {type(error).__name__}: {error}"
    return _print_error(error, text, int(ExitCode.TROUBLE), as_json)
