"""What README and docs tell people to type works; links lead somewhere; made pages are current."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from everyframe.engine.workers.worker_start import IN_PROCESS
from helpers.architecture_rules import ROOMS
from helpers.docs_blocks import COMMANDS, Block, Reader, blocks_of, environment, plain_programs

ROOT = Path(__file__).parent.parent
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("recipes/**/*.md")),
]
BLOCKS = {page: blocks_of(page, page.read_text(encoding="utf-8")) for page in PAGES}
TO_RUN = [block for blocks in BLOCKS.values() for block in blocks if block.language in COMMANDS]


def label(block: Block) -> str:
    """``README.md:12``."""
    return f"{block.page.relative_to(ROOT)}:{block.line}"


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Path, Reader]]:
    env = environment(ROOT / "src", tmp_path_factory.mktemp("bin"))
    with_workers = {name: value for name, value in env.items() if name != IN_PROCESS}
    made = {
        page: Reader(
            blocks,
            tmp_path_factory.mktemp("page"),
            with_workers if page.name == "tutorial.md" else env,  # its last command has two ranks
        )
        for page, blocks in BLOCKS.items()
    }
    yield made
    for reader in made.values():
        reader.close()


#: Pages whose commands take longest. What they do has tests of its own in the fast set.
LONG = ("cluster.md", "config.md", "devices.md", "fast-paths.md", "previews.md", "quality.md",
        "trace.md", "tutorial.md", "warm-engine.md")  # fmt: skip


@pytest.mark.parametrize(
    "block",
    [pytest.param(b, marks=[pytest.mark.slow] if b.page.name in LONG else []) for b in TO_RUN],
    ids=label,
)
def test_block_runs(block: Block, readers: dict[Path, Reader]) -> None:
    if block.not_run:
        pytest.skip(block.not_run)
    readers[block.page].read_to(block)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    own = [link.split("#")[0] for link in links if "://" not in link and not link.startswith("#")]
    broken = [link for link in own if not (page.parent / link).exists()]
    assert not broken


def load_generator() -> ModuleType:
    """``docs/generate.py`` as a module."""
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


#: Words of our own that the field has other words for; see the glossary.
OLD_WORDS = re.compile(
    r"\b(gone on with|goes on with|broken off|by turns|of whom|what is told|mends?|troubles?)\b"
)


def strings_of(source: str) -> list[str]:
    """Text in the code that is no docstring: messages, notes, help."""
    nodes = list(ast.walk(ast.parse(source)))
    docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = [n for n in nodes if isinstance(n, ast.Constant) and id(n) not in docs]
    return [node.value for node in texts if isinstance(node.value, str)]


def test_messages_and_pages_speak_the_fields_words() -> None:
    history = {ROOT / "CHANGELOG.md", ROOT / "docs" / "reference" / "exit-codes.md"}
    texts = {page: [page.read_text(encoding="utf-8")] for page in PAGES if page not in history}
    for file in (ROOT / "src").rglob("*.py"):
        texts[file] = strings_of(file.read_text(encoding="utf-8"))
    found = [(file.name, each[0]) for file, all_ in texts.items() for text in all_
             for each in OLD_WORDS.finditer(text)]  # fmt: skip
    assert not found


def test_an_old_word_in_a_message_is_found() -> None:
    source = '"By turns."\nraise ValueError(f"{run} is broken off")'
    assert strings_of(source) == [" is broken off"]
    assert OLD_WORDS.search(" is broken off")


#: Where a file that a page names by its path is looked for.
BASES = (ROOT, ROOT / "src" / "everyframe", ROOT / "docs")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_are_there(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return  # it names files of earlier versions
    named = re.findall(
        r"`((?:[a-z_]+/)+\w+\.(?:py|yaml|json|md))\b", page.read_text(encoding="utf-8")
    )
    missing = [each for each in named if not any((base / each).exists() for base in BASES)]
    assert not missing


@pytest.fixture(scope="module")
def generator() -> Iterator[ModuleType]:
    """`docs/generate.py`, which imports the modules beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")
        yield load_generator()


PAGES_MADE = ("options.md", "api.md", "events.md", "exit-codes.md", "known-issues.md")
DRAWN = ("packages", "request", "guard", "tokens", "memory", "plan", "doctor")
MADE = (
    *(f"reference/{name}" for name in (*PAGES_MADE, "doctor.schema.json", "openapi.json")),
    *(f"pictures/{name}.svg" for name in DRAWN),
    "../src/everyframe/__init__.pyi",
    "man/everyframe.1",
    "gallery.md",
    "reference/machines.md",
    "reference/cards/README.md",
)


#: Pages of many plans, which take seconds each.
PLANNED = tuple(f"reference/cards/{make}.md" for make in ("cpu", "nvidia", "amd", "apple"))


@pytest.mark.parametrize(
    "name", [*MADE, *(pytest.param(name, marks=pytest.mark.slow) for name in PLANNED)]
)
def test_a_made_page_or_picture_is_up_to_date(name: str, generator: ModuleType) -> None:
    page = Path(os.path.normpath(ROOT / "docs" / name))
    assert page.read_text(encoding="utf-8") == generator.PAGES[page](), "run `make docs`"


def test_each_made_page_and_picture_is_compared(generator: ModuleType) -> None:
    compared = {Path(os.path.normpath(ROOT / "docs" / name)) for name in (*MADE, *PLANNED)}
    assert compared == {Path(os.path.normpath(page)) for page in generator.PAGES}


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_the_manual_page_is_read_without_a_warning() -> None:
    page = str(ROOT / "docs" / "man" / "everyframe.1")
    done = subprocess.run(["groff", "-man", "-ww", "-Tutf8", page], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "everyframe generate" in re.sub("(.)\b\\1|_\b", r"\1", done.stdout)


@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/pictures/*")), ids=lambda path: path.name)
def test_a_picture_is_small_shown_and_readable_in_the_dark(path: Path) -> None:
    assert path.stat().st_size < 80_000
    assert any(f"pictures/{path.name})" in page.read_text(encoding="utf-8") for page in PAGES)
    if path.suffix == ".svg":
        text = path.read_text(encoding="utf-8")
        assert ElementTree.fromstring(text).find("{http://www.w3.org/2000/svg}title") is not None
        assert "prefers-color-scheme:dark" in text
        assert not re.search(r"(href|src|url)\b", text), "it fetches nothing"


def test_the_site_has_every_page() -> None:
    """`make site` fails otherwise, where mkdocs is installed."""
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")}
    assert pages == set(re.findall(r"[\w/-]+\.md", config))


def test_the_architecture_page_lists_every_package_in_order(generator: ModuleType) -> None:
    assert tuple(generator.diagrams.packages()) == ROOMS


PAGE = """# Title

```sh
echo 1 > made
```

<!-- not run: it would take an hour -->
```sh
exit 1
```

```text
exit 1
```

```python
assert open("made").read() == "1\\n"
```
"""


def read_all(text: str, folder: Path) -> list[Block]:
    """Read a page to its last block that is run."""
    blocks = blocks_of(Path("page.md"), text)
    reader = Reader(blocks, folder, environment(ROOT / "src", folder / "bin"))
    reader.read_to(blocks[-1])
    return blocks


def test_blocks_are_found_and_run_in_order(tmp_path: Path) -> None:
    blocks = read_all(PAGE, tmp_path)
    assert [block.language for block in blocks] == ["sh", "sh", "text", "python"]
    assert [block.line for block in blocks] == [4, 9, 13, 17]
    assert [block.not_run for block in blocks] == [None, "it would take an hour", None, None]


def test_python_of_the_tutorial_is_one_session(tmp_path: Path) -> None:
    text = "```python\nx = 1\n```\n\n```sh\ntrue\n```\n\n```python\nassert x == 1\n```\n"
    for name, fails in (("tutorial.md", False), ("page.md", True)):
        blocks = blocks_of(Path(name), text)
        reader = Reader(blocks, tmp_path, environment(ROOT / "src", tmp_path / "bin"))
        with pytest.raises(AssertionError, match="NameError") if fails else nullcontext():
            reader.read_to(blocks[-1])


@pytest.mark.parametrize(
    "block",
    ["```sh\nfalse\ntrue\n```", "```sh\necho $not_there\n```", "```python\nassert False\n```"],
)
def test_a_failing_block_is_seen(block: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="exit status"):
        read_all(block, tmp_path)


def test_a_command_is_run_by_a_shell_where_it_needs_one() -> None:
    def programs(text: str) -> object:
        (block,) = blocks_of(Path("page.md"), f"```sh\n{text}\n```")
        return plain_programs(block)

    assert programs('everyframe plan "a b" -o x.mp4\neveryframe models') == [
        ["plan", "a b", "-o", "x.mp4"], ["models"],
    ]  # fmt: skip
    for text in ("everyframe models | head", "ls", 'everyframe inspect "$FILE"', "everyframe x &"):
        assert programs(text) is None


@pytest.mark.parametrize("text", ["everyframe plan ''", "everyframe nothing"])
def test_a_command_of_ours_that_fails_is_seen(text: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"exit status 2(.|\n)*error: "):
        read_all(f"```sh\n{text}\n```", tmp_path)


@pytest.mark.parametrize("block", ["```\nls\n```", "```bash\nls\n```", "```sh\nls"])
def test_a_block_that_nobody_would_run_is_an_error(block: str) -> None:
    with pytest.raises(ValueError, match=r"page\.md:1"):
        blocks_of(Path("page.md"), block)


def test_a_reason_is_needed_to_leave_a_block_out() -> None:
    (block,) = blocks_of(Path("page.md"), "<!-- not run: -->\n```sh\nls\n```")
    assert block.not_run is None


def test_the_command_is_ours(tmp_path: Path) -> None:
    env = environment(ROOT / "src", tmp_path / "bin")
    assert shutil.which("everyframe", path=env["PATH"]) == str(tmp_path / "bin" / "everyframe")
