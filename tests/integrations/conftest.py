"""The node pack on the stand-in for ComfyUI."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers import comfyui_stand_in as stand_in


@pytest.fixture
def pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The nodes by name, and the modules of the pack; ComfyUI's folders are under `tmp_path`."""
    for name, module in stand_in.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(stand_in.Folders, "root", tmp_path)
    monkeypatch.setattr(stand_in.Interrupt, "is_set", False)
    monkeypatch.setattr(stand_in.Interrupt, "num_unloads", 0)
    monkeypatch.setattr(stand_in.ProgressBar, "shown", [])
    (tmp_path / "input").mkdir()
    module = stand_in.load_pack()

    async def listed() -> list[type]:
        extension = await module.comfy_entrypoint()
        return await extension.get_node_list()

    nodes = {node.define_schema().node_id: node for node in asyncio.run(listed())}
    parts = {
        name: importlib.import_module(f"{module.__name__}.{name}")
        for name in ("local_run", "media", "request_options", "run_loop", "server_client",
                     "server_run")
    }  # fmt: skip
    yield SimpleNamespace(nodes=nodes, **parts)
    parts["local_run"].WORKERS.close()
    for name in [*sys.modules]:
        if name.startswith(module.__name__):
            del sys.modules[name]
