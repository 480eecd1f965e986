"""The page of `octavo inspect --html`: what it holds, and what Chromium shows of it, from a file."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from compiler.cli.main import main
from ir.dims import evaluate
from ir.text import print_graph, print_op
from passes.memory.schedule import Schedule
from passes.plan_memory import lifetimes
from tests.cli.browser import Browser, find_chromium
from tests.cli.staged import Staged, imported, octavo, write

CAUSAL, WINDOW = "k <= q", "(k <= q) & (q - k < 12)"
HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><!--\u2028'${0}`"
LAYERS = 'net.<img src=x onerror="alert(1)">.layers'
VIEWS = ("overview", "graph", "diff", "memory", "kernels")


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Staged:
    """Two KV groups, two targets, and names that would be markup if something made markup of them."""
    text = imported([WINDOW, CAUSAL, WINDOW, CAUSAL, CAUSAL], LAYERS, HOSTILE)
    return write(tmp_path_factory.mktemp("page") / "small.octavo", text, ("cpu", "cuda:sm_90"))


@pytest.fixture(scope="module")
def page(staged: Staged, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("html") / "a page #1.html"
    with pytest.raises(SystemExit) as end:
        main(["inspect", str(staged.path), "--html", str(out)])
    assert not end.value.code and os.listdir(out.parent) == [out.name]
    return out


@pytest.fixture(scope="module")
def browser(page: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile"), find_chromium()) as found:
        found.emulate(dark=False)
        found.open(url(page))
        yield found


def url(page: Path) -> str:
    return f"file://{quote(str(page))}"


def place(view: str, **params: object) -> str:
    return f"#{view}?{urlencode(params)}"


def told(capsys: pytest.CaptureFixture[str], *args: object) -> Any:
    code, out, err = octavo(capsys, *args, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


class Elements(HTMLParser):
    """Tags of a page, and its scripts' texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.texts: dict[str, list[str]] = {}
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self._inside, []).append(data)


def test_names_stay_text(page: Path) -> None:
    found = Elements(page.read_text())
    assert (found.tags["script"], found.tags["style"], found.tags["img"]) == (2, 1, 0)
    assert found.texts["title"] == [f"{HOSTILE} · octavo inspect"]
    text = "".join(found.texts["script"][:-1])
    assert text.isascii() and not set("<>&") & set(text)
    data = json.loads(text)
    assert data["overview"]["name"] == HOSTILE
    assert any(LAYERS in text for text in data["texts"])


def test_nothing_is_fetched_and_nothing_else_runs(page: Path) -> None:
    text = page.read_text()
    assert set(re.findall(r"https?://[^\"' ]*", text)) == {"http://www.w3.org/2000/svg"}  # a name, no address
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy
    assert "innerHTML" not in text and "insertAdjacentHTML" not in text and "document.write" not in text


def test_equal_artifacts_give_equal_pages(staged: Staged, page: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["inspect", str(staged.path), "--html", str(tmp_path / "again.html")])
    assert (tmp_path / "again.html").read_bytes() == page.read_bytes()


def test_opens_without_an_error_or_a_request(browser: Browser, page: Path) -> None:
    """Every view of every stage has been drawn by then, in both schemes, wide and narrow."""
    for dark, width in ((False, 1280), (True, 420)):
        browser.emulate(dark=dark, width=width)
        for view in VIEWS:
            browser.show(f"#{view}")
            assert browser.run("document.body.dataset.view") == view
            assert browser.run("document.documentElement.scrollWidth <= innerWidth"), (view, width)
    browser.emulate(dark=False)
    assert browser.run("document.querySelector('h1').textContent") == HOSTILE
    assert browser.run("[document.images.length, document.title]") == [0, f"{HOSTILE} · octavo inspect"]
    assert set(browser.requests) <= {url(page), "about:blank"}
    assert browser.errors == []


EXPANDED = """(() => {
  for (const toggle of document.querySelectorAll('.toggle[aria-expanded=false]'))
    [...document.querySelectorAll('.toggle')].find((t) => t.textContent === toggle.textContent).click();
  return [...document.querySelectorAll('.group')].map((group) => ({
    sections: (group.querySelector('select') || {length: 1}).length,
    kinds: [...group.querySelectorAll('.op[tabindex] .kind')].map((kind) => kind.textContent)}));
})()"""


def test_every_stage_shows_its_graph(browser: Browser, staged: Staged) -> None:
    different = {print_graph(graph): name for name, graph in staged.graphs.items()}
    assert len(different) > 10
    for name in different.values():
        graph = staged.graphs[name]
        browser.show(place("graph", stage=name))
        assert browser.run("document.querySelector('.total').dataset.ops") == str(len(graph.ops)), name
        current = browser.run("document.querySelector('.strip [aria-current]').title")
        assert current.startswith(f"{name}: {len(graph.ops)} op")
        shown: Counter[str] = Counter()
        for group in browser.run(EXPANDED):
            shown.update({kind: group["sections"] * n for kind, n in Counter(group["kinds"]).items()})
        assert shown == Counter(op.kind for op in graph.ops), name
    assert browser.errors == []


def test_ops_are_put_together_again(browser: Browser, staged: Staged) -> None:
    """From templates and names: each op's line as the IR prints it, but for the order of attributes."""
    for name in ("00-imported", "15-page_kv", "30-plan_memory", "31-plan_memory"):
        script = f"graphOf(stageNamed('{name}').graph).ops.map((op) => [opText(op), op.fullLoc])"
        ops = staged.graphs[name].ops
        found = [(sorted(re.split(r"[{}, ]+", text)), loc) for text, loc in browser.run(script)]
        wanted = [print_op(op).removesuffix(f" // {json.dumps(op.loc)[1:-1]}").rstrip() for op in ops]
        assert found == [(sorted(re.split(r"[{}, ]+", t)), op.loc) for t, op in zip(wanted, ops, strict=True)]


def test_layers_that_do_the_same_are_one(browser: Browser) -> None:
    browser.show(place("graph", stage="15-page_kv"))
    paths = browser.run("graphOf(stageNamed('15-page_kv').graph).sections.map((s) => [s.path, s.template])")
    template = {path.rpartition(".")[2]: number for path, number in paths}
    assert template["0"] == template["2"] != template["1"] == template["3"] == template["4"]
    heads = browser.run("[...document.querySelectorAll('.toggle strong')].map((x) => x.textContent)")
    assert f"{LAYERS}.0, 2" in heads and f"{LAYERS}.1, 3, 4" in heads


def test_an_op_shows_what_it_reads_and_what_reads_it(browser: Browser, staged: Staged) -> None:
    graph = staged.graphs["13-dce"]
    op = next(op for op in graph.ops if op.kind == "attention" and op.loc.endswith(".2"))
    browser.show(place("graph", stage="13-dce", op=f"%{op.out.name}"))
    marked = "[...document.querySelectorAll('.op.{}')].map((row) => row.dataset.value)"
    producers = {f"%{value.name}" for value in op.values}
    consumers = {f"%{user.out.name}" for user in graph.users()[op.out.name]}
    assert set(browser.run(marked.format("producer"))) == producers and len(producers) == 3
    assert set(browser.run(marked.format("consumer"))) == consumers and consumers
    assert browser.run(marked.format("chosen")) == [f"%{op.out.name}"]
    listed = browser.run("[...document.querySelectorAll('.jump .mono')].map((each) => each.textContent)")
    assert set(listed) == producers | consumers
    browser.run("document.querySelector('.jump').click()")  # chosen in its place, and in the address
    assert browser.run("new URLSearchParams(location.hash.split('?')[1]).get('op')") == listed[0]


def test_the_keyboard_reaches_ops(browser: Browser) -> None:
    browser.show(place("graph", stage="13-dce"))
    browser.run("document.querySelector('.op[tabindex]').focus()")
    rows = browser.run("[...document.querySelectorAll('.op[tabindex]')].map((row) => row.dataset.value)")
    browser.key("ArrowDown", 40)
    assert browser.run("document.activeElement.dataset.value") == rows[1]
    browser.key("Enter", 13)
    assert browser.run("document.querySelector('.op.chosen').dataset.value") == rows[1]
    assert rows[1] in browser.run("document.querySelector('.details').textContent")


def test_search_finds_ops_in_all_layers(browser: Browser, staged: Staged) -> None:
    norms = sum(op.kind == "rms_norm" for op in staged.graphs["13-dce"].ops)
    browser.show(place("graph", stage="13-dce", find="rms_norm"))
    assert browser.run("document.querySelector('.found').dataset.found") == str(norms)
    browser.show(place("graph", stage="13-dce", find="l3.up linear"))
    rows = browser.run("[...document.querySelectorAll('.op[tabindex]')].map((row) => row.dataset.value)")
    assert rows == ["%l3.up"]
    assert browser.run("document.querySelector('.group select').value") == f"{LAYERS}.3"


@pytest.mark.parametrize(
    ("a", "b"), [("08-dce", "13-dce"), ("graph-cpu", "00-imported"), ("graph-cpu", "graph-cuda-sm_90")]
)
def test_a_difference_is_that_of_the_command(
    browser: Browser, staged: Staged, capsys: pytest.CaptureFixture[str], a: str, b: str
) -> None:
    wanted = told(capsys, staged.path, "--diff", a, b)
    browser.show(place("diff", a=a, b=b))
    totals = browser.run("document.querySelector('.totals').dataset.totals")
    assert totals == ",".join(str(wanted[status]) for status in ("removed", "added", "changed", "same"))
    for status in ("removed", "added", "changed"):
        rows = browser.run(f"document.querySelectorAll('.change.{status}').length")
        assert rows == sum(group[status] for group in wanted["groups"]), status
    sections = browser.run("[...document.querySelectorAll('.group[data-paths]')].length")
    assert sections == sum(bool(group["changes"]) for group in wanted["groups"])


@pytest.mark.parametrize(("target", "sizes"), [("cpu", (33, 7, 5)), ("cuda:sm_90", (64, 16, 32))])
def test_memory_over_time(browser: Browser, staged: Staged, target: str, sizes: tuple[int, ...]) -> None:
    names = {"cpu": "30-plan_memory", "cuda:sm_90": "31-plan_memory"}
    graph, device = staged.graphs[names[target]], "cpu" if target == "cpu" else "gpu"
    rounded = {name: -(-size // 16) * 16 for name, size in zip("TRQ", sizes, strict=True)}
    browser.show(place("memory", target=target, T=sizes[0], R=sizes[1], Q=sizes[2]))
    facts = browser.run("({...document.querySelector('.facts').dataset})")
    assert int(facts["arena"]) == sum(evaluate(size, rounded) for size in graph.arena)
    lives = lifetimes(Schedule.of(graph), device)
    in_bytes = [(life.first, life.last, evaluate(life.bytes, rounded)) for life in lives]
    in_use = [sum(n for first, last, n in in_bytes if first <= k <= last) for k in range(200)]
    assert int(facts["peak"]) == max(in_use) and int(facts["pieces"]) == len(lives)
    drawn = browser.run("[...document.querySelectorAll('.piece')].map((each) => Number(each.dataset.bytes))")
    assert sorted(drawn) == sorted(n for _, _, n in in_bytes)


def test_kernels_are_those_of_the_command(
    browser: Browser, staged: Staged, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = told(capsys, staged.path, "--kernels")
    for target, step in (("cpu", "decode"), ("cuda:sm_90", "prefill")):
        mine = [row for row in rows if (row["target"], row["step"]) == (target, step)]
        browser.show(place("kernels", target=target, step=step, sort="bytes"))
        facts = browser.run("({...document.querySelector('.facts').dataset})")
        for name in ("bytes", "operations", "launches"):
            assert int(facts[name]) == sum(row[name] or 0 for row in mine), name
        first = browser.run("document.querySelector('tbody td').textContent")
        assert first == max(mine, key=lambda row: row["bytes"] or 0)["op"]
        assert browser.run("document.querySelectorAll('tbody tr').length") == len(mine)


def test_an_artifact_without_stages(browser: Browser, page: Path, tmp_path: Path) -> None:
    bare = write(tmp_path / "bare.octavo", imported([CAUSAL]), dump=False)
    out = tmp_path / "bare.html"
    with pytest.raises(SystemExit) as end:
        main(["inspect", str(bare.path), "--html", str(out)])
    assert not end.value.code
    browser.open(url(out))
    assert "--dump-ir" in browser.run("document.getElementById('view').textContent")
    browser.show("#graph")
    num_ops = len(bare.graphs["30-plan_memory"].ops)
    assert browser.run("document.querySelector('.total').dataset.ops") == str(num_ops)
    browser.show("#diff")
    assert browser.run("document.querySelectorAll('.group.quiet').length") == 1
    assert browser.errors == []
    browser.open(url(page))


def test_a_browser_reports_what_goes_wrong(browser: Browser, page: Path, tmp_path: Path) -> None:
    """What the tests above rely on: errors and requests are seen."""
    wrong = tmp_path / "wrong.html"
    wrong.write_text("<script>console.error('seen'); nothing()</script><img src='missing.png'>")
    before = len(browser.errors)
    browser.open(url(wrong))
    assert len(browser.errors) >= before + 2 and any("missing.png" in each for each in browser.requests)
    del browser.errors[:], browser.requests[:]
    browser.open(url(page))
