"""The sandbox: runs untrusted code in isolation, within resource limits, and leaves nothing behind."""

from rally.sandbox.isolation_levels import Isolation
from rally.sandbox.languages import LANGUAGES, installed
from rally.sandbox.sandbox import Sandbox, SandboxSession, SandboxSettings, shared_sandbox
from rally.sandbox.types import CommandResult, Limits, Outcome, Program, SandboxError, UnsupportedProgram

__all__ = [
    "CommandResult",
    "Isolation",
    "LANGUAGES",
    "Limits",
    "Outcome",
    "Program",
    "Sandbox",
    "SandboxError",
    "UnsupportedProgram",
    "SandboxSettings",
    "SandboxSession",
    "installed",
    "shared_sandbox",
]
