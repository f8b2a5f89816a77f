"""Tests ``tokenspeed-kernel report``: the content of the page, and its rendering in a browser."""

from __future__ import annotations

import builtins
import html.parser
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from processes import run_python

pytest.importorskip("typer")
pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner

from tokenspeed_kernel.version import __version__
from tokenspeed_kernel.workbench.benchmark import Metadata, Method, Report, Roofline, Row, Share, Timing, load_report
from tokenspeed_kernel.workbench.report import devices_of, palette, plots, render_page, write_plots
from tokenspeed_kernel_command.commands import app

H200 = Path(__file__).parents[1] / "benchmarks" / "h200.json"
ROOFLINE = Roofline(4200.0, 4380.0, {"bfloat16": 729.0, "float16": 735.0, "float8_e4m3fn": 1390.0, "float32": 51.0}, "2026-11-20")
OPERATORS = {
    "attention.mha_prefill": [
        "4 x 4096",
        "a very long name that has to be cut somewhere, as the plot is only so wide: window 128, sinks",
    ],
    "gemm.mm": ["qkv <b>decode</b> & $64$", "qkv prefill 8192"],
}


def row(operator: str, case: str, solution: str, time_us: float, **more: Any) -> Row:
    timing = Timing.of([[time_us * factor for factor in (0.99, 1.0, 1.01)]])
    known: dict[str, Any] = {"tflops": 8e3 / time_us, "gb_per_s": 6e4 / time_us, "share": Share(14 / time_us, "memory"), **more}
    kernel = f"{solution}_{operator.partition('.')[2]}"
    return Row(kernel, operator, case, "measured", timing=timing, solution=solution, **known)


def report(
    commit: str = "aaaaaaa", date: str = "2026-11-01T10:00:00", faster: float = 1.0, device: str = "NVIDIA H200", **more: Any
) -> Report:
    """Makes a report of three solutions on two cases of two operators. The times of Triton's kernels are divided by ``faster``, and
    one CuteDSL kernel fails."""
    rows = []
    for operator, cases in OPERATORS.items():
        for place, case in enumerate(cases):
            for number, solution in enumerate(("cutedsl", "reference", "triton")):
                time_us = 20.0 * (place + 1) ** 3 * (1 + number / 3) / (faster if solution == "triton" else 1.0)
                rows.append(row(operator, case, solution, time_us))
    rows[3] = Row(
        rows[3].kernel, rows[3].operator, rows[3].case, "failed", "out differs in 12 of 2048 elements", solution="cutedsl"
    )
    rows.append(Row("torch_mm", "gemm.mm", "qkv prefill 8192", "skipped", "head_dim", solution="torch"))
    metadata = Metadata(device, "sm_90", "580", "3.12", "2.11", "3.6", "0.2.0", commit, "tokenspeed-kernel bench mm", date)
    return Report(metadata, tuple(rows), **{"roofline": ROOFLINE, "method": Method(), **more})


def history() -> list[tuple[str, Report]]:
    """Makes named reports that are not in order of their dates."""
    return [
        ("b.json", report("bbbbbbbbb", "2026-11-08T10:00:00", 1.25)),
        ("c.json", report("ccccccccc+", "2026-11-15T10:00:00", 1.5)),
        ("a.json", report("aaaaaaaaa", "2026-11-01T10:00:00")),
        ("cpu.json", report("", "2026-11-15T10:00:00", device="a <CPU>", roofline=None)),
    ]


# -- what is shown ----------------------------------------------------------------------------------------------------------------


def test_reports_are_sorted_by_device_and_time() -> None:
    gpu, cpu = devices_of(history())
    assert (gpu.name, cpu.name) == ("NVIDIA H200", "a <CPU>")
    assert [run.label for run in gpu.runs] == ["aaaaaaa", "bbbbbbb", "ccccccc+"]
    assert [run.label for run in cpu.runs] == ["11-15 10:00"]


def test_of_each_kernel_and_case_the_newest_row_is_shown() -> None:
    gpu, _ = devices_of(history())
    rows = gpu.rows()
    assert len(rows) == 12
    assert {run.name for _, run in rows} == {"c.json"}
    assert gpu.skipped() == 3
    only_old = devices_of([*history(), ("new.json", Report(report(date="2026-12-01").metadata, (), ROOFLINE))])[0]
    assert {run.name for _, run in only_old.rows()} == {"c.json"}, "a run of something else hides nothing"


def test_bars_are_the_fastest_kernel_of_each_solution() -> None:
    slow = row("gemm.mm", "qkv prefill 8192", "triton", 1e4)
    with_two = report(faster=2.0)
    with_two = Report(with_two.metadata, (*with_two.rows, Row(**{**vars(slow), "kernel": "triton_mm_slow"})), ROOFLINE)
    cases = devices_of([("a", with_two)])[0].bars()
    (case,) = [case for case in cases["gemm.mm"] if case.case == "qkv prefill 8192"]
    assert [(bar.solution, bar.row.kernel) for bar in case.bars] == [
        ("cutedsl", "cutedsl_mm"), ("reference", "reference_mm"), ("triton", "triton_mm"),
    ]  # fmt: skip
    assert [bar.part for bar in case.bars] == [pytest.approx(14 / bar.row.timing.median_us) for bar in case.bars if bar.row.timing]
    (failed,) = [bar for case in cases["attention.mha_prefill"] for bar in case.bars if bar.part is None]
    assert failed.row.status == "failed"


def test_without_a_roofline_bars_are_of_the_fastest() -> None:
    _, cpu = devices_of(history())
    assert [bar.part for bar in cpu.bars()["gemm.mm"][0].bars] == [1.0, pytest.approx(3 / 4), pytest.approx(3 / 5)]


def test_old_reports_tell_their_part_of_the_roofline_and_their_solution() -> None:
    (device,) = devices_of([("h200.json", load_report(H200))])
    assert device.roofline is not None
    rows = {row.key: row for row, _ in device.rows()}
    prefill = rows["activation.silu_and_mul", "llama-70b prefill 8192", "triton_silu_and_mul"]
    share = device.share(prefill)
    assert prefill.gb_per_s is not None
    assert share == Share(prefill.gb_per_s / device.roofline.memory_gb_per_s, "memory")
    assert {bar.solution for cases in device.bars().values() for case in cases for bar in case.bars} == {"triton"}


def test_points_are_where_cost_and_time_put_them() -> None:
    point = devices_of(history())[0].points()[0]
    assert point.intensity == pytest.approx(1e3 * 8e3 / 6e4)
    assert point.tflops == point.row.tflops


def test_changes_are_in_terms_of_the_first_run() -> None:
    changes = {(each.operator, each.case, each.kernel): each for each in devices_of(history())[0].changes()["gemm.mm"]}
    triton = changes["gemm.mm", "qkv prefill 8192", "triton_mm"]
    assert triton.ratios == (1.0, pytest.approx(1 / 1.25), pytest.approx(1 / 1.5))
    assert triton.last == pytest.approx(1 / 1.5)
    assert changes["gemm.mm", "qkv prefill 8192", "cutedsl_mm"].last == 1.0
    assert devices_of(history())[1].changes() == {}, "one run has no history"


def test_other_differences_between_runs_are_reported() -> None:
    (device,) = devices_of([("old", load_report(H200)), ("new", report(date="2026-12-01"))])
    assert device.notes() == [
        "driver: 580.159.04, then 580",
        "python: 3.12.3, then 3.12",
        "torch: 2.11.0+cu130, then 2.11",
        "triton: 3.6.0, then 3.6",
        "timing: not said; then cold caches",
    ]
    assert devices_of([("a", report())])[0].notes() == []


# -- the page ---------------------------------------------------------------------------------------------------------------------


class Page(html.parser.HTMLParser):
    """Collects the elements of a page: ids, references, tags and cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: Counter[str] = Counter()
        self.references: list[str] = []
        self.tags: Counter[str] = Counter()
        self.cells: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        if tag == "td":
            self.cells.append("")
        for name, value in attributes:
            if name == "id":
                self.ids[value or ""] += 1
            elif name in ("src", "href", "xlink:href", "action", "data"):
                self.references.append(value or "")

    def handle_data(self, data: str) -> None:
        if self.cells and self.lasttag in ("td", "wbr"):
            self.cells[-1] += data


@pytest.fixture(scope="module")
def page_text() -> str:
    return render_page(devices_of(history()), "Kernels & <measured>")


def test_the_page_needs_nothing_else(page_text: str) -> None:
    page = Page(page_text)
    assert [each for each in page.references if not each.startswith("#")] == []
    assert {each[1:] for each in page.references} <= set(page.ids)
    assert page.tags["link"] == page.tags["img"] == page.tags["iframe"] == 0
    assert "@import" not in page_text
    assert [match for match in re.findall(r"url\((.)", page_text) if match != "#"] == []
    assert "default-src 'none'" in page_text


def test_ids_are_unique_across_all_plots(page_text: str) -> None:
    assert [name for name, count in Page(page_text).ids.items() if count > 1] == []


def test_text_is_escaped(page_text: str) -> None:
    assert "<title>Kernels &amp; &lt;measured&gt;</title>" in page_text
    assert "<b>decode</b>" not in page_text
    assert "qkv &lt;b&gt;decode&lt;/b&gt; &amp; $64$" in page_text
    assert "a &lt;CPU&gt;" in page_text


def test_all_rows_are_in_the_table(page_text: str) -> None:
    page = Page(page_text)
    columns = page_text.count('<th scope="col"')
    texts = [cell.strip() for cell in page.cells]
    rows = [texts[start : start + columns] for start in range(0, len(texts), columns)]
    assert len(rows) == 24
    found = {(cells[0], cells[1], cells[2]): cells for cells in rows[:12]}
    cells = found["gemm.mm", "qkv prefill 8192", "triton_mm"]
    assert cells[3:6] == ["177.8", "8% memory", "45"]
    assert cells[-2:] == ["measured", "ccccccc+"]
    failed = next(cells for cells in rows if cells[-2].startswith("failed"))
    assert failed[-2] == "failed: out differs in 12 of 2048 elements"
    assert failed[3:6] == ["", "", ""]


def test_plots_are_part_of_the_page(page_text: str) -> None:
    drawings = re.findall(r"<svg .*?</svg>", page_text, re.DOTALL)
    labels = [ElementTree.fromstring(drawing).get("aria-label") for drawing in drawings]
    gpu = ["Roofline of NVIDIA H200 with 11 kernels and cases"] * 2
    gpu += ["attention.mha_prefill: solutions on 2 cases", "gemm.mm: solutions on 2 cases"]
    gpu += ["attention.mha_prefill: times over 3 runs", "gemm.mm: times over 3 runs"]
    assert labels[:6] == gpu
    assert len(labels) == 10, "the other device has no history"
    assert "var(--series-0)" in drawings[0]
    assert "#0102" not in page_text, "a stand-in for a colour"
    assert "a very long name that has to be cut somewhere, as the plot is only so wide: window 128, sinks" in drawings[2]


def test_the_same_reports_give_the_same_page(page_text: str) -> None:
    assert render_page(devices_of(history()), "Kernels & <measured>") == page_text


def test_the_committed_report_is_shown_whole() -> None:
    text = render_page(devices_of([("h200.json", load_report(H200))]), "H200")
    assert text.count("<tr data-") == 160
    assert Page(text).tags["svg"] == 2 + 28
    assert len(text) < 1_000_000


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colours_can_be_told_from_the_background(scheme: int) -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        red, green, blue = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    def contrast(name: str, background: str) -> float:
        both = sorted(luminance(palette.COLOURS[each][scheme]) + 0.05 for each in (name, background))
        return both[1] / both[0]

    for background in ("paper", "panel"):
        assert {name for name in ("ink", "faint", "accent", "bad") if contrast(name, background) < 4.5} == set()
        assert {name for name in palette.SERIES if contrast(name, background) < 3} == set()


def test_plots_as_files(tmp_path: Path) -> None:
    files = write_plots(devices_of(history()), tmp_path / "made")
    names = {file.name for file in files}
    stems = ["nvidia-h200-roofline", "nvidia-h200-bars-gemm-mm", "nvidia-h200-history-gemm-mm", "a-cpu-bars-attention-mha-prefill"]
    assert {f"{stem}.{ending}" for stem in stems for ending in ("svg", "png")} <= names
    assert len(files) == 16
    for file in files:
        if file.suffix == ".png":
            assert file.read_bytes().startswith(b"\x89PNG")
        else:
            text = file.read_text()
            ElementTree.fromstring(text)
            assert "var(" not in text
            assert "#0102" not in text


def test_a_roofline_of_one_point_has_room() -> None:
    (point,) = devices_of([("a", report())])[0].points()[:1]
    for roofline in (None, ROOFLINE, Roofline(4200.0, 4380.0)):
        drawing = plots.roofline_plot("GPU", roofline, [point], palette.light)
        (axes,) = drawing.figure.axes
        assert axes.get_xlim()[0] < point.intensity < axes.get_xlim()[1]
        assert axes.get_ylim()[0] < point.tflops < axes.get_ylim()[1]


# -- the command ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    for name, content in history():
        content.write(tmp_path / name)
    return [str(tmp_path / name) for name, _ in history()]


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["report", *words])


def test_the_command_writes_a_page_and_plots(files: list[str], tmp_path: Path) -> None:
    done = run(*files, "-o", str(tmp_path / "report.html"), "--plots", str(tmp_path / "plots"), "--title", "Ours")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[1] == f"{tmp_path / 'plots'}: 16 plots"
    assert "<h1>Ours</h1>" in (tmp_path / "report.html").read_text()
    assert list(tmp_path.glob(".*")) == []


def test_unreadable_reports_are_rejected(files: list[str], tmp_path: Path) -> None:
    page = ["-o", str(tmp_path / "report.html")]
    (tmp_path / "other.json").write_text("{}")
    Report(report().metadata, report().rows[-1:]).write(tmp_path / "skipped.json")
    for words, said in (
        ([str(tmp_path / "absent.json"), *page], "absent.json"),
        ([files[0], str(tmp_path / "other.json"), *page], "other.json is no benchmark report"),
        ([str(tmp_path / "skipped.json"), *page], "there is nothing to show"),
        ([files[0], "-o", str(tmp_path / "absent" / "report.html")], "there is no folder"),
    ):
        done = run(*words)
        assert (done.exit_code, done.stdout) == (2, "")
        assert said in done.stderr
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("missing", ["jinja2", "matplotlib"])
def test_a_missing_library_is_named(missing: str, files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("tokenspeed_kernel.workbench.report", missing))]:
        monkeypatch.delitem(sys.modules, name)
    found = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
        return found(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    done = run(*files)
    assert done.exit_code == 2
    assert f"this needs {missing}: pip install 'tokenspeed-kernel[tools]=={__version__}'" in done.stderr


def test_no_other_command_waits_for_the_libraries() -> None:
    modules = ", ".join(f"tokenspeed_kernel.workbench.cli.{name}" for name in ("bench", "report", "show", "verify"))
    program = f"import sys, {modules}; print(sorted({{'jinja2', 'matplotlib'}} & set(sys.modules)))"
    assert run_python("-c", program).stdout == "[]\n"


# -- in a browser -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="the package playwright is not there")
    with api.sync_playwright() as playwright:
        named = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
        if named is None and not Path(playwright.chromium.executable_path).exists():
            pytest.skip("there is no browser: playwright install chromium, or the package chromium of the system")
        started = playwright.chromium.launch(executable_path=named, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory, page_text: str) -> Path:
    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(page_text)
    return file


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
class TestInABrowser:
    @pytest.fixture
    def page(self, browser: Any, page_file: Path, width: int, scheme: str) -> Iterator[Any]:
        """Loads the page in a browser. The page must log no console messages and request no other addresses."""
        said: list[str] = []
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: said.append(request.url) if request.url != page_file.as_uri() else None)
        page.goto(page_file.as_uri())
        yield page
        page.close()
        assert said == []

    def test_nothing_overflows(self, page: Any, width: int, tmp_path: Path, scheme: str) -> None:
        page.screenshot(path=tmp_path / f"{width}-{scheme}.png", full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        # Only the table may scroll, within its own frame.
        beyond = page.evaluate(
            """() => [...document.querySelectorAll("body *")].filter((e) => !e.closest(".scroll") && !e.matches(".skip"))
                .filter((e) => e.getBoundingClientRect().width && (e.getBoundingClientRect().right > innerWidth + 0.5
                    || e.getBoundingClientRect().left < -0.5)).map((e) => e.outerHTML.slice(0, 80))"""
        )
        assert beyond == []

    def test_texts_of_plots_do_not_overlap(self, page: Any) -> None:
        """Texts must be inside their plots, must not overlap, and must be large enough to read."""
        found = page.evaluate(
            """() => [...document.querySelectorAll("svg")].filter((svg) => svg.getBoundingClientRect().width).flatMap((svg) => {
                const frame = svg.getBoundingClientRect(), problems = [];
                const texts = [...svg.querySelectorAll("text")].map((e) => [e.textContent, e.getBoundingClientRect()]);
                texts.forEach(([text, box], place) => {
                    if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1)
                        problems.push(["outside", text]);
                    if (Math.max(box.height, box.width) < 8) problems.push(["small", text]);
                    texts.slice(place + 1).forEach(([other, there]) => {
                        const across = Math.min(box.right, there.right) - Math.max(box.left, there.left);
                        const down = Math.min(box.bottom, there.bottom) - Math.max(box.top, there.top);
                        if (across > 1 && down > 3) problems.push(["overlap", text, other]);
                    });
                });
                return problems;
            })"""
        )
        assert found == []

    def test_colours_are_those_of_the_scheme(self, page: Any, scheme: str) -> None:
        def colour(selector: str, what: str) -> str:
            found = page.eval_on_selector(selector, f"(e) => getComputedStyle(e).{what}")
            return "#" + "".join(f"{int(part):02x}" for part in re.findall(r"\d+", found)[:3])

        place = ["light", "dark"].index(scheme)
        assert colour("body", "backgroundColor") == palette.COLOURS["paper"][place]
        assert colour("body", "color") == palette.COLOURS["ink"][place]
        assert colour(".card svg g[id$='hint-0'] text", "fill") == palette.COLOURS["ink"][place]
        bars = {colour(f".card svg g[id$='hint-{number}'] path", "fill") for number in (1, 2)}
        assert bars == {palette.COLOURS[name][place] for name in palette.SERIES[:2]}

    def test_sorting(self, page: Any) -> None:
        def medians() -> list[float | None]:
            column = page.locator("th", has_text="median").evaluate("(e) => e.cellIndex")
            texts = page.eval_on_selector_all("tbody tr", f"(rows) => rows.map((row) => row.cells[{column}].textContent)")
            return [float(text) if text else None for text in texts]

        before = medians()
        heading = page.locator("th", has_text="median")
        known = sorted(time for time in before if time is not None)
        for direction, expected in (("ascending", known), ("descending", known[::-1]), ("ascending", known)):
            heading.locator("button").click()
            assert heading.get_attribute("aria-sort") == direction
            assert medians() == [*expected, None, None], "what is not known comes last"
        other = page.locator("th", has_text="kernel")
        other.locator("button").press("Enter")
        assert heading.get_attribute("aria-sort") == "none"
        kernels = page.eval_on_selector_all("tbody tr", "(rows) => rows.map((row) => row.cells[2].textContent)")
        assert kernels == sorted(kernels)

    def test_filtering(self, page: Any) -> None:
        def shown() -> tuple[int, str]:
            return page.locator("tbody tr:visible").count(), page.locator("#count").inner_text()

        assert shown() == (24, "24 rows")
        page.fill("#search", "PREFILL triton")
        assert shown() == (6, "6 of 24 rows")
        page.fill("#search", "<b>decode")
        assert shown() == (6, "6 of 24 rows")
        page.select_option("[data-filter=solution]", "cutedsl")
        assert shown() == (2, "2 of 24 rows")
        page.select_option("[data-filter=device]", "a <CPU>")
        assert shown() == (1, "1 of 24 rows")
        page.fill("#search", "nothing has this")
        assert shown() == (0, "0 of 24 rows")
        page.fill("#search", "")
        page.select_option("[data-filter=solution]", "")
        page.select_option("[data-filter=device]", "")
        assert shown() == (24, "24 rows")


@pytest.mark.slow
def test_without_scripts_the_table_is_whole(browser: Any, page_file: Path) -> None:
    page = browser.new_context(java_script_enabled=False).new_page()
    page.goto(page_file.as_uri())
    assert page.locator("tbody tr:visible").count() == 24
    assert not page.locator(".filters").is_visible()
