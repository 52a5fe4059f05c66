"""Commands and settings that the page makes of a video, without a browser."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from everyframe.cli.main import _parse
from helpers.page_modules import needs_node, run_page_script

pytestmark = needs_node

VIDEO = {"prompt": "a red circle", "model": "shapes", "seed": 3, "request": {}}


def run(tmp_path: Path, module: str, call: str) -> Any:
    """The value of a call of a module's functions, as JSON."""
    script = f'const module = await import("./static/{module}")'
    return run_page_script(tmp_path, script, call)


def snippet(tmp_path: Path, kind: str, **video: Any) -> str:
    call = f"module.snippet({json.dumps(kind)}, {json.dumps({**VIDEO, **video})})"
    return str(run(tmp_path, "snippets.js", call))


@pytest.mark.parametrize(
    "prompt",
    ["a red circle", "-o /tmp/elsewhere.mp4", "--output=elsewhere.mp4", "it's $HOME `id`"],
)
def test_a_command_has_the_prompt_as_a_prompt(tmp_path: Path, prompt: str) -> None:
    """Also one that somebody wrote like a flag: nothing of it is read as an option."""
    request = {"prompt": prompt, "negative_prompt": "-x", "preview": False, "loras": ["-a"]}
    words = shlex.split(snippet(tmp_path, "Command", prompt=prompt, request=request))
    _, values = _parse(words[1:])
    assert values.pop("loras") == ["-a"]
    assert values == {
        "prompt": prompt, "model": "shapes", "negative_prompt": "-x", "preview": False,
        "seed": "3",
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["Command", "Python", "curl"])
def test_uploads_are_left_out(tmp_path: Path, kind: str) -> None:
    """The server says of them that they were there; a mask that is a word stays."""
    request = {"source": True, "mask": "0,0,8,8", "control": True, "image": True, "fps": 8}
    text = snippet(tmp_path, kind, request=request)
    assert "0,0,8,8" in text
    assert not [name for name in ("source", "control", "image") if name in text]


def test_files_of_a_record_are_asked_for_again(tmp_path: Path) -> None:
    asked = {"source": {"file": "street.png"}, "mask": "0,0,8,8", "image": True, "fps": 8}
    call = f"module.settingsOf({json.dumps({'request': asked, 'settings': {'seed': 5}})})"
    found = run(tmp_path, "record.js", call)
    assert found["values"] == {"mask": "0,0,8,8", "fps": 8, "seed": 5}
    assert found["notes"] == [
        "its image has no name: add it again", "it began with street.png: add it again",
    ]  # fmt: skip
