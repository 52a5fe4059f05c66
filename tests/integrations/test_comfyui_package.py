"""The node pack as a package: its own pyproject.toml, workflows and icon."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from everyframe._version import __version__
from everyframe.planning.config_files import tomllib
from helpers.comfyui_stand_in import PACK

WORKFLOWS = sorted((PACK / "example_workflows").glob("*.json"))
PROJECT = tomllib.loads((PACK / "pyproject.toml").read_text())
#: Inputs that are widgets on a node of the page.
WIDGETS = ("STRING", "INT", "FLOAT", "BOOLEAN", "COMBO")


def test_registry_takes_the_project_file() -> None:
    project, comfy = PROJECT["project"], PROJECT["tool"]["comfy"]
    assert re.fullmatch(r"(?!.*comfyui)[a-z][a-z0-9-]*", project["name"])
    assert project["version"] == __version__
    assert (PACK / project["license"]["file"]).read_text() == (
        PACK.parents[1] / "LICENSE"
    ).read_text()
    assert project["dependencies"] == []
    assert {*comfy} == {"DisplayName", "requires-comfyui"}
    release = (PACK.parents[1] / "CONTRIBUTING.md").read_text().split("## Release")[1]
    assert all(f"`{key}" in release for key in ("[project.urls]", "PublisherId", "Icon"))
    icon = ElementTree.parse(PACK / "icon.svg").getroot()
    assert int(icon.attrib["width"]) <= 400
    assert int(icon.attrib["height"]) <= 400


def test_server_mode_needs_the_standard_library_alone() -> None:
    """What is imported at the top of a module, apart from what ComfyUI itself needs."""
    given = {"comfy", "comfy_api", "folder_paths", "numpy", "PIL", "torch"}
    import ast
    import sys

    for path in PACK.glob("*.py"):
        for each in ast.parse(path.read_text()).body:
            names = [a.name for a in each.names] if isinstance(each, ast.Import) else []
            if isinstance(each, ast.ImportFrom) and not each.level:
                names = [str(each.module)]
            for name in names:
                top = name.partition(".")[0]
                assert top in given or top in sys.stdlib_module_names, f"{path.name}: {name}"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_fits_the_nodes(path: Path, pack: Any) -> None:
    workflow = json.loads(path.read_text())
    by_id = {node["id"]: node for node in workflow["nodes"]}
    for node in workflow["nodes"]:
        if node["type"] == "SaveVideo":
            continue
        schema = pack.nodes[node["type"]].define_schema()
        ordered = sorted(schema.inputs, key=lambda each: each.optional)
        widgets = [each for each in ordered if each.io_type in WIDGETS]
        shown = len(widgets) + sum(
            getattr(e, "control_after_generate", None) is True for e in widgets
        )
        assert len(node["widgets_values"]) == shown, node["type"]
        sockets = [each.id for each in ordered if each.io_type not in WIDGETS]
        assert [each["name"] for each in node["inputs"]] == sockets
        names = [each.display_name for each in schema.outputs]
        assert [each["name"] for each in node["outputs"]] == names
    for link, source, at, target, to, kind in workflow["links"]:
        output, entry = by_id[source]["outputs"][at], by_id[target]["inputs"][to]
        assert output["type"] == entry["type"] == kind
        assert link in output["links"]
        assert entry["link"] == link


def test_there_are_workflows() -> None:
    assert len(WORKFLOWS) == 3
