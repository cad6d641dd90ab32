"""The page against the real service with a real model: what an operator and a newcomer see.

`--keep-screenshots FOLDER` keeps the pictures; those in docs/images are made so.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("playwright")

from playwright.async_api import Page, expect

from tests.browser import chromium, looking_at, needs_chromium
from tests.service_process import ServiceProcess

pytestmark = [needs_chromium, pytest.mark.cluster, pytest.mark.model, pytest.mark.timeout(480)]

PATIENCE_MS = 90_000


@pytest.fixture
def pictures(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    kept = request.config.getoption("--keep-screenshots")
    folder = tmp_path if kept is None else Path(kept)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


async def talk(page: Page, key: str) -> None:
    """Open the service with its key, and ask for two answers, longer than a few looks at the fleet; ends meanwhile."""
    await page.get_by_label("This service has keys").fill(key)
    await page.keyboard.press("Enter")
    await expect(page.locator("#state")).to_have_text("ready", timeout=PATIENCE_MS)
    await page.get_by_label("Answers").fill("2")
    await page.get_by_label("Most tokens").fill("160")
    await page.get_by_label("Seed").fill("7")
    await page.get_by_label("Message").fill("Write a long essay on honeycombs, bees and wax.")
    await page.get_by_label("Message").press("Control+Enter")
    await expect(page.locator(".answer p").first).not_to_be_empty(timeout=PATIENCE_MS)
    await expect(page.locator("tbody tr")).to_have_count(2, timeout=PATIENCE_MS)


async def fork(page: Page) -> None:
    """Go on anew from the sixth token of the first answer."""
    await page.get_by_label("Most tokens").fill("16")
    token = page.get_by_label("Tokens of Answer 1", exact=True).get_by_role("button").nth(5)
    at = int(await token.get_attribute("data-at") or 0)
    await token.click()
    forked = page.get_by_label(f"Fork of Answer 1 at token {at + 1}", exact=True)
    await expect(forked).to_have_attribute("aria-current", "true", timeout=PATIENCE_MS)
    kept = "".join(await forked.locator(".kept").all_text_contents())
    assert kept
    assert (await page.locator(".answer p").first.text_content() or "").startswith(kept)
    assert len(await forked.locator("p").text_content() or "") > len(kept)


@pytest.mark.parametrize(("name", "width", "dark"), [("desk", 1280, False), ("phone", 390, True)])
async def test_a_newcomer_talks_to_the_model_and_sees_its_cells(
    smollm2_service: ServiceProcess, api_key: str, pictures: Path, name: str, width: int, dark: bool
) -> None:
    async with chromium() as browser, looking_at(browser, smollm2_service.url, width=width, dark=dark) as (page, wrong):
        await talk(page, api_key)
        await page.screenshot(path=pictures / f"page-{name}.png", full_page=True)
        ending = re.compile("length|stop")
        await expect(page.locator(".answer footer")).to_contain_text([ending, ending], timeout=PATIENCE_MS)
        await expect(page.locator("#timing")).to_contain_text("tokens in")
        if name == "desk":
            await fork(page)
            await page.screenshot(path=pictures / "page-fork.png", full_page=True)
        await expect(page.locator("tbody tr")).to_have_count(0, timeout=PATIENCE_MS)
        assert await page.locator(".worker").count() == 2
        # Without a key the first looks are refused, which a browser tells on its console.
        assert [text for text in wrong if "401" not in text] == []
    assert (pictures / f"page-{name}.png").stat().st_size > 20_000
