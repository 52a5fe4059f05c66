"""Completion scripts are made of every command; bash completes, others can read theirs."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from everyframe.cli.completion import SHELLS
from everyframe.cli.main import COMMANDS, main


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The script of each shell."""
    import contextlib
    import io

    folder, found = tmp_path_factory.mktemp("completion"), {}
    for shell in SHELLS:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            assert main(["completion", shell]) == 0
        found[shell] = folder / shell
        found[shell].write_text(out.getvalue(), encoding="utf-8")
    return found


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_is_in_it_and_the_shell_can_read_it(
    shell: str, scripts: dict[str, Path]
) -> None:
    text = scripts[shell].read_text(encoding="utf-8")
    assert all(word in text for name in COMMANDS for word in name.split())
    assert "num-inference-steps" in text
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed, so that it can't read the script")
    done = subprocess.run([shell, "-n", str(scripts[shell])], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


#: Words typed so far -> what bash offers.
TYPED = {
    ("pl",): {"plan"},
    ("cache", ""): {"list", "remove"},
    ("plan", "--num-f"): {"--num-frames"},
    ("cache", "remove", "--y"): {"--yes"},
    ("generate", "--image", "pict"): {"picture.png"},
    ("generate", "--model", "pict"): {"picture.png"},
    ("plan", "--seed", ""): set(),
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize("words", TYPED, ids=" ".join)
def test_bash_completes(words: tuple[str, ...], scripts: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "picture.png").touch()
    typed = " ".join(f"'{word}'" for word in ("everyframe", *words))
    program = f"""
        source {scripts["bash"]}
        COMP_WORDS=({typed}); COMP_CWORD={len(words)}
        _everyframe everyframe '{words[-1]}' '{words[-2] if len(words) > 1 else "everyframe"}'
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "--norc", "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stderr == ""
    assert {line.strip() for line in done.stdout.splitlines()} - {""} == TYPED[words]


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
@pytest.mark.parametrize("words", [each for each in TYPED if each[-1]], ids=" ".join)
def test_fish_completes(words: tuple[str, ...], scripts: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "picture.png").touch()
    program = f"source {scripts['fish']}; complete -C'everyframe {' '.join(words)}'"
    done = subprocess.run(
        ["fish", "--no-config", "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stderr == ""
    assert {line.split("\t")[0] for line in done.stdout.splitlines()} == TYPED[words]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes_by_the_file_name_that_the_help_says(
    scripts: dict[str, Path], tmp_path: Path
) -> None:
    """Typed at a terminal: zsh completes nowhere else, and loads the script by its name."""
    name = SHELLS["zsh"].split(" as ")[1]
    shutil.copy(scripts["zsh"], tmp_path / name)
    (tmp_path / ".zshrc").write_text(
        f"fpath=({tmp_path} $fpath); autoload -Uz compinit; compinit -u -D; PS1='ready> '\n"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(ZDOTDIR=str(tmp_path), TERM="dumb")
        os.execvp("zsh", ["zsh", "-i"])
    try:
        _read_to(terminal, "ready> ")
        os.write(terminal, b"everyframe pla\t")
        _read_to(terminal, "everyframe plan ")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)


def _read_to(terminal: int, text: str) -> None:
    """Read what a terminal shows until it has the text; fail after half a minute without it."""
    shown, until = "", time.monotonic() + 30
    while text not in shown:
        assert time.monotonic() < until, shown
        if select.select([terminal], [], [], 0.1)[0]:
            shown += os.read(terminal, 4096).decode(errors="replace")


def test_another_shell_is_wrong_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bsh"]) == 2
    assert "did you mean 'bash'" in capsys.readouterr().err
