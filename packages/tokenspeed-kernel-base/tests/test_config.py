"""Tests settings from the environment and from the TOML file."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from tokenspeed_kernel_base import config
from tokenspeed_kernel_base.config import ConfigurationError, read_settings
from tokenspeed_kernel_base.platform import current_platform


def read(toml: Path | None = None, **variables: str) -> config.Settings:
    environ = {config.PREFIX + name: value for name, value in variables.items()}
    return read_settings({**environ, **({config.PREFIX + "CONFIG": str(toml)} if toml else {}), "PATH": "/bin"})


@pytest.fixture
def toml(tmp_path: Path) -> Any:
    def write(text: str | bytes) -> Path:
        path = tmp_path / "settings.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_nothing_set_gives_the_defaults() -> None:
    assert read() == config.Settings()


def test_everything_from_the_environment() -> None:
    settings = read(
        PLATFORM="gfx950",
        VERBOSE="1",
        DISABLE_PLUGINS=" one, two ,,",
        TUNED="/tmp/tuned",
        CAPTURE_SHAPES="/tmp/shapes.jsonl",
        OVERRIDE_ATTENTION_MHA_PREFILL="mine",
        OVERRIDE_GEMM_MM="",
    )
    assert settings.platform == "gfx950"
    assert settings.verbose is True
    assert settings.disabled_plugins == {"one", "two"}
    assert settings.tuned == "/tmp/tuned"
    assert settings.capture_path == Path("/tmp/shapes.jsonl")
    assert settings.override_for("attention", "mha_prefill") == ("mine", "TOKENSPEED_KERNEL_OVERRIDE_ATTENTION_MHA_PREFILL")
    assert settings.override_for("gemm", "mm") is None, "an empty variable is one that is not set"
    assert settings.override_for("attention", "mha") is None


def test_everything_from_the_file(toml: Any) -> None:
    path = toml(
        """
        objective = "accuracy"
        platform = "sm_90"
        disabled_plugins = ["broken"]
        verbose = true
        tuned = "off"
        capture_shapes = "shapes.jsonl"
        [overrides]
        "attention.mha_prefill" = "quoted"
        norm.rmsnorm = "dotted"
        [overrides.gemm]
        mm = "nested"
        """
    )
    settings = read(path)
    assert (settings.objective, settings.platform, settings.verbose) == ("accuracy", "sm_90", True)
    assert settings.disabled_plugins == {"broken"}
    assert settings.tuned == "off"
    assert settings.capture_path == Path("shapes.jsonl")
    assert settings.source == path
    assert settings.override_for("attention", "mha_prefill") == ("quoted", f"{path}: overrides.attention.mha_prefill")
    assert settings.override_for("norm", "rmsnorm") == ("dotted", f"{path}: overrides.norm.rmsnorm")
    assert settings.override_for("gemm", "mm") == ("nested", f"{path}: overrides.gemm.mm")


def test_the_environment_wins(toml: Any) -> None:
    path = toml(
        """
        platform = "sm_90"
        disabled_plugins = ["a"]
        verbose = true
        capture_shapes = "file.jsonl"
        [overrides]
        "gemm.mm" = "file"
        """
    )
    settings = read(path, PLATFORM="gfx950", DISABLE_PLUGINS="b", VERBOSE="0", CAPTURE_SHAPES="env.jsonl", OVERRIDE_GEMM_MM="env")
    assert settings.platform == "gfx950"
    assert settings.disabled_plugins == {"b"}
    assert settings.verbose is False
    assert settings.capture_path == Path("env.jsonl")
    assert settings.override_for("gemm", "mm") == ("env", "TOKENSPEED_KERNEL_OVERRIDE_GEMM_MM")
    assert read(path, DISABLE_PLUGINS="").disabled_plugins == frozenset(), "set to nothing: none is disabled"


@pytest.mark.parametrize("text", ["1", "true", "YES", "on"])
def test_flags_that_are_set(text: str) -> None:
    assert read(VERBOSE=text).verbose is True


@pytest.mark.parametrize("text", ["0", "False", "no", "off", ""])
def test_flags_that_are_clear(text: str) -> None:
    assert read(VERBOSE=text).verbose is False


def test_a_flag_that_is_neither() -> None:
    with pytest.raises(ConfigurationError, match="_KERNEL_VERBOSE must be 1 or 0, got 'maybe'"):
        read(VERBOSE="maybe")


NO = ["0", "False", "no", " off ", "OFF"]
YES = ["1", "true", "YES", "on"]


@pytest.mark.parametrize("word", NO)
def test_a_word_for_no_is_no_path(toml: Any, word: str) -> None:
    settings = read(CONFIG=word, CAPTURE_SHAPES=word, TUNED=word, PROFILE=word, VERBOSE=word)
    assert settings == config.Settings(tuned=config.OFF)
    assert not settings.watches_calls
    path = toml("capture_shapes = 'calls'\ntuned = '/tmp/tuned'\n")
    settings = read(path, CAPTURE_SHAPES=word, TUNED=word)
    assert (settings.capture_path, settings.tuned) == (None, config.OFF), "the environment wins"
    settings = read(toml(f"capture_shapes = '{word}'\ntuned = '{word}'\n"))
    assert (settings.capture_path, settings.tuned) == (None, config.OFF), "the file says it like the environment"


@pytest.mark.parametrize("word", YES)
@pytest.mark.parametrize("name", ["CONFIG", "CAPTURE_SHAPES"])
def test_a_word_for_yes_names_no_file(toml: Any, name: str, word: str) -> None:
    message = rf"TOKENSPEED_KERNEL_{name} must be the path of a file, or off, got '{word}'; a file of that name is \./{word}"
    with pytest.raises(ConfigurationError, match=message):
        read(**{name: word})
    path = toml(f"capture_shapes = '{word}'\n")
    with pytest.raises(ConfigurationError, match=f"{path}: capture_shapes .* off, got '{word}'"):
        read(path)


@pytest.mark.parametrize("word", YES)
def test_a_word_for_yes_is_the_usual_directory(toml: Any, word: str) -> None:
    assert read(TUNED=word).tuned is None
    assert read(toml("tuned = 'off'\n"), TUNED=word).tuned is None, "the environment wins"
    assert read(toml(f"tuned = '{word}'\n")).tuned is None


def test_files_named_like_words() -> None:
    settings = read(CAPTURE_SHAPES="./0", TUNED="./off")
    assert (settings.capture_path, settings.tuned) == (Path("0"), "./off")


def test_where_files_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for text, place in [
        ("", tmp_path / "tokenspeed_kernel" / "things"),
        ("on", tmp_path / "tokenspeed_kernel" / "things"),
        ("there", Path("there")),
        ("0", None),
    ]:
        assert config.kept_in(config.directory(text), "things") == place


@pytest.mark.parametrize(
    ("name", "near"),
    [("VERBOS", "VERBOSE"), ("DISABLED_PLUGINS", "DISABLE_PLUGINS"), ("PLATTFORM", "PLATFORM"), ("CONFIG_FILE", "CONFIG")],
)
def test_an_unknown_variable_warns_with_the_nearest_name(name: str, near: str) -> None:
    with pytest.warns(UserWarning, match=rf"unknown .*KERNEL_{name}; .*KERNEL_{near}\?"):
        read(**{name: "x"})


def test_known_variables_and_those_of_others_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read = read_settings({"TOKENSPEED_KERNEL_VERBOSE": "0", "TOKENSPEED_OTHER": "x", "TOKENSPEED_KERNEL_OVERRIDE_A_B": "k"})
    assert read.verbose is False
    assert read.override_for("a", "b") is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("objective = ", "is not valid TOML"),
        (b"\xff\xfe", "is not valid TOML"),
        ("objektive = 'accuracy'", "unknown key 'objektive'; did you mean 'objective'?"),
        ("verbose = 1", "verbose must be a bool, got 1"),
        ("objective = 3", "objective must be a str, got 3"),
        ("platform = ['cpu']", r"platform must be a str, got \['cpu'\]"),
        ("disabled_plugins = 'all'", "disabled_plugins must be a list, got 'all'"),
        ("disabled_plugins = [1]", r"disabled_plugins must be a list of str, got \[1\]"),
        ("disabled_plugins = [['a']]", "disabled_plugins must be a list of str"),
        ("overrides = 'x'", "overrides must be a table, got 'x'"),
        ("[overrides]\nmm = 'k'", r"""an override is spelled "family.mode" = "kernel_name", got 'mm' = 'k'"""),
        ("[overrides]\n'gemm.mm' = 3", 'an override is spelled "family.mode"'),
        ("[overrides]\n'gemm.mm' = ''", 'an override is spelled "family.mode"'),
        ("[overrides]\n'.mm' = 'k'", 'an override is spelled "family.mode"'),
        ("[overrides]\n'gemm.' = 'k'", 'an override is spelled "family.mode"'),
        ("[overrides.gemm.mm]\nx = 'k'", 'an override is spelled "family.mode"'),
    ],
)
def test_a_file_that_cannot_be_used(toml: Any, text: str, message: str) -> None:
    path = toml(text)
    with pytest.raises(ConfigurationError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"_KERNEL_CONFIG names .*absent\.toml, .* read"):
        read(tmp_path / "absent.toml")
    with pytest.raises(ConfigurationError, match="which cannot be read"):
        read(tmp_path)


def test_settings_are_read_once_and_again_on_request(settings_from: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = settings_from(PLATFORM="gfx950")
    assert config.settings() is first
    monkeypatch.setenv("TOKENSPEED_KERNEL_PLATFORM", "sm_90")
    assert config.settings().platform == "gfx950"
    assert config.reload_settings().platform == "sm_90"


def test_an_unknown_platform_names_the_setting(settings_from: Any) -> None:
    settings_from(PLATFORM="h10")
    with pytest.raises(ValueError, match=r"PLATFORM .*unknown platform 'h10'"):
        current_platform()


def test_overrides_of_operators_that_do_not_exist(settings_from: Any, toml: Any) -> None:
    path = toml("[overrides]\n'gemm.nm' = 'k'\n'gemm.mm' = 'k'\n")
    settings_from(CONFIG=str(path), OVERRIDE_GEMM_MM="k", OVERRIDE_GEMMM_MM="k")
    with pytest.warns(UserWarning, match="names no operator") as caught:
        config.warn_about_unknown_overrides([("gemm", "mm"), ("norm", "rmsnorm")])
    assert sorted(str(w.message) for w in caught) == sorted(
        [
            "TOKENSPEED_KERNEL_OVERRIDE_GEMMM_MM names no operator; did you mean TOKENSPEED_KERNEL_OVERRIDE_GEMM_MM?",
            f"{path}: overrides.gemm.nm names no operator; did you mean gemm.mm?",
        ]
    )


def test_every_variable_is_documented() -> None:
    assert {name.removeprefix(config.PREFIX) for name in config.VARIABLES} == {
        "CONFIG", "PLATFORM", "VERBOSE", "DISABLE_PLUGINS", "TUNED", "PROGRAMS", "PACKS", "COMPILE_POLICY", "CAPTURE_SHAPES",
        "PROFILE", "OVERRIDE_<FAMILY>_<MODE>",
    }  # fmt: skip
    assert all(config.VARIABLES.values())
