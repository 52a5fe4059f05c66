"""What files, prompts and names hold does not steer the terminal that it is shown on."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everyframe
from everyframe.cli import main as main_module
from everyframe.cli.main import main
from everyframe.cli.progress import Lines
from everyframe.cli.tables import console, json_line, one_line, print_plan, printable
from everyframe.core.events import Note
from everyframe.media.output_path import RECORD_SCHEMA
from everyframe.media.write import write

#: A title, the clipboard, a cleared screen, a link, what C1 does in 8 bits, and turned letters.
EVIL = (
    "\x1b]0;title\x07\x1b]52;c;Y3VybA==\x07\x1b[2J\x1b[31m\x1b]8;;http://x\x1b\\a\x9b2J\x08\r"
    "\u202egpj.exe\u2066\x7f\ufeff"
)


def is_harmless(text: str) -> bool:
    return printable(text) == text


def test_what_steers_is_written_out() -> None:
    assert printable("\x1b[2J") == r"\x1b[2J"
    assert printable("a\u202eb\x9b") == r"a\u202eb\x9b"
    assert is_harmless(printable(EVIL))
    assert one_line("a\nerror: b") == r"a\nerror: b"
    # Letters of all people, and what holds their emoji together.
    for plain in ("ein roter Kreis", "赤い円", "دائرة حمراء", "👩‍🚀", "a\tb\nc"):
        assert printable(plain) == plain
    assert json_line({"a": EVIL}).isascii()
    assert json.loads(json_line({"a": EVIL})) == {"a": EVIL}
    assert is_harmless(json_line({"a": EVIL}))


def evil_record() -> dict[str, Any]:
    return {
        "schema": RECORD_SCHEMA, "everyframe": EVIL,
        "model": {"name": EVIL, "sha256": EVIL},
        "request": {"prompt": EVIL, EVIL: EVIL, "option": {EVIL: [EVIL]}},
        "settings": {"prompt": EVIL, "negative_prompt": EVIL, "options": [[EVIL, EVIL]],
                     "given_frames": [EVIL]},
        "versions": {EVIL: EVIL},
        "plan": {"device": {"name": EVIL}, "components": [
            {"name": EVIL, "precision": {"compute": EVIL, "weights": EVIL}, "paths": [EVIL]}]},
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["json", "mp4", "gif", "webp", "png"])
def test_inspect_shows_a_strangers_record(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "json":
        file = tmp_path / "r.json"
        file.write_text(json.dumps(evil_record()), encoding="utf-8")
    else:
        frames = np.zeros((1 if kind == "png" else 2, 16, 16, 3), np.uint8)
        file = Path(write(tmp_path / f"a.{kind}", [frames], 8, evil_record()))
    for more in ([], ["--json"]):
        assert main(["inspect", str(file), *more]) == 0
        shown = capsys.readouterr()
        assert "title" in shown.out
        assert is_harmless(shown.out + shown.err)


@pytest.mark.parametrize(
    "words",
    [["inspect", f"no{EVIL}.mp4"], ["plan", "a", "--model", f"no{EVIL}"], ["plan", EVIL],
     ["generate", "--from", f"no{EVIL}.mp4"], ["generate", "a", f"--no{EVIL}"], [EVIL],
     ["generate", "a red circle", "--image", f"no{EVIL}.png"], ["doctor", "--as", f"no{EVIL}"],
     ["resume", f"no{EVIL}"], ["trace", "diff", f"no{EVIL}", "b"]],
)  # fmt: skip
def test_errors_say_what_was_given(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1
    assert is_harmless(shown.out + shown.err)


def test_a_model_that_is_called_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / f"m{EVIL.replace('/', '')}"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": EVIL}), encoding="utf-8")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert main(["plan", "a", "--model", str(folder)]) == 2
    assert is_harmless(capsys.readouterr().err)


def test_plans_notes_and_logs(capsys: pytest.CaptureFixture[str]) -> None:
    from dataclasses import replace

    plan = everyframe.plan("a red circle", size="16x16", seed=1)
    settings = replace(plan.settings, prompt=EVIL, options=((EVIL, EVIL),))
    parts = tuple(replace(part, title=EVIL) for part in plan.components)
    plan = replace(plan, settings=settings, model=EVIL, notes=(EVIL,), components=parts)
    out = io.StringIO()
    print_plan(plan, out)
    assert "title" in out.getvalue()
    assert is_harmless(out.getvalue())
    lines = Lines()
    lines.show(Note(f"{EVIL}\nerror: planted"))
    assert capsys.readouterr().err.count("\n") == 1
    terminal = io.StringIO()
    console(terminal).print(EVIL, style="red")
    assert is_harmless(terminal.getvalue())
    main_module.set_up("warning")
    logging.getLogger("everyframe").warning("%s", EVIL)
    shown = capsys.readouterr().err
    assert "title" in shown
    assert is_harmless(shown)
