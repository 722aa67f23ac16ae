"""Keys of verl that are moved, dropped with one note, or refused in one sentence."""

from pathlib import Path

import pytest

from rally.config import Config, ConfigError, SftConfig, load_config, load_sft_config
from rally.config.checks.multi_gpu import with_rollout_servers

A, M, R = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
SEPARATE = ("trainer.v1.trainer_mode=separate_async",)


def load(*lines: str) -> tuple[Config, str]:
    notes: list[str] = []
    config = load_config(overrides=lines, note=notes.append)
    assert len(notes) <= 1
    return config, "".join(notes)


def load_sft(*lines: str) -> tuple[SftConfig, str]:
    notes: list[str] = []
    return load_sft_config(overrides=lines, note=notes.append), "".join(notes)


HINTS = (
    *(f"{A}.fsdp_config.param_offload=True", f"{M}.use_shm=True"),
    *(f"{A}.fsdp_config.offload_policy=true", f"{A}.fsdp_config.cpu_offload=true"),
    *(f"{A}.ulysses_sequence_parallel_size=4", f"{A}.fsdp_config.ulysses_sequence_parallel_size=2"),
    *(f"{R}.enable_chunked_prefill=False", f"{R}.enable_prefix_caching=False", f"{R}.mode=sync", f"{R}.name=hf"),
    *(f"{R}.multi_stage_wake_up=True", f"{A}.use_torch_compile=True"),
    *("actor_rollout_ref.ref.entropy_from_logits_with_chunking=True", f"{A}.fsdp_config.model_dtype=bf16"),
    *("+ray_kwargs.ray_init.runtime_env.py_executable=uv", "global_profiler.steps=[2]", f"{A}.profiler.enable=True"),
    *(f"{M}.use_liger=True", "trainer.logger=[console,swanlab]", f"{A}.checkpoint.save_contents=['hf_model']"),
    *(f"{R}.val_kwargs={{do_sample: false, temperature: 1.0}}", "critic.optim.lr=0.1", "algorithm.lam=0.95"),
    *(f"{R}.engine_kwargs.sglang.attention_backend=fa3", "trainer.resume_from_path=nowhere/"),
    *(f"{R}.over_sample_rate=0.1", "trainer.tensorboard_dir=logs", "+ray_kwargs.ray_init.num_gpus=4"),
    *(f"{A}.fsdp_config.use_no_sync_for_gradient_accumulation=True", "data={train_batch_size: 32, gen_batch_size: 32}"),
    f"+{A}.fsdp_config.turbo_config.plan={{model.layers.\\{{*\\}}:{{}},lm_head:{{}}}}",
    *(f"{M}={{lora_rank: 0, lora_alpha: 32}}", f"{A}={{use_kl_loss: false, kl_loss_type: mse}}"),
)


@pytest.mark.parametrize("line", HINTS)
def test_a_hint_is_named_in_the_note_and_leaves_the_configuration_as_it_is(line: str) -> None:
    config, note = load(line)
    key = line.lstrip("+").partition("=")[0].removesuffix("data") or "gen_batch_size"
    assert note.startswith("these keys have no effect here:") and key.split(".")[-1].split("=")[0] in note
    assert config.trainer.logger in (("console", "file"), ("console",))
    default = Config().flat()
    unlike = {k: v for k, v in config.flat().items() if v != default[k] and k != "trainer.logger"}
    assert set(unlike) <= {f"{R}.val_kwargs.do_sample"}


@pytest.mark.parametrize(
    "line",
    [
        "+ray_kwargs.ray_init.runtime_env.py_executable=null",
        "global_profiler.tool=null",
        f"{A}.fsdp_config.param_offload=False",
        f"{A}.use_kl_loss=",
        f"{A}.profiler={{enable: false, tool: npu, ranks: [0]}}",
        "reward_model={enable: false, model: {path: some/model, use_remove_padding: true}, strategy: fsdp}",
        "distillation={enabled: false, teacher_models: {a: {model_path: some/model}}}",
        f"{R}.prometheus={{enable: false, port: 9091}}",
        f"{A}={{_target_: verl.workers.config.FSDPActorConfig, strategy: fsdp}}",
        "algorithm.rollout_correction={rollout_token_veto_threshold: null, rollout_rs: null}",
        "model_engine=dp",
        "reward_model.reward_manager=null",
        "trainer.test_freq=False",
        f"{A}.optim.lr_warmup_steps=null",
        "trainer.checkpoint_callback_class=null",
        "reward_model.overlong_buffer={enable: false, len: 0}",
        f"{M}.torch_dtype=bfloat16",
        "reward.reward_manager.name=gdpo",
    ],
)
def test_what_asks_for_nothing_is_accepted_without_a_word(line: str) -> None:
    assert load(line)[1] == ""


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (f"{A}.fsdp_config.model_dtype=bf16", "updates in bfloat16 would lose small steps to rounding"),
        ("actor_rollout_ref.ref.fsdp_config.model_dtype=bf16", "the difference is one of rounding"),
        (f"{R}.val_kwargs={{do_sample: false, temperature: 1.0}}", "verl does not read do_sample and validates with"),
        (f"{A}.fsdp_config.param_offload=True", "the embedded engine samples from the trainer's weights"),
        (f"{A}.fsdp_config.offload_policy=True", "one device holds the whole model, so nothing is gathered"),
    ],
)
def test_a_note_says_what_differs_from_verl(line: str, reason: str) -> None:
    assert reason in load(line)[1]


@pytest.mark.parametrize(
    "lines",
    [
        (f"{A}.fsdp_config.param_offload=True", f"{R}.name=vllm"),
        (f"{A}.fsdp_config.param_offload=True", f"{A}.fsdp_config.offload_policy=True", "trainer.n_gpus_per_node=2"),
        (f"{A}.fsdp_config.optimizer_offload=True", f"{M}.enable_activation_offload=True"),
        ("algorithm.adv_estimator=gae", "critic.fsdp_config.param_offload=True"),
        ("algorithm.adv_estimator=gae", "critic.model.enable_activation_offload=True"),
        (f"{A}.use_kl_loss=true", "actor_rollout_ref.ref.fsdp_config.param_offload=True", "trainer.nnodes=2"),
    ],
)
def test_offloading_that_has_an_effect_is_kept_without_a_word(lines: tuple[str, ...]) -> None:
    config, note = load(*lines, "trainer.device=cpu")
    assert note == ""
    assert all(config.flat()[line.partition("=")[0]] is True for line in lines if "offload" in line)


def test_supervised_runs_offload_too() -> None:
    keys = ("model.fsdp_config.cpu_offload=True", "model.fsdp_config.offload_params=True")
    config, note = load_sft(*keys, "trainer.n_gpus_per_node=2", "trainer.device=cpu")
    assert note == "" and config.model.fsdp_config.uses_offload_policy
    assert "nothing is gathered layer by layer" in load_sft(*keys)[1]
    assert "always in use" in load_sft("model.fsdp_config.param_offload=True")[1]
    assert load_sft("model.enable_activation_offload=True")[1] == ""


def test_all_keys_without_effect_are_in_one_note_by_reason() -> None:
    _, note = load(f"{M}.use_shm=True", *(hint for hint in HINTS if "ulysses" in hint), f"{A}.optim.lr=0.1")
    both = f"  {A}.ulysses_sequence_parallel_size=4, {A}.fsdp_config.ulysses_sequence_parallel_size=2:"
    assert any(line.startswith(both) for line in note.splitlines())
    assert len(note.splitlines()) == 3


def test_python_callers_get_the_note_as_a_warning() -> None:
    with pytest.warns(UserWarning, match="have no effect here"):
        load_config(overrides=[f"{M}.use_shm=true"])


def test_keys_of_other_places_are_moved() -> None:
    config, note = load(
        "reward_model.reward_manager=dapo",
        "reward_model.overlong_buffer={enable: true, len: 128, penalty_factor: 0.5}",
        "algorithm.adv_estimator=gae",
        "critic.model.fsdp_config.optimizer_offload=True",
        f"{A}.clip_cov_ratio=0.01",
        f"{A}.loss_mode=clip_cov",
        f"{R}.name=vllm",
        f"{R}.update_weights_bucket_megabytes=512",
    )
    assert note == ""
    buffer = config.reward_model.reward_kwargs.overlong_buffer_cfg
    assert (buffer.enable, buffer.len, buffer.penalty_factor) == (True, 128, 0.5)
    assert config.critic.fsdp_config.optimizer_offload and config.actor.policy_loss.clip_cov_ratio == 0.01
    assert config.rollout.checkpoint_engine.update_weights_bucket_megabytes == 512
    new, _ = load("reward.reward_manager.name=dapo", "+reward.reward_kwargs.overlong_buffer_cfg={enable: true, len: 9}")
    assert new.reward_model.reward_kwargs.overlong_buffer_cfg.len == 9


def test_a_moved_key_that_contradicts_its_place_is_an_error() -> None:
    with pytest.raises(ConfigError, match="set the same thing to different values"):
        load("reward_model.overlong_buffer.len=5", "reward_model.reward_kwargs.overlong_buffer_cfg.len=6")


def test_earlier_rejection_tests_get_the_names_of_today() -> None:
    config, _ = load(
        "algorithm.rollout_correction={rollout_rs: geometric, rollout_rs_threshold: 1.01, "
        "rollout_rs_threshold_lower: 0.99, rollout_token_veto_threshold: 1e-4}"
    )
    correction = config.algorithm.rollout_correction
    assert correction.tests == ("seq_mean_k1", "seq_min_k1")
    assert [tuple(r)[1:] for r in correction.rejections] == [(0.99, 1.01), (0.0001, float("inf"))]


def test_objectives_over_sequences_average_over_sequences() -> None:
    config, note = load(f"{A}.policy_loss.loss_mode=geo_mean", f"{A}.loss_agg_mode=token-mean")
    assert config.actor.loss_agg_mode == "seq-mean-token-mean"
    assert f"{A}.loss_agg_mode=token-mean: geo_mean always averages over sequences" in note


def test_a_group_of_one_is_noted() -> None:
    assert "the advantage of an episode is its reward" in load(f"{R}.n=1")[1]


def test_a_mini_batch_that_does_not_divide_the_batch_is_noted() -> None:
    sizes = [f"data.train_batch_size={size}" for size in (32, 33)]
    mini = f"{A}.ppo_mini_batch_size=16"
    assert "does not divide" not in str(load(sizes[0], mini)[1])
    note = load(sizes[1], mini)[1]
    assert f"{mini} does not divide data.train_batch_size=33: the last optimizer step of each batch has only 1" in note


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (("reward_model.enable=true",), "needs a model; set reward_model.model.path"),
        (("distillation.enabled=true", "distillation.nnodes=2"), "distillation.enabled=true needs a teacher"),
        ((f"{A}.fsdp_config.qat.enable=true",), "asks for quantization-aware training"),
        (("async_training.staleness_threshold=0.1",), "asks for asynchronous training; set trainer.v1.trainer_mode="),
        ((*SEPARATE, "async_training.compute_prox_log_prob=true"), "set algorithm.rollout_correction.rollout_is=token"),
        ((*SEPARATE, "async_training.use_dynamic_resource_scheduling=true"), "servers keep their GPUs"),
        ((*SEPARATE, "trainer.v1.separate_async.hybrid_rollout.enable_switch=true"), "servers keep their GPUs"),
        ((*SEPARATE, "trainer.v1.separate_async.parameter_sync_step=4"), "so set that to 128"),
        (("actor_rollout_ref.hybrid_engine=false",), "set trainer.v1.trainer_mode=separate_async"),
        ((f"{A}.fsdp_config.model_dtype=float16",), "model_dtype=float16 is not built yet"),
        ((f"{R}.repetition_penalty=1.1",), "repetition_penalty=1.1 is not built yet"),
        (("trainer.nnodes=2", "trainer.launcher=local"), "launcher=local is for one machine"),
        ((f"{M}.use_shm=often",), "it must be true or false"),
        (("+ray_kwargs.ray_init.runtime_env.env_vars.SCALE=2",), "leave it out and set SCALE in the environment"),
        (("+ray_kwargs.ray_init.runtime_env.working_dir=/x",), "start the run in that folder"),
    ],
)
def test_what_changes_results_and_is_not_built_is_one_sentence(lines: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*lines)
    assert sentence in str(caught.value) and len(caught.value.problems) == 1


@pytest.mark.parametrize(
    "lines",
    [
        (f"{A}.strategy=megatron", f"{A}.megatron.param_offload=True"),
        (f"{A}.megatron={{param_offload: true, tensor_model_parallel_size: 4}}", f"{A}.optim.lr_decay_style=cosine"),
        ("model_engine=megatron", f"{A}.megatron.param_offload=True", f"{A}.optim.override_optimizer_config.x=1"),
        ("actor@actor_rollout_ref.actor=megatron_actor", f"{A}.megatron.param_offload=True"),
        ("actor@actor_rollout_ref.actor=mlite_actor", f"{A}.engine={{tp: 2, param_offload: true}}"),
        (f"{A}.megatron.param_offload=True", f"{R}.layer_name_map.qkv=x", f"{A}.optim={{muon_momentum: 0.9, eps: 1}}"),
    ],
)
def test_a_megatron_line_gets_one_sentence_with_the_keys_of_fsdp(lines: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*lines)
    [sentence] = caught.value.problems
    assert "Megatron" in sentence and f"{A}.fsdp_config.param_offload" in sentence


def test_a_composed_file_of_verl_has_the_defaults_of_rally(tmp_path: Path) -> None:
    file, mine = tmp_path / "ppo_trainer.yaml", tmp_path / "mine.yaml"
    file.write_text(
        "defaults:\n  - model_engine: dp\n  - actor@actor_rollout_ref.actor: ${model_engine}_actor\n"
        "  - legacy_reward_impl\n  - _self_\ntrainer: {seed: 3}\n"
    )
    assert load_config(file).trainer.seed == 3
    mine.write_text("defaults: [ppo_trainer, my_other_file, _self_]\n")
    with pytest.raises(ConfigError, match="does not compose files with Hydra"):
        load_config(mine)
    mine.write_text("defaults: [ppo_trainer, {override model_engine: megatron}, _self_]\n")
    with pytest.raises(ConfigError, match="asks for Megatron"):
        load_config(mine)


def test_problems_of_file_line_and_checks_are_in_the_order_in_which_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "data: {no_such_key: 1}\nalgorithm: {use_pf_ppo: true}\nactor_rollout_ref: {rollout: {temperature: hot}}\n"
    )
    line = ("data.train_files=none.parquet", f"{A}.megatron.param_offload=true", "trainer.seed=x", "bare")
    with pytest.raises(ConfigError) as caught:
        load_config(file, line)
    parts = ("no_such_key", "use_pf_ppo", "temperature", "data.train_files", "Megatron", "trainer.seed", "'bare'")
    assert len(caught.value.problems) == len(parts)
    assert all(part in problem for part, problem in zip(parts, caught.value.problems, strict=True))


def test_an_sft_file_of_question_and_answer_switches_conversations_off() -> None:
    config, note = load_sft(
        "data={prompt_key: question, response_key: answer, multiturn: {enable: false, messages_key: messages}}",
        "trainer.save_freq=after_each_epoch",
    )
    assert config.data.prompt_key == "question" and "data.multiturn.enable is false" in note
    with pytest.raises(ConfigError, match="rows are always conversations"):
        load_sft("data.multiturn.enable=false")


def test_an_sft_line_of_the_engine_trainer_resolves() -> None:
    config, note = load_sft(
        "engine=fsdp", "optim=fsdp", "engine.strategy=fsdp2", "engine.fsdp_size=16", "optim.warmup_style=cosine",
        "engine.ulysses_sequence_parallel_size=8", "checkpoint.save_contents=[model,optimizer,extra]",
    )  # fmt: skip
    assert (config.model.strategy, config.model.fsdp_config.fsdp_size) == ("fsdp2", 16)
    assert "model.fsdp_config.ulysses_sequence_parallel_size=8" in note
    with pytest.raises(ConfigError, match="Megatron"):
        load_sft("engine=megatron")


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("trainer.device=npu", "torch has no npu devices here"),
    ],
)
def test_what_would_run_otherwise_than_asked_is_no_hint(word: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load(word)


def test_verls_fully_asynchronous_trainer_in_the_keys_of_separate_async() -> None:
    """As its example scripts write it: a step is what it trains on between two publications of weights."""
    config, note = load(
        *SEPARATE, "data.train_batch_size=0", "data.gen_batch_size=1", f"{A}.ppo_mini_batch_size=32",
        "rollout.total_rollout_steps=51200", "rollout.nnodes=1", "rollout.n_gpus_per_node=4", f"{R}.name=vllm",
        f"{R}.tensor_model_parallel_size=2", f"{R}.calculate_log_probs=True", f"{R}.checkpoint_engine.backend=nccl",
        "actor_rollout_ref.hybrid_engine=False", f"{A}.use_rollout_log_probs=True",
        "algorithm.rollout_correction.bypass_mode=True", "async_training.staleness_threshold=0.5",
        "async_training.trigger_parameter_sync_step=4", "async_training.require_batches=1",
        "async_training.partial_rollout=True", "async_training.use_trainer_do_validate=False",
        "async_training.use_dynamic_resource_scheduling=False", "async_training.concurrent_samples_per_replica=16",
    )  # fmt: skip
    assert (config.data.train_batch_size, config.trainer.total_training_steps) == (128, 400)
    assert config.separate and config.batches_ahead == 0.5 and not config.fixed_lag
    assert with_rollout_servers(config).rollout.data_parallel_size == 2
    assert "gen_batch_size" in note and "concurrent_samples_per_replica" in note
    assert config.rollout.checkpoint_engine.backend == "nccl"


@pytest.mark.parametrize(
    ("lines", "backend"),
    [
        (SEPARATE, "nccl"),
        ((f"{R}.name=rally",), "nccl"),
        ((f"{R}.name=vllm",), "naive"),  # on the trainer's GPUs
        ((*SEPARATE, f"{R}.name=sglang"), "naive"),
    ],
)
def test_weights_are_broadcast_to_servers_that_take_them(lines: tuple[str, ...], backend: str) -> None:
    config, note = load(*lines, f"{R}.checkpoint_engine.backend=nccl")
    assert config.rollout.checkpoint_engine.backend == backend
    assert ("weights take the fastest way" in note) == (backend == "naive")


def test_a_running_vllm_cannot_join_a_broadcast() -> None:
    words = ("name=vllm", "mode=server", "server.url=http://a", "checkpoint_engine.backend=nccl")
    with pytest.raises(ConfigError, match="only a vLLM that the run starts can join its broadcasts"):
        load(*SEPARATE, *(f"{R}.{word}" for word in words))


def test_the_keys_of_separate_async() -> None:
    config, note = load(
        *SEPARATE, "data.train_batch_size=64", f"{A}.ppo_mini_batch_size=16", f"{R}.n_gpus_per_node=3",
        "trainer.v1.separate_async={num_warmup_batches: 2, parameter_sync_step: 4}",
        "trainer.v1.separate_async.hybrid_rollout={enable_switch: false, switch_threshold_ratio: 0.4}",
    )  # fmt: skip
    rollout = with_rollout_servers(config).rollout
    assert (config.batches_ahead, rollout.name, rollout.data_parallel_size, note) == (2, "rally", 3, "")
    unused, note = load("trainer.v1.separate_async={num_warmup_batches: 2, parameter_sync_step: 4}")
    assert not unused.asynchronous and "the mode separate_async is not used" in note


def test_a_saved_configuration_gives_no_note(tmp_path: Path) -> None:
    saved = tmp_path / "config.yaml"
    saved.write_text(load()[0].to_yaml(), encoding="utf-8")
    notes: list[str] = []
    load_config(saved, note=notes.append)
    assert notes == []
