"""What is shipped beside the code: versions agree, containers are sound, wheels install."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from everyframe import __version__
from everyframe.cli import serve
from everyframe.cli.main import COMMANDS

ROOT = Path(__file__).parent.parent
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_citation_names_this_version() -> None:
    found = read_yaml(ROOT / "CITATION.cff")
    assert found["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "version", "license"} <= found.keys()
    assert str(found["version"]) == __version__
    assert found["license"] == "Apache-2.0"
    assert all("name" in author or "family-names" in author for author in found["authors"])


#: What a form of the issue tracker may hold.
_ELEMENTS = {"markdown", "textarea", "input", "dropdown", "checkboxes"}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_asks_for_the_doctors_report(path: Path) -> None:
    form = read_yaml(path)
    if path.name == "config.yml":
        assert form["blank_issues_enabled"] is False
        return
    assert {"name", "description", "body"} <= form.keys()
    assert {each["type"] for each in form["body"]} <= _ELEMENTS
    ids = [each["id"] for each in form["body"]]
    assert len(ids) == len({*ids})
    labels = [each["attributes"]["label"] for each in form["body"]]
    assert any("everyframe doctor --share" in label for label in labels)
    commands = re.findall(r"everyframe (\w[\w-]*)", path.read_text(encoding="utf-8"))
    assert {*commands} <= {name.split()[0] for name in COMMANDS}


def test_a_release_needs_no_token_and_is_built_once() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    assert "secrets." not in text
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert jobs["publish"]["needs"] == "build"
    assert jobs["announce"]["needs"] == "publish"
    assert "id-token" not in jobs["build"]["permissions"], "what builds can't publish"
    runs = " ".join(step.get("run", "") for job in jobs.values() for step in job["steps"])
    assert runs.count("python -m build") == 1
    assert "cyclonedx-py" in runs
    assert ".ci/run" in [step.get("run") for step in jobs["build"]["steps"]]
    used = re.findall(r"uses: (.+)", text)
    assert used
    # A tag can be moved to other code, a commit can't; the comment is for people and Dependabot.
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v[\d.]+", each) for each in used)
    updates = read_yaml(ROOT / ".github" / "dependabot.yml")["updates"]
    assert [each["package-ecosystem"] for each in updates] == ["github-actions"]


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, arguments) of a Dockerfile, continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    found = []
    for line in filter(None, map(str.strip, joined.splitlines())):
        word, _, rest = line.partition(" ")
        found.append((word, rest.strip()))
    return found


_KNOWN = {
    "ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL",
    "RUN", "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR",
}  # fmt: skip


def problems_of(text: str) -> list[str]:
    """What is wrong with a Dockerfile, by the rules that linters of it agree on."""
    found = instructions(text)
    last = max((n for n, (word, _) in enumerate(found) if word == "FROM"), default=0)
    final = found[last:]
    words = [word for word, _ in final]
    problems = [f"unknown instruction {word}" for word, _ in found if word not in _KNOWN]
    for word, rest in found:
        if word == "FROM" and not re.search(r":[^\s:]+( AS \w+)?$", rest):
            problems.append(f"{rest} has no tag")
        if word == "FROM" and ":latest" in rest:
            problems.append(f"{rest} is any version")
        if word == "ADD":
            problems.append("ADD fetches and unpacks; COPY is enough")
        if word == "RUN" and "apt-get install" in rest:
            if "--no-install-recommends" not in rest or "rm -rf /var/lib/apt/lists" not in rest:
                problems.append("apt-get leaves packages and lists behind")
        if word in ("CMD", "ENTRYPOINT") and not rest.startswith("["):
            problems.append(f"{word} goes through a shell, which keeps signals to itself")
    users = [rest for word, rest in final if word == "USER"]
    if not users or users[-1] in ("root", "0"):
        problems.append("it runs as root")
    problems += [f"no {word}" for word in ("HEALTHCHECK", "STOPSIGNAL") if word not in words]
    return problems


def test_the_dockerfile_is_sound() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert problems_of(text) == []
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    for word, rest in instructions(text):
        if word != "COPY" or rest.startswith("--from"):
            continue
        for source in rest.split()[:-1]:
            assert (ROOT / source).exists(), source
            is_back = f"!{source}" in ignored
            assert is_back or not {source, source.split("/")[0]} & {*ignored}, source


def test_the_container_serves_and_is_asked_whether_it_is_well() -> None:
    found = dict(instructions((ROOT / "Dockerfile").read_text(encoding="utf-8")))
    command, *flags = yaml.safe_load(found["CMD"])
    assert command == "serve"
    assert {each.removeprefix("--") for each in flags[::2]} <= {
        *inspect.signature(serve.COMMAND).parameters
    }
    path = re.search(r"127\.0\.0\.1:8000(/\w+)", found["HEALTHCHECK"])
    assert path is not None
    routes = (ROOT / "src" / "everyframe" / "server" / "http" / "routes").glob("*.py")
    assert any(f'.get("{path[1]}")' in each.read_text(encoding="utf-8") for each in routes)


PLANTED = {
    "FROM python\nUSER a\nHEALTHCHECK x\nSTOPSIGNAL SIGTERM": "has no tag",
    "FROM python:latest\nUSER a\nHEALTHCHECK x\nSTOPSIGNAL SIGTERM": "any version",
    "FROM a:1\nUSER a\nUSER root\nHEALTHCHECK x\nSTOPSIGNAL SIGTERM": "root",
    "FROM a:1 AS b\nUSER a\nHEALTHCHECK x\nSTOPSIGNAL S\nFROM a:1\nRUN x": "no HEALTHCHECK",
    "FROM a:1\nUSER a\nHEALTHCHECK x\nSTOPSIGNAL S\nCMD serve": "through a shell",
    "FROM a:1\nUSER a\nHEALTHCHECK x\nSTOPSIGNAL S\nRUN apt-get install x": "leaves packages",
    "FROM a:1\nUSER a\nHEALTHCHECK x\nSTOPSIGNAL S\nRUNN x": "unknown instruction",
}


@pytest.mark.parametrize("text", PLANTED, ids=PLANTED.values())
def test_a_planted_fault_of_a_dockerfile_is_found(text: str) -> None:
    assert any(PLANTED[text] in problem for problem in problems_of(text))


def test_the_compose_file_starts_what_the_dockerfile_builds() -> None:
    found = read_yaml(ROOT / "compose.yaml")
    file = dict(instructions((ROOT / "Dockerfile").read_text(encoding="utf-8")))
    services, volumes = found["services"], yaml.safe_load(file["VOLUME"])
    assert {*services} == {"cpu", "nvidia", "amd"}
    for name, service in services.items():
        assert service["profiles"] == [name]
        assert "BACKEND" in service["build"]["args"]
        assert [each.split(":")[1] for each in service["volumes"]] == volumes
        assert {each.split(":")[0] for each in service["volumes"]} == {*found["volumes"]}
        assert service["ports"] == [f"127.0.0.1:{file['EXPOSE']}:{file['EXPOSE']}"]
        assert service["stop_grace_period"] == "60s"
        assert ":?" in service["environment"]["EVERYFRAME_API_KEYS"], "no key, no server"
    reserved = services["nvidia"]["deploy"]["resources"]["reservations"]["devices"]
    assert reserved[0]["capabilities"] == ["gpu"]
    assert services["amd"]["devices"] == ["/dev/kfd", "/dev/dri"]
    assert services["amd"]["group_add"] == ["video", "render"]


FORM = "check-jsonschema --builtin-schema vendor."
LINTERS = {
    "Dockerfile": "hadolint Dockerfile",
    "workflow": "zizmor --offline --quiet .github",
    "compose": f"{FORM}compose-spec compose.yaml",
    "citation": f"{FORM}citation-file-format CITATION.cff",
    "dependabot": f"{FORM}dependabot .github/dependabot.yml",
    "forms": f"{FORM}github-issue-forms .github/ISSUE_TEMPLATE/*_*.yml",
    "forms' config": f"{FORM}github-issue-config .github/ISSUE_TEMPLATE/config.yml",
}


@pytest.mark.slow  # programs of others, which the extra `dev` does not have
@pytest.mark.parametrize("name", LINTERS)
def test_linters_of_others_find_nothing(name: str) -> None:
    program = LINTERS[name].split()[0]
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}")
    run_line(LINTERS[name], ROOT, dict(os.environ))


def test_the_model_card_has_the_hubs_head() -> None:
    card = ROOT / "src" / "everyframe" / "checkpoints" / "shapes" / "MODEL_CARD.md"
    head = re.match(r"---\n(.*?)\n---\n", card.read_text(encoding="utf-8"), re.DOTALL)
    assert head is not None
    found = yaml.safe_load(head[1])
    assert found["license"] == "apache-2.0"
    assert found["pipeline_tag"] == "text-to-video"
    assert found["library_name"] == "everyframe"
    assert "video-diffusion" in found["tags"]


def extras() -> dict[str, list[str]]:
    """Optional dependencies by extra."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = text.split("[project.optional-dependencies]")[1].split("\n[")[0]
    pairs = re.findall(r"^([\w-]+) = \[(.*?)\]$", table, re.DOTALL | re.MULTILINE)
    pairs += re.findall(r'^(\w+) = \[("[^\n]*")\]$', table, re.MULTILINE)
    return {name: re.findall(r'"([^"]+)"', each) for name, each in pairs}


def test_the_extra_all_has_the_others() -> None:
    found = extras()
    assert {"gguf", "server", "all", "dev"} <= found.keys()
    (whole,) = [Requirement(each) for each in found["all"]]
    assert whole.name == "everyframe"
    assert whole.extras <= found.keys()
    assert whole.extras == {"comfyui", "gguf", "otel", "server"}
    assert not {"dev", "recipes", "ray", "torchao"} & whole.extras


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package index of this machine with the wheel and the sdist of this tree."""
    if shutil.which("uv") is None:
        pytest.skip("needs uv, which builds and installs")
    folder = tmp_path_factory.mktemp("index") / "everyframe"
    subprocess.run(["uv", "build", "--quiet", "--out-dir", str(folder), str(ROOT)], check=True)
    names = sorted(path.name for path in folder.iterdir() if path.suffix in (".whl", ".gz"))
    links = "".join(f'<a href="{name}">{name}</a>\n' for name in names)
    (folder / "index.html").write_text(links)
    (folder.parent / "index.html").write_text('<a href="everyframe/">everyframe</a>\n')
    return folder.parent


@pytest.fixture
def bare(index: Path, tmp_path: Path) -> dict[str, str]:
    """Variables of a shell that knows nothing of this tree but the index and the tested versions.

    Wheels that lie on this machine (`PIP_FIND_LINKS`) are taken in place of a download.
    """
    known = {name: text for name, text in os.environ.items()
             if name not in ("PYTHONPATH", "VIRTUAL_ENV")}  # fmt: skip
    constraints = str(ROOT / "constraints.txt")
    pipx = {f"PIPX_{name}": str(tmp_path / name) for name in ("HOME", "BIN_DIR", "MAN_DIR")}
    return {**known, **pipx, "UV_INDEX": index.as_uri(), "UV_PYTHON": sys.executable,
            "UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", ""),
            "UV_CONSTRAINT": constraints, "PIP_CONSTRAINT": constraints}  # fmt: skip


def run_line(line: str, folder: Path, variables: dict[str, str]) -> str:
    """What a line of a page prints on both streams; it must succeed."""
    done = subprocess.run(line, shell=True, cwd=folder, env=variables, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=1800)  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def line_of(page: Path, start: str) -> str:
    """The command of a page that begins so, without its comment."""
    lines = page.read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith(start)).partition("  #")[0].strip()


@pytest.mark.slow  # it builds two archives and installs torch
def test_the_line_of_the_readme_makes_a_video_from_the_index(
    bare: dict[str, str], tmp_path: Path
) -> None:
    """Without `--torch-backend`: its index is not everywhere reachable, where PyPI's torch is."""
    line = line_of(ROOT / "README.md", "uvx ").replace("--torch-backend auto ", "")
    run_line(f"{line} --seed 7", tmp_path, bare)
    assert (tmp_path / "clip.mp4").stat().st_size > 1000
    printed = run_line("uvx --help && uv tool install --help", tmp_path, bare)
    assert printed.count("--torch-backend") >= 2


@pytest.mark.slow  # it builds two archives and installs torch twice
@pytest.mark.parametrize("backend", ["uv", "pip"])
def test_pipx_installs_and_runs_from_the_index(
    backend: str, index: Path, bare: dict[str, str], tmp_path: Path
) -> None:
    """By both of pipx's backends, and with the index given as the page on installing gives one."""
    if shutil.which("pipx") is None:
        pytest.skip("needs pipx")
    line = line_of(ROOT / "docs" / "how-to" / "install.md", "pipx install everyframe --pip-args")
    ours = re.sub(r"https://\S+/whl/cpu", index.as_uri(), line)
    assert ours != line
    assert line.startswith(line_of(ROOT / "README.md", "pipx install"))
    variables = {**bare, "PIPX_DEFAULT_BACKEND": backend, "UV_INDEX": ""}
    run_line(ours, tmp_path, variables)
    command = str(tmp_path / "BIN_DIR" / "everyframe")
    assert __version__ in run_line(f"{command} --version", tmp_path, variables)
    run_line(f'{command} generate "a red circle" --seed 7 -o clip.mp4', tmp_path, variables)
    assert (tmp_path / "clip.mp4").stat().st_size > 1000
    assert (tmp_path / "MAN_DIR" / "man1" / "everyframe.1").exists()


@pytest.mark.slow  # it builds two archives and asks the index for what each extra needs
@pytest.mark.parametrize("extra", ["server", "ray", "gguf", "comfyui", "otel", "torchao", "all"])
def test_each_extra_resolves_from_the_index(
    extra: str, bare: dict[str, str], tmp_path: Path
) -> None:
    run_line("uv venv --quiet .venv", tmp_path, bare)
    found = run_line(
        f'uv pip install --python .venv --dry-run "everyframe[{extra}]"', tmp_path, bare
    )
    assert f"+ everyframe=={__version__}" in found
    for each in map(Requirement, extras()[extra]):
        assert f"+ {each.name.replace('_', '-')}==" in found, found


@pytest.mark.slow  # it builds two archives
def test_wheel_and_sdist_hold_what_they_should(index: Path) -> None:
    import tarfile
    import zipfile

    (wheel,) = index.glob("everyframe/*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.endswith("share/man/man1/everyframe.1") for name in names)
    assert "everyframe/checkpoints/shapes/model.safetensors" in names
    assert "everyframe/py.typed" in names
    assert not [name for name in names if name.startswith(("tests", "docs"))]
    assert wheel.stat().st_size < 20e6
    (sdist,) = index.glob("everyframe/*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"pyproject.toml", "CITATION.cff", "Dockerfile", "tests/conftest.py"} <= inside
