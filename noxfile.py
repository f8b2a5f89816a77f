"""The sessions that developers and CI run. ``python -m nox -l`` lists them. Each session makes its own environment.

A session that needs hardware or software that this machine lacks is skipped, and its message names the requirement.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["lint", "tests"]
nox.options.reuse_venv = "yes"

ROOT = Path(__file__).parent
BASE = "packages/tokenspeed-kernel-base"
CORE = "packages/tokenspeed-kernel"
RUNTIME = "tools/gpt_oss"
EMULATION = "tools/kernel_emulation"
EMULATOR = "tools/gfx950_emulator"
HOPPER = "tools/sm90_emulator"
AMD = "packages/tokenspeed-kernel-amd"
NVIDIA = "packages/tokenspeed-kernel-nvidia"
VLLM_PLUGIN = "tools/vllm_plugin"
TRANSFORMERS_PLUGIN = "tools/transformers_plugin"
SGLANG_PLUGIN = "tools/sglang_plugin"
# The exact version makes all sessions and CI use the same PyTorch: the build for CPUs if the package index offers one.
TORCH = "torch==2.13.0"
# The oldest and the newest Triton that the kernels are compiled with.
TRITONS = ("triton==3.6.0", "triton==3.9.0")
# The releases that the vLLM plugin is tested with. vLLM pins another PyTorch, so it is installed without its requirements.
VLLMS = ("vllm==0.26.0", "vllm==0.33.0")
# The releases that the transformers plugin is tested with: the oldest that the plugin accepts, and the newest.
TRANSFORMERS = ("transformers==5.17.0", "transformers==5.24.0")
# The releases that the SGLang plugin is tested with, each with the transformers that it pins.
SGLANGS = (("sglang==0.5.15", "transformers==5.12.1"), ("sglang==0.5.23", "transformers==5.19.0"))
# The compiler of the NVIDIA wheel's kernels. It can be installed without a GPU.
CUTEDSL = "nvidia-cutlass-dsl==4.8.1"
# A C compiler, for machines that have none.
ZIG = "ziglang==0.17.1"
# The environment of tests. One thread per worker, because workers that each use all cores slow each other down many times over.
# Tests start hundreds of processes, each of which would compile every module again if none might write bytecode.
TESTING = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}


def _install(session: nox.Session, *groups: str, runtime: bool = True) -> None:
    """Installs this repository's packages as editable, and dependency groups of pyproject.toml. PyTorch is installed first.
    Otherwise a requirement of a package could install another version."""
    session.install(TORCH)
    packages = [BASE, f"{CORE}[tools]", *([RUNTIME] if runtime else [])]
    session.install(*(part for package in packages for part in ("-e", package)), *_requirements(*groups))


def _requirements(*groups: str) -> tuple[str, ...]:
    return nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), *groups) if groups else ()


@nox.session
def demo(session: nox.Session) -> None:
    """GPT-OSS generates text through the public API, shows which kernels ran, and checks its results."""
    _install(session)
    session.run("python", "-m", "gpt_oss", "demo", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Runs the tests that need no GPU, compiler or engine. Arguments replace the default arguments of pytest."""
    _install(session, "test", "peers", "build")
    # Other sessions run the ignored tests: `emulate` those that need Triton, `cutedsl` those that need CuteDSL, `vllm`,
    # `transformers` and `sglang` those of the plugins.
    ignored = (EMULATION, EMULATOR, HOPPER, AMD, NVIDIA, VLLM_PLUGIN, TRANSFORMERS_PLUGIN, SGLANG_PLUGIN)
    others = [part for path in ignored for part in ("--ignore", path)]
    arguments = session.posargs or ["-n", "auto", "-m", "not slow and not nvidia and not amd", *others]
    session.run("python", "-m", "pytest", *arguments, env=TESTING)


@nox.session
def interpret(session: nox.Session) -> None:
    """Runs the portable Triton kernels on small cases in Triton's interpreter, without a GPU.

    Then compiles the kernels of ``ci/compiled.json`` that have changed since. Arguments replace pytest's.
    """
    _install(session, "test", runtime=False)
    session.install(TRITONS[-1])
    arguments = session.posargs or ["-n", "auto", "-m", "not slow", "-k", "triton"]
    environment = {**TESTING, "TRITON_INTERPRET": "1"}
    files = [f"{CORE}/tests/{name}" for name in ("test_kernels.py", "test_ids.py", "test_docs.py", "triton")]
    session.run("python", "-m", "pytest", *files, *arguments, env=environment)
    if not session.posargs:
        session.run("python", "ci/compile_triton.py", "--arch", "sm_90", "--arch", "gfx950", "--changed", "--seconds", "300")


@nox.session
def emulate(session: nox.Session) -> None:
    """Runs the tests of the emulator of gfx950 and gfx942. Runs tests of the AMD wheel's kernels and of the GPT-OSS runtime on this
    emulator. Needs no GPU.

    Arguments replace pytest's.
    """
    _install(session, "test", "build")
    session.install(TRITONS[-1], "-e", EMULATION, "-e", f"{EMULATOR}[cli]", "-e", AMD)
    tests = (f"{EMULATION}/tests", f"{EMULATOR}/tests", f"{AMD}/tests", f"{RUNTIME}/tests/test_gfx950.py")
    arguments = session.posargs or ["-n", "auto", "-m", "not slow", *tests]
    session.run("python", "-m", "pytest", *arguments, env={**TESTING, "TRITON_DEFAULT_FP_FUSION": "1"})


@nox.session
def cutedsl(session: nox.Session) -> None:
    """Compiles one configuration of each CuteDSL kernel. Then runs the tests of the NVIDIA wheel and of the sm_90 emulator, which
    executes the wheel's kernels and portable kernels.

    Needs no GPU. Arguments replace pytest's, and leave out the first step.
    """
    _install(session, "test", "build", runtime=False)
    session.install(CUTEDSL, TRITONS[-1], "-e", NVIDIA, "-e", EMULATION, "-e", f"{HOPPER}[cli]")
    if not any(shutil.which(compiler) for compiler in ("cc", "gcc", "clang")):
        session.install(ZIG)
    arguments = session.posargs or ["-n", "auto", "-m", "not slow and not nvidia", f"{NVIDIA}/tests", f"{HOPPER}/tests"]
    if not session.posargs:
        session.run("python", "ci/compile_cutedsl.py", "--each", "--keep")
    session.run("python", "-m", "pytest", *arguments, env={**TESTING, "TRITON_DEFAULT_FP_FUSION": "1"})


@nox.session
@nox.parametrize("release", VLLMS)
def vllm(session: nox.Session, release: str) -> None:
    """Runs the plugin in vLLM's own layers on a CPU, with the reference kernels, and with the AMD wheel's kernels on the emulator.

    Only vLLM's Python code runs, not its compiled operators, which need a GPU. Arguments replace pytest's.
    """
    _install(session, "test", "vllm", "build", runtime=False)
    session.install(TRITONS[-1], "-e", EMULATION, "-e", EMULATOR, "-e", AMD, "-e", VLLM_PLUGIN)
    session.install("--no-deps", release)
    arguments = session.posargs or ["-n", "auto", f"{VLLM_PLUGIN}/tests"]
    environment = {**TESTING, "TRITON_DEFAULT_FP_FUSION": "1"}
    session.run("python", "-m", "pytest", *arguments, env=environment)


@nox.session
@nox.parametrize("release", TRANSFORMERS)
def transformers(session: nox.Session, release: str) -> None:
    """Runs the plugin in transformers' own models on a CPU, with random weights. Arguments replace pytest's."""
    _install(session, "test", "build", runtime=False)
    session.install("-e", TRANSFORMERS_PLUGIN, release)
    arguments = session.posargs or ["-n", "auto", f"{TRANSFORMERS_PLUGIN}/tests"]
    session.run("python", "-m", "pytest", *arguments, env=TESTING)


@nox.session
@nox.parametrize("release", SGLANGS, ids=[release for release, _ in SGLANGS])
def sglang(session: nox.Session, release: tuple[str, str]) -> None:
    """Runs the plugin in SGLang's own layers on a CPU, with the reference kernels.

    Only SGLang's Python code runs, not its compiled operators, which need a GPU. Arguments replace pytest's.
    """
    engine, models = release
    _install(session, "test", "sglang", "build", runtime=False)
    session.install(TRITONS[-1], models, "-e", SGLANG_PLUGIN)
    session.install("--no-deps", engine)
    arguments = session.posargs or ["-n", "auto", f"{SGLANG_PLUGIN}/tests"]
    session.run("python", "-m", "pytest", *arguments, env=TESTING)


@nox.session
def lint(session: nox.Session) -> None:
    """Runs ruff, ruff format, the check of words in prose, and mypy (strict on the core, the NVIDIA wheel and the emulators)."""
    _install(session, "lint", runtime=False)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("python", "ci/check_words.py")
    session.run("mypy")


@nox.session
def docs(session: nox.Session) -> None:
    """Builds the documentation site into build/site. A broken link, and a public name without a description, are errors."""
    _install(session, "docs", runtime=False)
    session.install("--no-deps", "-e", AMD, "-e", NVIDIA)  # pages list these wheels' kernels, read from the declarations
    session.run("mkdocs", "build", "--strict", *session.posargs, env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def build(session: nox.Session) -> None:
    """Builds all wheels into dist/wheels, imports the wheels in a fresh environment, and runs every install line of the pages.

    Arguments are added to pytest's.
    """
    session.install(*_requirements("build"))
    session.run("python", "ci/build_wheels.py")
    session.install(TORCH, *_requirements("install"))
    session.run("python", "-m", "pytest", "-n", "auto", "-o", "filterwarnings=", "ci/test_install.py", *session.posargs)


@nox.session
def resolve(session: nox.Session) -> None:
    """Asks pip whether the wheels in dist/wheels can be installed beside the newest vLLM, SGLang and transformers.

    Prints the version pins that conflict. Arguments are names of engines; all by default.
    """
    if not any((ROOT / "dist" / "wheels").glob("*.whl")):
        session.skip("needs the wheels: `nox -s build` makes them")
    session.install("pip>=26")
    session.run("python", "ci/resolve.py", *session.posargs)


def _on_this_machine(session: nox.Session, tool: str, vendor: str) -> None:
    """Skips the session unless this machine has the vendor's GPU and a PyTorch for it. Sessions that need a GPU use the machine's
    own PyTorch, which matches the driver. A PyTorch built for CPUs would not find the GPU."""
    if shutil.which(tool) is None or subprocess.run([tool], capture_output=True, check=False).returncode:
        session.skip(f"needs an {vendor} GPU with its driver: `{tool}` does not answer here")
    if importlib.util.find_spec("torch") is None:
        session.skip(f"needs a PyTorch for {vendor} in the Python that runs nox: install it as pytorch.org says for your driver")


@nox.session(name="tests-nvidia", venv_params=["--system-site-packages"])
def tests_nvidia(session: nox.Session) -> None:
    """Runs all tests that need an NVIDIA GPU, among them every kernel for NVIDIA on every case, large cases included."""
    _on_this_machine(session, "nvidia-smi", "NVIDIA")
    session.install("-e", BASE, "-e", f"{CORE}[tools]", "-e", RUNTIME, "-e", NVIDIA, *_requirements("test"))
    session.run("python", "-m", "pytest", "-m", "nvidia", *session.posargs)


@nox.session(name="sanitize-nvidia", venv_params=["--system-site-packages"])
def sanitize_nvidia(session: nox.Session) -> None:
    """Runs the small cases of every Triton kernel under compute-sanitizer's memcheck. Arguments are operators; all by default."""
    _on_this_machine(session, "nvidia-smi", "NVIDIA")
    if shutil.which("compute-sanitizer") is None:
        session.skip("needs compute-sanitizer, which comes with the CUDA toolkit")
    session.install("-e", BASE, "-e", f"{CORE}[tools]")
    # Without PyTorch's memory pool, every tensor is a separate allocation. So memcheck finds accesses past the end of a tensor.
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    check = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "1")
    for target in session.posargs or [""]:
        verify = ("python", "-m", "tokenspeed_kernel", "verify", *([target] if target else []), "--solution", "triton")
        session.run(*check, *verify, env=environment, external=True)


@nox.session(name="tests-amd", venv_params=["--system-site-packages"])
def tests_amd(session: nox.Session) -> None:
    """Runs all tests that need an AMD GPU, among them every kernel for AMD on every case, large cases included.

    Tests that count instructions run on the emulator.
    """
    _on_this_machine(session, "rocm-smi", "AMD")
    session.install("-e", BASE, "-e", f"{CORE}[tools]", "-e", RUNTIME, *_requirements("test"))
    session.install("--no-deps", "-e", AMD, "-e", EMULATION, "-e", EMULATOR)  # PyTorch for ROCm has its own Triton
    session.run("python", "-m", "pytest", "-m", "amd", *session.posargs)


@nox.session(name="compile")
@nox.parametrize("compiler", [*TRITONS, CUTEDSL])
def compile_kernels(session: nox.Session, compiler: str) -> None:
    """Compiles every kernel for every architecture, without a GPU, and reports the registers and memory that each kernel uses.

    Arguments go to ``ci/compile_triton.py`` or ``ci/compile_cutedsl.py``: ``nox -s compile -- --arch sm_90 --kernel decode``.
    """
    _install(session, runtime=False)
    if compiler == CUTEDSL:
        session.install(compiler, "-e", NVIDIA)
        session.run("python", "ci/compile_cutedsl.py", *session.posargs)
        return
    session.install(compiler)
    session.run("python", "ci/compile_triton.py", *session.posargs)
