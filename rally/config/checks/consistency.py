"""Checks that compare keys with each other, and the lists of all checks.

Each check reads a valid configuration and yields one sentence per problem.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from rally.config.actor import LOSS_MODES
from rally.config.algorithm import ESTIMATORS, GRPO, TOKEN_BASELINES, PfPpo, RolloutCorrection
from rally.config.aliases import SAME_AS, SFT_SAME_AS
from rally.config.base import look_up, missing_file
from rally.config.checks.asynchronous import asynchronous
from rally.config.checks.critic import critic, kl_control
from rally.config.checks.distillation import distillation
from rally.config.checks.environments import environments
from rally.config.checks.multi_gpu import BLACK_BOX, multi_gpu, sft_multi_gpu
from rally.config.checks.reward_model import reward_model
from rally.config.checks.servers import servers
from rally.config.checks.unused_keys import sft_unused_keys, unused_keys
from rally.config.errors import shown
from rally.config.model import LoraKeys
from rally.config.reward import CustomRewardFunction, RewardShaping
from rally.config.schema import MANAGER, ROLLOUT, SPELLINGS, Config
from rally.config.sft import MESSAGES, SFT_SPELLINGS, SftConfig
from rally.config.trainer import RunConfig
from rally.platforms import Platform, named_platform, shared_backend

ACTOR = "actor_rollout_ref.actor"
EXTERNAL_LIB = "actor_rollout_ref.model.external_lib"
CURRICULUM_KEYS: dict[str | None, tuple[str, ...]] = {
    "field": ("field", "start_share", "grow_steps"),
    "success": ("low", "high", "explore", "solved_at"),
}
LORA_SHAPE = ("lora_alpha", "target_modules", "exclude_modules", "target_parameters")
CHAINS = ("reinforce_plus_plus", "gae", "turn_gae")
"""Estimators that always discount along an episode."""
LOSS_KEYS: dict[str, tuple[str, ...]] = {
    f"{ACTOR}.tau_pos": ("sapo",),
    f"{ACTOR}.tau_neg": ("sapo",),
    f"{ACTOR}.policy_loss.clip_cov_ratio": ("clip_cov",),
    f"{ACTOR}.policy_loss.clip_cov_lb": ("clip_cov",),
    f"{ACTOR}.policy_loss.clip_cov_ub": ("clip_cov",),
    f"{ACTOR}.policy_loss.kl_cov_ratio": ("kl_cov",),
    f"{ACTOR}.policy_loss.ppo_kl_coef": ("kl_cov",),
    f"{ACTOR}.policy_loss.dro_beta": ("dro",),
}
"""Keys that only some objectives use."""


def trace(config: Config) -> Iterator[str]:
    settings = config.rollout.trace
    if settings.backend is None:
        for name, value in settings.model_dump(exclude_defaults=True).items():
            problem = f"{ROLLOUT}.trace.{name}={shown(value)} has no effect without {ROLLOUT}.trace.backend"
            yield f"{problem}; set that to mlflow or otel."


def micro_batch_limits(config: Config) -> Iterator[str]:
    """Without a token budget, a number of episodes must limit a forward pass."""
    ref, per_gpu = "actor_rollout_ref.ref", "micro_batch_size_per_gpu"
    for key, count in (
        (f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.ppo_{per_gpu}"),
        (f"{ROLLOUT}.log_prob_use_dynamic_bsz", f"{ROLLOUT}.log_prob_{per_gpu}"),
        (f"{ref}.log_prob_use_dynamic_bsz", f"{ref}.log_prob_{per_gpu}"),
        ("critic.use_dynamic_bsz", f"critic.ppo_{per_gpu}"),
    ):
        if look_up(config, key) is False and look_up(config, count) is None:
            yield f"{key}=false removes the token budget; set {count} to the number of episodes per forward pass."


def sft_micro_batch_limits(config: SftConfig) -> Iterator[str]:
    if not config.data.use_dynamic_bsz and config.data.micro_batch_size_per_gpu is None:
        problem = "data.use_dynamic_bsz=false removes the token budget"
        yield f"{problem}; set data.micro_batch_size_per_gpu to the number of conversations per forward pass."


def custom_rows(config: Config) -> Iterator[str]:
    chosen = config.data.custom_cls
    if (chosen.path is None) != (chosen.name is None):
        yield "data.custom_cls.path and data.custom_cls.name select a class together; set both."


def spellings_agree(config: Config | SftConfig) -> Iterator[str]:
    for keys in SPELLINGS if isinstance(config, Config) else SFT_SPELLINGS:
        written = {key: value for key in keys if (value := look_up(config, key)) is not None}
        if len(set(written.values())) > 1:
            problem = " and ".join(f"{key}={shown(value)}" for key, value in written.items())
            yield f"{problem} set the same thing to different values; keep one of them."


def aliases_agree(config: Config | SftConfig) -> Iterator[str]:
    for alias, key in SAME_AS if isinstance(config, Config) else SFT_SAME_AS:
        alias_value, value = look_up(config, alias), look_up(config, key)
        if alias_value is not None and alias_value != value:
            yield f"{alias}={shown(alias_value)} must equal {key}={shown(value)}; leave it out and set {key}."


def history(config: Config) -> Iterator[str]:
    multi_turn = config.rollout.multi_turn
    if multi_turn.use_inference_chat_template and multi_turn.history == "append":
        name = f"{ROLLOUT}.multi_turn"
        yield f"{name}.use_inference_chat_template=true means {name}.history=rerender, not append; keep one of them."


def router_replay(config: Config) -> Iterator[str]:
    records, mode = config.rollout.enable_rollout_routing_replay, config.actor.router_replay.mode
    if mode == "R3" and not records:
        yield f"{ACTOR}.router_replay.mode=R3 needs {ROLLOUT}.enable_rollout_routing_replay=true; set it, or use R2."
    if records and mode != "R3":
        problem = f"{ROLLOUT}.enable_rollout_routing_replay=true has no effect with {ACTOR}.router_replay.mode={mode}"
        yield f"{problem}; set that to R3."
    if mode != "disabled" and config.rollout.deterministic:
        yield f"{ACTOR}.router_replay.mode={mode} has no effect with {ROLLOUT}.deterministic=true; leave it out."


def batch_sizes(config: Config) -> Iterator[str]:
    n, mini, train = config.rollout.n, config.mini_batch_size, config.data.train_batch_size
    estimator = config.algorithm.adv_estimator
    needs_no_group = estimator in ("reinforce_plus_plus", "remax", *GRPO) or config.needs_critic
    needs_no_group = needs_no_group or estimator not in ESTIMATORS  # that of a user's module is not known
    if n < 2 and not needs_no_group and not config.trainer.val_only:
        yield f"{ROLLOUT}.n={n} leaves nothing for {estimator} to compare an episode with; set it to 2 or more."
    if mini > train:
        yield f"{ACTOR}.ppo_mini_batch_size={mini} is more than data.train_batch_size={train}; make it {train} or less."
    window, prompt = config.rollout.max_model_len, config.data.max_prompt_length
    if window is not None and window <= prompt:
        yield f"{ROLLOUT}.max_model_len={window} leaves no tokens after data.max_prompt_length={prompt}; raise it."


def sampling(config: Config) -> Iterator[str]:
    rollout, val = config.rollout, config.rollout.val_kwargs
    if rollout.temperature == 0 and not config.trainer.val_only:
        yield f"{ROLLOUT}.temperature=0 makes all episodes of a group equal; set it above 0."
    if val.do_sample and val.temperature == 0:
        yield f"{ROLLOUT}.val_kwargs.do_sample=true needs {ROLLOUT}.val_kwargs.temperature above 0; set it."
    if val.do_sample is False and val.temperature > 0:
        problem = f"{ROLLOUT}.val_kwargs.temperature={val.temperature}"
        yield f"{problem} has no effect with do_sample=false; set do_sample=true or temperature=0."
    if val.n > 1 and not (val.do_sample or val.temperature > 0):
        problem = f"{ROLLOUT}.val_kwargs.n={val.n} asks for greedy samples, which are all equal"
        yield f"{problem}; leave it out, or set {ROLLOUT}.val_kwargs.temperature above 0."


def curriculum(config: Config) -> Iterator[str]:
    sampler, chosen = config.data.sampler, config.data.curriculum
    if (sampler.class_path is None) != (sampler.class_name is None):
        yield "data.sampler.class_path and data.sampler.class_name select a class together; set both."
    if sampler.class_path is not None and chosen.by is not None:
        yield f"data.sampler and data.curriculum.by={chosen.by} both choose the rows of a step; keep one of them."
    if chosen.low > chosen.high:
        yield f"data.curriculum.low={chosen.low} is above data.curriculum.high={chosen.high}; lower it."
    written = chosen.model_dump(exclude_defaults=True)
    for name in [n for n in written if n not in ("by", *CURRICULUM_KEYS.get(chosen.by, ()))]:
        problem = f"data.curriculum.{name}={shown(written[name])}"
        yield f"{problem} has no effect with data.curriculum.by={shown(chosen.by)}; leave it out."


def loss(config: Config) -> Iterator[str]:
    actor = config.actor
    if actor.use_kl_loss and config.algorithm.use_kl_in_reward and not config.algorithm.allow_both_kl:
        problem = f"{ACTOR}.use_kl_loss and algorithm.use_kl_in_reward together count the KL twice"
        yield f"{problem}; keep one of them, or set algorithm.allow_both_kl=true."
    if actor.loss_scale_factor is not None and actor.loss_agg_mode != "seq-mean-token-sum-norm":
        problem = f"{ACTOR}.loss_scale_factor={actor.loss_scale_factor}"
        yield f"{problem} has no effect unless {ACTOR}.loss_agg_mode=seq-mean-token-sum-norm; leave it out."
    if actor.optim.lr_warmup_steps >= 0 and actor.optim.lr_warmup_steps_ratio > 0:
        yield f"{ACTOR}.optim.lr_warmup_steps and lr_warmup_steps_ratio both set the warm-up; keep one of them."


def objective(config: Config) -> Iterator[str]:
    actor = config.actor
    mode, aggregation = actor.policy_loss.loss_mode, actor.loss_agg_mode
    yield from _registered(
        config, f"{ACTOR}.policy_loss.loss_mode", mode, LOSS_MODES, f"{ACTOR}.policy_loss.loss_kwargs"
    )
    if mode in ("gspo", "geo_mean", "gmpo") and aggregation != "seq-mean-token-mean":
        problem = f"{ACTOR}.policy_loss.loss_mode={mode} averages over sequences"
        yield f"{problem}; set {ACTOR}.loss_agg_mode=seq-mean-token-mean."
    if mode == "dro" and actor.policy_loss.dro_beta is None:
        yield f"{ACTOR}.policy_loss.loss_mode=dro needs {ACTOR}.policy_loss.dro_beta; set it to a number above 0."
    for key, belongs in LOSS_KEYS.items():
        if mode not in belongs and look_up(config, key) != look_up(Config(), key):
            yield f"{key} has no effect with {ACTOR}.policy_loss.loss_mode={mode}; leave it out."


def _registered(config: Config, key: str, name: str, known: tuple[str, ...], kwargs: str) -> Iterator[str]:
    """A loss or an estimator is one of Rally's, or of a module of the user's, which alone takes arguments."""
    if name in known:
        if look_up(config, kwargs):
            yield f"{kwargs} has no effect with {key}={name}, which is Rally's own; leave it out."
    elif not config.external_libs:
        problem = f"{key}={name} is none of {', '.join(known)}"
        yield f"{problem}; use one of them, or set {EXTERNAL_LIB} to the module that registers it."


def advantages(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    estimator, turns, gamma = algorithm.adv_estimator, algorithm.turn_rewards, algorithm.gamma
    yield from _registered(config, "algorithm.adv_estimator", estimator, ESTIMATORS, "algorithm.adv_estimator_kwargs")
    if estimator not in ESTIMATORS:  # what it uses is not known
        return
    if gamma != 1 and turns == "trajectory" and estimator not in (*CHAINS, "gigpo"):
        yield f"algorithm.gamma={gamma} has no effect with {estimator} over whole episodes; set algorithm.turn_rewards."
    if turns != "trajectory" and estimator in ("remax", "gdpo", *TOKEN_BASELINES):
        yield f"algorithm.turn_rewards={turns} is not supported with {estimator}; leave it out."
    if turns == "turn_baseline" and estimator in (*CHAINS, "gigpo"):
        yield f"algorithm.turn_rewards=turn_baseline is not supported with {estimator}; set it to returns."
    for key, usual in (("kl_penalty", ("kl",)), ("kl_ctrl.kl_coef", (0.001, 0.0))):
        if not algorithm.use_kl_in_reward and look_up(algorithm, key) not in usual:
            yield f"algorithm.{key} has no effect without algorithm.use_kl_in_reward=true; set that, or leave it out."
    if not algorithm.norm_adv_by_std_in_grpo and not estimator.startswith(("grpo", "gigpo", "gdpo")):
        yield f"algorithm.norm_adv_by_std_in_grpo=false has no effect with {estimator}; leave it out."
    if algorithm.use_pf_ppo and estimator != "gae":
        yield f"algorithm.use_pf_ppo=true has no effect with {estimator}; set algorithm.adv_estimator=gae."
    if not algorithm.use_pf_ppo and algorithm.pf_ppo != PfPpo():
        yield "algorithm.pf_ppo has no effect without algorithm.use_pf_ppo=true; set that, or leave it out."
    if estimator in TOKEN_BASELINES and algorithm.rollout_correction.rollout_is is not None:
        problem = f"algorithm.rollout_correction.rollout_is is not supported with {estimator}"
        yield f"{problem}, whose baseline would need its weights; leave it out."
    if estimator in TOKEN_BASELINES and config.trainer.world_size > 1:
        yield f"algorithm.adv_estimator={estimator} works on one GPU only; set trainer.n_gpus_per_node=1 and nnodes=1."
    if algorithm.gigpo.step_advantage_w != 1 and estimator != "gigpo":
        yield "algorithm.gigpo.step_advantage_w has no effect unless algorithm.adv_estimator=gigpo; leave it out."


def gdpo_components(config: Config) -> Iterator[str]:
    keys, chosen = config.algorithm.gdpo_reward_keys, config.algorithm.adv_estimator == "gdpo"
    if bool(keys) != chosen:
        yield "algorithm.gdpo_reward_keys and algorithm.adv_estimator=gdpo belong together; set both or neither."
    if chosen and config.algorithm.use_kl_in_reward:
        yield f"algorithm.use_kl_in_reward has no effect with gdpo; use {ACTOR}.use_kl_loss."
    shaped = config.reward_shaping != RewardShaping() and config.reward_shaping.enable is not False
    if chosen and shaped and not any(key.startswith("shaping/") for key in keys):
        problem = "reward_shaping has no effect with gdpo unless its components are among algorithm.gdpo_reward_keys"
        yield f"{problem}; add them, such as shaping/tool_call_success."


def dynamic_sampling(config: Config) -> Iterator[str]:
    key, chosen, data = "algorithm.filter_groups", config.algorithm.filter_groups, config.data
    if not chosen.enable and "enable" in chosen.model_fields_set:
        return  # with an explicit enable=false, the rest is known to have no effect
    if not chosen.enable:
        written = [f"{key}.{name}" for name in chosen.model_dump(exclude_defaults=True) if name != "enable"]
        for name in [*written, *(["data.gen_batch_size"] if data.gen_batch_size is not None else [])]:
            yield f"{name} has no effect without {key}.enable=true; set that, or leave it out."
        return
    if data.gen_batch_size is not None and data.gen_batch_size < data.train_batch_size:
        started, trained = data.gen_batch_size, data.train_batch_size
        problem = f"data.gen_batch_size={started} is less than data.train_batch_size={trained}"
        yield f"{problem}, which a step trains on; make it at least as large, or leave it out."
    if config.rollout.n < 2 and config.algorithm.adv_estimator != "remax":
        yield f"{key} with {ROLLOUT}.n=1 sets all groups aside; set {ROLLOUT}.n to 2 or more."
    if chosen.metric == "seq_final_reward" and config.algorithm.use_kl_in_reward:
        yield f"{key}.metric=seq_final_reward includes a KL that is computed after filtering; use seq_reward."


def off_policy_correction(config: Config) -> Iterator[str]:
    key, settings = "algorithm.rollout_correction", config.algorithm.rollout_correction
    mode = config.actor.policy_loss.loss_mode
    if settings.bypass_mode and mode != "vanilla":
        problem = f"{key}.bypass_mode=true trains with {key}.loss_type={settings.loss_type}"
        yield f"{problem}, not with {ACTOR}.policy_loss.loss_mode={mode}; leave one of them out."
    if settings.loss_type == "reinforce" and not settings.bypass_mode:
        yield f"{key}.loss_type=reinforce has no effect without {key}.bypass_mode=true; set that, or leave it out."
    if settings.rollout_is_batch_normalize and settings.rollout_is is None:
        yield f"{key}.rollout_is_batch_normalize has no effect without {key}.rollout_is; set it to token or sequence."
    if settings.rollout_is is None and settings.rollout_is_threshold != 2.0:
        yield f"{key}.rollout_is_threshold has no effect without {key}.rollout_is; set it to token or sequence."
    for test in settings.tests:
        if not re.fullmatch("token_k[123]|seq_(sum|mean)_k[123]|seq_max_k[23]|seq_min_k1", test):
            yield f"{key}.rollout_rs={test} is unknown; use token_k1, seq_mean_k3 or another of docs/methods.md."
    if bool(settings.tests) != (settings.rollout_rs_threshold is not None):
        yield f"{key}.rollout_rs and {key}.rollout_rs_threshold belong together; set both or neither."
    elif settings.tests and not _bounds_fit(settings):
        problem = f"{key}.rollout_rs_threshold={settings.rollout_rs_threshold}"
        yield f"{problem} is invalid; set a number or bounds such as 0.5_2.0, once or for each test."


def _bounds_fit(settings: RolloutCorrection) -> bool:
    try:
        rejections = settings.rejections
    except (ValueError, ZeroDivisionError):
        return False
    count = str(settings.rollout_rs_threshold).count(",") + 1
    sound = all(r.highest > 0 and (0 < r.lowest <= r.highest or not r.test.endswith("k1")) for r in rejections)
    return sound and count in (1, len(settings.tests))


def lora(config: Config | SftConfig) -> Iterator[str]:
    model, key = (config.model, "actor_rollout_ref.model") if isinstance(config, Config) else (config.model, "model")
    shape = {name: value for name in LORA_SHAPE if (value := getattr(model, name)) != getattr(LoraKeys(), name)}
    why = "without lora_rank" if not model.lora_rank else "with lora_adapter_path, whose folder sets it"
    if not model.lora_rank or model.lora_adapter_path:
        for name, value in shape.items():
            yield f"{key}.{name}={shown(value)} has no effect {why}; leave it out."
    yield from _missing(config, f"{key}.lora_adapter_path")


def agent_loop(config: Config) -> Iterator[str]:
    named = config.rollout.agent.default_agent_loop
    if config.rollout.agent_loop_class and named != "single_turn_agent":
        yield f"{ROLLOUT}.agent_loop_class and {ROLLOUT}.agent.default_agent_loop={named} both select a loop; keep one."
    if config.rollout.agent_loop_class in BLACK_BOX:
        for key in (*SPELLINGS[0], *SPELLINGS[1], f"{ROLLOUT}.agent_loop_config.tools"):
            if look_up(config, key):
                yield f"{key} has no effect with {ROLLOUT}.agent_loop_class=black_box; leave it out."


def reward(config: Config) -> Iterator[str]:
    function, unset = config.reward_function, CustomRewardFunction()
    if config.custom_reward_function not in (unset, function):
        problem = "custom_reward_function and reward.custom_reward_function set the same thing to different values"
        yield f"{problem}; keep one of them."
    if function.path is None and function.name != "compute_score":
        yield f"custom_reward_function.name={function.name} needs custom_reward_function.path; set it."
    if config.reward_shaping == RewardShaping(enable=True):
        yield "reward_shaping.enable=true has no effect while all its values are 0; set one of them."


def reward_manager(config: Config) -> Iterator[str]:
    written = {key: name for key in MANAGER if (name := look_up(config, key)) != "naive"}
    name, kwargs = config.reward_manager_name, config.reward_model.reward_kwargs
    buffer, overlong = kwargs.overlong_buffer_cfg, "reward_model.reward_kwargs.overlong_buffer_cfg"
    if len(set(written.values())) > 1:
        problem = " and ".join(f"{key}={shown(value)}" for key, value in written.items())
        yield f"{problem} set the same thing to different values; keep one of them."
    if name == "batch" and config.reward_function.path is None:
        yield "reward_manager=batch needs a reward function that takes lists; set custom_reward_function.path."
    if buffer.enable and name != "dapo":
        yield f"{overlong}.enable=true has no effect with reward_manager={name}; set reward_manager=dapo."
    longest = kwargs.max_resp_len or config.data.max_response_length
    if buffer.enable and buffer.len > longest:
        yield f"{overlong}.len={buffer.len} is more than the response budget of {longest} tokens; make it smaller."


def files(config: Config) -> Iterator[str]:
    rows = ("data.train_files", "data.val_files") if config.data.custom_cls.path is None else ("data.custom_cls.path",)
    for key in (
        *rows,
        f"{ROLLOUT}.agent.agent_loop_config_path",
        f"{ROLLOUT}.multi_turn.interaction_config_path",
        "custom_reward_function.path",
        "reward.custom_reward_function.path",
        "data.sampler.class_path",
        "actor_rollout_ref.model.path",
        "actor_rollout_ref.model.tokenizer_path",
        "critic.model.path",
        *SPELLINGS[0],
        *SPELLINGS[1],
    ):
        yield from _missing(config, key)
    validates = any(config.env.val_sizes.values()) if config.env.entries else config.data.val_files
    if not validates and (config.trainer.test_freq > 0 or config.trainer.val_only):
        key = "env.val_size" if config.env.entries else "data.val_files"
        yield f"trainer.test_freq and trainer.val_only need validation rows; set {key}."


def sft_files(config: SftConfig) -> Iterator[str]:
    for key in ("data.train_files", "data.val_files", "model.path", "model.partial_pretrain", "model.tokenizer_path"):
        yield from _missing(config, key)
    if not config.data.val_files and config.trainer.test_freq != -1:
        yield f"trainer.test_freq={config.trainer.test_freq} needs validation rows; set data.val_files."
    if config.optim.lr_warmup_steps >= 0 and config.optim.lr_warmup_steps_ratio > 0:
        yield "optim.lr_warmup_steps and optim.lr_warmup_steps_ratio both set the warm-up; keep one of them."


def sft_columns(config: SftConfig) -> Iterator[str]:
    data = config.data
    if (data.prompt_key is None) != (data.response_key is None):
        yield "data.prompt_key and data.response_key select question and answer together; set both."
    for name in ("prompt", "response"):
        inner = look_up(config, f"data.{name}_dict_keys")
        if inner and look_up(config, f"data.{name}_key") is None:
            yield f"data.{name}_dict_keys={shown(inner)} has no effect without data.{name}_key; leave it out."
    written = config.first_set(MESSAGES)
    if data.prompt_key is not None and written is not None:
        problem = f"data.messages_key={shown(written)} and data.prompt_key={shown(data.prompt_key)}"
        yield f"{problem} both select the conversations; keep one of them."


def resume(config: Config | SftConfig) -> Iterator[str]:
    mode, path = config.trainer.resume_mode, config.trainer.resume_from_path
    if mode == "resume_path" and path is None:
        yield "trainer.resume_mode=resume_path needs trainer.resume_from_path; set it to a checkpoint folder."
    if mode != "resume_path" and path is not None:
        yield f"trainer.resume_from_path={path} has no effect with resume_mode={mode}; set resume_mode=resume_path."
    if path is not None and missing_file(path):
        yield f"trainer.resume_from_path={path} does not exist; set it to a checkpoint folder."


def devices(config: Config | SftConfig) -> Iterator[str]:
    trainer: RunConfig = config.trainer
    if trainer.device == "npu" and isinstance(config, Config) and config.rollout.server_kind == "sglang":
        yield "rollout.name=sglang is not set up for trainer.device=npu; use vllm with vllm-ascend, or leave it out."
    if trainer.on_ray or (trainer.n_gpus_per_node == 1 and trainer.device in ("auto", "cpu")):
        return  # the cluster is asked when the run starts
    platform = named_platform(trainer.device)
    gpus = count_gpus(platform)
    wanted = trainer.n_gpus_per_node
    if wanted > max(gpus, 1) and trainer.device != "cpu" and not (gpus and shared_backend()):
        problem = f"trainer.n_gpus_per_node={wanted} is more than the {gpus} GPUs of this machine"
        yield f"{problem}; set it to {max(gpus, 1)}."
    if trainer.device not in ("auto", "cpu") and gpus == 0:
        yield f"trainer.device={trainer.device}, but {platform.missing()} on this machine; set it to auto or cpu."


def count_gpus(platform: Platform) -> int:
    return platform.device_count()


def _missing(config: Config | SftConfig, key: str) -> Iterator[str]:
    value = look_up(config, key)
    for path in value if isinstance(value, tuple) else (value,):
        if path is not None and _is_path(key, path) and missing_file(path):
            yield f"{key}={path} does not exist; check the path."


def _is_path(key: str, text: str) -> bool:
    """Whether the text must be a path. A model may also be a Hub name; a reward function or sampler may be a module."""
    if key.startswith(("actor_rollout_ref.model.", "critic.model.", "model.")):
        return text.startswith(("/", ".", "~", "$")) or text.count("/") > 1 or text.endswith("/")
    if key.endswith(("custom_reward_function.path", "sampler.class_path", "custom_cls.path")):
        return text.endswith(".py") or ("/" in text and not text.startswith("pkg://"))
    return True


CHECKS: tuple[Callable[[Config], Iterator[str]], ...] = (
    spellings_agree,
    aliases_agree,
    history,
    micro_batch_limits,
    router_replay,
    batch_sizes,
    sampling,
    curriculum,
    loss,
    objective,
    advantages,
    gdpo_components,
    dynamic_sampling,
    critic,
    kl_control,
    distillation,
    off_policy_correction,
    asynchronous,
    lora,
    servers,
    multi_gpu,
    agent_loop,
    reward,
    reward_manager,
    reward_model,
    trace,
    unused_keys,
    custom_rows,
    environments,
    files,
    resume,
    devices,
)
SFT_CHECKS: tuple[Callable[[SftConfig], Iterator[str]], ...] = (
    spellings_agree,
    aliases_agree,
    sft_micro_batch_limits,
    lora,
    sft_columns,
    sft_files,
    sft_unused_keys,
    sft_multi_gpu,
    resume,
    devices,
)
