"""Imports the user code of verl's examples and recipes, and trains on it, from checkouts and without verl installed.

    git clone https://github.com/volcengine/verl
    git clone https://github.com/verl-project/verl-recipe
    python -m benchmarks.verl_examples imports verl verl-recipe

`imports` finds all reward functions, agent loops, tools, simulated users, data sets and samplers in `examples/`,
`recipe/` and `tests/`, and verl's own agent loops. It imports each file as a run would, in a process of its own, and
prints what failed with the reason. The working directory has `examples` and `recipe`, as in a checkout of verl.

    python -m benchmarks.verl_examples objectives verl

registers the policy losses and advantage estimators of verl's own `core_algos.py` as a user's, and compares losses,
gradients and advantages with those of Rally's functions of the same name.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from rally.algos import credit_assignment, losses
from rally.algos.credit_assignment import CreditSettings, Scored
from rally.algos.losses import Sampled, SurrogateSettings
from rally.compat.verl import core_algos
from rally.config import Config
from rally.importing import import_file
from rally.types import RallyError

BASES = {
    "loop": {"AgentLoopBase", "ToolAgentLoop", "SingleTurnAgentLoop", "ReactAgentLoop"},
    "tool": {"BaseTool", "SandboxFusionTool", "SearchTool", "Gsm8kTool"},
    "dataset": {"RLHFDataset"},
    "interaction": {"BaseInteraction"},
    "sampler": {"AbstractSampler", "AbstractCurriculumSampler"},
}
OWN_LOOPS = "verl/experimental/agent_loop", "verl/experimental/fully_async_policy"
NOT_USER_CODE = "data_preprocess", "data_process", "create_dataset", "_trainer", "test_", "main_"


class Piece(NamedTuple):
    """One piece of user code: a class or function of a file."""

    kind: str
    path: Path  # below the working directory
    name: str


def pieces(folder: Path) -> Iterator[Piece]:
    """The user code below `folder`."""
    for path in sorted(folder.rglob("*.py")):
        if any(word in path.stem for word in NOT_USER_CODE) or "data_preprocess" in path.parts:
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
                yield from (Piece(kind, path, node.name) for kind, known in BASES.items() if bases & known)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = {argument.arg for argument in node.args.args}
                decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
                scores = {"solution_str", "ground_truth"} <= arguments or node.name.startswith("compute_score")
                if scores and not node.name.startswith("_"):
                    yield Piece("reward", path, node.name)
                elif any("function_tool" in decorator for decorator in decorators):
                    yield Piece("tool", path, node.name)


def stage(checkout: Path, folder: Path) -> list[Path]:
    """Link the user code of a checkout of verl or verl-recipe into `folder`, a working directory without verl."""
    if not (checkout / "verl").is_dir():
        (folder / "recipe").symlink_to(checkout.resolve())
        return [folder / "recipe"]
    # `recipe` of a checkout is an empty submodule.
    links = [name for name in ("examples", "recipe", "tests") if any((checkout / name).glob("*"))]
    for name in links:
        (folder / name).symlink_to((checkout / name).resolve())
    for number, name in enumerate(name for name in OWN_LOOPS if (checkout / name).is_dir()):
        links.append(f"own_{number}")
        (folder / links[-1]).symlink_to((checkout / name).resolve())
    return [folder / name for name in links]


def problem_of(piece: Piece) -> str:
    """Why the piece cannot be imported, or an empty text. Runs in a child process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        os.write(writing, _import(piece).encode()[:2000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        problem = answer.read()
    os.waitpid(child, 0)
    return problem


def _import(piece: Piece) -> str:
    try:
        module = import_file(piece.path, piece.kind)
        return "" if hasattr(module, piece.name) else f"no {piece.name}"
    except RallyError as failed:
        return str(failed)


def imports(checkouts: list[Path]) -> None:
    counts: dict[str, list[int]] = {}
    for checkout in (path.resolve() for path in checkouts):
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            for piece in (piece for root in stage(checkout, Path(folder)) for piece in pieces(root)):
                problem = problem_of(piece)
                count = counts.setdefault(piece.kind, [0, 0])
                count[0] += not problem
                count[1] += 1
                name = f"{checkout.name}/{piece.path.relative_to(folder)}:{piece.name}"
                print(f"{'ok    ' if not problem else 'FAILED'} {piece.kind:11} {name} {problem}", flush=True)
    for kind, (good, total) in sorted(counts.items()):
        print(f"{kind}: {good} of {total} import")


def _loss(mode: str, aggregation: str) -> Tensor:
    """The gradient of the loss of ten made-up tokens of four rows, and the loss as the last number."""
    generator = torch.Generator().manual_seed(0)
    row_M = torch.tensor([0, 0, 0, 1, 2, 2, 3, 3, 3, 3])
    old_M = -2 * torch.rand(10, generator=generator)
    logp_M = (old_M + 0.4 * torch.randn(10, generator=generator)).requires_grad_()
    tokens = Sampled(logp_M, old_M, torch.randn(4, generator=generator)[row_M], row_M, 4)
    keys = {**Config().actor.model_dump(mode="json"), "loss_agg_mode": aggregation}
    keys["policy_loss"]["dro_beta"] = SurrogateSettings().dro_beta
    settings = SurrogateSettings(mode=mode, keys=keys)
    losses.check_policy_loss(settings)
    loss_M = losses.policy_loss(tokens, settings).loss_M
    weights_E = losses.token_weights(torch.bincount(row_M), aggregation)  # type: ignore[arg-type]
    loss = (loss_M * weights_E[row_M]).sum()
    return torch.cat([torch.autograd.grad(loss, logp_M)[0], loss.detach()[None]])


def _advantages(estimator: str) -> Tensor:
    """The advantages of eight made-up episodes of two groups."""
    rewards_N = torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    groups_N, tokens_N = torch.arange(8) // 4, torch.tensor([3, 2, 5, 1, 4, 4, 2, 6])
    scored = Scored(rewards_N, groups_N, tokens_N, baselines_N=torch.full((8,), 0.3, dtype=torch.float64))
    keys = Config().algorithm.model_dump(mode="json")
    settings = CreditSettings(estimator=estimator, keys=keys)
    credit_assignment.check_estimator(settings)
    return credit_assignment.token_advantages(scored, settings)


def _compare(what: str, name: str, numbers: Callable[[str], Tensor], known: bool) -> None:
    try:
        theirs_X = numbers(f"verl_{name}")
    except RallyError as refused:
        print(f"refused {what} {name}: {refused}")
        return
    apart = f"{float((theirs_X - numbers(name)).abs().max()):.1e} apart" if known else "Rally has none of this name"
    print(f"ran     {what} {name}: {apart}")


KNOWN = losses.BUILT_IN - {"clip_cov", "kl_cov"}  # which mark tokens in the whole mini-batch


def objectives(checkout: Path) -> None:
    """Compare the functions of verl's core_algos.py with Rally's. Its own agg_loss is replaced by that which files of
    users import."""
    module = import_file(checkout / "verl/trainer/ppo/core_algos.py", "verl")
    module.agg_loss = core_algos.agg_loss  # type: ignore[attr-defined]
    for name, function in sorted(module.POLICY_LOSS_REGISTRY.items()):
        core_algos.register_policy_loss(f"verl_{name}")(function)
        for aggregation in ("token-mean", "seq-mean-token-mean"):
            _compare(f"loss ({aggregation})", name, partial(_loss, aggregation=aggregation), name in KNOWN)
    for name, function in sorted(module.ADV_ESTIMATOR_REGISTRY.items()):
        core_algos.register_adv_est(f"verl_{name}")(function)
        _compare("estimator", name, _advantages, name in credit_assignment.BUILT_IN)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("imports").add_argument("checkouts", nargs="+", type=Path)
    commands.add_parser("objectives").add_argument("checkout", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "objectives":
        objectives(arguments.checkout)
    else:
        imports(arguments.checkouts)


if __name__ == "__main__":
    main()
