"""The dashboard in a real browser, before a real cluster on the timed engine, while a trace is replayed at it.

MOONPOOL_SCREENSHOTS=docs/images writes the documentation's pictures.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx
import pytest

from moonpool.bench.cluster import RunningCluster, running_cluster
from tests.keys import make_key
from tests.live.kit import BLOCK, wait_at_rest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Locator, Page

pytestmark = pytest.mark.live

SECONDS = 45.0
"""Of arrivals."""
WAIT_MS = 30_000.0
HANG = 120.0
DESKTOP, PHONE = (1280, 900), (390, 844)
HOSTILE = "<img/src=x/onerror=document.body.remove()>"
SCREENSHOTS = os.environ.get("MOONPOOL_SCREENSHOTS")
SERIOUS = ("serious", "critical")
OPTIONS = (
    "--engine",
    "timed",
    "--nodes",
    "2",
    "--prefill",
    "2",
    "--decode",
    "2",
    "--slo-ttft",
    "2s",
    "--slo-tbt",
    "0.15s",
)


class Watched:
    """A page, and what it must not do: complain, or talk to others."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.elsewhere: list[str] = []
        self.asked: list[str] = []
        host = urlsplit(url).netloc
        page.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda e: self.complaints.append(str(e)))
        page.on("request", lambda r: (self.asked if urlsplit(r.url).netloc == host else self.elsewhere).append(r.url))

    def text(self, selector: str) -> str:
        return self.page.locator(selector).first.inner_text()

    def tile(self, name: str) -> str:
        tile = self.page.locator(".tile", has=self.page.get_by_text(name, exact=True))
        return tile.locator(".value").inner_text()

    def table(self, selector: str) -> dict[str, list[str]]:
        """Texts of the cells of each row, by its head."""
        rows = self.page.locator(f"{selector} tbody tr:not(:has(.empty))").all()
        cells = [row.locator("th, td").all_inner_texts() for row in rows]
        return {first.strip(): [text.strip() for text in rest] for first, *rest in cells}

    def eventually(self, condition: Callable[[], object], what: str) -> None:
        until = time.monotonic() + WAIT_MS / 1e3
        while not condition():
            assert time.monotonic() < until, f"never happened: {what}"
            self.page.wait_for_timeout(100)


@pytest.fixture(scope="module")
def cluster(browser: Browser, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    with running_cluster(*OPTIONS, "--journal", str(tmp_path_factory.mktemp("journal"))) as running:
        yield running


@pytest.fixture(scope="module")
def replayed(cluster: RunningCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[bytes]]:
    """Documents that are asked about, some far more than others, and a burst beyond what can be served."""
    rng, at, lines = random.Random(3), 0.0, []
    while at < SECONDS:
        burst = 0.4 < at / SECONDS < 0.55
        document = min(int(rng.expovariate(0.6)), 7)
        own = rng.randint(1, 3) + burst * rng.randint(6, 14)
        ids = [*range(100 * document, 100 * document + 6 + document), *(1000 + len(lines) * 50 + i for i in range(own))]
        tokens = len(ids) * BLOCK + rng.randint(0, BLOCK - 1)
        output = rng.randint(16, 48)
        lines.append({"timestamp": round(at * 1e3), "input_length": tokens, "output_length": output, "hash_ids": ids})
        at += rng.expovariate(9.0 if burst else 3.0)
    folder = tmp_path_factory.mktemp("trace")
    trace, log = folder / "trace.jsonl", (folder / "replay.log").open("wb")
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "-P", "-m", "moonpool", "replay", str(trace), "--url", cluster.url]
    command += ["--block-size", str(BLOCK), "--ttft", "2", "--tbt", "0.15", "--out", str(folder / "run.json")]
    process = subprocess.Popen(command, stdout=log, stderr=log)
    yield process
    process.kill()
    process.wait()
    log.close()


@pytest.fixture
def opened(browser: Browser, cluster: RunningCluster) -> Iterator[Callable[..., Watched]]:
    """`opened(size=PHONE, color_scheme="dark")`: the dashboard; at the end nothing may have been complained of."""
    contexts: list[tuple[BrowserContext, Watched]] = []

    def open_page(size: tuple[int, int] = DESKTOP, path: str = "/dashboard", **options: object) -> Watched:
        context = browser.new_context(viewport={"width": size[0], "height": size[1]}, **options)  # type: ignore[arg-type]
        watched = Watched(context.new_page(), cluster.url)
        contexts.append((context, watched))
        watched.page.goto(cluster.url + path)
        watched.page.locator('#status[data-level="wait"]').wait_for(state="detached", timeout=WAIT_MS)
        return watched

    yield open_page
    for context, watched in contexts:
        context.close()
        assert watched.complaints == []
        assert watched.elsewhere == []


def metrics(cluster: RunningCluster) -> dict[str, float]:
    """By name and labels without `model_name`."""
    values: dict[str, float] = {}
    for line in cluster.get("/metrics").decode().splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            values[re.sub(r'model_name="[^"]*",?', "", name).replace(",}", "}").removesuffix("{}")] = float(value)
    return values


def violations(page: Page) -> list[str]:
    """What axe-core calls serious or worse."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [f"{v['id']}: {[n['html'] for n in v['nodes']][:3]}" for v in found if v["impact"] in SERIOUS]


def number(text: str) -> float:
    return float(re.sub(r"[^\d.]", "", text.split()[0]))


def shoot(what: Page | Locator, name: str) -> None:
    if SCREENSHOTS:
        what.screenshot(path=Path(SCREENSHOTS) / f"{name}.png")


def test_figures_move_during_a_replay_and_agree_with_metrics_after_it(
    cluster: RunningCluster, replayed: subprocess.Popen[bytes], opened: Callable[..., Watched]
) -> None:
    light = opened(color_scheme="light")
    seen = {light.text("#stages")}
    light.eventually(lambda: seen.add(light.text("#stages")) or len(seen) > 3, "requests flow")
    light.eventually(lambda: number(light.tile("Goodput")) > 0, "goodput")
    light.eventually(lambda: light.tile("TTFT, P90") != "–", "first tokens")
    light.eventually(lambda: "/s" in light.tile("Output"), "rates")
    light.eventually(lambda: light.table("#prefixes"), "hot prefixes")
    light.eventually(lambda: light.page.locator("#decided .weighed .chosen").count(), "weighed costs")
    light.eventually(lambda: number(light.tile("Refused")) > 9, "the burst is refused in part")
    assert light.page.locator("#status").get_attribute("data-level") == "warn"
    if SCREENSHOTS:
        light.page.wait_for_timeout(SECONDS * 0.3 * 1e3)
        light.page.set_viewport_size({"width": DESKTOP[0], "height": 1100})
        light.page.wait_for_timeout(1500)
        shoot(light.page, "dashboard")
        light.page.set_viewport_size({"width": DESKTOP[0], "height": 2400})
        light.page.wait_for_timeout(1500)
        shoot(light.page, "full")

    replayed.wait(HANG)
    wait_at_rest(cluster)
    told = metrics(cluster)
    finished = light.page.locator(".stage", has_text="Finished").locator(".value")
    light.eventually(
        lambda: number(finished.inner_text()) == told['moonpool:conductor_finished{conductor="conductor"}'],
        "all finished",
    )
    light.eventually(lambda: light.tile("In flight") == "0", "rest")
    refused = {name: number(rest[-1]) for name, rest in light.table("#refused").items()}
    assert refused == {
        reason[1]: value
        for name, value in told.items()
        if (reason := re.fullmatch(r'moonpool:requests_rejected_total\{reason="([^"]+)"\}', name))
    }
    assert sum(refused.values()) > 0
    share = told["moonpool:prefix_cache_hits_total"] / told["moonpool:prefix_cache_queries_total"]
    assert 0.2 < share < 1
    assert f"{share * 100:.0f} % since start" in light.text(".tile:has-text('Prompt tokens cached')")
    for node, cells in light.table("#nodes").items():
        blocks = (
            told[f'moonpool:node_blocks_dram{{node="{node}"}}'] + told[f'moonpool:node_blocks_ssd{{node="{node}"}}']
        )
        assert number(cells[3]) == blocks > 0
        assert cells[0] == "exact"
    assert {*light.table("#prefill"), *light.table("#decode")} == {"prefill-0", "prefill-1", "decode-0", "decode-1"}


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_accessible_and_fits_in_both_themes(
    replayed: subprocess.Popen[bytes], opened: Callable[..., Watched], size: tuple[int, int], scheme: str
) -> None:
    it = opened(size, color_scheme=scheme)
    it.eventually(lambda: it.page.locator("#decided button").count(), "decisions")
    background = it.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) < 3 * 128) == (scheme == "dark")
    assert violations(it.page) == []
    wide = it.page.evaluate("document.documentElement.scrollWidth")
    assert wide <= size[0], "only tables scroll sideways"
    for chart in it.page.locator(".canvas canvas").all():
        box = chart.bounding_box()
        assert box is not None
        assert 200 < box["width"] <= size[0]
    for table in ("#prefill", "#decode"):
        head = it.page.locator(f"{table} th", has_text="headroom").bounding_box()
        assert head is not None
        assert head["x"] + head["width"] <= size[0], "what matters most is seen without scrolling"
    if size is PHONE and scheme == "dark":
        shoot(it.page, "dashboard-phone")


def test_the_keyboard_opens_and_closes_an_explanation(cluster: RunningCluster, opened: Callable[..., Watched]) -> None:
    wait_at_rest(cluster)
    body = {"model": "smollm2", "prompt": [7] * 300, "max_tokens": 4}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, headers={"x-request-id": HOSTILE}, timeout=HANG)
    assert answer.status_code == 200
    it = opened()
    page = it.page
    newest = page.locator("#decided tbody tr:first-child button")
    it.eventually(lambda: newest.count() and newest.inner_text() == HOSTILE, "it is the newest")
    newest.focus()
    page.keyboard.press("Enter")
    dialog = page.locator("#explain")
    dialog.locator(".story li").first.wait_for(timeout=WAIT_MS)
    told = dialog.inner_text()
    assert f"x-request-id {HOSTILE}: finished" in told
    for part in ("arrived", "weighed by kvcache-centric", "placed", "prefill done", "joined", "finished"):
        assert part in told
    assert dialog.locator("tr.chosen").count() == 2
    assert violations(page) == []
    shoot(dialog, "dashboard-explain")
    page.keyboard.press("Escape")
    dialog.wait_for(state="hidden")
    page.wait_for_timeout(2500)
    assert page.evaluate("document.activeElement === document.querySelector('#decided tbody button')"), (
        "through updates"
    )
    page.locator("#ask-id").fill("nobody")
    page.keyboard.press("Enter")
    dialog.get_by_role("alert").wait_for(timeout=WAIT_MS)
    assert "no request 'nobody' is remembered" in dialog.inner_text()
    assert page.locator("#decided img").count() == 0
    it.complaints = [c for c in it.complaints if "404" not in c]  # the browser's own line about nobody


def test_an_explanation_can_be_linked_to(cluster: RunningCluster, opened: Callable[..., Watched]) -> None:
    body = {"model": "smollm2", "prompt": [8] * 100, "max_tokens": 2}
    httpx.post(f"{cluster.url}/v1/completions", json=body, headers={"x-request-id": "a/b#c"}, timeout=HANG)
    it = opened(path="/dashboard#request=a%2Fb%23c")
    it.page.locator("#explain .story li").first.wait_for(timeout=WAIT_MS)
    assert "x-request-id a/b#c" in it.text("#explain")


def test_theme_and_pause_hold(opened: Callable[..., Watched]) -> None:
    it = opened(color_scheme="light")
    page = it.page
    page.get_by_role("button", name="Theme: system").click()
    page.get_by_role("button", name="Theme: light").click()
    assert page.locator("html").get_attribute("data-theme") == "dark"
    page.reload()
    page.get_by_role("button", name="Theme: dark").wait_for()
    page.get_by_role("button", name="Pause").click()
    page.wait_for_timeout(500)
    it.asked.clear()
    page.wait_for_timeout(2500)
    assert it.asked == []
    page.get_by_role("button", name="Resume").click()
    it.eventually(lambda: it.asked, "it goes on")


def test_an_idle_page_asks_seldom_and_changes_nothing(cluster: RunningCluster, opened: Callable[..., Watched]) -> None:
    wait_at_rest(cluster)
    it = opened()
    it.eventually(lambda: "idle" in it.text("#status"), "rest")
    it.page.wait_for_timeout(20_000)
    it.asked.clear()
    it.page.wait_for_timeout(6_000)
    assert 1 <= len(it.asked) <= 2


def test_an_admin_key_is_asked_for_and_kept_in_the_tab(browser: Browser, smollm2: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    admin, tenant = make_key(file, "boss", admin=True), make_key(file, "tenant")
    classes = tmp_path / "classes.yaml"
    classes.write_text("classes: [{name: soon, rank: 0, slo-ttft: 2s}, {name: late, rank: 10}]")
    options = ("--keys", str(file), "--classes", str(classes), "--journal", str(tmp_path / "journal"))
    with running_cluster("--engine", "timed", *options) as guarded:
        page = browser.new_page()
        page.goto(guarded.url + "/dashboard")
        for key, told in (("wrong", "key"), (tenant, " is none"), (admin, "")):
            page.locator("#key[open]").wait_for(timeout=WAIT_MS)
            assert violations(page) == []
            page.get_by_label("Admin key").fill(key)
            page.keyboard.press("Enter")
            if told:
                page.locator("#key-problem", has_text=told).wait_for(timeout=WAIT_MS)
        page.locator('#status[data-level="good"]').wait_for(timeout=WAIT_MS)
        assert page.evaluate("localStorage.length") == 0
        page.reload()
        page.locator('#status[data-level="good"]').wait_for(timeout=WAIT_MS)
        rows = page.locator("#classes tbody tr").all_inner_texts()
        assert [row.split("\t")[:2] for row in rows] == [
            ["soon", "TTFT 2.00 s, TBT none"],
            ["late", "TTFT none, TBT none"],
        ]
        assert "limits by class" in page.locator("#tiles").inner_text()
        page.close()


def test_the_page_says_when_nothing_answers(browser: Browser, cluster: RunningCluster) -> None:
    page = browser.new_page()
    page.goto(cluster.url + "/dashboard")
    page.locator('#status[data-level="good"]').wait_for(timeout=WAIT_MS)
    page.route("**/cluster/live**", lambda route: route.abort())
    page.get_by_text("No figures: the gateway does not answer").wait_for(timeout=WAIT_MS)
    page.unroute("**/cluster/live**")
    page.locator('#status[data-level="good"]').wait_for(timeout=WAIT_MS)
    page.close()
