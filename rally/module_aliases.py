"""Module paths that earlier documentation named keep working: each is the module that holds its names today.

User files and YAML may import or name classes by these paths. New code uses the paths on the right.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

ALIASES = {
    "rally.algos.correction": "rally.algos.off_policy_correction",
    "rally.algos.credit": "rally.algos.credit_assignment",
    "rally.algos.returns": "rally.algos.advantages",
    "rally.algos.surrogates": "rally.algos.losses",
    "rally.algos.values": "rally.algos.gae",
    "rally.cluster": "rally.distributed",
    "rally.config.several": "rally.config.checks.multi_gpu",
    "rally.data.arithmetic": "rally.recipes.arithmetic.data",
    "rally.engines.embedded.attention": "rally.models.attention",
    "rally.engines.remote.wire": "rally.engines.remote.server_api",
    "rally.engines.replica": "rally.engines.base",
    "rally.patches": "rally.images.patches",
    "rally.rewards.trajectories": "rally.rewards.custom_functions",
    "rally.tools.calculator": "rally.tools.builtin.calculator",
    "rally.tools.code_interpreter": "rally.tools.builtin.code_interpreter",
    "rally.tools.examples": "rally.tools.sample_arguments",
    "rally.tools.geo3k": "rally.tools.builtin.answer_check",
    "rally.tools.gsm8k": "rally.tools.builtin.answer_check",
    "rally.tools.image_zoom": "rally.tools.builtin.image_zoom",
    "rally.tools.search": "rally.tools.builtin.search",
    "rally.train.course": "rally.demo.training_stages",
    "rally.train.guards": "rally.train.divergence",
    "rally.train.run": "rally.runs.train",
    "rally.train.sft": "rally.sft.training",
    "rally.train.sft_check": "rally.sft.template_check",
    "rally.view.export": "rally.view.page_export",
    "rally.view.run": "rally.view.run_data",
}


class AliasFinder(MetaPathFinder, Loader):
    """Finds the old paths, and nothing else."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in ALIASES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(ALIASES[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """The module has run already under its own name; its spec, which the import system replaced, is put back."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def install() -> None:
    if not any(isinstance(finder, AliasFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, AliasFinder())
