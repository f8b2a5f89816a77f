"""Runs the benchmark program on a small model."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.17", reason="needs transformers: `nox -s transformers` installs it")
pytest.importorskip("tokenspeed_kernel_transformers", reason="needs the plugin: `nox -s transformers` installs it")

PROGRAM = Path(__file__).parents[1] / "benchmarks" / "h200_transformers.py"


@pytest.fixture
def program() -> Any:
    spec = importlib.util.spec_from_file_location("h200_transformers", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_every_variant(program: Any, tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    sizes = ["--tokens", "2", "--repeats", "1", "--prompts", "8", "--batches", "2", "--caches", "dynamic", "static"]
    rows = program.main(["--device", "cpu", "--tiny", *sizes, "--output", str(output)])
    assert [row["variant"] for row in rows] == [name for name in program.USUAL for _ in range(2)]
    assert all(row["error"] < 0.05 and row["prefill"] > 0 and row["decode"] > 0 for row in rows)
    found = json.loads(output.read_text())
    assert found["rows"] == rows
    assert found["measured_on"]["transformers"]


def test_a_variant_whose_package_is_missing(program: Any, tmp_path: Path) -> None:
    if importlib.util.find_spec("flash_attn") is not None:
        pytest.skip("FlashAttention is installed")
    output = tmp_path / "results.json"
    sizes = ["--tokens", "2", "--repeats", "1", "--prompts", "8", "--batches", "1"]
    variants = ["--variants", "flash_attention_4", "sdpa"]
    missing, measured = program.main(["--device", "cpu", "--tiny", *sizes, *variants, "--output", str(output)])
    assert missing["variant"] == "flash_attention_4"
    assert "FlashAttention4" in missing["problem"].replace(" ", "")
    assert measured["prefill"] > 0
    assert json.loads(output.read_text())["rows"] == [missing, measured]


def test_a_run_that_is_cut_off_keeps_its_rows(program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def figures(given: Any, model: Any, ids: Any, cache: str) -> dict[str, Any]:
        if cache == "static":
            raise KeyboardInterrupt
        return {"decode": 1.0}

    monkeypatch.setattr(program, "figures", figures)
    output = tmp_path / "results.json"
    sizes = ["--device", "cpu", "--tiny", "--variants", "sdpa", "--prompts", "8", "--batches", "1", "--caches", "dynamic", "static"]
    with pytest.raises(KeyboardInterrupt):
        program.main([*sizes, "--output", str(output)])
    assert [row["cache"] for row in json.loads(output.read_text())["rows"]] == ["dynamic"]


@pytest.mark.parametrize(
    ("place", "file", "variants"),
    [
        (0, "h200_transformers.json", ("sdpa", "tokenspeed attention", "tokenspeed")),
        (1, "h200_flash_attention.json", ("sdpa", "flash_attention_4", "tokenspeed attention")),
    ],
)
def test_the_readme_has_the_measured_figures(place: int, file: str, variants: tuple[str, ...]) -> None:
    """Each row of a README's table has the figures of its file, by batch and prompt. ``place`` counts the tables."""
    folder = PROGRAM.parent
    rows = json.loads((folder / file).read_text())["rows"]
    found = {(row["variant"], row["batch"], row["prompt"]): row for row in rows}
    readme = (folder.parent / "README.md").read_text().splitlines()
    for batch, prompt in {key[1:] for key in found}:
        line = [line for line in readme if line.startswith(f"| {batch} x {prompt:,} |")][place]
        wanted = []
        for figure in ("prefill", "decode", "graph"):
            for variant in variants:
                row = found.get((variant, batch, prompt), {})
                value = row.get(figure)
                digits = None if value is None else 0 if value >= 200 else 1
                empty = "error" if f"{figure}_problem" in row else ""
                wanted.append(empty if value is None else f"{value:,.{digits}f}")
        assert [cell.strip() for cell in line.strip("|").split("|")[1:]] == wanted, line
