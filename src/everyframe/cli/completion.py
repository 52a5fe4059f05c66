"""``everyframe completion SHELL``: the completion script of a shell, made from the commands."""

from __future__ import annotations

from everyframe.cli.options import command, positional, run_flag
from everyframe.core.errors import ExitCode, InputError, did_you_mean

#: Shell -> where its script goes.
SHELLS = {
    "bash": "~/.local/share/bash-completion/completions/everyframe",
    "zsh": "a folder of $fpath, as _cyclopts_everyframe",  # the name of the function inside
    "fish": "~/.config/fish/completions/everyframe.fish",
}

_HELP = f"""Print the completion script of a shell: commands, options and files.

Where it goes: {"; ".join(f"{shell}: {place}" for shell, place in SHELLS.items())}.
"""


def completion(shell: str) -> int:
    """Print the script; the exit code."""
    # Late import: it imports every command.
    from everyframe.cli.main import build_app

    if shell not in SHELLS:
        raise InputError(
            f"the shell must be one of {', '.join(SHELLS)}, got {shell!r}"
            f"{did_you_mean(shell, SHELLS)}"
        )
    print(build_app().generate_completion(shell=shell), end="")  # type: ignore[arg-type]
    return int(ExitCode.DONE)


COMMAND = command(
    completion,
    (positional("shell", "bash, zsh or fish."), run_flag("log_level")),
    _HELP,
)
