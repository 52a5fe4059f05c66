"""The web page in a browser, by a whole server: each way that a person takes, and what goes wrong.

No test passes with a line in the browser's console or a request to another origin.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from helpers.browser_tabs import Tabs, drop
from helpers.page_server import PageServer

api = pytest.importorskip(
    "playwright.sync_api", reason="needs the extra web-test: pip install 'everyframe[web-test]'"
)
expect = api.expect
expect.set_options(timeout=90_000)
pytestmark = pytest.mark.slow

PROMPT = "a red circle moves to the right on a blue background"
HOSTILE = 'a red circle <img src=x onerror="document.title=1"><script>document.title=2</script>'
#: Steps of a job that lasts until a test ends it.
MANY = 2000


def begin(page: Any, prompt: str = PROMPT, **options: str) -> None:
    """Fill the form and send it."""
    page.get_by_label("What should the video show?").fill(prompt)
    for name, value in options.items():
        page.locator(f"#field-{name}").fill(value)
    page.get_by_role("button", name="Make video").click()


def wait_for_step(page: Any, least: int) -> None:
    """Wait until the job that runs has done that many steps."""
    digits = len(str(least))
    more = rf"step (\d{{{digits + 1},}}|[{str(least)[0]}-9]\d{{{digits - 1}}}) of"
    expect(page.locator(".is-in_progress .doing")).to_contain_text(re.compile(more))


def test_a_video_is_planned_made_and_played(tabs: Tabs) -> None:
    page = tabs.open()
    page.get_by_label("What should the video show?").fill(PROMPT)
    page.get_by_label("Seed", exact=True).fill("7")
    expect(page.locator(".plan-line")).to_contain_text("float32")
    facts = page.locator(".plan-line .fact").all_text_contents()
    assert re.fullmatch(r"time(about \d.*|under a second)", facts[0])
    assert re.fullmatch(r"memory\d+ MB of [\d.]+ GB", facts[1])
    page.get_by_label("Plan").click()
    expect(page.get_by_role("table")).to_contain_text("STDiT denoiser")

    page.get_by_role("button", name="Make video").click()
    job = page.get_by_role("article", name=PROMPT)
    expect(job).to_contain_text(re.compile(r"Waiting|Starting|Denoising"))
    expect(job.get_by_role("progressbar")).to_be_visible()
    card = page.get_by_role("link", name=PROMPT)
    expect(card).to_be_visible()
    expect(job).to_have_count(0)
    expect(page.get_by_role("status").first).to_have_text(f"Ready: {PROMPT}")

    card.hover()
    expect(card.locator(".is-playing video")).to_have_js_property("videoWidth", 64)
    expect(card.locator("video")).not_to_have_js_property("currentTime", 0)
    page.mouse.move(0, 0)
    expect(page.locator(".card video")).to_have_count(0)

    card.click()
    details = page.get_by_role("dialog", name="Video")
    expect(details.get_by_role("definition").filter(has_text="17 frames")).to_be_visible()
    expect(details.locator("video")).to_have_js_property("readyState", 4)
    page.keyboard.press("Escape")
    expect(details).to_be_hidden()
    expect(page).to_have_url(re.compile("#/$"))

    card.click()
    delete = details.get_by_role("button", name="Delete")
    delete.click()
    expect(card).to_have_count(1)
    delete.click()
    expect(card).to_have_count(0)


def test_a_plan_that_does_not_fit_says_why_and_what_would(tabs: Tabs, server: PageServer) -> None:
    page = tabs.open()
    page.get_by_label("What should the video show?").fill(PROMPT)
    page.locator("#field-size").fill("8192x8192")
    page.locator("#field-num_frames").fill("400")
    box = page.locator(".plan.is-refused")
    expect(box.locator(".error")).to_contain_text(
        re.compile(r"not enough memory.* has .* free; the largest that fits is \d+x\d+")
    )
    expect(box.locator(".error")).to_be_visible()  # without a click
    expect(box.get_by_role("table")).to_contain_text("STDiT denoiser")

    page.get_by_role("button", name="Make video").click()
    expect(page.locator("#composer-error")).to_contain_text("not enough memory")
    assert server.ask("/v1/videos")["data"] == []
    page.locator("#field-size").fill("")
    page.locator("#field-num_frames").fill("")
    expect(page.locator(".plan.is-refused")).to_have_count(0)
    expect(page.locator(".plan-line")).to_contain_text("float32")
    tabs.forgive("status of 422")


def test_the_plan_line_names_the_method_of_a_quality(tabs: Tabs) -> None:
    page = tabs.open()
    page.get_by_label("What should the video show?").fill(PROMPT)
    line = page.locator(".plan-line")
    expect(line).to_contain_text("float32")
    expect(line).not_to_contain_text("quality")
    page.get_by_text("More settings").click()
    quality = page.locator("#field-quality")
    quality.fill("taylor1@9")
    expect(line.locator(".fact").last).to_have_text("qualitytaylor1@9")
    quality.fill("<b>500dB</b>")
    expect(page.locator("#field-quality-error")).to_contain_text("20dB to 50dB")
    expect(page.locator("#field-quality-error b")).to_have_count(0)
    tabs.forgive("status of 400")


def test_a_reload_in_the_middle_changes_nothing(tabs: Tabs) -> None:
    page = tabs.open()
    begin(page, num_inference_steps=str(MANY), seed="3")
    wait_for_step(page, 5)
    page.reload()
    wait_for_step(page, 5)
    expect(page.get_by_label("What should the video show?")).to_have_value(PROMPT)
    expect(page.get_by_label("Steps")).to_have_value(str(MANY))
    expect(page.get_by_label("Seed", exact=True)).to_have_value("3")
    expect(page.get_by_role("article")).to_have_count(1)


def test_a_killed_server_comes_back(tabs: Tabs, server: PageServer) -> None:
    page = tabs.open()
    begin(page, num_inference_steps="400")
    wait_for_step(page, 100)  # fast steps are not saved one by one
    server.kill()
    expect(page.locator("#connection")).to_contain_text("No job is lost")
    expect(page.get_by_role("article", name=PROMPT)).to_be_visible()
    server.start()
    expect(page.locator("#connection")).to_be_empty()
    card = page.get_by_role("link", name=PROMPT)
    expect(card).to_be_visible()
    card.click()
    expect(page.get_by_role("dialog", name="Video")).to_contain_text("no step was lost")
    tabs.forgive("ERR_CONNECTION_REFUSED|ERR_INCOMPLETE|ERR_EMPTY|ERR_CONNECTION_RESET")


def test_two_tabs_see_the_same_and_a_cancelled_job_goes_on(tabs: Tabs) -> None:
    first = tabs.open()
    second = tabs.tab(first.context)
    begin(first, num_inference_steps=str(MANY))
    job = second.get_by_role("article", name=PROMPT)
    wait_for_step(second, 20)
    job.get_by_role("button", name="Cancel").click()
    here = first.get_by_role("article", name=PROMPT)
    expect(here).to_contain_text(
        "Cancelled",
    )
    here.get_by_role("button", name="Retry").click()
    wait_for_step(second, 25)
    expect(job).to_contain_text("Resumed")
    job.get_by_role("button", name="Cancel").click()
    expect(here).to_contain_text(
        "Cancelled",
    )
    here.get_by_role("button", name="Remove").click()
    expect(job).to_have_count(0)


def test_a_hostile_prompt_stays_text(tabs: Tabs, server: PageServer) -> None:
    made = server.make_video(HOSTILE, 1, model="shapes")
    page = tabs.open()
    card = page.get_by_role("link", name=HOSTILE)
    expect(card.locator(".card-prompt")).to_have_text(HOSTILE)
    page.goto(f"{server.url}/#/video/{made}")
    expect(page.locator("#details h2")).to_have_text(HOSTILE)
    page.keyboard.press("Escape")
    server.create(HOSTILE, model="shapes", num_inference_steps=MANY)
    expect(page.get_by_role("article").locator("h3")).to_have_text(HOSTILE)
    drop(page, b"no video", f"{HOSTILE}.txt", "text/plain")
    expect(page.locator(".message")).to_contain_text(f"{HOSTILE}.txt is neither")
    begin(page, HOSTILE)
    expect(page.locator("#prompt-error")).to_contain_text("can't draw")
    assert page.locator("[onerror], body script").count() == 0
    assert "Everyframe" in page.title()
    tabs.forgive("status of 400")


def test_settings_are_reused(tabs: Tabs, server: PageServer) -> None:
    made = server.make_video(PROMPT, 41, num_inference_steps=4, guidance_scale=2.5)
    file = server.ask(f"/v1/videos/{made}/content")
    page = tabs.open()
    prompt, seed = page.get_by_label("What should the video show?"), page.locator("#field-seed")
    expect(page.get_by_label("Steps")).to_be_visible()
    drop(page, file, "ours.mp4", "video/mp4")
    expect(prompt).to_have_value(PROMPT)
    for label, value in {"Seed": "41", "Steps": "4", "Guidance": "2.5"}.items():
        expect(page.get_by_label(label, exact=True)).to_have_value(value)

    page.get_by_role("button", name="Clear").click()
    expect(prompt).to_have_value("")
    # The boxes before it, and one whose size has 64 bits, as large files have it.
    wide = (1).to_bytes(4, "big") + b"free" + (20).to_bytes(8, "big") + b"1234"
    drop(page, file[:32] + wide + file[32:], "moved.mp4", "video/mp4")
    expect(seed).to_have_value("41")

    page.get_by_role("link", name=PROMPT).click()
    page.get_by_role("button", name="Another seed").click()
    expect(seed).to_have_value("")
    expect(prompt).to_have_value(PROMPT)


def test_pictures_and_foreign_videos_are_taken_as_given_frames(
    tabs: Tabs, server: PageServer
) -> None:
    made = server.make_video(PROMPT, 5)
    file = server.ask(f"/v1/videos/{made}/content")
    picture = server.ask(f"/v1/videos/{made}/content?variant=thumbnail")
    page = tabs.open()
    expect(page.locator(".slot")).to_have_count(3)
    drop(page, picture, "cat.webp", "image/webp")
    expect(page.locator(".slot.is-filled")).to_have_text("cat.webp")
    page.get_by_role("button", name="Remove: first frame").click()
    drop(page, file.replace(b"everyframe.record", b"somebodys.record."), "cat.mp4", "video/mp4")
    expect(page.locator(".slot.is-filled")).to_have_text("cat.mp4")
    page.get_by_role("button", name="Remove: extend a video").click()

    page.get_by_role("link", name=PROMPT).click()
    page.get_by_role("button", name="Start from its last frame").click()
    expect(page.locator(".slot.is-filled")).to_contain_text("last frame")
    begin(page)
    expect(page.get_by_role("link", name=PROMPT)).to_have_count(2)


def test_wrong_settings_are_named_at_their_field(tabs: Tabs) -> None:
    page = tabs.open()
    page.get_by_label("What should the video show?").fill(PROMPT)
    size = page.get_by_label("Size")
    size.fill("huge")
    expect(page.locator("#field-size-error")).to_contain_text("WIDTHxHEIGHT")
    expect(size).to_have_attribute("aria-invalid", "true")
    size.fill("")
    expect(page.locator("#field-size-error")).to_be_hidden()
    expect(page.locator(".plan-line")).to_contain_text("float32")
    page.get_by_label("Steps").fill("-3")
    page.get_by_role("button", name="Make video").click()
    expect(page.locator("#field-num_inference_steps-error")).to_be_visible()
    expect(page.get_by_role("article")).to_have_count(0)
    tabs.forgive("status of 400")


def test_the_keyboard_is_enough(tabs: Tabs) -> None:
    page = tabs.open(reduced_motion="reduce")
    expect(page.get_by_label("Steps")).to_be_visible()

    def go(selector: str) -> None:
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate("selector => document.activeElement.matches(selector)", selector):
                return
        raise AssertionError(f"the Tab key does not reach {selector}")

    go("#prompt")
    page.keyboard.type(PROMPT)
    page.keyboard.press("Control+Enter")
    expect(page.get_by_role("link", name=PROMPT)).to_be_visible()
    go(".card")
    assert page.locator(".card video").count() == 0, "who wants no motion gets none"
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Video")
    expect(dialog).to_be_visible()
    assert page.evaluate("document.querySelector('#details video').paused")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    assert page.evaluate("document.activeElement.matches('.card')"), "focus comes back"


def test_a_screen_reader_hears_every_control(tabs: Tabs, server: PageServer) -> None:
    server.make_video(PROMPT, 2)
    page = tabs.open()
    expect(page.get_by_role("link", name=PROMPT)).to_be_visible()
    page.locator(".more-settings summary").click()
    nameless = """() => [...document.querySelectorAll("button, input, select, textarea, a[href]")]
        .filter((each) => each.checkVisibility() && !each.labels?.length
            && !each.getAttribute("aria-label") && !each.textContent.trim())
        .map((each) => each.outerHTML)"""
    assert page.evaluate(nameless) == []
    snapshot = page.locator("body").aria_snapshot()
    for line in ("banner", "navigation", 'form "New video"', 'heading "Videos"', "status"):
        assert line in snapshot, line
    page.get_by_role("link", name=PROMPT).click()
    assert page.evaluate(nameless) == []


def test_the_doctor_is_asked(tabs: Tabs) -> None:
    page = tabs.open("/#/machine")
    expect(page.locator(".system")).to_contain_text("Everyframe")
    expect(page.locator(".verdict")).to_contain_text("Ready")
    expect(page.get_by_text(re.compile(r"\d+ checks are fine"))).to_be_visible()
