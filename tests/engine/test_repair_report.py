"""The report: one page that needs no network, written where something went wrong and only there."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

import everyframe
from everyframe.cli.main import main
from everyframe.core.errors import InputError, NumericsError
from everyframe.core.events import Event, Note, Repaired, RunSaved, StageStarted
from everyframe.core.request import Request
from everyframe.engine.repair_report import page, with_repair_report
from everyframe.engine.resumption.resume import resume_run
from everyframe.engine.run import stream
from everyframe.numerics.tensor_stats import Magnitudes
from everyframe.runs.folder import RunFolder
from everyframe.runs.run_state import SaveOptions
from everyframe.runtime.components.component_observers import notify_loaded
from everyframe.runtime.stages.guard import Guard
from helpers.guard_modules import Net, halved, inputs, plan, scaled
from helpers.tiny_checkpoints import opensora as tiny_opensora

RECORD: dict[str, Any] = {
    "settings": {"prompt": "a <b>red</b> circle", "seed": 3, "negative_prompt": None},
    "versions": {"torch": "2.13"},
    "everyframe": "0",
}


def faulty() -> nn.Module:
    torch.manual_seed(0)
    net = Net(nn.Linear(8, 8), scaled(nn.Linear(8, 8), 1e5), nn.Linear(8, 8))
    return halved(net.requires_grad_(False))


def run_of(net: nn.Module) -> Iterator[Event]:
    """Three steps, as a stage makes them."""
    notify_loaded("net", net)
    guard = Guard(plan(), "denoise", {"net": net})
    with torch.inference_mode():
        for step in range(1, 4):
            guard.call(step, lambda: net(inputs()))
            yield from guard.events()


def pictures(page: str) -> list[Image.Image]:
    found = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    return [Image.open(io.BytesIO(base64.b64decode(each))) for each in found]


def test_what_was_repaired_is_on_a_page_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    events = list(with_repair_report(run_of(faulty()), plan(), RECORD, folder, {}))  # type: ignore[arg-type]
    (first, *_) = [event for event in events if isinstance(event, Repaired)]
    (note,) = [event for event in events if isinstance(event, Note)]
    assert str(folder / "report.html") in note.text
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert [each.name for each in folder.iterdir()] == ["report.html"]
    assert f"net.{first.module}" in page
    assert "float16 ends at 65504" in page
    assert "a processor" in page
    assert "a &lt;b&gt;red" in page, "what somebody wrote is text"
    assert "://" not in page, "nothing is fetched"
    (picture,) = pictures(page)
    # The scale's colour of what is not finite is in it.
    colours = np.asarray(picture.convert("RGB")).reshape(-1, 3)
    assert (colours == (230, 30, 120)).all(axis=1).any()


def test_what_a_report_shows_is_text() -> None:
    """Whatever a model, prompt or record is called: nothing of it becomes a part of the page."""
    evil = "</title></p><script>alert(1)</script><img src=x onerror=alert(1)> \"' &"
    named = replace(plan(), model=evil, title=evil)
    record = {
        "settings": {"prompt": evil, evil: evil, "options": [[evil, evil]]},
        "versions": {evil: evil},
        "everyframe": evil,
    }
    (first, *_) = [event for event in run_of(faulty()) if isinstance(event, Repaired)]
    fields = dict.fromkeys(("cause", "operation", "dtype", "module", "component"), evil)
    repairs = [replace(first, **fields)]
    text = page(named, record, repairs, Magnitudes(), evil)
    assert text.count("&lt;script&gt;") > 10
    assert not re.search(r"<(script|img|/title><)", text)


def test_a_run_that_ends_names_the_page(tmp_path: Path) -> None:
    net = faulty()
    net.parts[0].weight[0, 0] = torch.nan
    with pytest.raises(NumericsError, match=r"parts\.0\.weight.*report\.html"):
        list(with_repair_report(run_of(net), plan(), RECORD, tmp_path, {}))  # type: ignore[arg-type]
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "the weights themselves are not finite: net.parts.0.weight" in page
    assert len(pictures(page)) == 1


def test_without_trouble_there_is_no_page(tmp_path: Path) -> None:
    net = halved(Net(nn.Linear(8, 8)).requires_grad_(False))
    assert not list(with_repair_report(run_of(net), plan(), RECORD, tmp_path / "r", {}))  # type: ignore[arg-type]
    assert not (tmp_path / "r").exists()
    hooks = sum(len(part._forward_hooks) for part in net.modules())
    assert hooks == 1, "the one that widens the results, and none of ours"


def test_a_resumed_run_has_a_page_beside_that_of_its_first_part(tmp_path: Path) -> None:
    first = Repaired("encode", 1, "text", "a", "linear", "range", "float16", "a", "float32", "then")
    for pages in (["report.html"], ["report.html", "report-2.html"]):
        again = with_repair_report(run_of(faulty()), plan(), RECORD, tmp_path, {}, [first])  # type: ignore[arg-type]
        (note,) = [event for event in again if isinstance(event, Note)]
        assert pages[-1] in note.text
        assert sorted(each.name for each in tmp_path.iterdir()) == sorted(pages)
        page = (tmp_path / pages[-1]).read_text(encoding="utf-8")
        assert "<td>then</td>" in page
        assert "begin where the run was resumed" in page
    # What needed no repair since has nothing to add to it.
    list(with_repair_report(run_of(Net()), plan(), RECORD, tmp_path, {}, [first]))  # type: ignore[arg-type]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_run_that_is_resumed_is_reported(tmp_path: Path) -> None:
    """Broken off before the part in which something has to be repaired."""
    folder = tiny_opensora.opensora_1_2(tmp_path / "model")
    tensors = load_file(folder / "vae/model.safetensors")
    weight = tensors["spatial_vae.module.decoder.up_blocks.3.resnets.0.conv1.weight"]
    weight.mul_(6e4 / weight.abs().max())
    save_file(tensors, folder / "vae/model.safetensors", metadata={"format": "pt"})
    request = Request(
        prompt="a red circle", model=str(folder), size="16x16", num_frames=1, device="cpu", seed=3,
        num_inference_steps=2, dtype="float16", force=True, report=str(tmp_path / "seen"),
    )  # fmt: skip
    kept = ""
    for event in stream(request, keep=SaveOptions(tmp_path / "runs")):
        kept = event.path if isinstance(event, RunSaved) else kept
        if isinstance(event, StageStarted) and event.stage == "decode":
            break
    assert not (tmp_path / "seen").exists()
    again = list(resume_run(RunFolder(Path(kept))))
    assert any(isinstance(event, Repaired) for event in again)
    page = (tmp_path / "seen" / "report.html").read_text(encoding="utf-8")
    assert "vae.spatial_vae.module.decoder.up_blocks.3.resnets.0.conv1" in page


def test_magnitudes_are_those_of_the_modules() -> None:
    net = Net(nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False)
    seen: dict[str, list[float]] = {}
    for name, part in net.named_modules():
        part.register_forward_hook(
            lambda _, __, out, name=name: seen.setdefault(name, []).append(float(out.abs().max()))
        )
    magnitudes = Magnitudes()
    magnitudes.watch("net", net)
    for seed in range(3):
        net(inputs(seed))
    net(inputs() * torch.inf)
    magnitudes.remove()
    names, table = magnitudes.table("net")
    assert set(names) == set(seen)
    for name, row in zip(names, table, strict=True):
        np.testing.assert_array_equal(row[:3], seen[name][:3])
        assert np.isinf(row[3]), "NaN is not finite either"
    assert magnitudes.components() == ("net",)


def test_a_report_goes_into_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in ("file", "file/below"):
        request = Request(prompt="a red circle", report=str(tmp_path / place))
        with pytest.raises(InputError, match="report must be a folder"):
            next(iter(everyframe.stream(request)))


def test_the_command_line_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_opensora.opensora_1_2(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["spatial_blocks.1.mlp.fc2.weight"].view(-1)[5] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    words = "--size 32x32 --num-frames 1 --steps 1 --device cpu -o clip.png --report seen"
    assert main(["generate", "a red circle", *words.split(), "--model", str(folder)]) == 4
    printed = " ".join(capsys.readouterr().err.split())
    assert "denoiser.spatial_blocks.1.mlp.fc2.weight" in printed
    assert str(Path("seen", "report.html")) in printed
    page = Path("seen", "report.html").read_text(encoding="utf-8")
    assert len(pictures(page)) == 2, "text encoder and denoiser"
