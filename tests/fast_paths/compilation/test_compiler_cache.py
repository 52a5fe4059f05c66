"""A compiler that dies in the middle leaves nothing that is taken for whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch._inductor.config
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from everyframe.fast_paths.compilation import compiler_cache
from everyframe.fast_paths.compilation.toolchain import why_not

# torch's switches are made at import, so type checkers see none of them.
config: Any = torch._inductor.config

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the compiler of Windows is another one")

#: Writes its arguments, one a line, into what comes after -o.
HONEST = """#!/bin/sh
all=$(printf '%s\\n' "$@")
while [ $# -gt 0 ]; do [ "$1" = -o ] && printf '%s' "$all" > "$2"; shift; done
"""
#: Writes half, and then all that has to do with it is killed.
KILLED = """#!/bin/sh
while [ $# -gt 0 ]; do [ "$1" = -o ] && printf half > "$2"; shift; done
kill -9 0
"""
FAILING = """#!/bin/sh
while [ $# -gt 0 ]; do [ "$1" = -o ] && printf half > "$2"; shift; done
echo 'error: planted' >&2
exit 3
"""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the compiler of that name is, which a test writes; the cache is the test's own."""
    monkeypatch.setenv("EVERYFRAME_CACHE", str(tmp_path / "cache"))
    # Set first, so that it is put back whatever becomes of it.
    monkeypatch.setenv(compiler_cache.CACHE_VARIABLE, "gone")
    monkeypatch.delenv(compiler_cache.CACHE_VARIABLE)
    path = tmp_path / "a place" / "g++"
    path.parent.mkdir()
    with config.patch({"cpp.cxx": (None, str(path))}):
        yield path


def behind(path: Path, text: str) -> str:
    """What torch calls in place of a compiler that does that."""
    path.write_text(text)
    path.chmod(0o755)
    compiler_cache.prepare()
    return str(config.cpp.cxx[1])


def test_what_is_whole_has_its_name_and_every_argument_comes_through(
    made: Path, tmp_path: Path
) -> None:
    script = behind(made, HONEST)
    target = tmp_path / "x.so"
    subprocess.run([script, "-D a='b c'", "$x", "-o", str(target), "-shared"], check=True)
    first, second, o, part, shared = target.read_text().splitlines()
    assert (first, second, o, shared) == ("-D a='b c'", "$x", "-o", "-shared")
    assert part.startswith(f"{target}.")
    assert part.endswith(".part")
    assert [path.name for path in tmp_path.glob("x.so*")] == ["x.so"]
    # torch tells compilers apart by what they are called.
    assert Path(script).name == "g++"
    subprocess.run([script, "--version", "-o", "/dev/null"], check=True)
    assert Path("/dev/null").is_char_device()


def test_what_is_killed_leaves_no_library(made: Path, tmp_path: Path) -> None:
    target = tmp_path / "x.so"
    # Without the script it does: the test can fail.
    made.write_text(KILLED)
    made.chmod(0o755)
    for command, is_left in ((str(made), True), (behind(made, KILLED), False)):
        ended = subprocess.run([command, "-o", str(target)], start_new_session=True, check=False)
        assert ended.returncode == -signal.SIGKILL
        assert target.exists() == is_left
        target.unlink(missing_ok=True)
    # The next one that comes makes it.
    subprocess.run([behind(made, HONEST), "-o", str(target)], check=True)
    assert target.exists()


def test_what_fails_says_so_and_leaves_nothing(made: Path, tmp_path: Path) -> None:
    target = tmp_path / "x.so"
    ended = subprocess.run(
        [behind(made, FAILING), "-o", str(target)], check=False, capture_output=True
    )
    assert (ended.returncode, ended.stderr) == (3, b"error: planted\n")
    assert not list(tmp_path.glob("x.so*"))


def test_the_cache_is_ours_unless_one_is_named(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Path(behind(made, HONEST))
    ours = tmp_path / "cache" / "inductor"
    assert os.environ[compiler_cache.CACHE_VARIABLE] == str(ours)
    assert ours in script.parents
    # What torch names by itself is nobody's wish.
    monkeypatch.setenv(compiler_cache.CACHE_VARIABLE, default_cache_dir())
    # Again: no script of the script.
    assert behind(made, HONEST) == str(script)
    assert str(made) in script.read_text()
    assert os.environ[compiler_cache.CACHE_VARIABLE] == str(ours)
    config.cpp.cxx = str(made)
    monkeypatch.setenv(compiler_cache.CACHE_VARIABLE, str(tmp_path / "named"))
    assert (tmp_path / "named") in Path(behind(made, HONEST)).parents
    assert os.environ[compiler_cache.CACHE_VARIABLE] == str(tmp_path / "named")


def test_where_nothing_can_be_written_it_is_as_without_and_reported(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EVERYFRAME_CACHE", str(tmp_path / "file"))
    assert behind(made, HONEST) == str(made)
    assert compiler_cache.CACHE_VARIABLE not in os.environ
    assert "half a library" in caplog.text


#: Compiles a small block by the real compiler, and says what it gives.
COMPILES = """
import torch
from torch import nn
from everyframe.fast_paths.compilation.module_compilation import compile_blocks

torch.manual_seed(0)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x) * 2 + x.sin()

net = nn.Sequential(Block()).eval().requires_grad_(False)
if {ours}:
    compile_blocks(net, ("0",))
else:
    net.get_submodule("0").compile(backend="inductor")
x = torch.ones(3, 8)
with torch.inference_mode():
    plain = net[0]._call_impl(x)
    torch.testing.assert_close(net(x), plain)
print("computed")
"""
#: The system's own, killed with all that waits for it while it first links what it was asked for:
#: torch.compile calls that main, and an exported block's library wrapper.
DIES_ONCE = """#!/bin/sh
for given do
  case $given in *.so|*.so.*.part) target=$given ;; esac
  [ "$given" = -shared ] && links=1
done
if [ -n "$links" ] && [ -n "$target" ] && [ ! -e {mark} ]; then
  case $target in *main.so*|*wrapper.so*) : > "$target"; : > {mark}; kill -9 0 ;; esac
fi
exec g++ "$@"
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(missing := why_not()), reason=str(missing))
@pytest.mark.parametrize("ours", [True, False])
def test_a_run_that_dies_while_it_links_harms_none_after_it(ours: bool, tmp_path: Path) -> None:
    """The real one, and that torch alone does not get over it."""
    path = tmp_path / "g++"
    path.write_text(DIES_ONCE.format(mark=tmp_path / "died"))
    path.chmod(0o755)
    environment = {
        **os.environ, "CXX": str(path), compiler_cache.CACHE_VARIABLE: str(tmp_path / "cache"),
        # In this process, so that the one who is killed is the one who waits.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }  # fmt: skip

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", COMPILES.format(ours=ours)], env=environment, check=False,
            start_new_session=True, capture_output=True, text=True,
        )  # fmt: skip

    assert run().returncode == -signal.SIGKILL
    assert (tmp_path / "died").exists()
    again = run()
    assert (again.returncode == 0, "computed" in again.stdout) == (ours, ours), again.stderr[-2000:]
