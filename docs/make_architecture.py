"""Draws docs/images/training_step.svg, and docs/images/packages.svg from the import contract in pyproject.toml.

    python docs/make_architecture.py

A test compares both pictures with what this script draws, so the layers shown are those that CI enforces.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
WIDTH, BOX_H, LAYER_H = 1080, 62, 30
INK, SOFT, LINE = "#1d2733", "#5b6b7c", "#9fb0c0"
COLORS = {"data": "#e8f1fb", "play": "#e7f6ec", "learn": "#fdf1e3", "keep": "#f1ecfa"}
ABOUT = {
    "cli": "one module per command",
    "api": "AgentTrainer, for Python",
    "demo": "the CPU demo",
    "distributed": "the same run on several ranks",
    "doctor": "checks before a run",
    "replay": "episodes rendered, scored, sampled again",
    "recipes": "runs by name",
    "runs": "from a Config to a run: build, train, evaluate, fine-tune",
    "compat": "code and names of verl",
    "gateway": "agents over OpenAI's API",
    "sft": "supervised fine-tuning",
    "services": "HTTP servers",
    "train": "trainer, update, packing, checkpoints",
    "loops": "who plays an episode",
    "interactions": "simulated users",
    "envs": "environments",
    "tools": "tool calls: functions, built-in, MCP",
    "sandbox": "untrusted code",
    "retrieval": "search index",
    "rewards": "scores, in killable workers",
    "view": "the browser viewer",
    "track": "run folder, metrics, trackers",
    "engines": "embedded, vLLM, SGLang, router",
    "models": "loading, attention, LoRA, vision, kernels",
    "algos": "advantages and losses",
    "scoring": "answer checking",
    "chat": "messages to tokens",
    "data": "rows, tasks, samplers",
    "config": "keys and checks",
    "images": "image inputs",
    "nodes": "this machine, Ray nodes",
    "importing": "user modules",
    "platforms": "kinds of accelerators",
    "hub": "the model hub",
    "redact": "secrets",
    "util": "locks, files, processes",
    "types": "the data model",
}
HIDDEN = ("__main__", "module_aliases")


def main() -> None:
    for name, drawing in pictures().items():
        (IMAGES / name).write_text(drawing, encoding="utf-8")


def pictures() -> dict[str, str]:
    layers = contract_layers()
    return {
        "training_step.svg": drawing("One training step", loop(), 296),
        "packages.svg": drawing("The packages in layers", stack(layers), 34 + len(layers) * (LAYER_H + 6)),
    }


def drawing(label: str, body: list[str], height: int) -> str:
    font = "text{font-family:system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif}"
    arrow_head = f'<path d="M0 0L8 4L0 8z" fill="{SOFT}"/>'
    marker = 'id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">',
            f"<style>{font}</style>",
            f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
            f"<defs><marker {marker}>{arrow_head}</marker></defs>",
            *body,
            "</svg>\n",
        ]
    )


def contract_layers() -> list[list[str]]:
    """The layers of the import contract, the highest first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [layers] = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    named = [[name.strip() for name in layer.split("|") if name.strip() not in HIDDEN] for layer in layers]
    return [layer for layer in named if layer]


def loop() -> list[str]:
    """One step of training as boxes: what happens, and which package does it."""
    drawn: list[str] = []
    top = [
        (24, "rows become tasks", "data", "data"),
        (236, "agent loop, an episode", "loops", "play"),
        (448, "reward", "rewards", "learn"),
        (660, "advantage per token", "algos", "learn"),
        (872, "packed update", "train", "learn"),
    ]
    for x, what, package, color in top:
        drawn += box(x, 20, 184, what, package, COLORS[color])
    drawn += [arrow(x + 184, 51, x + 212, 51) for x, *_ in top[:-1]]
    drawn += box(130, 156, 184, "sampling: ids, logprobs", "engines", COLORS["play"])
    drawn += box(342, 156, 184, "tools and users", "tools, interactions", COLORS["play"])
    drawn += box(554, 156, 184, "episodes, metrics", "track, view", COLORS["keep"])
    drawn += [
        arrow(290, 82, 240, 156),
        arrow(256, 156, 306, 82),
        arrow(360, 82, 410, 156),
        arrow(426, 156, 376, 82),
    ]
    weights = f'<path d="M964 82V258H222V220" fill="none" stroke="{SOFT}" marker-end="url(#a)"/>'
    drawn += [arrow(412, 82, 600, 156), weights, text(760, 250, "new weights, next version", 12, color=SOFT)]
    drawn += [text(196, 120, "turn", 12, color=SOFT), text(404, 120, "calls, results", 12, color=SOFT)]
    return drawn


def stack(layers: list[list[str]]) -> list[str]:
    drawn = []
    for number, names in enumerate(layers):
        y = 20 + number * (LAYER_H + 6)
        width = (WIDTH - 48 - 8 * (len(names) - 1)) / len(names)
        for column, name in enumerate(names):
            x = 24 + column * (width + 8)
            frame = f'height="{LAYER_H}" rx="5" fill="#f6f8fa" stroke="{LINE}"'
            drawn.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" {frame}/>')
            room = int((width - 20) / 6.6) - len(name)
            about = ABOUT[name] if len(ABOUT[name]) <= room else ""
            small = f'fill="{SOFT}" font-size="12"'
            words = f'<tspan font-weight="600">{name}</tspan><tspan dx="8" {small}>{escape(about)}</tspan>'
            drawn.append(f'<text x="{x + 10:.1f}" y="{y + 20}" font-size="13" fill="{INK}">{words}</text>')
    return drawn


def box(x: int, y: int, width: int, what: str, package: str, fill: str) -> list[str]:
    middle = x + width // 2
    return [
        f'<rect x="{x}" y="{y}" width="{width}" height="{BOX_H}" rx="8" fill="{fill}" stroke="{LINE}"/>',
        text(middle, y + 27, what, 13, bold=True, anchor="middle"),
        text(middle, y + 47, package, 12, color=SOFT, anchor="middle"),
    ]


def arrow(x1: int, y1: int, x2: int, y2: int) -> str:
    return f'<path d="M{x1} {y1}L{x2} {y2}" fill="none" stroke="{SOFT}" marker-end="url(#a)"/>'


def text(x: int, y: int, words: str, size: int, *, bold: bool = False, color: str = INK, anchor: str = "start") -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" fill="{color}" text-anchor="{anchor}"{weight}>{escape(words)}</text>'
    )


if __name__ == "__main__":
    main()
