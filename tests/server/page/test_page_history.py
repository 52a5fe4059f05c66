"""The pages of older videos, without a browser: each video is shown once, and none is left out."""

from __future__ import annotations

from pathlib import Path

from helpers.page_modules import needs_node, run_page_script

pytestmark = needs_node

#: A server's videos as `server`, the newest first, all of one second; ids are in no order.
SERVER = """
const { Videos } = await import("./static/videos.js");
const idOf = (number) => `video_${(number * 7919) % 1000}`;
const made = (number, created_at = 100) => ({ id: idOf(number), status: "completed", created_at });
const some = (least, most) => Array.from({ length: most - least }, (_, at) => made(most - 1 - at));
let server = some(0, 200);
let during = () => {};
globalThis.fetch = async (address) => {
  const { pathname, searchParams } = new URL(address);
  const after = searchParams.get("after");
  const place = after === null ? -1 : server.findIndex(({ id }) => id === after);
  const answer = (status, body) => ({ ok: status === 200, status, json: async () => body });
  if (after !== null && place < 0) return answer(400, { error: { message: "no", param: "after" } });
  const last = pathname.split("/").at(-1);
  if (last !== "videos") return answer(200, server.find(({ id }) => id === last));
  const data = server.slice(place + 1, place + 61);
  const found = answer(200, { data, has_more: place + 61 < server.length });
  during();
  return found;
};
const videos = new Videos();
const loadAll = async () => {
  for (let pages = 0; videos.hasMore && pages < 20; pages += 1) await videos.loadMore();
};
const same = () => {
  const shown = videos.list.map(({ id }) => id).sort();
  return JSON.stringify(shown) === JSON.stringify(server.map(({ id }) => id).sort());
};
"""


def run(tmp_path: Path, script: str) -> object:
    """The value that a script has put into `result`."""
    return run_page_script(tmp_path, f"{SERVER} let result; {script}", "result")


def test_older_pages_stay_when_the_newest_is_loaded_again(tmp_path: Path) -> None:
    """It is whenever the connection is lost, and each ten seconds in a hidden tab."""
    script = """
        await videos.load(); await videos.loadMore();
        await videos.load();
        const before = videos.list.length;
        await loadAll();
        result = [before, videos.list.length, same()];
    """
    assert run(tmp_path, script) == [120, 200, True]


def test_a_video_that_was_opened_by_its_address_leaves_no_gap(tmp_path: Path) -> None:
    script = """
        server.find(({ id }) => id === idOf(3)).created_at = 1;
        await videos.load(); await videos.refresh(idOf(3));
        await videos.load(); await loadAll();
        result = [videos.get(idOf(3)) !== undefined, same()];
    """
    assert run(tmp_path, script) == [True, True]


def test_many_new_videos_leave_no_gap(tmp_path: Path) -> None:
    script = """
        await videos.load(); await videos.loadMore();
        server = some(0, 300);
        await videos.load();
        await loadAll();
        result = same();
    """
    assert run(tmp_path, script) is True


def test_videos_that_are_deleted_meanwhile_go(tmp_path: Path) -> None:
    """Among the newest at once; a page after a deleted one begins after the one before it."""
    script = """
        await videos.load(); await videos.loadMore();
        server = some(85, 195);
        await videos.load();
        const shown = videos.list.length;
        await loadAll();
        server = server.filter(({ id }) => id !== idOf(190));
        await videos.load();
        const all = videos.get(idOf(190));
        server = some(90, 100);
        await videos.load();
        result = [shown, videos.hasMore, all === undefined, same()];
    """
    assert run(tmp_path, script) == [115, False, True, True]


def test_a_page_that_arrives_after_another_load_is_asked_for_again(tmp_path: Path) -> None:
    script = """
        await videos.load();
        during = () => { during = () => {}; server = some(0, 300); };
        await Promise.all([videos.loadMore(), videos.load()]);
        await loadAll();
        result = same();
    """
    assert run(tmp_path, script) is True


def test_a_clock_that_is_set_back_hides_nothing(tmp_path: Path) -> None:
    script = """
        server = [...Array.from({ length: 70 }, (_, at) => made(269 - at, 50)), ...some(0, 200)];
        await videos.load(); await loadAll();
        await videos.load();
        result = same();
    """
    assert run(tmp_path, script) is True
