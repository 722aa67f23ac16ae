"""Every key of verl is known; each one is supported and described, fixed with a reason, or an error that says why."""

import functools
import re
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rally.config import Config, ConfigError, SftConfig, load_config, load_sft_config
from rally.config.base import Only, Root, Section, look_up
from rally.config.checks.unsupported import SFT_UNSUPPORTED, UNSUPPORTED, Unsupported, unsupported_values
from rally.config.verl_key_tables import HINTS, MOVES, OFF, SFT_HINTS, hint_for

A, M, R = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
KNOWN = sorted(Config.keys())


def error_text(*lines: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=lines)
    return str(caught.value)


def tree(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


FIELD_KEYS = {
    R: """name mode temperature top_k top_p repetition_penalty do_sample n prompt_length response_length dtype
        gpu_memory_utilization ignore_eos enforce_eager cudagraph_capture_sizes free_cache_engine
        tensor_model_parallel_size data_parallel_size expert_parallel_size pipeline_model_parallel_size
        max_num_batched_tokens max_model_len max_num_seqs enable_chunked_prefill enable_prefix_caching logprobs_mode
        scheduling_policy load_format layered_summon log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu
        log_prob_use_dynamic_bsz log_prob_max_token_len_per_gpu disable_log_stats over_sample_rate multi_stage_wake_up
        engine_kwargs.vllm engine_kwargs.sglang engine_kwargs.trtllm calculate_log_probs skip_rollout skip_dump_dir
        skip_tokenizer_init enable_rollout_routing_replay quantization quantization_config_file enable_sleep_mode
        limit_images custom mtp sglang_engine_mode server.timeout server.max_attempts server.retry_delay
        server.max_connections server.max_start_wait_time val_kwargs.top_k val_kwargs.top_p val_kwargs.temperature
        val_kwargs.n val_kwargs.do_sample multi_turn.enable multi_turn.max_assistant_turns multi_turn.max_user_turns
        multi_turn.tool_config_path multi_turn.max_parallel_calls multi_turn.max_tool_response_length
        multi_turn.tool_response_truncate_side multi_turn.interaction_config_path
        multi_turn.use_inference_chat_template multi_turn.tokenization_sanity_check_mode multi_turn.format
        multi_turn.num_repeat_rollouts multi_turn.function_tool_path agent.num_workers agent.default_agent_loop
        agent.agent_loop_config_path agent.custom_async_server.path agent.custom_async_server.name
        agent.agent_loop_manager_class checkpoint_engine.backend checkpoint_engine.update_weights_bucket_megabytes
        checkpoint_engine.engine_kwargs trace.backend trace.token2text trace.max_samples_per_step_per_worker
        prometheus.enable prometheus.port prometheus.file prometheus.served_model_name profiler.tool profiler.enable
        profiler.all_ranks profiler.ranks profiler.save_path profiler.tool_config seed""",
    "actor_rollout_ref": "hybrid_engine nccl_timeout",
    M: """path hf_config_path tokenizer_path use_shm trust_remote_code custom_chat_template external_lib
        override_config enable_gradient_checkpointing enable_activation_offload use_remove_padding lora_rank lora_alpha
        target_modules exclude_modules lora_adapter_path use_liger use_fused_kernels fused_kernel_options.impl_backend
        tiled_mlp.enabled tiled_mlp.num_shards mtp.enable mtp.enable_train mtp.enable_rollout mtp.detach_encoder
        mtp.mtp_loss_scaling_factor""",
    "data": """tokenizer use_shm train_files val_files train_max_samples val_max_samples prompt_key reward_fn_key
        max_prompt_length max_response_length train_batch_size val_batch_size tool_config_path return_raw_input_ids
        return_raw_chat return_full_prompt shuffle seed dataloader_num_workers image_patch_size validation_shuffle
        filter_overlong_prompts filter_overlong_prompts_workers truncation image_key video_key trust_remote_code
        custom_cls.path custom_cls.name return_multi_modal_inputs sampler.class_path sampler.class_name datagen.path
        datagen.name apply_chat_template_kwargs need_tools_kwargs chat_template_func filter_prompts cache_dir""",
    "algorithm": """gamma lam adv_estimator norm_adv_by_std_in_grpo use_kl_in_reward kl_penalty kl_ctrl.type
        kl_ctrl.kl_coef kl_ctrl.horizon kl_ctrl.target_kl use_pf_ppo pf_ppo.reweight_method pf_ppo.weight_pow
        rollout_correction.rollout_is rollout_correction.rollout_is_threshold rollout_correction.rollout_rs
        rollout_correction.rollout_rs_threshold rollout_correction.bypass_mode rollout_correction.loss_type
        rollout_correction.rollout_is_batch_normalize filter_groups.enable filter_groups.metric
        filter_groups.max_num_gen_batches filter_groups.max_inflight_gen_batches""",
    A: """strategy rollout_n ppo_mini_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu use_dynamic_bsz
        ppo_max_token_len_per_gpu clip_ratio clip_ratio_low clip_ratio_high clip_ratio_c tau_pos tau_neg
        freeze_vision_tower loss_agg_mode loss_scale_factor entropy_coeff calculate_entropy use_kl_loss kl_loss_coef
        kl_loss_type use_prefix_grouper use_torch_compile ppo_epochs shuffle data_loader_seed grad_clip
        ulysses_sequence_parallel_size entropy_from_logits_with_chunking entropy_checkpointing use_remove_padding
        calculate_sum_pi_squared sum_pi_squared_checkpointing use_fused_kernels router_replay.mode
        router_replay.record_file router_replay.replay_file policy_loss.loss_mode policy_loss.clip_cov_ratio
        policy_loss.clip_cov_lb policy_loss.clip_cov_ub policy_loss.kl_cov_ratio policy_loss.ppo_kl_coef
        optim.optimizer optim.optimizer_impl optim.lr optim.lr_warmup_steps optim.lr_warmup_steps_ratio
        optim.total_training_steps optim.weight_decay optim.betas optim.clip_grad optim.min_lr_ratio optim.num_cycles
        optim.lr_scheduler_type optim.override_optimizer_config fsdp_config.wrap_policy.min_num_params
        fsdp_config.param_offload fsdp_config.optimizer_offload fsdp_config.offload_policy
        fsdp_config.reshard_after_forward fsdp_config.fsdp_size fsdp_config.forward_prefetch fsdp_config.model_dtype
        fsdp_config.dtype fsdp_config.use_orig_params fsdp_config.seed fsdp_config.full_determinism
        fsdp_config.forward_only checkpoint.save_contents checkpoint.load_contents checkpoint.async_save""",
    "actor_rollout_ref.ref": """strategy log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu
        log_prob_use_dynamic_bsz log_prob_max_token_len_per_gpu fsdp_config ulysses_sequence_parallel_size""",
    "critic": """enable strategy optim.lr model.path model.tokenizer_path model.lora_rank ppo_mini_batch_size
        ppo_micro_batch_size_per_gpu forward_micro_batch_size_per_gpu use_dynamic_bsz ppo_max_token_len_per_gpu
        forward_max_token_len_per_gpu ppo_epochs shuffle cliprange_value loss_agg_mode grad_clip checkpoint""",
    "custom_reward_function": "path name reward_kwargs",
    "reward_manager": "source name module.path module.name",
    "reward_model": """use_reward_loop reward_manager enable enable_resource_pool n_gpus_per_node num_workers nnodes
        model.path model.external_lib model.trust_remote_code rollout reward_kwargs sandbox_fusion.url
        sandbox_fusion.max_concurrent sandbox_fusion.memory_limit_mb launch_reward_fn_async reward_loop_source
        reward_loop_module_path reward_loop_class_name max_concurrent max_rpm max_tpm estimated_tokens_per_request
        timeout""",
    "reward": """num_workers custom_reward_function.path custom_reward_function.name reward_manager.source
        reward_manager.name reward_manager.module reward_model.enable reward_model.enable_resource_pool
        reward_model.n_gpus_per_node reward_model.nnodes reward_model.model_path reward_model.rollout
        sandbox_fusion.url sandbox_fusion.max_concurrent sandbox_fusion.memory_limit_mb""",
    "trainer": """balance_batch total_epochs total_training_steps project_name experiment_name logger
        log_val_generations rollout_data_dir validation_data_dir nnodes n_gpus_per_node save_freq esi_redundant_time
        resume_mode resume_from_path val_before_train val_only test_freq critic_warmup default_hdfs_dir
        del_local_ckpt_after_load default_local_dir max_actor_ckpt_to_keep max_critic_ckpt_to_keep
        ray_wait_register_center_timeout device use_legacy_worker_impl""",
    "global_profiler": "tool steps profile_continuous_steps save_path global_tool_config",
    "transfer_queue": "enable",
    "ray_kwargs": "ray_init.num_cpus timeline_json_file",
}


@pytest.mark.parametrize("section", FIELD_KEYS)
def test_every_key_of_verl_is_known(section: str) -> None:
    keys = {f"{section}.{key}" for key in FIELD_KEYS[section].split()}
    assert {key for key in keys if not any(f"{key}.".startswith(f"{old}.") for old, _ in MOVES)} - set(KNOWN) == set()


def supported_keys(
    schema: type[Section], rules: tuple[Unsupported, ...], prefix: str = ""
) -> Iterator[tuple[str, str]]:
    """Keys that docs/keys.md describes by the docstring of their field, with that docstring."""
    for name, field in schema.model_fields.items():
        key = prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from supported_keys(field.annotation, rules, key + ".")
            continue
        fixed = any(isinstance(mark, Only) for mark in field.metadata)
        waits = any((key == r.key and not r.supported) or key.startswith(r.key + ".") for r in rules)
        if not fixed and not waits and not hint_for(key, HINTS if rules is UNSUPPORTED else SFT_HINTS):
            yield key, field.description or ""


@pytest.mark.parametrize(("schema", "rules"), [(Config, UNSUPPORTED), (SftConfig, SFT_UNSUPPORTED)])
def test_every_supported_key_has_a_description(schema: type[Root], rules: tuple[Unsupported, ...]) -> None:
    described = dict(supported_keys(schema, rules))
    assert len(described) > 70
    assert [key for key, text in described.items() if not text.strip().endswith(".")] == []


def idle(key: str) -> bool:
    return hint_for(key, HINTS) is not None


@functools.cache
def free_of_extras() -> list[str]:
    """Known keys whose misspelling cannot pass as a key that is handed on to a user's class or function."""
    free = (f"{R}.agent_loop_config", "reward_model.reward_kwargs", "reward_model", *(section for section, _, _ in OFF))
    return [key for key in KNOWN if not any(key == f or key.startswith(f"{f}.") for f in free) and not idle(key)]


@st.composite
def misspellings(draw: st.DrawFn) -> tuple[str, str]:
    key = draw(st.sampled_from(free_of_extras()))
    at = draw(st.integers(0, len(key) - 1))
    letter = draw(st.sampled_from(string.ascii_lowercase))
    kind = draw(st.sampled_from(["drop", "double", "replace", "swap"]))
    wrong = {
        "drop": key[:at] + key[at + 1 :],
        "double": key[:at] + key[at] + key[at:],
        "replace": key[:at] + letter + key[at + 1 :],
        "swap": key[:at] + key[at : at + 2][::-1] + key[at + 2 :],
    }[kind]
    # A dot that is lost or moved makes another path, not another spelling.
    assume(wrong.count(".") == key.count(".") and all(wrong.split(".")) and "." not in key[at : at + 2])
    assume(wrong not in KNOWN and not idle(wrong) and wrong not in dict(MOVES))
    return key, wrong


@settings(max_examples=60, deadline=None)
@given(pair=misspellings())
def test_a_misspelled_key_is_reported_with_the_right_one(pair: tuple[str, str]) -> None:
    key, wrong = pair
    line = error_text(f"{wrong}=1", "algorithm.adv_estimator=gae")
    suggested = line.partition("did you mean ")[2].rstrip("?").replace(" or ", ", ").split(", ")
    assert f"unknown key {wrong}" in line
    assert len(suggested) <= 3 and key in suggested


def test_a_key_without_its_leading_sections_suggests_the_full_one() -> None:
    assert f"did you mean {R}.temperature" in error_text("rollout.temperature=1")
    assert f"did you mean {R}" in error_text("rollout.n=4", "rollout.top_p=1")
    assert "no known key is similar" in error_text("xyzzy=1")


def fixed_keys(schema: type[Section], prefix: str = "") -> Iterator[tuple[str, Only]]:
    for name, field in schema.model_fields.items():
        yield from ((prefix + name, mark) for mark in field.metadata if isinstance(mark, Only))
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from fixed_keys(field.annotation, prefix + name + ".")


@pytest.mark.parametrize(
    ("key", "mark"), list(fixed_keys(Config)), ids=lambda part: part if isinstance(part, str) else ""
)
def test_a_fixed_key_accepts_its_values_and_rejects_others_with_a_reason(key: str, mark: Only) -> None:
    for value in mark.values:
        assert look_up(Config.model_validate(tree(key, value)), key) == value
    others: tuple[Any, ...] = (True, False, 3, "other", ["model"])
    reasons = []
    for other in others:
        try:
            Config.model_validate(tree(key, other))
        except ValidationError as error:
            reasons += [detail["msg"] for detail in error.errors() if detail["type"] == "only"]
    assert reasons and set(reasons) == {mark.because}


def candidates(schema: type[Root], key: str) -> Iterator[Any]:
    parent, _, name = key.rpartition(".")
    section = look_up(schema(), parent) if parent else schema()
    for part in get_args(type(section).model_fields[name].annotation):
        yield from (value for value in (part, *get_args(part)) if isinstance(value, str))
    yield from (True, False, 3, 5, 0.25, "other", {"x": 1}, [3], [0.5, 0.5])


def refused(schema: type[Root], rules: tuple[Unsupported, ...], rule: Unsupported, key: str) -> bool:
    for value in candidates(schema, key):
        try:
            config = schema.model_validate(tree(key, value))
        except ValidationError:
            continue
        lines = list(unsupported_values(config, rules))
        if lines:
            assert all(line.startswith(f"{key}=") and "is not built yet; " in line for line in lines)
            return any(line.endswith(f"{rule.advice}.") for line in lines)
    return False


@pytest.mark.parametrize(("schema", "rules"), [(Config, UNSUPPORTED), (SftConfig, SFT_UNSUPPORTED)])
def test_every_rule_reports_each_of_its_keys_by_name(schema: type[Root], rules: tuple[Unsupported, ...]) -> None:
    fixed = {key for key, _ in fixed_keys(schema)}
    assert list(unsupported_values(schema(), rules)) == []
    for rule in rules:
        part = look_up(schema(), rule.key)
        keys = [k for k, _ in part.leaves(rule.key + ".")] if isinstance(part, Section) else [rule.key]
        assert [key for key in keys if key not in fixed and not refused(schema, rules, rule, key)] == []


@pytest.mark.parametrize(
    "line",
    [
        f"{A}.strategy=fsdp2",
        f"{A}={{use_kl_loss: true, kl_loss_type: k3, kl_loss_coef: 0.01}}",
        f"{A}={{use_kl_loss: false, kl_loss_type: low_var_kl, kl_loss_coef: 0.0, data_loader_seed: 42}}",
        f"{A}.optim={{lr_scheduler_type: constant, min_lr_ratio: 0.0, num_cycles: 0.5}}",
        f"{A}.checkpoint={{save_contents: [model, optimizer, extra, hf_model], "
        "load_contents: [model, optimizer, extra, hf_model]}",
        "reward_model.reward_kwargs.overlong_buffer_cfg={enable: false, len: 512, penalty_factor: 1.0, log: false}",
        f"{A}.fsdp_config.param_offload=false",
        "algorithm.norm_adv_by_std_in_grpo=false",
        "algorithm.use_kl_in_reward=False",
        "algorithm.kl_ctrl.kl_coef=0.0",
        "algorithm={adv_estimator: reinforce_plus_plus, gamma: 0.99}",
        "algorithm={adv_estimator: gigpo, gamma: 0.95, gigpo: {step_advantage_w: 0.5}}",
        "algorithm={use_kl_in_reward: true, kl_penalty: k3, kl_ctrl: {kl_coef: 0.02}}",
        f"{A}={{policy_loss: {{loss_mode: geo_mean}}, loss_agg_mode: seq-mean-token-mean}}",
        f"{A}={{policy_loss: {{loss_mode: sapo}}, tau_neg: 1.2}}",
        "algorithm.rollout_correction.rollout_is=sequence",
        "algorithm.rollout_correction={rollout_is: token, rollout_is_batch_normalize: true}",
        "algorithm.rollout_correction.bypass_mode=true",
        "algorithm.rollout_correction={bypass_mode: true, loss_type: reinforce, rollout_is: sequence}",
        "algorithm.rollout_correction={bypass_mode: true, rollout_rs: token_k1, rollout_rs_threshold: 2}",
        "algorithm={adv_estimator: gdpo, gdpo_reward_keys: [acc, format], norm_adv_by_std_in_grpo: false}",
        "algorithm.filter_groups={enable: true, metric: acc, max_num_gen_batches: 10}",
        "trainer.critic_warmup=0",
        "trainer.logger=[file]",
        f"{R}.load_format=auto",
        f"{R}.mode=async",
        f"{R}.name=embedded",
        f"{A}.checkpoint.save_contents=[optimizer, extra, model]",
    ],
)
def test_values_equal_to_the_default_behaviour_load(line: str) -> None:
    load_config(overrides=[line])


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (f"{R}.quantization=awq", f"{R}.quantization=awq is not built yet; use fp8."),
        (
            f"{R}.do_sample=false",
            f"{R}.do_sample=false is not supported: training always samples; val_kwargs sets validation; "
            "leave the key out.",
        ),
        (f"{M}.use_shm=often", f"{M}.use_shm is often (text); it must be true or false."),
        ("trainer.total_epochs=abc", "trainer.total_epochs is abc (text); it must be a whole number."),
        ("trainer.total_epochs=1.5", "trainer.total_epochs is 1.5 (a number); it must be a whole number."),
        ("data.seed=true", "data.seed is true (a true/false value); it must be a number."),
        ("data.shuffle=maybe", "data.shuffle is maybe (text); it must be true or false."),
        ("data.max_prompt_length=-3", "data.max_prompt_length is -3 (a whole number); it must be at least 1."),
        ("data.train_max_samples=0", "data.train_max_samples is 0 (a whole number); it must be -1 or at least 1."),
        (f"{R}.top_p=0", f"{R}.top_p is 0 (a whole number); it must be more than 0."),
        (f"{A}.optim.betas=[0.9, 2]", f"{A}.optim.betas[1] is 2 (a whole number); it must be at most 1."),
        (f"{A}.optim.betas=[0.9]", f"{A}.optim.betas[1] is missing from [0.9]; the list must be longer."),
        ("trainer=5", "trainer is 5 (a whole number); it must be a section with keys of its own."),
        ("data=[1, {}]", "data is [1, {}] (a list); it must be a section with keys of its own."),
        ("data.prompt_key={a: b}", 'data.prompt_key is {"a": "b"} (a mapping); it must be text.'),
        (
            "data.truncation=up",
            "data.truncation is up (text); it must be one of 'error', 'left', 'right' or 'middle'.",
        ),
        (f"{A}.clip_ratio=.inf", f"{A}.clip_ratio is Infinity (a number); it must be a finite number."),
    ],
)
def test_error_messages(line: str, sentence: str) -> None:
    assert error_text(line) == sentence


@pytest.mark.parametrize(
    ("line", "kind", "meant"),
    [
        (f"{M}=foo", "text", f"{M}.path=foo"),
        ("actor_rollout_ref=foo", "text", f"{M}.path=foo"),
        ("model=foo", "text", f"{M}.path=foo"),
        ("rollout=vllm", "text", f"{R}.name=vllm"),
        (f"{R}=vllm", "text", f"{R}.name=vllm"),
        (f"{R}.multi_turn=5", "a whole number", f"{R}.multi_turn.max_assistant_turns=5"),
        (f"{R}.agent=tool_agent", "text", f"{R}.agent.default_agent_loop=tool_agent"),
        (f"{A}.optim=0.5", "a number", f"{A}.optim.lr=0.5"),
        ("data=[a.jsonl]", "a list", 'data.train_files=["a.jsonl"]'),
        ("algorithm=grpo", "text", "algorithm.adv_estimator=grpo"),
        ("critic=foo", "text", "critic.model.path=foo"),
        ("reward_model=foo", "text", "reward_model.model.path=foo"),
        ("reward.reward_model=foo", "text", "reward_model.model.path=foo"),
        ("custom_reward_function=foo.py", "text", "custom_reward_function.path=foo.py"),
    ],
)
def test_a_value_for_a_section_names_the_key_that_was_meant(line: str, kind: str, meant: str) -> None:
    key, _, value = line.partition("=")
    value = meant.partition("=")[2] if kind == "a list" else value
    sentence = f"{key} is {value} ({kind}); it must be a section with keys of its own; did you mean {meant}?"
    assert error_text(line) == sentence
    section = f"{key}.a={{}}"
    for lines in ((line, section), (section, line)):  # neither replaces the other without a word
        assert sentence in error_text(*lines).splitlines()


@pytest.mark.parametrize("section", [*Config.sections()])
def test_no_section_takes_a_value(section: str) -> None:
    assert f"{section} is foo (text); it must be a section with keys of its own" in error_text(f"{section}=foo")


@pytest.mark.parametrize("section", [*SftConfig.sections()])
def test_no_section_of_sft_takes_a_value(section: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(section)} is foo .text.; it must be a section"):
        load_sft_config(overrides=[f"{section}=foo"])


def test_a_value_for_a_section_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("actor_rollout_ref:\n  model: foo\n")
    with pytest.raises(ConfigError, match=f"; did you mean {M}.path=foo"):
        load_config(file, [f"{M}.path=bar"])
    file.write_text("actor_rollout_ref:\n  model: ${data.train_files}\ndata:\n  train_files: foo\n")
    with pytest.raises(ConfigError, match=f"; did you mean {M}.path=foo"):
        load_config(file)


def test_all_mistakes_are_reported_at_once_one_line_each() -> None:
    given = (
        "data.shufle=true",
        f"{A}.use_kl_loss=true",
        "nonsense",
        "trainer.seed=x",
        f"{R}.quantization=awq",
        f"{R}.n=0",
        f"{R}.do_sample=false",
        "algorithm.use_kl_in_reward=true",
    )
    lines = error_text(*given).splitlines()
    expected = ("data.shufle", "count the KL twice", "nonsense", "trainer.seed is x", "quantization=awq", "n is 0")
    for part, line in zip((*expected, "do_sample=false"), lines, strict=True):
        assert part in line


def test_a_check_that_depends_on_a_misspelled_key_is_not_reported() -> None:
    lines = error_text("data.train_batchsize=512", f"{A}.ppo_mini_batch_size=256", f"{R}.temperature=0")
    assert [line.split()[0] for line in lines.splitlines()] == ["unknown", f"{R}.temperature=0"]


def test_a_misspelled_key_of_a_mode_that_is_not_used_is_reported() -> None:
    with pytest.raises(ConfigError, match="fixed_lag"):
        load_config(overrides=["trainer.v1.separate_async.ixed_lag=true"])
