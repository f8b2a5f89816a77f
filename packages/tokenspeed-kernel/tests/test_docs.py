"""Tests of the documentation: Python blocks run, commands work, tables match the reports, and links resolve."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from processes import run_python

from tokenspeed_kernel.workbench import numerics
from tokenspeed_kernel.workbench.numerics.conformance import Options, conform
from tokenspeed_kernel.workbench.numerics.summary import assert_none_wrong
from tokenspeed_kernel_base import config, memo, registry, selection
from tokenspeed_kernel_base import operator as operator_module
from tokenspeed_kernel_base.hooks import HOOKS
from tokenspeed_kernel_base.ops.norm.rmsnorm import rmsnorm
from tokenspeed_kernel_base.platform import current_platform, named_platform, use_platform
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.traits import at_most

PACKAGE = Path(__file__).parents[1]
ROOT = PACKAGE.parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
READMES = sorted([*ROOT.glob("*.md"), *ROOT.glob("packages/*/README.md"), *ROOT.glob("tools/*/README.md"), ROOT / "ci/README.md"])

pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="the documentation is no part of the source distribution")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page. ``needs`` is the text of the comment above the block; empty without a comment."""

    language: str
    text: str
    needs: str

    @property
    def file(self) -> str:
        """The path in the comment of the block's first line, if the block is a Python or TOML file; else empty."""
        named = re.match(r"# (\S+\.(?:py|toml))\n", self.text)
        return named[1] if named and self.language in ("py", "toml") else ""


def blocks_of(page: Path) -> list[Block]:
    text = re.sub(r'^--8<-- "(.*)"\n', lambda snippet: (ROOT / snippet[1]).read_text(), page.read_text(), flags=re.MULTILINE)
    found = re.findall(r"(?:^<!-- (slow|needs[^\n]*) -->\n)?^```(\w+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [Block(language, text, needs) for needs, language, text in found]


def write_files(blocks: list[Block], folder: Path) -> None:
    for block in blocks:
        if block.file:
            (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.file).write_text(block.text)


def left_out(block: Block) -> bool:
    """Whether this machine lacks what the block needs."""
    lacks = {
        "": False,
        "slow": False,
        "needs Triton": "triton" not in current_platform().features,
        "needs a GPU": not torch.cuda.is_available(),
    }
    return lacks[block.needs]


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture
def operators_are_put_back() -> Iterator[None]:
    before = dict(operator_module._operators)
    yield
    operator_module._operators.clear()
    operator_module._operators.update(before)


def run(page: Path, blocks: list[Block], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the Python blocks in order, as one module, beside the files that other blocks define."""
    write_files(blocks, tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = ModuleType("page_of_the_documentation")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    before = set(sys.modules)
    try:
        for block in blocks:
            code = compile(block.text, named(page), "exec") if block.language in ("python", "py") else None
            if code is not None and block.language == "python" and not left_out(block):
                exec(code, vars(module))
    finally:
        for name in set(sys.modules) - before:
            if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
                del sys.modules[name]
                registry._declared.pop(name, None)


@pytest.mark.usefixtures("operators_are_put_back")
@pytest.mark.parametrize("page", [page for page in PAGES if "```py" in page.read_text()], ids=named)
def test_the_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = [block for block in blocks_of(page) if block.needs != "slow"]
    run(page, quick, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.usefixtures("operators_are_put_back")
@pytest.mark.parametrize("page", [page for page in PAGES if "<!-- slow -->" in page.read_text()], ids=named)
def test_the_slow_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(page, blocks_of(page), tmp_path, monkeypatch)


@pytest.mark.skipif("triton" not in current_platform().features, reason="Triton runs on a GPU, or under TRITON_INTERPRET=1")
def test_the_triton_kernel_of_the_page_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = DOCS / "writing-a-kernel.md"
    assert any(block.needs == "needs Triton" for block in blocks_of(page))
    run(page, blocks_of(page), tmp_path, monkeypatch)
    findings = conform(KernelRegistry.get().get_by_name("mine_silu_and_mul"), numerics.default_device(), Options(shrink_seconds=0))
    assert_none_wrong(findings)
    assert {"values", "strides", "trait edges"} <= {finding.check for finding in findings if finding.status == "passed"}


def run_command(line: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs a line of a shell, which may begin with variables. Programs in Python run in processes that have imported PyTorch."""
    words = shlex.split(line)
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environment = {**environment, name: value}
    programs = {"tokenspeed-kernel": ["-m", "tokenspeed_kernel"], "python": []}
    if words[0] in programs:
        return run_python(*programs[words[0]], *words[1:], cwd=folder, env=environment)
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_ten_commands_lead_from_a_kernel_to_its_report(tmp_path: Path) -> None:
    """Writes the files of ``ten-commands.md``, and runs its ten commands, with packages installed into a separate folder."""
    for package in ("hatchling", "typer", "jinja2", "matplotlib"):
        pytest.importorskip(package)
    blocks = blocks_of(DOCS / "workbench" / "ten-commands.md")
    write_files(blocks, tmp_path)
    (commands,) = [block.text for block in blocks if block.language == "sh"]
    assert len(commands.splitlines()) == 10
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TOKENSPEED_KERNEL_")} | {
        # pip installs into a separate folder and downloads nothing.
        "PIP_TARGET": str(tmp_path / "site"),
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip inverts this variable: 0 disables build isolation
        "PIP_NO_INDEX": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path / "site"), os.environ.get("PYTHONPATH")])),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    shown = []
    for command in commands.splitlines():
        # By default, `tune` measures each call for 10 seconds.
        done = run_command(command + " --budget 0.5" * ("tune" in command), tmp_path, environment)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        shown.append(done.stdout)
    assert re.search(r"my-kernels +loaded", shown[1])
    assert re.search(r"10 +norm\.rmsnorm +mine_rmsnorm +x float32\[512, 2880\]", shown[3])
    assert "failed" not in shown[4]
    assert (tmp_path / "conformance.xml").read_text().count("<testcase") == len(
        re.findall("^mine_rmsnorm ", shown[4], re.MULTILINE)
    )
    assert json.loads((tmp_path / "after.json").read_text())["rows"]
    assert "written to" in shown[6]
    assert re.search(r"norm\.rmsnorm +mine_rmsnorm", shown[8])
    assert "mine_rmsnorm" in (tmp_path / "report.html").read_text()


# -- statements of pages about the code --------------------------------------------------------------------------------------------


def marks(kind: str) -> list[str]:
    """Returns the sorted names of the generated parts of this kind on all pages. A generated part begins with ``<!-- kind: NAME
    -->``."""
    return sorted(name for page in PAGES for name in re.findall(rf"<!-- {kind}: (.*?) -->", page.read_text()))


def test_the_measured_tables_are_on_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PACKAGE / "benchmarks"))
    table = importlib.import_module("table")
    assert marks("tables") == sorted(table.SECTIONS)
    for name in table.SECTIONS:
        assert re.search(r"^\|---.*\n\| ", table.made(name), re.MULTILINE), name


def test_the_plots_are_on_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    for folder in (PACKAGE / "benchmarks", DOCS):
        monkeypatch.syspath_prepend(str(folder))
    plots = importlib.import_module("figure_plots")
    assert marks("plot") == sorted(plots.PLOTS)
    for name, calls in plots._families("h200").compared().items():
        for case, ratio in calls:
            ours, fastest = case.bars[0].row.timing.median_us, min(bar.row.timing.median_us for bar in case.bars[1:])
            assert ratio == fastest / ours, (name, case.case)


def test_a_size_that_one_format_supports_is_not_listed_as_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    coverage = importlib.import_module("coverage_table")
    op, spec = operator_module.get_operator("mha_prefill"), KernelRegistry.get().get_by_name("triton_mha_prefill")
    fp8 = frozenset(found for found in spec.format_signatures or () if "float8" in str(found))
    usual = dataclasses.replace(spec, format_signatures=(spec.format_signatures or frozenset()) - fp8)
    narrow = dataclasses.replace(spec, format_signatures=fp8, traits={**spec.traits, "head_dim": at_most(64)})
    listed = coverage._left_out(op, [usual, narrow]).split("<br>")
    assert not any(entry.startswith("head_dim") for entry in listed)
    assert "fp8, head_dim 96" in listed[-1].removeprefix("these together: ").split("; ")
    assert "head_dim 80, 96, 128, 192, 256" in coverage._left_out(op, [narrow]).split("<br>")


def test_backends_are_listed_in_the_order_of_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    backends = importlib.import_module("backends_table")
    op = operator_module.get_operator("rmsnorm")
    assert backends._backends(op, backends._platform("a100")) == ["Triton"]
    assert backends._backends(op, backends._platform("cpu")) == ["reference"]


def test_callers_are_found_in_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    lines = importlib.import_module("callers_table").callers_table().splitlines()
    callers = {re.findall(r"`(\w+)`", line)[0]: line.rpartition("| ")[2] for line in lines[2:]}
    assert callers["moe_apply"] == "GPT-OSS runtime, vLLM, SGLang, transformers |"  # found as an attribute, or as a text
    assert callers["mla_prefill"] == "vLLM, SGLang |"
    assert callers["rmsnorm"].startswith("GPT-OSS runtime, vLLM, SGLang")  # vLLM's: an attribute of an imported module
    assert callers["bmm"] == "none |"
    assert len(callers) == len(operator_module.operators())


def test_each_operator_without_a_caller_has_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    table = importlib.import_module("callers_table")
    lines = table.idle_table().splitlines()
    assert lines[0] == f"{len(lines) - 4} of {len(operator_module.operators())} operators have no caller."
    monkeypatch.setitem(table.IDLE, "moe_apply", "It has callers.")
    monkeypatch.delitem(table.IDLE, "bmm")
    with pytest.raises(ValueError, match=r"differs in \['bmm', 'moe_apply'\]"):
        table.idle_table()


def test_engines_parts_name_kernels_and_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table's switches are the plugins' settings, and each of their parts is in the table."""
    monkeypatch.syspath_prepend(str(DOCS))
    served = importlib.import_module("served_table")
    cells = {tuple(line.strip("| ").split(" | ")[:2]): line for line in served.served_table().splitlines()[2:]}
    latent, experts = cells["latent attention", "deepseek-v3"], cells["experts", "gpt-oss-120b, gpt-oss-20b"]
    assert experts.endswith("| on | on | on | on |")
    if all(importlib.util.find_spec(wheel) for wheel in ("tokenspeed_kernel_nvidia", "tokenspeed_kernel_amd", "cutlass", "triton")):
        assert "`cutedsl_mla_decode_with_kvcache`" in latent
        assert "| `cutedsl_moe_apply_mxfp4` | `gluon_moe_apply_mxfp4` |" in experts
    else:
        assert "`triton_mla_decode_with_kvcache`" in latent
    assert "refused" not in "".join(cells.values())
    named = set(re.findall(r"`(TOKENSPEED_\w+)`", "".join(cells.values())))
    for engine in ("vllm", "sglang"):
        monkeypatch.syspath_prepend(str(DOCS.parent / "tools" / f"{engine}_plugin" / "src"))
        settings = importlib.import_module(f"tokenspeed_kernel_{engine}.settings")
        ours = {name for name in named if name.startswith(settings.PREFIX)}
        assert ours
        for name in ours:  # an unknown setting is an error, whatever its value
            settings.read_settings({name: {"TOKENSPEED_VLLM_ACTIVATIONS": "fp8"}.get(name, "1")})


def test_formats_are_on_as_the_plugin_for_vllm_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each format of experts and linear layers, vLLM's cell says whether our kernels run it by default on Hopper. On an MI355X
    they run none by default."""
    monkeypatch.syspath_prepend(str(DOCS))
    served = importlib.import_module("served_table")
    settings = importlib.import_module("tokenspeed_kernel_vllm.settings")
    for parts in (served.EXPERTS, served.LINEAR):
        for weight_format, part in parts.items():
            cell = part.status[served.ENGINES.index("vLLM")]
            (switch,) = re.findall(r"TOKENSPEED_\w+", cell)
            with use_platform(named_platform("h200")):
                assert settings.default_of(switch, weight_format).on == cell.startswith("on (Hopper"), cell
            with use_platform(named_platform("mi355x")):
                assert not settings.default_of(switch, weight_format).on, cell


def test_a_plugins_speed_is_relative_to_the_engines_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    served = importlib.import_module("served_table")
    assert served.measured_table("vllm", tmp_path) == "Nothing has been measured with these models yet."

    def rows(engine: str, ms: float, rate: float, **more: Any) -> list[dict[str, Any]]:
        return [
            {"engine": engine, "figure": "decode", "batch": 1, "ms": ms, **more},
            {"engine": engine, "figure": "prefill", "shape": "4x8192", "tokens_per_s": rate, **more},
        ]

    report = {"rows": [*rows("vllm", 4.0, 100), *rows("plugin", 2.0, 50), *rows("plugin-linear", 1.0, 1, engines_starting=1)]}
    report["rows"] += rows("plugin-experts", 2.0, 1, engines_starting=1, all_ms=[2.0, 2.0, 2.1])
    report["rows"] += rows("plugin-mla", 5.0, 80, engines_starting=1, all_ms=[5.0, 5.01, 5.02])
    (tmp_path / "llama.json").write_text(json.dumps(report))
    assert served.measured_table("vllm", tmp_path).splitlines()[0] == "| model | variant | decode 1 | prefill | geometric mean |"
    expected = ["| llama | `plugin` | 2.00 | 0.50 | 1.00 |", "| llama | `plugin-mla` | 0.80 | 0.80 | 0.80 |"]
    assert served.measured_table("vllm", tmp_path).splitlines()[2:] == expected
    assert marks("measured") == sorted(served.RESULTS)
    for engine in served.RESULTS:
        assert re.search(r"^\| gpt-oss", served.measured_table(engine), re.MULTILINE), engine


def test_the_configuration_file_has_every_key(tmp_path: Path) -> None:
    """The configuration file in ``configuration.md`` must be valid and have every key."""
    (example,) = [block.text for block in blocks_of(DOCS / "configuration.md") if block.language == "toml"]
    path = tmp_path / "settings.toml"
    path.write_text(example)
    settings = config.read_settings({config.PREFIX + "CONFIG": str(path)})
    assert settings.overrides == {("norm", "rmsnorm"): "triton_rmsnorm", ("attention", "mha_prefill"): "triton_mha_prefill"}
    missing = [key for key in config._KEYS if not re.search(rf"^{key} = ", example, re.MULTILINE)]
    assert missing == [], "add them to the file in docs/configuration.md"


def test_the_page_names_every_check_and_no_other() -> None:
    section = (DOCS / "workbench" / "checking.md").read_text().partition("## The conformance kit")[2].partition("\n## ")[0]
    shown = re.findall(r"^\| `(.*?)`", section, re.MULTILINE)
    assert shown == list(numerics.CHECKS), "mend the table of checks in docs/workbench/checking.md"


def test_the_page_names_every_gate_in_order() -> None:
    section = (DOCS / "selection.md").read_text().partition("## The gates")[2].partition("\n## ")[0]
    shown = re.findall(r"^\| (\w+) \|", section, re.MULTILINE)[1:]
    assert shown == list(selection.GATES), "mend the table of gates in docs/selection.md"


def test_the_package_readme_says_how_kernels_are_chosen() -> None:
    text = " ".join((PACKAGE / "README.md").read_text().split())
    assert f"gates ({', '.join(selection.GATES)})" in text
    *others, last = selection.RANKS
    assert f"ranked by {', '.join(others)} and {last}, in this order." in text


def test_a_cold_call_runs_the_functions_of_the_page_in_order() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    rows = re.findall(r"^\| \d[ to\d]* \| `(?:\w+\.)?(\w+)` \| (?:generated by `fast_path\.(\w+)`|`(\w+)`) \|", text, re.MULTILINE)
    files = {"build_public_function": "rmsnorm", "Comparisons": "rmsnorm_like", "build_describing": "rmsnorm_describing"}
    wanted = [(f"<tokenspeed_kernel {files[maker]}>" if maker else f"{module}.py", name) for name, maker, module in rows]
    weight = torch.ones(8)
    memo.invalidate()
    rmsnorm(torch.ones(2, 8), weight)
    called = []

    def trace(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            file = re.sub(r"(_\d+)?( \d+)?>$", ">", Path(frame.f_code.co_filename).name)  # generated files are numbered
            called.append((file, frame.f_code.co_name))

    sys.setprofile(trace)
    try:
        rmsnorm(torch.ones(2, 8, dtype=torch.float16), weight)
    finally:
        sys.setprofile(None)
    assert len(wanted) == 10
    assert [call for call in called if call in wanted][: len(wanted)] == wanted


def test_the_page_names_every_hook() -> None:
    text = (DOCS / "declaring-an-operator.md").read_text()
    missing = [hook for hook in HOOKS if not re.search(rf"`{hook}\b|\.{hook}\b", text)]
    assert missing == [], "add them to the table of hooks in docs/declaring-an-operator.md"


def test_commands_and_options_exist() -> None:
    """Every `tokenspeed-kernel` command in a page or README must exist, with its options."""
    pytest.importorskip("typer")
    import typer.main

    from tokenspeed_kernel_command.commands import app

    group = typer.main.get_command(app)
    shown = {
        line.split("#")[0].strip()
        for page in [*PAGES, *READMES]
        for block in blocks_of(page)
        if block.language == "sh"
        for line in block.text.splitlines()
        if "tokenspeed-kernel " in line and "pip install" not in line
    }
    assert len(shown) > 20
    for line in sorted(shown):
        words = line.partition("tokenspeed-kernel ")[2].partition(" -- ")[0].split()
        command = group
        while words and hasattr(command, "commands"):
            assert words[0] in command.commands, f"{line}: there is no command {words[0]}"
            command = command.commands[words.pop(0)]
        options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        assert [word for word in words if word.startswith("-") and word not in options] == [], line


# -- links -----------------------------------------------------------------------------------------------------------------------


def headings(page: Path) -> set[str]:
    """Returns the anchors of a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {re.sub(r"[\s]+", "-", heading.strip()) for heading in plain}


GENERATED = {DOCS / "architecture.md": ROOT / "ARCHITECTURE.md", DOCS / "contributing.md": ROOT / "CONTRIBUTING.md"}


@pytest.mark.parametrize("page", [*PAGES, *READMES], ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        target = GENERATED.get(target, target)
        if not target.exists() or (anchor and anchor not in headings(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", [*PAGES, *READMES], ids=named)
def test_files_that_are_named_exist(page: Path) -> None:
    """Every path that a page names must exist, relative to the root of the repository or to the page's folder."""
    paths = re.findall(r"\b((?:packages|tools|ci|docs)/[\w./-]*\w/?)", page.read_text())
    missing = sorted({path for path in paths if not (ROOT / path).exists() and not (page.parent / path).exists()})
    assert missing == []


@pytest.mark.parametrize("page", [*PAGES, *READMES], ids=named)
def test_merges_are_finished(page: Path) -> None:
    assert not re.search(r"^(<{7}|={7}|>{7})( |$)", page.read_text(), re.MULTILINE)


@pytest.mark.parametrize(("page", "most"), [(PACKAGE / "README.md", 150), (ROOT / "README.md", 100)], ids=["package", "repository"])
def test_readmes_stay_short(page: Path, most: int) -> None:
    assert len(page.read_text().splitlines()) <= most


def test_the_sessions_are_those_of_nox() -> None:
    """The tables of sessions in README and CONTRIBUTING must name exactly the sessions of ``noxfile.py``."""
    text = (ROOT / "noxfile.py").read_text()
    sessions = set()
    for options, function in re.findall(r"^@nox\.session(\(.*?\))?\n(?:@.*\n)*def (\w+)", text, re.MULTILINE):
        renamed = re.search(r'name="([\w-]+)"', options)
        sessions.add(renamed[1] if renamed else function)
    for name in ("README.md", "CONTRIBUTING.md"):
        rows = re.findall(r"^\| ((?:`[\w-]+`(?:, )?)+) \|", (ROOT / name).read_text(), re.MULTILINE)
        shown = {session for row in rows for session in re.findall(r"`([\w-]+)`", row)}
        assert (shown | {"demo", "tests"}) == sessions, name
