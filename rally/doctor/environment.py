"""Doctor checks of the environment: Python, packages and the GPU driver. Each problem comes with a command to fix
it."""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import NamedTuple

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from rally.config import Config
from rally.doctor.check_context import DoctorCase, Finding
from rally.engines.base import EngineError
from rally.engines.remote.launched_server import probe_package

OURS = "rally-rl"
SHOWN = ("torch", "transformers", "tokenizers")


class Need(NamedTuple):
    """A package that a configuration key needs, and the extra of Rally that installs it."""

    package: str
    extra: str
    because: str


def packages(case: DoctorCase) -> Iterator[Finding]:
    problems = [*_extras(case.config), *_server(case.config)]
    try:
        about = metadata.metadata(OURS)
    except metadata.PackageNotFoundError:
        problem = f"{OURS} is not installed, so its requirements are unknown; run: pip install --editable ."
        yield Finding("environment", "warning", problem)
    else:
        wanted = [Requirement(text) for text in about.get_all("Requires-Dist") or ()]
        problems += [*_python(about["Requires-Python"]), *_core(wanted)]
    yield from (Finding("environment", "error", text) for text in problems)
    if not problems:
        versions = ", ".join(f"{name} {metadata.version(name)}" for name in SHOWN)
        yield Finding("environment", "ok", f"Python {platform.python_version()}, {versions}; nothing is missing")


def _python(requires: str | None) -> Iterator[str]:
    if requires and platform.python_version() not in SpecifierSet(requires, prereleases=True):
        yield f"Python {platform.python_version()} is not supported; create an environment with Python {requires}"


def _core(wanted: list[Requirement]) -> Iterator[str]:
    for one in wanted:
        if (one.marker is None or one.marker.evaluate({"extra": ""})) and (problem := _problem(one)):
            yield f"{problem}; run: pip install '{_asked(one)}'"


def _extras(config: Config) -> Iterator[str]:
    for package, extra, because in needs(config):
        if problem := _problem(Requirement(package)):
            yield f"{because} needs it, but {problem}; run: pip install '{OURS}[{extra}]'"


def needs(config: Config) -> Iterator[Need]:
    """Packages that only some configurations import. Tools check their own."""
    model = config.model
    if model.lora_rank or model.lora_adapter_path:
        yield Need("peft", "lora", "actor_rollout_ref.model.lora_rank")
    if str(model.path).endswith(".gguf"):
        yield from (Need(name, "gguf", "a model in a .gguf file") for name in ("gguf", "accelerate"))
    if config.rollout.name != "embedded":
        yield Need("aiohttp", "servers", f"actor_rollout_ref.rollout.name={config.rollout.name}")
    if config.samples_in_ranks:
        because = f"sampling in {config.trainer.world_size} ranks"
        yield from (Need(*package, because) for package in (("aiohttp", "servers"), ("uvicorn", "services")))
    if config.reward_kwargs.get("equality") == "symbolic":
        yield Need("math-verify", "math", "reward_kwargs.equality=symbolic")
    for tracker in ("tensorboard", "mlflow", "wandb"):
        if tracker in config.trainer.logger:
            yield Need("mlflow-skinny" if tracker == "mlflow" else tracker, tracker, f"trainer.logger={tracker}")
    if backend := config.rollout.trace.backend:
        package = {"mlflow": "mlflow-skinny", "otel": "opentelemetry-sdk"}[backend]
        yield Need(package, backend, f"actor_rollout_ref.rollout.trace.backend={backend}")


def _server(config: Config) -> Iterator[str]:
    """Problems of the Python that launches rollout servers, which may be another one."""
    rollout = config.rollout
    if rollout.name != "embedded" and rollout.mode != "server":
        try:
            probe_package(rollout.server.python or sys.executable, rollout.server_kind)
        except EngineError as error:
            yield str(error)


def _problem(requirement: Requirement) -> str:
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return f"{requirement.name} is not installed"
    fits = requirement.specifier.contains(version, prereleases=True)
    return "" if fits else f"{requirement.name} {version} is not {requirement.specifier}"


def _asked(requirement: Requirement) -> str:
    return f"{requirement.name}{requirement.specifier}"


class Driver(NamedTuple):
    """The CUDA versions of torch and of the NVIDIA driver as (major, minor), None if there is none, and the GPUs."""

    built_for: tuple[int, int] | None
    supports: tuple[int, int] | None
    gpus: tuple[str, ...]


def device(case: DoctorCase) -> Iterator[Finding]:
    if case.config.trainer.device == "cpu":
        yield Finding("device", "ok", "the CPU (trainer.device=cpu)")
        return
    yield judge_driver(read_driver())


def judge_driver(driver: Driver) -> Finding:
    alternative = "or set trainer.device=cpu"
    if driver.gpus:
        versions = f"{', '.join(driver.gpus)}; torch is built for CUDA {_dotted(driver.built_for)}"
        return Finding("device", "ok", f"{versions}, the driver supports {_dotted(driver.supports)}")
    if driver.supports is None:
        return Finding("device", "ok", "no NVIDIA driver, so this machine would train on the CPU")
    if driver.built_for is None:
        problem = f"torch {torch.__version__} is built without CUDA, though there is an NVIDIA driver"
        return Finding("device", "error", f"{problem}; run: pip install --force-reinstall torch, {alternative}")
    if driver.built_for > driver.supports:
        problem = f"torch is built for CUDA {_dotted(driver.built_for)}, the driver supports {_dotted(driver.supports)}"
        return Finding(
            "device", "error", f"{problem}; update the driver, or install a torch for that CUDA, {alternative}"
        )
    problem = "there is an NVIDIA driver, but torch sees no GPU"
    return Finding("device", "error", f"{problem}; run nvidia-smi and check CUDA_VISIBLE_DEVICES, {alternative}")


def read_driver() -> Driver:
    built = torch.version.cuda
    gpus = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    numbers = tuple(map(int, built.split(".")[:2])) if built else None
    assert numbers is None or len(numbers) == 2
    return Driver(numbers, _supported(), gpus)


def _supported() -> tuple[int, int] | None:
    """The newest CUDA that the driver can run."""
    try:
        library, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    except OSError:
        return None
    return divmod(version.value // 10, 100) if library.cuDriverGetVersion(ctypes.byref(version)) == 0 else None


def _dotted(version: tuple[int, int] | None) -> str:
    return "none" if version is None else f"{version[0]}.{version[1]}"
