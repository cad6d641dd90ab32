"""The page at `/` in a real browser: the fleet live, a playground, by keyboard, in light and dark, on a phone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

pytest.importorskip("playwright")

from playwright.async_api import Browser, Page, expect

from cluster.answers.maker import AnswerMaker, Service
from cluster.api_settings import ApiSettings
from cluster.models import Models, single
from cluster.web.api import create_app
from cluster.web.debug_views import RollCall, View
from tests.browser import CONTRAST, UNLABELLED, chromium, looking_at, needs_chromium
from tests.fake_fleet import FakeFleet
from tests.fleet_reports import reports
from tests.http_desk import MODEL, TEXT, desk, says
from tests.listening import eventually, listening
from tests.tiny_text import EOS

pytestmark = [needs_chromium, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

ROOMY = replace(MODEL, context=4096, capacity=4096)
SPANS = [{"owner": "1", "num_bins": 20}, {"owner": "2", "num_bins": 30}, {"owner": "cached", "num_bins": 25}]


def pool_view() -> View:
    sequence = {"request": 1, "index": 0, "phase": "decoding", "tenant": "", "sequence": 1, "num_prompt": 12}
    sequences = [
        sequence | {"request": n, "sequence": n, "num_tokens": 20, "num_computed": 19, "num_cells": 19} for n in (1, 2)
    ]
    kv = {"capacity": 100, "map": [*SPANS, {"owner": "free", "num_bins": 25}], "adds_up": True}
    return {"worker": "w1", "kv": kv, "num_sequences": 40, "sequences": sequences, "limits": {}, "steps": []}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as made:
        yield made


@asynccontextmanager
async def service(
    fleet: FakeFleet, may_tell: asyncio.Event | None = None, silent: tuple[str, ...] = (), **settings: Any
) -> AsyncIterator[str]:
    """Workers tell of their pools once they may, but for the silent ones."""

    async def inspect(_num_steps: int) -> RollCall:
        if may_tell is not None:
            await may_tell.wait()
        return RollCall([pool_view()], list(silent))

    app = create_app(single(Service(fleet, TEXT, ApiSettings(**settings), inspect=inspect)))
    async with listening(app) as url:
        yield url


async def no_view(_num_steps: int) -> RollCall:
    return RollCall([], [])


def fleet_that(script: Any = None) -> FakeFleet:
    return FakeFleet(ROOMY, script or says("hi there you", "hello"), reports=reports())


async def test_the_fleet_is_there_with_its_cells_sequences_and_figures(browser: Browser) -> None:
    async with service(fleet_that()) as url, looking_at(browser, url) as (page, wrong):
        await expect(page.get_by_role("heading", name="w1")).to_be_visible()
        await expect(page.get_by_role("heading", name="w2")).to_be_visible()
        await expect(page.locator("#state")).to_have_text("ready")
        await expect(page.locator("#figures")).to_contain_text("Running3")
        await expect(page.locator("#figures")).to_contain_text("40 %")
        await expect(page.locator("[data-worker=w1]")).to_contain_text("25 % of 100 cells owned")
        await expect(page.locator("[data-worker=w1] tbody tr")).to_have_count(3)
        await expect(page.locator("[data-worker=w1]")).to_contain_text("and 38 more")
        await expect(page.locator("[data-worker=w2]")).to_contain_text("draining")
        colours = await page.locator("[data-worker=w1] canvas").evaluate(
            "map => { const data = map.getContext('2d').getImageData(0, 0, map.width, map.height).data;"
            " const seen = new Set(); for (let i = 0; i < data.length; i += 4)"
            " if (data[i + 3]) seen.add(data.slice(i, i + 3).join()); return seen.size }"
        )
        assert colours == len(SPANS) + 1
        assert wrong == []


async def test_a_worker_that_hangs_holds_nothing_up_and_is_told(browser: Browser) -> None:
    may_tell = asyncio.Event()
    fleet = fleet_that()
    async with service(fleet, may_tell, ("w2",)) as url, looking_at(browser, url) as (page, wrong):
        await expect(page.locator("#figures")).to_contain_text("Running3")
        await expect(page.locator("[data-worker=w1]")).to_contain_text("3 running")
        await expect(page.locator("tbody tr")).to_have_count(0)
        may_tell.set()
        await expect(page.locator("[data-worker=w2]")).to_contain_text("does not answer; draining")
        await expect(page.locator("[data-worker=w1]")).not_to_contain_text("does not answer")
        await expect(page.locator("[data-worker=w1] tbody tr")).to_have_count(3)
        assert wrong == []


async def test_a_conversation_by_keyboard_with_two_answers_goes_on_with_the_chosen_one(browser: Browser) -> None:
    fleet = fleet_that()
    async with service(fleet) as url, looking_at(browser, url) as (page, wrong):
        await expect(page.locator("#state")).to_have_text("ready")
        await page.keyboard.press("Tab")
        await page.keyboard.press("Enter")  # the link that skips to the playground
        await page.keyboard.type("hello")
        await page.get_by_label("Answers").fill("2")
        await page.get_by_label("Message").press("Control+Enter")
        answers = page.locator(".answer p")
        await expect(answers).to_have_text(["hi there you", "hello"])
        await expect(page.locator(".answer footer").first).to_contain_text("stop")
        await expect(page.locator("#timing")).to_contain_text("tokens in")
        second = page.get_by_role("button", name="Go on with this").nth(1)
        await second.focus()
        await page.keyboard.press("Space")
        await expect(page.locator(".answer").nth(1)).to_have_attribute("aria-current", "true")
        await page.get_by_label("Answers").fill("1")
        await page.get_by_label("Message").fill("you")
        await page.get_by_label("Message").press("Control+Enter")
        await eventually(lambda: len(fleet.requests) == 2)
        said = TEXT.decode(fleet.requests[1].prompt.tolist())
        assert said.index("hello") < said.rindex("hello") < said.index("you")
        assert "hi there" not in said
        assert wrong == []


async def test_of_several_models_one_is_chosen_and_another_begins_a_new_conversation(browser: Browser) -> None:
    small, large = fleet_that(says("hi there you")), FakeFleet(replace(ROOMY, name="large"), says("hello", "you"))
    services = [
        Service(fleet, TEXT, ApiSettings(served_model_names=(name,)), inspect=no_view)
        for name, fleet in (("tiny", small), ("large", large))
    ]
    app = create_app(Models([AnswerMaker(each) for each in services]))
    async with listening(app) as url, looking_at(browser, url) as (page, wrong):
        await expect(page.locator("#model")).to_be_hidden()
        choice = page.get_by_label("Model", exact=True)
        await expect(choice.locator("option")).to_have_text(["tiny", "large"])
        await expect(page.get_by_role("heading", name="w1: tiny")).to_be_visible()
        await page.get_by_label("Message").fill("hello")
        await page.get_by_label("Message").press("Control+Enter")
        await expect(page.locator(".answer p")).to_have_text("hi there you")
        await choice.select_option("large")
        await expect(page.locator(".answer")).to_have_count(0)
        await page.get_by_label("Message").fill("you")
        await page.get_by_label("Message").press("Control+Enter")
        await expect(page.locator(".answer p")).to_have_text("hello")
        assert (len(small.requests), len(large.requests)) == (1, 1)
        await page.locator(".token[role=button]").first.click()
        await eventually(lambda: len(large.requests) == 2)  # a fork is the chosen model's, too
        assert wrong == []
        assert await page.evaluate(UNLABELLED) == []


async def test_one_model_is_told_and_not_chosen(browser: Browser) -> None:
    async with service(fleet_that()) as url, looking_at(browser, url) as (page, wrong):
        await expect(page.locator("#model")).to_have_text("tiny")
        await expect(page.get_by_label("Model", exact=True)).to_be_hidden()
        assert wrong == []


async def test_stop_ends_what_runs_on_the_worker(browser: Browser) -> None:
    fleet = fleet_that()
    fleet.gate.clear()
    async with service(fleet) as url, looking_at(browser, url) as (page, wrong):
        await expect(page.locator("#state")).to_have_text("ready")
        await page.get_by_label("Message").fill("hello")
        await page.get_by_role("button", name="Send").click()
        await eventually(lambda: fleet.num_running == 1)
        await page.get_by_role("button", name="Stop").click()
        await eventually(lambda: fleet.num_running == 0)
        await expect(page.locator(".answer footer")).to_contain_text("stopped")
        await expect(page.get_by_role("button", name="Send")).to_be_enabled()
        assert wrong == []


async def test_what_a_model_says_never_becomes_markup(browser: Browser) -> None:
    evil = "<img src=x onerror=document.title=1>"
    async with service(fleet_that(says(evil))) as url, looking_at(browser, url) as (page, wrong):
        await expect(page.locator("#state")).to_have_text("ready")
        await page.get_by_label("Message").fill(evil)
        await page.get_by_role("button", name="Send").click()
        await expect(page.locator(".answer footer")).to_contain_text("stop")
        assert await page.locator("#talk img").count() == 0
        assert await page.title() == "Raycomb"
        assert wrong == []


async def test_a_clicked_token_is_forked_at_through_sessions(browser: Browser) -> None:
    first, then = TEXT.encode("hi there you"), TEXT.encode("hello")
    fleet = fleet_that(lambda _request, _index: [*(then if len(fleet.generations) > 1 else first), EOS])
    async with service(fleet) as url, looking_at(browser, url) as (page, wrong):
        await expect(page.locator("#forking")).to_contain_text("Choose a token")
        await page.get_by_label("Message").fill("hello")
        await page.get_by_role("button", name="Send").click()
        await expect(page.locator(".answer footer")).to_contain_text("stop")
        asked = fleet.requests[0].prompt.tolist()

        token = page.get_by_label("Tokens of Answer 1", exact=True).get_by_role("button").nth(1)
        at = int(await token.get_attribute("data-at") or 0)
        await token.click()  # an answer of a chat has no session: a new one gets its tokens
        fork = page.get_by_label(f"Fork of Answer 1 at token {at + 1}", exact=True)
        await expect(fork).to_have_attribute("aria-current", "true")
        assert fleet.requests[1].prompt.tolist() == [*asked, *first[:at]]
        assert await fork.locator("p").text_content() == TEXT.decode(first[:at]) + "hello"
        assert "".join(await fork.locator(".kept").all_text_contents()) == TEXT.decode(first[:at])

        await fork.get_by_role("button").first.focus()  # by keyboard, in an answer that has a session
        await page.keyboard.press("ArrowRight")
        focused = page.locator(".token:focus")
        deeper = int(await focused.get_attribute("data-at") or 0)
        await page.keyboard.press("Enter")
        await expect(page.locator(".answer[aria-current=true]")).to_have_count(1)
        await eventually(lambda: len(fleet.requests) == 3)
        assert fleet.requests[2].prompt.tolist() == [*asked, *first[:at], *then][: len(asked) + deeper]
        await expect(page.locator(".answer")).to_have_count(3)

        listed = await page.request.get(f"{url}v1/sessions")
        assert [card["position"] for card in (await listed.json())["data"]] != []
        await page.get_by_role("button", name="New conversation").click()
        await eventually(lambda: no_sessions(page, url))
        assert wrong == []


async def no_sessions(page: Page, url: str) -> bool:
    return (await (await page.request.get(f"{url}v1/sessions")).json())["data"] == []


async def test_a_service_without_sessions_says_why_nothing_forks(browser: Browser) -> None:
    async with service(fleet_that(), max_sessions=0) as url, looking_at(browser, url) as (page, wrong):
        await expect(page.locator("#forking")).to_contain_text("this service keeps no sessions")
        await page.get_by_label("Message").fill("hello")
        await page.get_by_role("button", name="Send").click()
        await expect(page.locator(".answer footer")).to_contain_text("stop")
        assert await page.locator(".answer p [role=button]").count() == 0
        assert [text for text in wrong if "400" not in text] == []  # a browser tells of the one refusal


async def test_choosing_an_answer_of_an_earlier_round_forgets_what_came_after(browser: Browser) -> None:
    fleet = fleet_that()
    async with service(fleet) as url, looking_at(browser, url) as (page, wrong):
        await expect(page.locator("#state")).to_have_text("ready")
        await page.get_by_label("Answers").fill("2")
        for said in ("hello", "you"):
            await page.get_by_label("Message").fill(said)
            await page.get_by_role("button", name="Send").click()
            await expect(page.get_by_label("Message")).to_have_value("")
        await expect(page.locator("#talk > li")).to_have_count(4)
        await page.get_by_role("button", name="Go on with this").nth(1).click()
        await expect(page.locator("#talk > li")).to_have_count(2)
        await expect(page.locator(".answer").nth(1)).to_have_attribute("aria-current", "true")
        assert wrong == []


async def test_a_refusal_is_told_in_words(browser: Browser) -> None:
    async with service(fleet_that()) as url, looking_at(browser, url) as (page, _):
        await expect(page.locator("#state")).to_have_text("ready")
        await page.get_by_label("Most tokens").fill("9999")
        await page.get_by_label("Message").fill("hello")
        await page.get_by_role("button", name="Send").click()
        await expect(page.get_by_role("alert")).to_contain_text("4096")


async def test_a_service_with_keys_asks_for_one_and_then_opens(browser: Browser) -> None:
    async with service(fleet_that(), api_keys=("k",)) as url, looking_at(browser, url) as (page, _):
        await expect(page.locator("#state")).to_have_text("a key is needed")
        await page.get_by_label("This service has keys").fill("k")
        await page.keyboard.press("Enter")
        await expect(page.locator("#state")).to_have_text("ready")
        await expect(page.locator("#key-form")).to_be_hidden()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360], ids=["desk", "phone"])
async def test_every_text_can_be_read_and_nothing_hangs_over(
    browser: Browser, tmp_path: Path, width: int, dark: bool
) -> None:
    async with service(fleet_that()) as url, looking_at(browser, url, width=width, dark=dark) as (page, wrong):
        await expect(page.locator("#state")).to_have_text("ready")
        await page.get_by_label("Answers").fill("2")
        await page.get_by_label("Message").fill("hello")
        await page.get_by_role("button", name="Send").click()
        await expect(page.locator(".answer footer").nth(1)).to_contain_text("stop")
        await page.locator(".token[role=button]").nth(1).click()
        await expect(page.locator(".answer footer").nth(2)).to_contain_text("stop")
        assert await page.evaluate(CONTRAST) == []
        assert await page.evaluate(UNLABELLED) == []
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        shot = tmp_path / "page.png"
        await page.screenshot(path=shot, full_page=True)
        assert shot.stat().st_size > 10_000
        assert wrong == []


async def test_the_check_of_contrast_sees_a_poor_one(browser: Browser) -> None:
    async with service(fleet_that()) as url, looking_at(browser, url) as (page, _):
        await page.locator("h1").evaluate("title => { title.style.color = '#999'; title.style.background = '#aaa' }")
        assert any(poor.startswith("H1 Raycomb") for poor in await page.evaluate(CONTRAST))


async def test_the_page_needs_no_key_and_takes_nothing_from_elsewhere() -> None:
    async with desk(api_keys=("k",)) as d:
        index = await d.http.get("/")
        files = [part.partition('"')[0] for part in index.text.split('="page/')[1:]]
        answers: list[httpx.Response] = [index, *[await d.http.get(f"/page/{name}") for name in files]]
        assert (await d.http.get("/page/other.js")).status_code in (401, 404)
    assert len(answers) >= 4
    for answer in answers:
        assert answer.status_code == 200
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "http://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in answer.text
