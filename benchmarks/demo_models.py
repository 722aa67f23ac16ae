"""The demo's models, trained as `rally demo` trains them. They are made once, in a minute, and kept in a folder.

Two stages are kept: `caller`, fine-tuned only on correct conversations, which always calls its tool, and `start`,
deliberately degraded afterwards, from which GRPO begins.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from rally.chat import ChatCodec, tiny_tokenizer
from rally.data import load_tasks
from rally.demo.demo import CALCULATOR, write_data
from rally.demo.training_stages import CourseSettings, small_model, teach
from rally.track import RunConsole


@dataclass(frozen=True)
class DemoModels:
    folder: Path

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def caller(self) -> Path:
        return self.folder / "caller"

    @property
    def start(self) -> Path:
        return self.folder / "start"


def demo_models(folder: Path, console: RunConsole) -> DemoModels:
    models = DemoModels(folder)
    if (models.start / "config.json").exists():
        return models
    settings = CourseSettings()
    tokenizer = tiny_tokenizer()
    model = small_model(tokenizer, settings.seed)
    codec = ChatCodec(tokenizer, "hermes", CALCULATOR.toolbox().schemas())
    write_data(models.data, settings.seed)
    gate = load_tasks(models.data / "gate.parquet")
    only_clean = dataclasses.replace(settings, habit_steps=0)
    only_habits = dataclasses.replace(settings, clean_blocks=(1,), gate=0.0)
    for stage, place in ((only_clean, models.caller), (only_habits, models.start)):
        teach(CALCULATOR, model, codec, gate, stage, console)
        model.save_pretrained(place)
        tokenizer.save_pretrained(place)
    return models
