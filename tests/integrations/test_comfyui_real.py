"""The node pack in a real ComfyUI: ``EVERYFRAME_COMFYUI=FOLDER`` names it.

Its Python is that of ``.venv`` or ``venv`` in the folder, else this one. It needs what ComfyUI's
requirements.txt lists, and a torchvision that fits its torch. Without the packages of the page the
workflows are not opened; that takes playwright and a Chromium as well.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from everyframe.engine.records.recorded_request import record_in
from everyframe.engine.workers.worker_start import IN_PROCESS
from helpers.browser_tabs import find_chromium
from helpers.comfyui_stand_in import PACK
from helpers.server_process import SOURCE, ServerProcess

FOLDER = os.environ.get("EVERYFRAME_COMFYUI")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER, reason="EVERYFRAME_COMFYUI names no folder of a real ComfyUI"),
]
WORKFLOWS = sorted((PACK / "example_workflows").glob("*.json"))
_START_SECONDS, _RUN_SECONDS = 300.0, 600.0


class ComfyUI:
    """A process of the real ComfyUI with this pack alone; its folders are under `base`."""

    def __init__(self, base: Path) -> None:
        self.base = base
        for name in ("custom_nodes", "user", "output", "input", "front"):
            (base / name).mkdir()
        (base / "front" / "index.html").touch()
        (base / "custom_nodes" / "everyframe").symlink_to(PACK)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        folder = Path(str(FOLDER))
        own = [folder / name / "bin" / "python" for name in (".venv", "venv")]
        self.python = next((str(each) for each in own if each.exists()), sys.executable)
        words = [
            "--cpu", "--listen", "127.0.0.1", "--port", str(port), "--disable-auto-launch",
            "--base-directory", str(base),
        ]  # fmt: skip
        looked_for = [self.python, "-c", "import comfyui_frontend_package"]
        self.has_page = not subprocess.run(looked_for, capture_output=True, check=False).returncode
        if not self.has_page:
            words += ["--front-end-root", str(base / "front")]
        variables = {k: v for k, v in os.environ.items() if k != IN_PROCESS}
        self.log = (base / "log").open("w+")
        self.process = subprocess.Popen(
            [self.python, str(folder / "main.py"), *words],
            env={**variables, "PYTHONPATH": str(SOURCE)},
            stdout=self.log, stderr=self.log,
        )  # fmt: skip

    def wait_until_ready(self) -> None:
        """Wait for its first answer."""
        until = time.monotonic() + _START_SECONDS
        while self.process.poll() is None and time.monotonic() < until:
            try:
                self.ask("/queue")
                return
            except urllib.error.URLError:
                time.sleep(0.5)
        raise AssertionError((self.base / "log").read_text()[-3000:])

    def ask(self, path: str, data: Any = None) -> Any:
        """The JSON of an answer, also of a refusal."""
        body = None if data is None else json.dumps(data).encode()
        asked = urllib.request.Request(self.url + path, body, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            text = error.read()
        return json.loads(text) if text else None

    def wait_for(self, prompt: str) -> dict[str, Any]:
        """What a prompt that ended says of itself."""
        until = time.monotonic() + _RUN_SECONDS
        while not (history := self.ask(f"/history/{prompt}")):
            assert time.monotonic() < until, (self.base / "log").read_text()[-3000:]
            time.sleep(0.2)
        return dict(history[prompt])


@pytest.fixture(scope="module")
def comfyui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyUI]:
    made = ComfyUI(tmp_path_factory.mktemp("comfyui"))
    try:
        made.wait_until_ready()
        yield made
    finally:
        made.process.terminate()
        made.process.wait(30)
        made.log.close()


def _prompt(**given: Any) -> dict[str, Any]:
    values = {
        "prompt": "a red circle moves to the right", "model": "", "negative": "", "width": 0,
        "height": 0, "frames": 0, "fps": 0.0, "steps": 2, "guidance": -1.0, "seed": 3,
    }  # fmt: skip
    save = {"video": ["1", 3], "filename_prefix": "made", "format": "auto", "codec": "auto"}
    return {
        "prompt": {
            "1": {"class_type": "EveryframeGenerate", "inputs": {**values, **given}},
            "2": {"class_type": "SaveVideo", "inputs": save},
        }
    }


def test_its_own_reader_takes_the_project_file(comfyui: ComfyUI) -> None:
    """It leaves out a list of classifiers where one of them is unknown."""
    program = f"""if True:
        import json, sys
        sys.path.insert(0, {str(FOLDER)!r})
        from comfy_config.config_parser import extract_node_configuration
        print(json.dumps(extract_node_configuration({str(PACK)!r}).model_dump()))
    """
    done = subprocess.run([comfyui.python, "-c", program], capture_output=True, check=True)
    read = json.loads(done.stdout)
    assert read["tool_comfy"]["display_name"] == "Everyframe"
    assert read["project"]["license"]["file"] == "LICENSE"
    assert len(read["project"]["supported_os"]) == 3
    assert len(read["project"]["supported_accelerators"]) == 3
    assert read["project"]["supported_comfyui_version"] == ">=0.3.64"


def test_nodes_are_there(comfyui: ComfyUI) -> None:
    found = comfyui.ask("/object_info")
    ours = {name for name in found if name.startswith("Everyframe")}
    parts = ("Generate", "Plan", "Lora", "Server", "LoadRecord")
    assert ours == {f"Everyframe{name}" for name in parts}


def test_wrong_options_are_refused_once_before_the_queue(comfyui: ComfyUI) -> None:
    (node,) = comfyui.ask("/prompt", _prompt(options='{"seed": 1}'))["node_errors"].values()
    (error,) = node["errors"]
    assert error["details"] == "options - options can't hold seed: use the node's input seed"
    (node,) = comfyui.ask("/prompt", _prompt(width=-1))["node_errors"].values()
    assert [each["type"] for each in node["errors"]] == ["value_smaller_than_min"]


def test_video_is_saved_with_its_record_which_loads_again(comfyui: ComfyUI) -> None:
    done = comfyui.wait_for(comfyui.ask("/prompt", _prompt())["prompt_id"])
    assert done["status"]["status_str"] == "success", done["status"]
    (saved,) = (comfyui.base / "output").glob("made*.mp4")
    record = record_in(saved)
    assert record["settings"]["seed"] == 3
    assert record["settings"]["num_inference_steps"] == 2
    saved.rename(comfyui.base / "input" / "again.mp4")
    again = _prompt()
    again["prompt"]["3"] = {"class_type": "EveryframeLoadRecord", "inputs": {"file": "again.mp4"}}
    names = ["prompt", "model", "negative", "width", "height", "frames", "fps", "steps",
             "guidance", "seed"]  # fmt: skip
    again["prompt"]["1"]["inputs"] |= {name: ["3", at + 1] for at, name in enumerate(names)}
    done = comfyui.wait_for(comfyui.ask("/prompt", again)["prompt_id"])
    assert done["status"]["status_str"] == "success", done["status"]
    (second,) = (comfyui.base / "output").glob("made*.mp4")
    assert record_in(second)["settings"] == record["settings"]


def test_server_makes_the_video_and_its_record_is_saved(comfyui: ComfyUI, tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server:
        prompt = _prompt(server=["3", 0], seed=6)
        address = {"url": server.url, "key_name": ""}
        prompt["prompt"]["3"] = {"class_type": "EveryframeServer", "inputs": address}
        prompt["prompt"]["2"]["inputs"]["filename_prefix"] = "served"
        done = comfyui.wait_for(comfyui.ask("/prompt", prompt)["prompt_id"])
        assert done["status"]["status_str"] == "success", done["status"]
        (job,) = server.ask("/v1/videos")[1]["data"]
    assert (job["status"], job["seed"]) == ("completed", 6)
    (saved,) = (comfyui.base / "output").glob("served*.mp4")
    assert record_in(saved)["settings"]["seed"] == 6


def test_interrupt_ends_the_node_within_two_seconds(comfyui: ComfyUI) -> None:
    prompt = comfyui.ask("/prompt", _prompt(seed=4, steps=200))["prompt_id"]
    while not comfyui.ask("/queue")["queue_running"]:
        time.sleep(0.1)
    time.sleep(3.0)
    began = time.time()
    comfyui.ask("/interrupt", {})
    messages = dict(comfyui.wait_for(prompt)["status"]["messages"])
    assert messages["execution_interrupted"]["timestamp"] / 1000 - began < 2


def test_error_of_the_worker_is_its_message(comfyui: ComfyUI) -> None:
    prompt = comfyui.ask("/prompt", _prompt(model="no-such-model"))["prompt_id"]
    messages = dict(comfyui.wait_for(prompt)["status"]["messages"])
    assert "no-such-model" in messages["execution_error"]["exception_message"]


@pytest.fixture
def page(comfyui: ComfyUI) -> Iterator[Any]:
    """ComfyUI's own page in a Chromium, once it knows our nodes."""
    playwright = pytest.importorskip("playwright.sync_api", reason="the page needs playwright")
    chromium = find_chromium()
    if chromium is None or not comfyui.has_page:
        pytest.skip("needs a Chromium, and ComfyUI's package of the page")
    with playwright.sync_playwright() as browsers:
        browser = browsers.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page()
        tab.goto(comfyui.url)
        known = "window.LiteGraph?.registered_node_types.EveryframeGenerate && window.app.graph"
        tab.wait_for_function(known, timeout=120_000)
        yield tab
        browser.close()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_opens_in_the_page_and_is_taken(path: Path, comfyui: ComfyUI, page: Any) -> None:
    """The page makes a prompt of each example, which has the values of its widgets and is valid."""
    assert path.stem in comfyui.ask("/workflow_templates")["everyframe"]
    workflow = json.loads(path.read_text())
    page.evaluate("async (workflow) => { await window.app.loadGraphData(workflow) }", workflow)
    prompt = page.evaluate("async () => (await window.app.graphToPrompt()).output")
    assert {node["class_type"] for node in prompt.values()} == {
        node["type"] for node in workflow["nodes"]
    }
    (inputs,) = (
        node["inputs"] for node in prompt.values() if node["class_type"] == "EveryframeGenerate"
    )
    assert (inputs["prompt"], inputs["guidance"]) == ("a red circle moves to the right", -1)
    answer = comfyui.ask("/prompt", {"prompt": prompt})
    assert answer["node_errors"] == {}
    comfyui.ask("/queue", {"clear": True})
    comfyui.ask("/interrupt", {})


def test_killed_worker_is_a_message_with_what_to_do(comfyui: ComfyUI) -> None:
    prompt = comfyui.ask("/prompt", _prompt(seed=5, steps=200))["prompt_id"]
    until = time.monotonic() + 60
    while not (workers := _workers(comfyui)):
        assert time.monotonic() < until
        time.sleep(0.1)
    time.sleep(1.0)
    workers[0].kill()
    messages = dict(comfyui.wait_for(prompt)["status"]["messages"])
    error = messages["execution_error"]
    assert error["exception_type"].endswith("WorkerDiedError")
    assert "SIGKILL" in error["exception_message"]
    assert comfyui.process.poll() is None


def _workers(comfyui: ComfyUI) -> list[psutil.Process]:
    children = psutil.Process(comfyui.process.pid).children(recursive=True)
    return [
        each for each in children if "everyframe.engine.workers.worker" in " ".join(each.cmdline())
    ]
