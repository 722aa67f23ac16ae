"""Checks of keys against each other: equivalent keys, contradictions, missing files, and derived values."""

import json
from pathlib import Path

import pytest
from small_models import make_model

from rally.cli.serve import _drafts
from rally.config import Config, ConfigError, load_config
from rally.config.checks import consistency
from rally.runs.build.engines import launch_of
from rally.runs.build.rollout import engine_settings_of

C = "algorithm.rollout_correction"
A, M, R = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"


def error_text(*lines: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=lines)
    return str(caught.value)


def load(*lines: str) -> Config:
    return load_config(overrides=lines)


TOOL_KEYS = (f"{R}.tool_kwargs.tools_config_file", f"{R}.multi_turn.tool_config_path", "data.tool_config_path")
TURN_KEYS = (
    f"{R}.max_turns",
    f"{R}.agent_loop_config.max_turns",
    f"{R}.multi_turn.max_assistant_turns",
    f"{R}.multi_turn.max_turns",
)


@pytest.mark.parametrize("key", TOOL_KEYS)
def test_the_tool_file_has_three_spellings(key: str, tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").touch()
    config = load(f"{key}={tmp_path}/tools.yaml")
    assert config.tool_config_path == str(tmp_path / "tools.yaml")
    assert config.agent_loop_name == "tool_agent"


@pytest.mark.parametrize("key", TURN_KEYS)
def test_the_turn_limit_has_four_spellings(key: str) -> None:
    assert load(f"{key}=7").max_turns == 7


@pytest.mark.parametrize("key", [f"{R}.multi_turn.function_tool_path", "data.function_tool_path"])
def test_the_function_tools_have_two_spellings(key: str, tmp_path: Path) -> None:
    (tmp_path / "tools.py").touch()
    config = load(f"{key}={tmp_path}/tools.py")
    assert config.function_tool_path == str(tmp_path / "tools.py") and config.agent_loop_name == "tool_agent"


def test_spellings_may_repeat_but_not_differ() -> None:
    assert load(*(f"{key}=7" for key in TURN_KEYS)).max_turns == 7
    line = error_text(f"{TURN_KEYS[0]}=7", f"{TURN_KEYS[2]}=8")
    assert f"{TURN_KEYS[0]}=7" in line and f"{TURN_KEYS[2]}=8" in line and "keep one of them" in line


def test_tool_files_that_differ_are_an_error(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).touch()
    assert "set the same thing to different values" in error_text(
        f"{TOOL_KEYS[0]}={tmp_path}/a", f"{TOOL_KEYS[1]}={tmp_path}/b"
    )


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ((), "single_turn_agent"),
        ((f"{R}.multi_turn=true",), "tool_agent"),
        ((f"{R}.multi_turn=false",), "single_turn_agent"),
        ((f"{R}.multi_turn.enable=true",), "tool_agent"),
        ((f"{R}.use_agent_loop=true",), "tool_agent"),
        ((f"{R}.multi_turn.interaction_config_path={__file__}",), "tool_agent"),
        ((f"{R}.agent_loop_config.tools=[calculator]",), "tool_agent"),
        ((f"{R}.agent.default_agent_loop=mine", f"{R}.multi_turn=true"), "mine"),
        ((f"{R}.agent_loop_class=my.Loop", f"{R}.multi_turn=true"), "my.Loop"),
    ],
)
def test_the_loop_that_rows_without_a_name_get(lines: tuple[str, ...], name: str) -> None:
    assert load(*lines).agent_loop_name == name


def test_history() -> None:
    inference = f"{R}.multi_turn.use_inference_chat_template=true"
    assert load().history == "append"
    assert load(inference).history == load(f"{R}.multi_turn.history=rerender").history == "rerender"
    assert "keep one of them" in error_text(inference, f"{R}.multi_turn.history=append")


def test_the_clip_range_is_one_number_or_two() -> None:
    one = load(f"{A}.clip_ratio=0.3").actor
    two = load(f"{A}.clip_ratio_low=0.1", f"{A}.clip_ratio_high=0.28").actor
    assert (one.clip_low, one.clip_high, two.clip_low, two.clip_high) == (0.3, 0.3, 0.1, 0.28)


def test_the_mini_batch_defaults_to_the_batch() -> None:
    assert load("data.train_batch_size=48").mini_batch_size == 48
    assert load("data.train_batch_size=48", f"{A}.ppo_mini_batch_size=20").mini_batch_size == 20


def test_the_reward_function_has_two_spellings(tmp_path: Path) -> None:
    (tmp_path / "r.py").touch()
    for root in ("custom_reward_function", "reward.custom_reward_function"):
        config = load(f"{root}.path={tmp_path}/r.py", f"{root}.name=f", f"{root}.reward_kwargs.a=1")
        assert (config.reward_function.path, config.reward_function.name) == (str(tmp_path / "r.py"), "f")
        assert config.reward_kwargs == {"a": 1}
    line = error_text(f"custom_reward_function.path={tmp_path}/r.py", "reward.custom_reward_function.path=pkg://other")
    assert "set the same thing to different values" in line
    assert "needs custom_reward_function.path" in error_text("custom_reward_function.name=f")


def test_reward_kwargs_of_the_function_override_those_of_the_manager() -> None:
    config = load("reward_model.reward_kwargs={a: 1, b: 2}", "custom_reward_function.reward_kwargs.b=3")
    assert config.reward_kwargs == {"a": 1, "b": 3}


@pytest.mark.parametrize(
    ("second", "first"),
    [
        (f"{R}.prompt_length", "data.max_prompt_length"),
        (f"{R}.response_length", "data.max_response_length"),
        (f"{R}.log_prob_micro_batch_size", f"{R}.log_prob_micro_batch_size_per_gpu"),
        (f"{A}.ppo_micro_batch_size", f"{A}.ppo_micro_batch_size_per_gpu"),
        (f"{A}.optim.clip_grad", f"{A}.grad_clip"),
        ("reward_model.num_workers", "reward.num_workers"),
    ],
)
def test_an_alias_sets_its_key_and_must_agree_with_it(second: str, first: str) -> None:
    load(f"{second}=77", f"{first}=77")
    assert load(f"{second}=77").flat()[first] == 77
    line = error_text(f"{second}=77", f"{first}=78")
    assert line.startswith(f"{second}=77") and f"must equal {first}=78" in line


def test_aliases_with_text_values() -> None:
    config = load(f"{R}.dtype=bfloat16", f"{A}.optim.warmup_style=cosine")
    assert (config.model.dtype, config.actor.optim.lr_scheduler_type) == ("bfloat16", "cosine")


@pytest.mark.parametrize(
    ("key", "count"),
    [
        (f"{A}.use_dynamic_bsz", f"{A}.ppo_micro_batch_size_per_gpu"),
        (f"{R}.log_prob_use_dynamic_bsz", f"{R}.log_prob_micro_batch_size_per_gpu"),
        ("actor_rollout_ref.ref.log_prob_use_dynamic_bsz", "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"),
    ],
)
def test_without_a_token_budget_the_micro_batch_size_is_required(key: str, count: str) -> None:
    load(f"{key}=false", f"{count}=4")
    assert f"set {count} to the number of episodes" in error_text(f"{key}=false")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((f"{R}.n=1", "algorithm.adv_estimator=opo"), "leaves nothing for opo to compare"),
        (("data.train_batch_size=8", f"{A}.ppo_mini_batch_size=9"), "is more than data.train_batch_size=8"),
        ((f"{R}.max_model_len=512",), "leaves no tokens after data.max_prompt_length=512"),
        ((f"{R}.temperature=0",), "makes all episodes of a group equal"),
        ((f"{R}.val_kwargs.do_sample=true",), "temperature above 0"),
        ((f"{R}.val_kwargs.n=4",), "asks for greedy samples, which are all equal"),
        (("data.sampler.class_path=pkg://my.sampler",), "select a class together; set both"),
        (
            ("data.sampler={class_path: pkg://my.sampler, class_name: Mine}", "data.curriculum.by=success"),
            "both choose the rows of a step",
        ),
        (("data.curriculum={by: success, low: 0.5, high: 0.4}",), "low=0.5 is above data.curriculum.high=0.4"),
        (("data.curriculum={by: field, explore: 0.1}",), "explore=0.1 has no effect with data.curriculum.by=field"),
        (("data.curriculum.field=level",), "has no effect with data.curriculum.by=null"),
        ((f"{A}.use_kl_loss=true", "algorithm.use_kl_in_reward=true"), "count the KL twice"),
        ((f"{R}.n=1", "algorithm.adv_estimator=rloo"), "leaves nothing for rloo to compare"),
        (
            (f"{A}.policy_loss.loss_mode=gspo", f"{A}.loss_agg_mode=seq-mean-token-sum"),
            f"set {A}.loss_agg_mode=seq-mean-token-mean",
        ),
        ((f"{A}.tau_pos=2",), f"has no effect with {A}.policy_loss.loss_mode=vanilla"),
        ((f"{A}.policy_loss={{loss_mode: kl_cov, clip_cov_lb: 2}}",), "clip_cov_lb has no effect with"),
        (("algorithm.gamma=0.9",), "has no effect with grpo over whole episodes; set algorithm.turn_rewards"),
        (
            ("algorithm={adv_estimator: gigpo, turn_rewards: turn_baseline}",),
            "is not supported with gigpo",
        ),
        (("algorithm={adv_estimator: rloo, norm_adv_by_std_in_grpo: false}",), "has no effect with rloo"),
        (("algorithm.gigpo.step_advantage_w=2",), "unless algorithm.adv_estimator=gigpo"),
        (("algorithm.kl_penalty=k3",), "kl_penalty has no effect without algorithm.use_kl_in_reward=true"),
        (("algorithm.kl_ctrl.kl_coef=0.1",), "kl_coef has no effect without algorithm.use_kl_in_reward=true"),
        (
            (f"{R}.n=1", "algorithm.filter_groups.enable=true"),
            "with actor_rollout_ref.rollout.n=1 sets all groups aside",
        ),
        (
            (f"{R}.n=1", "algorithm={adv_estimator: reinforce_plus_plus, filter_groups: {enable: true}}"),
            "sets all groups aside",
        ),
        (("algorithm.filter_groups.metric=acc",), "metric has no effect without algorithm.filter_groups.enable=true"),
        (("data.gen_batch_size=64",), "data.gen_batch_size has no effect without algorithm.filter_groups.enable=true"),
        (("algorithm.filter_groups.enable=true", "data.gen_batch_size=16"), "is less than data.train_batch_size=32"),
        (
            ("algorithm={filter_groups: {enable: true, metric: seq_final_reward}, use_kl_in_reward: true}",),
            "includes a KL that is computed after filtering; use seq_reward",
        ),
        (
            ("algorithm={adv_estimator: remax, turn_rewards: returns}",),
            "turn_rewards=returns is not supported with remax",
        ),
        (("algorithm.adv_estimator=gdpo",), "gdpo_reward_keys and algorithm.adv_estimator=gdpo belong together"),
        (("algorithm.gdpo_reward_keys=[acc]",), "belong together; set both or neither"),
        (
            ("algorithm={adv_estimator: gdpo, gdpo_reward_keys: [acc], use_kl_in_reward: true}",),
            "use_kl_in_reward has no effect with gdpo",
        ),
        (
            ("algorithm={adv_estimator: gdpo, gdpo_reward_keys: [acc]}", "reward_shaping.tool_format_reward=0.1"),
            "unless its components are among algorithm.gdpo_reward_keys",
        ),
        (
            (f"{C}.bypass_mode=true", "actor_rollout_ref.actor.policy_loss.loss_mode=cispo"),
            "bypass_mode=true trains with algorithm.rollout_correction.loss_type=ppo_clip, not with",
        ),
        ((f"{C}.loss_type=reinforce",), f"has no effect without {C}.bypass_mode=true"),
        ((f"{C}.rollout_is_batch_normalize=true",), f"has no effect without {C}.rollout_is"),
        ((f"{C}.rollout_is_threshold=3",), f"has no effect without {C}.rollout_is"),
        ((f"{C}.rollout_rs=token_k9", f"{C}.rollout_rs_threshold=2"), f"{C}.rollout_rs=token_k9 is unknown; use"),
        ((f"{C}.rollout_rs=token_k1",), "belong together; set both or neither"),
        ((f"{C}.rollout_rs_threshold=2",), "belong together; set both or neither"),
        ((f"{C}.rollout_rs=token_k1", f"{C}.rollout_rs_threshold=wide"), "set a number or bounds such as 0.5_2"),
        ((f"{C}.rollout_rs=token_k1", f"{C}.rollout_rs_threshold=3.0_2.0"), "set a number or bounds such as 0.5_2"),
        ((f"{C}.rollout_rs=token_k1", f"{C}.rollout_rs_threshold='2,3'"), "once or for each test"),
        ((f"{A}.loss_scale_factor=3",), "has no effect unless"),
        ((f"{A}.optim={{lr_warmup_steps: 2, lr_warmup_steps_ratio: 0.1}}",), "both set the warm-up"),
        ((f"{R}.agent_loop_class=a.B", f"{R}.agent.default_agent_loop=mine"), "both select a loop"),
        ((f"{R}.agent_loop_class=black_box", f"{R}.agent_loop_config.tools=[calculator]"), "tools has no effect with"),
        (("trainer.resume_mode=resume_path",), "needs trainer.resume_from_path"),
        (("trainer.resume_from_path=.",), "has no effect with resume_mode=auto"),
        (("trainer.resume_mode=resume_path", "trainer.resume_from_path=no/step"), "does not exist"),
        (("trainer.test_freq=5",), "set data.val_files"),
        (("trainer.val_only=true",), "set data.val_files"),
    ],
)
def test_contradictions(lines: tuple[str, ...], message: str) -> None:
    assert message in error_text(*lines)


def test_bounds_of_rejection() -> None:
    tests = f"{C}.rollout_rs='token_k1, seq_mean_k3'"
    both = load(tests, f"{C}.rollout_rs_threshold='0.5_4, 0.1'").algorithm.rollout_correction.rejections
    assert [(r.test, r.lowest) for r in both] == [("token_k1", 0.5), ("seq_mean_k3", 10.0)]
    assert [r.highest for r in both] == [4.0, 0.1]
    [one, other] = load(tests, f"{C}.rollout_rs_threshold=2").algorithm.rollout_correction.rejections
    assert one[1:] == other[1:] == (0.5, 2.0)


def test_allow_both_kl_permits_both_kl_terms() -> None:
    load(f"{A}.use_kl_loss=true", "algorithm={use_kl_in_reward: true, allow_both_kl: true}")


def test_remax_needs_no_group_and_gen_batch_size_may_exceed_the_batch() -> None:
    load(f"{R}.n=1", "algorithm={adv_estimator: remax, filter_groups: {enable: true}}", "data.gen_batch_size=96")


def test_sampling_in_validation_needs_only_a_temperature() -> None:
    load(f"{R}.val_kwargs.temperature=0.7")
    load(f"{R}.val_kwargs.temperature=0.7", f"{R}.val_kwargs.do_sample=true", f"{R}.val_kwargs.n=4")


@pytest.mark.parametrize(
    "key",
    [
        "data.train_files",
        "data.val_files",
        *TOOL_KEYS,
        "data.function_tool_path",
        f"{R}.agent.agent_loop_config_path",
        "custom_reward_function.path",
        "reward.custom_reward_function.path",
        f"{M}.path",
        f"{M}.tokenizer_path",
    ],
)
def test_missing_files_are_named(key: str) -> None:
    assert error_text(f"{key}=./no/such.py") == f"{key}=./no/such.py does not exist; check the path."


def test_a_missing_sampler_file_is_named() -> None:
    line = error_text("data.sampler={class_path: ./no/such.py, class_name: Mine}")
    assert line == "data.sampler.class_path=./no/such.py does not exist; check the path."


def test_each_missing_file_of_a_list_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    assert error_text(f"data.train_files=[{tmp_path}/a, {tmp_path}/b, {tmp_path}/c]").count("does not exist") == 2


@pytest.mark.parametrize(
    "line",
    [f"{M}.path=gpt2", f"{M}.path=Qwen/Qwen3-4B", "custom_reward_function.path=pkg://my.rewards"],
)
def test_names_that_are_not_paths_are_not_checked(line: str) -> None:
    load(line)


@pytest.mark.parametrize(
    ("gpus", "line", "message"),
    [
        (0, "trainer.n_gpus_per_node=8", "is more than the 0 GPUs of this machine"),
        (4, "trainer.n_gpus_per_node=8", "is more than the 4 GPUs of this machine"),
        (4, "trainer.n_gpus_per_node=8", "set it to 4"),
        (0, "trainer.device=cuda", "torch finds no GPU on this machine"),
    ],
)
def test_missing_gpus_are_reported(monkeypatch: pytest.MonkeyPatch, gpus: int, line: str, message: str) -> None:
    monkeypatch.setattr("rally.config.checks.consistency.count_gpus", lambda _: gpus)
    assert message in error_text(line)


def test_ranks_may_share_gpus_in_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rally.config.checks.consistency.count_gpus", lambda _: 1)
    monkeypatch.setenv("RALLY_RANKS_SHARE_GPUS", "gloo")
    assert load("trainer.n_gpus_per_node=2").trainer.world_size == 2
    monkeypatch.setattr("rally.config.checks.consistency.count_gpus", lambda _: 0)
    assert "is more than the 0 GPUs of this machine" in error_text("trainer.n_gpus_per_node=2")


def test_one_gpu_means_the_cpu_on_a_machine_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rally.config.checks.consistency.count_gpus", lambda _: 0)
    assert load("trainer.n_gpus_per_node=1").trainer.device == "auto"


MANAGER_KEYS = ("reward_model.reward_manager", "reward_manager.name", "reward.reward_manager.name")
OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg"


@pytest.mark.parametrize("key", MANAGER_KEYS)
def test_the_reward_manager_has_three_spellings(key: str) -> None:
    assert load(f"{key}=dapo").reward_manager_name == "dapo"
    assert load(f"{key}=naive").reward_manager_name == "naive"
    assert load(f"{key}=gdpo").reward_manager_name == "gdpo"
    assert f"{key} is unheard (text); it must be one of" in error_text(f"{key}=unheard")


def test_rate_limits_need_the_rate_limited_manager() -> None:
    config = load("reward_model.reward_manager=rate_limited", "reward_model.max_rpm=90", "reward_model.max_tpm=120000")
    assert config.reward_model.calls_per_minute == 60
    assert "has no effect without reward_model.reward_manager=rate_limited" in error_text("reward_model.max_rpm=90")
    limited = error_text("reward_model.reward_manager=rate_limited", "reward.num_workers=9", "reward.timeout=2")
    assert "set reward_model.max_concurrent" in limited and "set reward_model.timeout" in limited


def test_reward_managers_that_differ_or_have_no_effect_are_reported() -> None:
    assert "set the same thing to different values" in error_text(f"{MANAGER_KEYS[0]}=dapo", f"{MANAGER_KEYS[1]}=batch")
    assert "set custom_reward_function.path" in error_text(f"{MANAGER_KEYS[0]}=batch")
    assert "set reward_manager=dapo" in error_text(f"{OVERLONG}.enable=true")
    too_long = error_text(f"{MANAGER_KEYS[0]}=dapo", f"{OVERLONG}.enable=true", f"{OVERLONG}.len=600")
    assert f"{OVERLONG}.len=600 is more than the response budget of 512 tokens" in too_long


def test_keys_of_the_manager_do_not_reach_the_reward_function(tmp_path: Path) -> None:
    config = load(
        "reward_model.reward_manager=dapo",
        f"{OVERLONG}.enable=true",
        f"{OVERLONG}.len=64",
        "reward_model.reward_kwargs.max_resp_len=128",
        "reward_model.reward_kwargs.method=strict",
        "reward_model.reward_kwargs.match=f1",
        "custom_reward_function.reward_kwargs.method=flexible",
    )
    assert config.reward_kwargs == {"method": "flexible", "match": "f1"}
    assert config.reward_model.reward_kwargs.overlong_buffer_cfg.len == 64
    assert load_config(overrides=[]).reward_kwargs == {}
    (tmp_path / "run.yaml").write_text(config.to_yaml())
    assert load_config(tmp_path / "run.yaml") == config


def test_an_unknown_key_of_the_overlong_buffer_is_reported() -> None:
    assert f"{OVERLONG}.length" in error_text(f"{OVERLONG}.length=5")


def test_shaping_without_effect_or_with_the_wrong_sign_is_reported() -> None:
    assert "reward_shaping.enable=true has no effect" in error_text("reward_shaping.enable=true")
    assert "reward_shaping.penalties.invalid_tool_call" in error_text("reward_shaping.penalties.invalid_tool_call=0.1")
    assert load("reward_shaping.enable=false", "reward_shaping.tool_format_reward=1").reward_shaping.enable is False


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["actor_rollout_ref.actor.router_replay.mode=R3"], "mode=R3 needs .*enable_rollout_routing_replay=true"),
        (
            ["actor_rollout_ref.rollout.enable_rollout_routing_replay=true"],
            "enable_rollout_routing_replay=true has no effect with .*mode=disabled; set that to R3",
        ),
        (["actor_rollout_ref.actor.router_replay.record_file=x"], "router_replay.record_file"),
    ],
)
def test_router_replay_needs_a_rollout_that_records(overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_config(overrides=overrides)


DRAFTS = f"{R}.speculative_config"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([f"{DRAFTS}.num_speculative_tokens=3"], f"has no effect without {DRAFTS}.method"),
        ([f"{DRAFTS}.method=ngram", f"{DRAFTS}.prompt_lookup_min=9"], "is more than prompt_lookup_max=4"),
        ([f"{DRAFTS}.method=ngram", f"{R}.deterministic=true"], "changes the last bits"),
        ([f"{DRAFTS}.method=ngram", f"{R}.name=vllm"], f"{R}.engine_kwargs.vllm"),
        (
            [f"{DRAFTS}.method=ngram", f"{R}.name=rally", f"{R}.mode=server", f"{R}.server.url=http://127.0.0.1:1"],
            "no effect on servers that already run",
        ),
    ],
)
def test_drafts_that_could_not_be_used_are_an_error(lines: list[str], words: str) -> None:
    assert words in error_text(*lines)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([f"{R}.name=vllm"], "is built for actor_rollout_ref.rollout.name=embedded: nobody has tried whether vllm"),
        ([f"{R}.name=sglang"], "nobody has tried whether sglang quantises new weights"),
        ([f"{R}.name=rally"], "does not work with servers, whose samples must agree with the trainer's own weights"),
        (["trainer.n_gpus_per_node=2"], "does not work with engines of several ranks"),
        (["trainer.n_gpus_per_node=2", "trainer.v1.trainer_mode=colocate_async"], "does not work with servers"),
        ([f"{R}.deterministic=true"], "exclude each other: training does not compute in FP8"),
        ([f"{R}.enable_rollout_routing_replay=true"], "does not support models with experts"),
        ([f"{R}.quantization_config_file=x.json"], "quantization_config_file=x.json is not built yet"),
    ],
)
def test_what_fp8_does_not_work_with_is_an_error(lines: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consistency, "count_gpus", lambda _: 2)
    assert words in error_text(f"{R}.quantization=fp8", *lines)


def test_fp8_reaches_the_engine() -> None:
    assert engine_settings_of(load(f"{R}.quantization=fp8")).quantization == "fp8"
    assert engine_settings_of(load()).quantization is None


def test_drafts_reach_the_engine_and_servers_of_rally() -> None:
    lines = [f"{DRAFTS}.method=ngram", f"{DRAFTS}.prompt_lookup_min=1"]
    drafts = engine_settings_of(load(*lines)).speculation
    assert drafts is not None and drafts.prompt_lookup_min == 1 and drafts.num_speculative_tokens == 4
    assert engine_settings_of(load()).speculation is None
    sent = launch_of(load(*lines, f"{R}.name=rally"), make_model()).extra["speculative_config"]
    assert _drafts(json.dumps(sent)) == drafts
