"""Imports the user code of verl's examples and recipes, and trains on it, from checkouts and without verl installed.

    git clone https://github.com/volcengine/verl
    git clone https://github.com/verl-project/verl-recipe
    python -m benchmarks.verl_examples imports verl verl-recipe

`imports` finds all reward functions, agent loops, tools, simulated users, data sets and samplers in `examples/`,
`recipe/` and `tests/`, and verl's own agent loops. It imports each file as a run would, in a process of its own, and
prints what failed with the reason. The working directory has `examples` and `recipe`, as in a checkout of verl.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("imports").add_argument("checkouts", nargs="+", type=Path)
    arguments = parser.parse_args()
    imports(arguments.checkouts)


if __name__ == "__main__":
    main()
