"""Configuration: the order of its places, what a file may set, and what a project's may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from everyframe.core.errors import InputError
from everyframe.core.options import facts_of
from everyframe.core.request import Request
from everyframe.families.registry import all_options
from everyframe.planning import config_files
from everyframe.planning.config_files import (
    FILE,
    default_options,
    environment_options,
    read_project_file,
    read_user_file,
    unknown_variables,
    without_displaced,
)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project, which is the current folder, and a user without a file."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return folder


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def users(project: Path) -> Path:
    return project.parent / "config" / "everyframe" / FILE


def values(model: str | None = None) -> dict[str, object]:
    return {name: default.value for name, default in default_options(model).items()}


def test_a_variable_goes_before_the_project_and_that_before_the_user(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(users(project), 'dtype = "fp32"\nnum_frames = 9\nseed = 1\n')
    write(project / FILE, 'dtype = "bf16"\nnum-frames = 17\n')
    monkeypatch.setenv("EVERYFRAME_DTYPE", "fp16")
    found = default_options(None)
    assert {name: each.value for name, each in found.items()} == {
        "dtype": "fp16", "num_frames": 17, "seed": 1,
    }  # fmt: skip
    assert [each.source for each in found.values()] == [
        "EVERYFRAME_DTYPE", str(project / FILE), str(users(project)),
    ]  # fmt: skip
    assert [each.is_of_project for each in found.values()] == [False, True, False]


def test_a_models_table_is_for_that_model(project: Path) -> None:
    write(project / FILE, 'fps = 8\n[models."opensora-1.2"]\nfps = 24\naesthetic = 6\n')
    assert values() == {"fps": 8.0}
    assert values("OpenSora-1.2") == {"fps": 24.0, "aesthetic": 6.0}


def test_a_models_table_is_for_the_configured_model(project: Path) -> None:
    write(project / FILE, 'model = "opensora-1.2"\n[models."opensora-1.2"]\naesthetic = 6\n')
    assert values()["aesthetic"] == 6.0
    assert "aesthetic" not in values("shapes")


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (["size"], {"num_frames"}),
        (["seconds"], {"height", "width"}),
        (["height"], {"width", "num_frames"}),
        (["resolution", "aspect"], {"num_frames"}),
    ],
)
def test_a_flag_displaces_what_sets_the_same_thing(
    given: list[str], left: set[str], project: Path
) -> None:
    write(project / FILE, "height = 64\nwidth = 96\nnum_frames = 17\n")
    assert set(without_displaced(default_options(None), given)) == left


def test_a_project_displaces_the_users_size(project: Path) -> None:
    write(users(project), "height = 64\nwidth = 96\n")
    write(project / FILE, 'size = "32x32"\n')
    assert values() == {"size": "32x32"}


def test_a_projects_named_size_with_its_aspect_goes_before_the_users(project: Path) -> None:
    write(users(project), 'resolution = "240p"\n')
    write(project / FILE, 'resolution = "360p"\naspect = "16:9"\n')
    assert values() == {"resolution": "360p", "aspect": "16:9"}


def test_variables_that_need_each_other_are_read_together(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERYFRAME_HEIGHT", "320")
    with pytest.raises(InputError, match="EVERYFRAME_HEIGHT: height was given without width"):
        values()
    monkeypatch.setenv("EVERYFRAME_WIDTH", "512")
    assert values() == {"height": 320, "width": 512}


def test_a_table_of_pyproject_is_read(project: Path) -> None:
    write(project / "pyproject.toml", "[tool.everyframe]\nsteps = 3\n")
    with pytest.raises(InputError, match=r"no option 'steps'"):
        read_project_file()
    write(project / "pyproject.toml", "[tool.everyframe]\nnum_inference_steps = 3\n")
    assert values() == {"num_inference_steps": 3}
    write(project / FILE, "num_inference_steps = 4\n")
    assert values() == {"num_inference_steps": 4}


def test_the_folders_above_are_read_within_a_repository_alone(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(project / FILE, "num_inference_steps = 3\n")
    inner = project / "a" / "b"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    assert read_project_file() is None
    (project / ".git").mkdir()
    assert values() == {"num_inference_steps": 3}
    (project / "a" / ".git").mkdir()
    assert read_project_file() is None


def test_files_can_be_switched_off_or_named(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(project / FILE, "num_inference_steps = 3\n")
    write(users(project), "seed = 1\n")
    monkeypatch.setenv("EVERYFRAME_CONFIG", "off")
    assert values() == {}
    monkeypatch.setenv("EVERYFRAME_CONFIG", str(write(project / "own.toml", "seed = 2\n")))
    assert values() == {"num_inference_steps": 3, "seed": 2}
    monkeypatch.setenv("EVERYFRAME_CONFIG", str(project / "none.toml"))
    with pytest.raises(InputError, match="where there is no file"):
        read_user_file()


def test_the_users_file_is_no_projects_by_whatever_path(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its settings would be refused, as those of a project."""
    own = write(project / FILE, "seed = 1\n[settings]\nrun_days = 3\n")
    users(project).parent.parent.symlink_to(project / "dotfiles")
    (project / "dotfiles").mkdir()
    monkeypatch.setenv("EVERYFRAME_CONFIG", str(own))
    assert read_project_file() is None
    assert values() == {"seed": 1}
    monkeypatch.delenv("EVERYFRAME_CONFIG")
    write(users(project), own.read_text())
    monkeypatch.chdir(project / "dotfiles" / "everyframe")
    assert read_project_file() is None
    assert values() == {"seed": 1}


WRONG = [
    ("num_frame = 3", "there is no option 'num_frame'; did you mean 'num_frames'"),
    ("num_frames = 0", "num_frames must be at least 1|num_frames must be more than 0"),
    ("num_frames = true", "num_frames must be a whole number"),
    ("num_frames = 3\nnum-frames = 4", "num_frames is set twice"),
    ("aesthetic = 6", "aesthetic is no option of every model; write it below .models.NAME."),
    ("[models.x]\nmodel = 'y'", "model belongs to one call"),
    ("[models.x]\nwobble = 1", "no option 'wobble'"),
    ("models = 3", "models must be a table"),
    ("[models]\nx = 3", "models.x must be a table"),
    ("a = ", "is not TOML"),
    ("a = " + "[" * 5000, "TOML"),
    ("num_frames = " + "9" * 5000, "TOML|num_frames"),
]


@pytest.mark.parametrize(("text", "says"), WRONG, ids=[says for _, says in WRONG])
def test_what_is_wrong_is_one_line_that_names_the_file(text: str, says: str, project: Path) -> None:
    write(project / FILE, text)
    with pytest.raises(InputError, match=says) as caught:
        default_options(None)
    assert str(caught.value).startswith(str(project / FILE))


def test_what_is_not_text_is_refused(project: Path) -> None:
    (project / FILE).write_bytes(b"a = '\xff'")
    with pytest.raises(InputError, match="not UTF-8"):
        default_options(None)
    (project / FILE).write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(InputError, match="too large"):
        default_options(None)


def test_a_byte_order_mark_is_no_text(project: Path) -> None:
    """Some editors on Windows write one."""
    (project / FILE).write_bytes(b"\xef\xbb\xbfseed = 3\n")
    assert default_options(None)["seed"].value == 3


PERSONS = sorted(
    name
    for name in Request.model_fields
    if facts_of(Request, name)["person_only"]
    and not facts_of(Request, name)["python_only"]
    and not facts_of(Request, name)["call_only"]
)


@pytest.mark.parametrize("name", PERSONS)
def test_a_project_sets_no_option_of_the_machine(name: str, project: Path) -> None:
    write(project / FILE, f'{name} = "2"')
    with pytest.raises(InputError, match=f"{name} is no project's to set"):
        default_options(None)


#: Options that belong to one call: no file and no variable sets them.
OF_A_CALL = {
    "prompt", "image", "last_image", "extend", "latents", "report", "forget_repairs", "force",
    "fast_paths", "quantized", "method", "repairs", "family_options", "trust_remote_code", "option",
    "source", "mask", "control",
}  # fmt: skip


def test_no_file_sets_what_belongs_to_a_call(project: Path) -> None:
    kinds = {"": Request, **all_options()}
    refused = set()
    for kind in kinds.values():
        for name in kind.model_fields:
            write(users(project), f'[models.shapes]\n{name} = "1"')
            try:
                read_user_file()
            except InputError as error:
                if "belongs to one call" in str(error):
                    refused.add(name)
    assert refused == OF_A_CALL | {"model"}


def test_code_of_a_model_is_allowed_by_the_call_alone(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERYFRAME_TRUST_REMOTE_CODE", "1")
    assert values() == {}
    for place in (users(project), project / FILE):
        for head in ("", "[models.shapes]\n"):
            path = write(place, f"{head}trust_remote_code = true")
            with pytest.raises(InputError, match="trust_remote_code belongs to one call"):
                default_options(None)
            path.unlink()


OUTSIDE = [
    'loras = ["../a.safetensors:0.5"]', 'loras = ["/etc/a.safetensors"]',
    'components = {transformer = "../a.gguf"}', 'components = {transformer = "~/a.gguf"}',
    'loras = ["link/a.safetensors"]',
]  # fmt: skip


@pytest.mark.parametrize("text", OUTSIDE)
def test_a_project_names_no_file_outside_of_its_folder(text: str, project: Path) -> None:
    (project / "link").symlink_to(project.parent)
    write(project / FILE, text)
    with pytest.raises(InputError, match="leads out of"):
        default_options(None)


@pytest.mark.parametrize("text", ["../model", "/etc", "somebody/model", "none"])
def test_a_project_names_known_models_and_its_own(text: str, project: Path) -> None:
    (project.parent / "model").mkdir()
    (project / "own").mkdir()
    write(project / FILE, f'model = "{text}"')
    with pytest.raises(InputError, match=r"leads out of|no known model"):
        default_options(None)
    write(project / FILE, 'model = "own"\nloras = ["a.safetensors:0.5"]')
    found = values()
    assert found["model"] == str(project / "own")
    assert [each.file for each in found["loras"]] == [str(project / "a.safetensors")]  # type: ignore[attr-defined]
    # A link that leads to itself is refused where it is opened.
    (project / "a.safetensors").symlink_to("a.safetensors")
    assert values() == found
    write(project / FILE, 'model = "opensora-1.2"')
    assert values()["model"] == "opensora-1.2"


def test_the_users_file_names_what_the_user_likes(project: Path) -> None:
    write(users(project), 'model = "somebody/model"\nmax_memory = "8GB"\ncompiled = "blocks"\n')
    assert values() == {
        "model": "somebody/model", "max_memory": "8GB",
        "compiled": str(users(project).parent / "blocks"),
    }  # fmt: skip


def test_settings_are_of_the_users_file(project: Path) -> None:
    write(users(project), '[settings]\nruns = "runs"\nlog = "info"\nrun_days = 3\n')
    user = read_user_file()
    assert user is not None
    assert user.settings == {
        "runs": str(users(project).parent / "runs"), "log": "info", "run_days": "3",
    }  # fmt: skip
    write(users(project), '[settings]\nrun = "runs"\n')
    with pytest.raises(InputError, match="no setting 'run'; did you mean 'runs'"):
        read_user_file()
    write(project / FILE, '[settings]\nruns = "runs"\n')
    with pytest.raises(InputError, match="of no project's"):
        read_project_file()


def test_a_variable_is_checked_and_an_unknown_one_named(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERYFRAME_COMPILE", "yes")
    assert values() == {"compile": True}
    monkeypatch.setenv("EVERYFRAME_NUM_FRAMES", "many")
    with pytest.raises(InputError, match="EVERYFRAME_NUM_FRAMES: num_frames must be a whole"):
        environment_options()
    monkeypatch.setenv("EVERYFRAME_NUM_FRAME", "3")
    monkeypatch.setenv("EVERYFRAME_TRUST_REMOTE_CODE", "1")
    lines = unknown_variables()
    assert any("EVERYFRAME_NUM_FRAME; did you mean 'EVERYFRAME_NUM_FRAMES'" in e for e in lines)
    assert any("EVERYFRAME_TRUST_REMOTE_CODE" in each for each in lines)


def test_every_variable_that_the_package_reads_is_known() -> None:
    import re

    import everyframe

    source = Path(everyframe.__file__).parent
    read = {
        name
        for file in source.rglob("*.py")
        for name in re.findall(r'"(EVERYFRAME_[A-Z_]+)"', file.read_text(encoding="utf-8"))
    }
    known = {*config_files.SETTINGS.values(), *config_files.OTHER_VARIABLES}
    assert read <= known | {config_files.PREFIX}
