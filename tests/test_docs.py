"""What README and docs tell people to type works; links lead somewhere; made pages are current."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest

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
def readers(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Reader]:
    env = environment(ROOT / "src", tmp_path_factory.mktemp("bin"))
    return {
        page: Reader(blocks, tmp_path_factory.mktemp("page"), env)
        for page, blocks in BLOCKS.items()
    }


#: Pages whose commands take half a minute and more.
LONG = ("fast-paths.md", "trace.md", "devices.md", "tutorial.md")


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


def test_made_pages_are_up_to_date() -> None:
    for page, make in load_generator().PAGES.items():
        assert page.read_text(encoding="utf-8") == make(), "run `make docs`"


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
