"""`rally from-verl`: what a shell script passes to verl is found without running it."""

import shlex
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from rally.cli.main import app
from rally.config import ConfigError
from rally.config.verl_script import from_verl, rally_command, read_script

SCRIPT = r"""
#!/usr/bin/env bash
set -xeuo pipefail   # a comment with "quotes' in it
touch {marker}
project_name='DAPO'
export N=${{N:-16}}
n_gpus=$((4 * (1 + 1)))
LR=1e-6 ; MODEL="$HOME/models/qwen"
if [ "$DEVICE" = npu ]; then
    name=sglang
else
    name=vllm
fi
DATA=(
    data.train_files="$HOME/data/train.parquet"  # the rows
    data.train_batch_size=$(( N * 4 ))
)
ACTOR=("actor_rollout_ref.actor.optim.lr=${{LR}}")
ACTOR+=(actor_rollout_ref.actor.fsdp_config.param_offload=True)
EXTRA="trainer.nnodes=1 trainer.total_epochs=2"

CUDA_VISIBLE_DEVICES=0 python3 -m verl.trainer.main_ppo \
    --config-name=ppo_trainer \
    "${{DATA[@]}}" "${{ACTOR[@]}}" $EXTRA \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.rollout.name=$name \
    actor_rollout_ref.rollout.n="${{N}}" \
    trainer.logger='["console","wandb"]' \
    trainer.project_name="${{project_name}}" \
    trainer.experiment_name="run-$(date +%s)" \
    reward_model.overlong_buffer.enable=True \
    trainer.n_gpus_per_node=$n_gpus "$@" 2>&1 | tee log.txt
"""


def script(text: str, folder: Path) -> Path:
    path = folder / "run.sh"
    path.write_text(text)
    return path


def test_variables_arrays_and_arithmetic_are_expanded_and_nothing_is_run(tmp_path: Path) -> None:
    marker = tmp_path / "was_run"
    found = read_script(SCRIPT.format(marker=marker))
    assert not marker.exists()
    assert (found.module, found.config_name) == ("verl.trainer.main_ppo", "ppo_trainer")
    assert found.words == (
        "data.train_files=$HOME/data/train.parquet",
        "data.train_batch_size=64",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        "actor_rollout_ref.actor.fsdp_config.param_offload=True",
        "trainer.nnodes=1",
        "trainer.total_epochs=2",
        "actor_rollout_ref.model.path=$HOME/models/qwen",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.n=16",
        'trainer.logger=["console","wandb"]',
        "trainer.project_name=DAPO",
        "trainer.experiment_name=run-$(date +%s)",
        "reward_model.overlong_buffer.enable=True",
        "trainer.n_gpus_per_node=8",
    )


def test_the_command_names_what_became_of_each_key(tmp_path: Path) -> None:
    text = SCRIPT.format(marker="x") + "\n"
    text = text.replace('"$@"', 'actor_rollout_ref.model.mtp.enable=true +xyzzy.a=1 "$@"')
    result = CliRunner().invoke(app, ["from-verl", str(script(text, tmp_path))])
    assert result.exit_code == 0
    comments = [line for line in result.output.splitlines() if line.startswith("#")]
    assert [line.split()[1:3] for line in comments] == [
        ["assumed:", "DEVICE"],
        ["renamed:", "reward_model.overlong_buffer.enable"],
        ["refused:", "actor_rollout_ref.model.mtp.enable=true"],
        ["refused:", "unknown"],
    ]
    command = result.output[result.output.index("rally train") :]
    words = shlex.split(command.replace("\\\n", ""))
    assert words[:2] == ["rally", "train"] and len(words) == 2 + 14
    assert "reward_model.reward_kwargs.overlong_buffer_cfg.enable=True" in words
    assert "data.train_files=$HOME/data/train.parquet" in words and '"$HOME/data/train.parquet"' in command
    assert "actor_rollout_ref.actor.fsdp_config.param_offload=True" in words
    assert not any("mtp" in word or "xyzzy" in word for word in words)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("python -m verl.trainer.main_ppo a.b=1 # c", ("a.b=1",)),
        (
            "X=1; python -m verl.trainer.main_ppo a=$X b=${X} c=${Y:-2} d=${X:+3} e=$Y",
            ("a=1", "b=1", "c=2", "d=3", "e=$Y"),
        ),
        ("torchrun --nproc_per_node=2 -m verl.trainer.sft_trainer \\\n a=1 \\\n\\\n b=2", ("a=1", "b=2")),
        ("ray job submit --address=x -- python3 -m verl.trainer.main_ppo a=1 > log 2>&1 &", ("a=1",)),
        ("f() {\n python3 -m verl.trainer.main_ppo a='${data.b}' b=\"x y\"\n}\nf", ("a=${data.b}", "b=x y")),
        (
            "A=(a=1 'b=[1, 2]')\npython3 -m verl.trainer.main_ppo \"${A[@]}\" ${A[*]}",
            ("a=1", "b=[1, 2]", "a=1", "b=[1, 2]"),
        ),
        ("p=$1\npython3 -m verl.trainer.main_ppo a=${1:-7} b=$p", ("a=7", "b=")),
        ("X=$((10 / 0))\npython3 -m verl.trainer.main_ppo a=$((2*3)) b=$((9**9**9))", ("a=6", "b=$((9**9**9))")),
        ("python3 -m verl.trainer.main_ppo --config-path /c --config-name x a=1", ("a=1",)),
        ('E=${E:-"-m verl.trainer.main_ppo"}\ntorchrun ${E} a=$(((1 + 2) * 2)) b=${B:-${C:-${D:-4}}}', ("a=6", "b=4")),
        ("cat <<EOF\nX=5\nEOF\npython3 -m verl.trainer.main_ppo a=${X:-1} ${@:2}", ("a=1",)),
        ('X=1 ls\n[ -z "$X" ] && Y=2\n[ -n "$X" ] || Z=3\npython3 -m verl.trainer.main_ppo a=$Y$Z', ("a=23",)),
    ],
)
def test_one_construct_of_the_shell(text: str, expected: tuple[str, ...]) -> None:
    assert read_script(text).words == expected


BRANCHES = """
B=${{B:-vllm}}
D=${{D:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}}
A=()
case "$D" in
    gpu | tpu)
        case "$B" in trtllm) A+=(a=1) ;; *) A+=(a=2) ;; esac
        if [ "$B" = sglang ]; then A+=(b=1); elif [[ $B == v* && $D != npu ]]; then A+=(b=2); else A+=(b=3); fi
        ;;
    *) A+=(a=3) ;;
esac
if {condition}; then A+=(c=1); else A+=(c=2); fi
python3 -m verl.trainer.main_ppo "${{A[@]}}"
"""


@pytest.mark.parametrize(
    ("condition", "taken"),
    [
        ('[ "$B" != vllm ] || { [ "$D" = gpu ] && [ 8 -gt 4 ]; }', "c=1"),
        ('! [ "$B" = vllm ]', "c=2"),
        ('[ -n "${NOT_SET:-}" ]', "c=2"),
        ("true && false", "c=2"),
        ("[ -f /tmp/x ]", "c=1"),
        ("command -v nvidia-smi >/dev/null 2>&1", "c=1"),
    ],
)
def test_conditions_are_decided_and_only_one_branch_is_taken(condition: str, taken: str) -> None:
    assert read_script(BRANCHES.format(condition=condition)).words == ("a=2", "b=2", taken)


def test_what_was_assumed_is_a_line(tmp_path: Path) -> None:
    text = 'if [ -d /data ]; then N=4; fi\nif [ "$FAST" = 1 ]; then N=5; fi\npython3 -m verl.trainer.main_generation\n'
    words = "data.train_batch_size=$N +xyzzy=$UNSET actor_rollout_ref.rollout.enable_chunked_prefill=$P"
    lines = from_verl(script(f"{text}python3 -m verl.trainer.main_ppo {words}", tmp_path)).splitlines()
    assert lines == [
        "# assumed: `if [ -d /data ]` depends on the machine; the first branch is taken",
        "# assumed: FAST is not set",
        "# not here: the script also starts verl.trainer.main_generation",
        "# refused: unknown key xyzzy; no known key is similar, so leave it out.",
        "rally train \\",
        "    data.train_batch_size=4 \\",
        '    actor_rollout_ref.rollout.enable_chunked_prefill="$P"',
    ]


def test_the_configuration_file_is_found_above_the_script(tmp_path: Path) -> None:
    folder = tmp_path / "examples" / "config"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("data: {no_such_key: 1}\n")
    text = 'python3 -m verl.trainer.main_ppo --config-path="$(pwd)/examples/config" --config-name=NAME trainer.seed=1'
    found = from_verl(script(text.replace("NAME", "mine"), folder))
    assert found.startswith("# refused: unknown key data.no_such_key")
    assert '--config-path "$(pwd)/examples/config" \\\n    --config-name mine' in found
    other = from_verl(script(text.replace("NAME", "theirs"), folder)).splitlines()
    assert (
        other[0] == ("# not read: $(pwd)/examples/config/theirs is not here, so its keys are not in these lines")
        and "    --config-name theirs \\" in other
    )


def test_nothing_of_a_command_is_left_out_without_a_line(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text("data: {no_such_key: 1}\n")
    pairs = "'actor_rollout_ref.actor.fsdp_config={param_offload:True,optimizer_offload:True}'"
    text = f"python3 -m verl.trainer.main_ppo --config-dir conf --config-name mine --multirun {pairs} trainer.seed=1"
    found = from_verl(script(text, tmp_path)).splitlines()
    assert found[0] == "# dropped: --multirun: it is an option of Hydra, which Rally does not run"
    assert any(line.startswith("# refused: unknown key data.no_such_key") for line in found)  # of --config-dir
    [line] = [line for line in found if line.startswith("# not here: ")]
    assert line.endswith("holds actor_rollout_ref.actor.fsdp_config.param_offload; write its other keys one by one")
    assert "    --config-path conf \\" in found and not any("fsdp_config=" in line for line in found[4:])


def test_interpolations_of_the_configuration_are_not_variables_of_the_shell(tmp_path: Path) -> None:
    words = "trainer.project_name='${data.prompt_key}' trainer.experiment_name=\"\\${x}-$Y\""
    command = from_verl(script(f"python3 -m verl.trainer.main_ppo {words}", tmp_path))
    assert "trainer.project_name='${data.prompt_key}'" in command and '"\\${x}-$Y"' in command


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("echo hello", "has no command of verl"),
        ("python3 -m recipe.prime.main_prime a=1", "recipe.prime.main_prime is a trainer of its own"),
        ("python3 -m recipe.partial_rollout.main_ppo a=1", "is an asynchronous trainer that is not built"),
        ("python3 examples/split/main_ppo_split.py a=1", "is a trainer of its own"),
        ("python3 -m verl.model_merger merge --backend fsdp", "verl.model_merger is no trainer; use rally merge"),
        ("python3 -m verl.trainer.main_generation_server a=1", "is no trainer; use rally eval"),
    ],
)
def test_a_script_without_an_equivalent_is_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        from_verl(script(text, tmp_path))


def test_asynchronous_trainers_become_separate_async(tmp_path: Path) -> None:
    words = "data.train_batch_size=0 actor_rollout_ref.actor.ppo_mini_batch_size=32 rollout.total_rollout_steps=51200"
    name = "verl.experimental.fully_async_policy.fully_async_main"
    written = from_verl(script(f"python3 -m {name} --config-name=fully_async_ppo_trainer.yaml {words}", tmp_path))
    assert "# renamed: rollout.total_rollout_steps is trainer.total_training_steps=400 here" in written
    assert {"data.train_batch_size=128", "trainer.total_training_steps=400"} <= set(written.split())
    assert "trainer.v1.trainer_mode=separate_async" in written and "refused" not in written
    assert "async_training.staleness_threshold=0.1" in written and "fully_async_ppo_trainer" not in written
    one_step = from_verl(
        script("python3 -m verl.experimental.one_step_off_policy.main_ppo data.shuffle=true", tmp_path)
    )
    assert "trainer.v1.separate_async.fixed_lag=true" in one_step


def test_modules_that_share_a_trainer_have_a_command() -> None:
    assert [rally_command(f"verl.trainer.{name}") for name in ("main_ppo", "fsdp_sft_trainer")] == ["train", "sft"]


def test_a_missing_script_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="check the path of the script"):
        from_verl(tmp_path / "missing.sh")
    (tmp_path / "binary.sh").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path, tmp_path / "binary.sh"):
        with pytest.raises(ConfigError, match="name one"):
            from_verl(path)


PIECES = st.sampled_from(
    [*"'\"\\$(){}=#;|&\n ", "A=(", "${A[@]}", "$((", "))", "${X:-", "if", "fi", "a.b=1", "-m", "A+="]
)


@settings(max_examples=150, deadline=None)
@given(pieces=st.lists(PIECES, max_size=40))
def test_any_text_is_read_or_refused(pieces: list[str]) -> None:
    with suppress(ConfigError):
        read_script("".join(pieces) + "\npython3 -m verl.trainer.main_ppo a=1\n")
