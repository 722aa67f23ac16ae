"""Files, overrides and base files are merged into one configuration; errors name file and position."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rally.config import Config, ConfigError, SftConfig, load_config, load_sft_config
from rally.types import RallyError

R = "actor_rollout_ref.rollout"


def write(folder: Path, text: str) -> Path:
    file = folder / "run.yaml"
    file.write_text(text)
    return file


def test_overrides_beat_the_file_and_the_file_beats_the_base(tmp_path: Path) -> None:
    base = {"data": {"seed": 1, "shuffle": False}, "trainer.total_epochs": 3}
    file = write(tmp_path, "data: {seed: 2, train_batch_size: 7}\n")
    config = load_config(file, ["data.train_batch_size=9", "+data.val_batch_size=4", "++trainer.save_freq=5"], base)
    assert (config.data.seed, config.data.shuffle, config.data.train_batch_size) == (2, False, 9)
    assert (config.data.val_batch_size, config.trainer.save_freq, config.trainer.total_epochs) == (4, 5, 3)
    assert base["data"] == {"seed": 1, "shuffle": False}


def test_the_short_form_of_multi_turn_keeps_what_others_wrote_below_it(tmp_path: Path) -> None:
    base = {"actor_rollout_ref": {"rollout": {"multi_turn": {"max_user_turns": 3}}}}
    file = write(tmp_path, "actor_rollout_ref: {rollout: {multi_turn: true}}\n")
    multi_turn = load_config(file, [f"{R}.multi_turn.format=llama3"], base).rollout.multi_turn
    assert (multi_turn.enable, multi_turn.max_user_turns, multi_turn.format) == (True, 3, "llama3")


def test_interpolations_see_written_keys_defaults_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHO", "ada")
    file = write(
        tmp_path,
        "trainer: {experiment_name: '${oc.env:WHO}-${trainer.project_name}'}\n"
        "data: {max_prompt_length: '${data.max_response_length}', max_response_length: 77, seed: '${trainer.seed}'}\n",
    )
    config = load_config(file, ["trainer.seed=5"])
    assert config.trainer.experiment_name == "ada-rally"
    assert (config.data.max_prompt_length, config.data.seed) == (77, 5)


def test_home_expands_in_every_way_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.parquet").touch()
    config = load_config(overrides=["data.train_files=[~/a.parquet, $HOME/a.parquet, '${oc.env:HOME}/a.parquet']"])
    assert set(config.data.train_files) == {str(tmp_path / "a.parquet")}


def test_a_base_may_hold_paths(tmp_path: Path) -> None:
    assert load_config(base={"data": {"train_files": tmp_path}}).data.train_files == (str(tmp_path),)


def test_small_numbers_in_scientific_notation_are_numbers() -> None:
    assert load_config(overrides=["actor_rollout_ref.actor.optim.lr=1e-6"]).actor.optim.lr == 1e-6


def test_an_empty_section_and_an_empty_file_are_fine(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "trainer:\n")) == load_config(write(tmp_path, "")) == load_config() == Config()


def test_the_run_folder_follows_the_names() -> None:
    named = load_config(overrides=["trainer.project_name=p", "trainer.experiment_name=e"])
    assert named.run_dir == Path("runs/p/e")
    assert load_config(overrides=["trainer.default_local_dir=~/x"]).run_dir == Path("~/x").expanduser()


def test_a_configuration_cannot_be_changed_by_accident() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_config().trainer.seed = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("data:\n  seed: [1\n", "line 3, column 1"),
        ("data:\n\tseed: 1\n", "cannot start any token); indent with spaces if it is a tab, else quote it."),
        ("data:\n  seed: 1\n  seed: 2\n", "line 3, column 3: this is not valid YAML (found duplicate key seed)"),
        ("a: b: c\n", "line 1"),
        ("- 1\n", "must hold a mapping"),
        ("5\n", "cannot be read"),
        ("data: {seed: '${x'}\n", "run.yaml: "),
    ],
)
def test_broken_yaml_is_told_with_its_place(tmp_path: Path, text: str, place: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(caught.value).startswith(str(file)) and place in str(caught.value)
    assert len(caught.value.problems) == 1


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"\xff\xfe\x00")
    for path, words in (("no.yaml", "does not exist"), (".", "is a folder"), ("latin.yaml", "not UTF-8")):
        with pytest.raises(ConfigError, match=words):
            load_config(tmp_path / path)


def test_all_malformed_overrides_are_told_at_once() -> None:
    lines = ["trainer.seed", "=3", "a..b=1", "data.seed=[x, #y]", "data.seed=${x"]
    with pytest.raises(RallyError) as caught:
        load_config(overrides=lines)
    assert len(str(caught.value).splitlines()) == len(lines)
    assert all(repr(line) in told for line, told in zip(lines, str(caught.value).splitlines(), strict=True))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("data.seed=${nope.x}", "data.seed: Interpolation key 'nope.x' not found"),
        ("data.seed=${data.seed}", "data.seed: Recursive interpolation"),
        ("data.seed=???", "data.seed is ???"),
    ],
)
def test_interpolations_that_lead_nowhere(line: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=[line])
    assert str(caught.value).startswith(words)


ROUND_TRIPS = [
    [],
    [f"{R}.multi_turn=true", f"{R}.max_turns=4", "trainer.logger=console", "actor_rollout_ref.actor.optim.lr=3e-7"],
    [
        f"{R}.agent_loop_class=a.B",
        f"{R}.agent_loop_config.extra={{deep: [1, null, 0.5]}}",
        f"{R}.stop_strings=[a, '#']",
    ],
    ["custom_reward_function.reward_kwargs={a: 1, b: {c: '1e-3'}}", "data.apply_chat_template_kwargs.thinking=false"],
]


@pytest.mark.parametrize("lines", ROUND_TRIPS)
def test_a_written_configuration_loads_as_an_equal_one(tmp_path: Path, lines: list[str]) -> None:
    config = load_config(overrides=lines)
    again = load_config(write(tmp_path, config.to_yaml()))
    assert again == config
    assert again.to_yaml() == config.to_yaml()


@settings(max_examples=40, deadline=None)
@given(template=st.text(st.sampled_from("abe1.- \n'\"\\${}:#é中"), max_size=12))
def test_any_text_survives_being_written(tmp_path_factory: pytest.TempPathFactory, template: str) -> None:
    config = SftConfig.model_validate({"model": {"custom_chat_template": template}})
    assert load_sft_config(write(tmp_path_factory.mktemp("c"), config.to_yaml())) == config


def test_flat_names_every_key_in_full() -> None:
    flat = load_config(overrides=[f"{R}.n=4", f"{R}.agent_loop_config.mine=1"]).flat()
    assert flat[f"{R}.n"] == 4 and flat[f"{R}.agent_loop_config.mine"] == 1
    assert flat["custom_reward_function.reward_kwargs"] == {}
    assert set(Config.keys()) >= set(flat) - {f"{R}.agent_loop_config.mine"}


def test_loading_needs_neither_torch_nor_transformers() -> None:
    code = "import sys, rally.config as c; c.load_config(); c.load_sft_config(); print('torch' in sys.modules, end=' ')"
    code += "; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_a_supervised_run_in_both_vocabularies(tmp_path: Path) -> None:
    (tmp_path / "c.parquet").touch()
    lines = [
        f"data.train_files={tmp_path}/c.parquet",
        "data.multiturn.enable=true",
        "data.multiturn.messages_key=talk",
        "data.max_token_len_per_gpu=4096",
        "model.partial_pretrain=Qwen/Qwen3-4B-Instruct-2507",
        "model.enable_gradient_checkpointing=false",
        "optim.lr=1e-5",
        "optim.lr_scheduler=cosine",
        "trainer.total_epochs=4",
    ]
    config: SftConfig = load_sft_config(overrides=lines)
    config.require_training()
    assert (config.model_path, config.messages_key, config.tools_key) == (
        "Qwen/Qwen3-4B-Instruct-2507",
        "talk",
        "tools",
    )
    assert load_sft_config(write(tmp_path, config.to_yaml())) == config


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("data.mesages_key=x", "unknown key data.mesages_key; did you mean data.messages_key"),
        ("model.lora_alpha=8", "model.lora_alpha=8 has no effect without lora_rank"),
        ("data.use_dynamic_bsz=false", "say in data.micro_batch_size_per_gpu how many conversations a pass may hold"),
        ("data.train_files=no.parquet", "data.train_files=no.parquet does not exist"),
        ("trainer.test_freq=5", "needs rows to validate on"),
        ("optim={lr_warmup_steps: 3, lr_warmup_steps_ratio: 0.1}", "both set the warm-up"),
        ("model={path: a, partial_pretrain: b}", "spellings of one setting but differ"),
        (
            "data.prompt_key=question",
            "data.prompt_key and data.response_key together say where question and answer are",
        ),
        ("data.response_dict_keys=answer", "has no effect without data.response_key; leave it out"),
        ("data={prompt_key: q, response_key: a, messages_key: m}", "both say where conversations are; keep one"),
    ],
)
def test_mistakes_in_a_supervised_run(line: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_sft_config(overrides=[line])
    assert words in str(caught.value)


@pytest.mark.parametrize("load", [load_config, load_sft_config])
def test_training_asks_for_a_model_and_rows(load: type) -> None:
    with pytest.raises(ConfigError) as caught:
        load().require_training()
    assert [line.split(" ")[0].split(".")[-1] for line in caught.value.problems] == ["path", "train_files"]
