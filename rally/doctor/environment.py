"""Whether Python, the packages and the GPU are what this configuration needs; what is not comes with the command that
mends it."""

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
from rally.config.checks.multi_gpu import with_rollout_servers
from rally.doctor.case import DoctorCase, Finding
from rally.engines.base import EngineError
from rally.engines.remote.launched_server import probe_package

OURS = "rally-rl"
SHOWN = ("torch", "transformers", "tokenizers")


class Need(NamedTuple):
    """A package that a key of the configuration asks for, and the extra of ours that brings it."""

    package: str
    extra: str
    because: str


def packages(case: DoctorCase) -> Iterator[Finding]:
    problems = [*_extras(case.config), *_server(case.config)]
    try:
        about = metadata.metadata(OURS)
    except metadata.PackageNotFoundError:
        told = f"{OURS} is not installed, so nobody knows what it requires; run: pip install --editable ."
        yield Finding("environment", "warning", told)
    else:
        wanted = [Requirement(text) for text in about.get_all("Requires-Dist") or ()]
        problems += [*_python(about["Requires-Python"]), *_core(wanted)]
    yield from (Finding("environment", "error", text) for text in problems)
    if not problems:
        versions = ", ".join(f"{name} {metadata.version(name)}" for name in SHOWN)
        yield Finding("environment", "ok", f"Python {platform.python_version()}, {versions}; nothing is missing")


def _python(requires: str | None) -> Iterator[str]:
    if requires and platform.python_version() not in SpecifierSet(requires, prereleases=True):
        yield f"Python {platform.python_version()} is not one of {requires}; make an environment with another"


def _core(wanted: list[Requirement]) -> Iterator[str]:
    for one in wanted:
        if (one.marker is None or one.marker.evaluate({"extra": ""})) and (problem := _problem(one)):
            yield f"{problem}; run: pip install '{_asked(one)}'"


def _extras(config: Config) -> Iterator[str]:
    for package, extra, because in needs(config):
        if problem := _problem(Requirement(package)):
            yield f"{because} needs it, but {problem}; run: pip install '{OURS}[{extra}]'"


def needs(config: Config) -> Iterator[Need]:
    """What is imported only where a key asks for it. Tools say themselves what they lack."""
    model = config.model
    if model.lora_rank or model.lora_adapter_path:
        yield Need("peft", "lora", "actor_rollout_ref.model.lora_rank")
    if str(model.path).endswith(".gguf"):
        yield from (Need(name, "gguf", "a model in a .gguf file") for name in ("gguf", "accelerate"))
    if (name := with_rollout_servers(config).rollout.name) != "embedded":
        yield Need("aiohttp", "servers", f"actor_rollout_ref.rollout.name={name}")
    if config.reward_kwargs.get("equality") == "symbolic":
        yield Need("math-verify", "math", "reward_kwargs.equality=symbolic")
    for tracker in ("tensorboard", "mlflow", "wandb"):
        if tracker in config.trainer.logger:
            yield Need("mlflow-skinny" if tracker == "mlflow" else tracker, tracker, f"trainer.logger={tracker}")
    if backend := config.rollout.trace.backend:
        package = {"mlflow": "mlflow-skinny", "otel": "opentelemetry-sdk"}[backend]
        yield Need(package, backend, f"actor_rollout_ref.rollout.trace.backend={backend}")


def _server(config: Config) -> Iterator[str]:
    """A server of our own is started by a Python that may not be this one."""
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
    """What torch and the NVIDIA driver say of each other; versions of CUDA as (major, minor), None where there is
    none."""

    built_for: tuple[int, int] | None
    supports: tuple[int, int] | None
    gpus: tuple[str, ...]


def device(case: DoctorCase) -> Iterator[Finding]:
    if case.config.trainer.device == "cpu":
        yield Finding("device", "ok", "the CPU, as trainer.device says")
        return
    yield judge_driver(read_driver())


def judge_driver(found: Driver) -> Finding:
    rather = "or set trainer.device=cpu if that is meant"
    if found.gpus:
        told = f"{', '.join(found.gpus)}; torch is built for CUDA {_dotted(found.built_for)}"
        return Finding("device", "ok", f"{told}, the driver supports {_dotted(found.supports)}")
    if found.supports is None:
        return Finding("device", "ok", "there is no NVIDIA driver here, so training on this machine is on the CPU")
    if found.built_for is None:
        told = f"torch {torch.__version__} is built without CUDA, though there is an NVIDIA driver"
        return Finding("device", "error", f"{told}; run: pip install --force-reinstall torch, {rather}")
    if found.built_for > found.supports:
        told = f"torch is built for CUDA {_dotted(found.built_for)}, the driver supports {_dotted(found.supports)}"
        return Finding("device", "error", f"{told}; update the driver, or install a torch for that CUDA, {rather}")
    told = "there is an NVIDIA driver, but torch sees no GPU"
    return Finding("device", "error", f"{told}; run nvidia-smi and look at CUDA_VISIBLE_DEVICES, {rather}")


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
