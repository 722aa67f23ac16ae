"""Brings a configuration written for verl into the keys of the schema, before it is validated.

Keys that have another place here are moved. Parts that are switched off are dropped. Hints about placement, memory and
speed, which change no result, are dropped with a reason; `load_config` collects them in one note. What asks for a
feature that is not built is refused in one sentence. Nothing here reads a value that the run depends on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from rally.config.actor import LOSS_MODES
from rally.config.algorithm import ESTIMATORS
from rally.config.base import Root, expand, look_up, missing_file
from rally.config.errors import shown
from rally.config.verl_backends import BACKENDS, refused_backend
from rally.config.verl_key_tables import (
    ASKED,
    ASYNC,
    ASYNC_KEYS,
    DECOUPLED,
    GROUP_FILES,
    GROUPS,
    HINTS,
    MOVES,
    NULLS,
    OFF,
    PLACEMENT,
    REF,
    REFUSED,
    SAMPLED,
    SFT_HINTS,
    SFT_MOVES,
    SWITCHED_OFF,
    UNSHARDED_OFFLOAD,
    WHOLE,
    A,
    M,
    R,
    hint_for,
)
from rally.config.yaml_files import Tree, at, leaves, put, without

OWN_FILES = (
    *("ppo_trainer", "sft_trainer", "sft_trainer_engine", "ppo_megatron_trainer", "ppo_veomni_trainer"),
    *("dapo_trainer", "dapo_megatron_trainer", "_generated_ppo_trainer"),
    *("fully_async_ppo_trainer", "fully_async_ppo_megatron_trainer", "one_step_off_ppo_trainer"),
)
"""Configuration files that belong to verl. Where they do not exist, Rally's own defaults take their place."""
FREE = (
    "engine_kwargs",
    "override_config",
    "reward_kwargs",
    "loss_kwargs",
    "adv_estimator_kwargs",
    "agent_loop_config",
    "apply_chat_template_kwargs",
    "custom",
)
"""Mappings whose keys are the user's."""


class Dropped(NamedTuple):
    """A key of the command line that has no effect, with its value and the reason."""

    key: str
    value: Any
    why: str


class Translation(NamedTuple):
    """The tree in the keys of the schema, and what became of the others."""

    tree: Tree
    dropped: tuple[Dropped, ...] = ()
    moved: tuple[tuple[str, str], ...] = ()
    problems: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


def group_choices(layer: Tree) -> tuple[Tree, dict[str, str]]:
    """A layer without the choices of Hydra's groups, such as `engine=fsdp`, and those choices."""
    chosen = {key: value for key, value in layer.items() if isinstance(value, str) and _is_choice(key, value)}
    return {key: value for key, value in layer.items() if key not in chosen}, chosen


def _is_choice(key: str, value: str) -> bool:
    """Whether a key and its text choose a file of verl. Any other text is a value for a section, and a mistake."""
    return "@" in key or (key in GROUPS and (value in GROUP_FILES or any(name in value for name in BACKENDS)))


def translate(tree: Tree, schema: type[Root], choices: Mapping[str, str], sft: bool) -> Translation:
    """The tree in the keys of the schema, with everything that has no effect taken out."""
    work = _Work(_without_targets(tree), schema, sft)
    for step in STEPS:
        step(work, choices)
    lists = (tuple(work.dropped), tuple(work.moved), tuple(work.problems), tuple(work.remarks))
    return Translation(work.tree, *lists)


class _Work:
    """A tree while it is translated."""

    def __init__(self, tree: Tree, schema: type[Root], sft: bool) -> None:
        self.tree, self.schema, self.sft = tree, schema, sft
        self.defaults = schema()
        self.known = set(schema.keys())
        self.dropped: list[Dropped] = []
        self.moved: list[tuple[str, str]] = []
        self.problems: list[str] = []
        self.remarks: list[str] = []

    def drop(self, key: str, why: str) -> None:
        """Take a key or section out. What asks for nothing is not reported."""
        value = at(self.tree, key)
        written = leaves(value, key + ".") if isinstance(value, dict) else ((key, value),)
        self.dropped += [Dropped(name, item, why) for name, item in written if not self._asks_nothing(name, item)]
        self.tree = without(self.tree, key)

    def is_default(self, key: str, value: Any) -> bool:
        if key not in self.known:
            return False
        default = look_up(self.defaults, key)
        return bool(value == (list(default) if isinstance(default, tuple) else default))

    def _asks_nothing(self, key: str, value: Any) -> bool:
        if key in self.known:
            nothing = value is None or (value == 0 and not isinstance(value, bool))
            return bool(nothing or self.is_default(key, value))
        return value is not True and value in (None, False, 1, "", -1, {}, [])


def _without_targets(tree: Any) -> Any:
    """The tree without `_target_: verl...`, by which Hydra finds the class of a section."""
    if not isinstance(tree, dict):
        return tree
    kept = {}
    for name, value in tree.items():
        if name == "_target_" and isinstance(value, str) and value.startswith(("verl.", "recipe.")):
            continue
        kept[name] = value if name in FREE and name != "reward_kwargs" else _without_targets(value)
    return kept


def _defaults(work: _Work, choices: Mapping[str, str]) -> None:
    """`defaults:` of a file of verl names verl's own files, whose place Rally's defaults take."""
    named = work.tree.get("defaults")
    if isinstance(named, list) and len(named) > 1 and not any(name in str(named) for name in BACKENDS):
        composed = any(isinstance(name, dict) and "actor@actor_rollout_ref.actor" in name for name in named)
        own = composed or all(isinstance(name, dict) or name in (*OWN_FILES, "_self_") for name in named)
        work.tree = without(work.tree, "defaults") if own else work.tree


def _backend(work: _Work, choices: Mapping[str, str]) -> None:
    if (found := refused_backend(work.tree, choices)) is not None:
        work.problems.append(found.problem)
        for key in found.keys:
            work.tree = without(work.tree, key)


def _moved(work: _Work, choices: Mapping[str, str]) -> None:
    for old, new in SFT_MOVES if work.sft else MOVES:
        value = at(work.tree, old)
        if value is None:
            work.tree = without(work.tree, old) if old not in work.known else work.tree
            continue
        if old in work.known:
            continue
        written = leaves(value) if isinstance(value, dict) and value else (("", value),)
        work.tree = without(work.tree, old)
        for name, item in written:
            source, target = (f"{old}.{name}", f"{new}.{name}") if name else (old, new)
            there = at(work.tree, target)
            if there is not None and item is None:
                continue  # null is not set
            if there is not None and there != item:
                problem = f"{source}={shown(item)} and {target}={shown(there)} set the same thing to different values"
                work.problems.append(f"{problem}; keep one of them.")
                continue
            work.tree = put(work.tree, target, item)
            work.moved.append((source, target))


def _switches(work: _Work, choices: Mapping[str, str]) -> None:
    """Sections that are off are not validated. Some that are on are refused in one sentence."""
    refused = {(section, switch): text for section, switch, text in REFUSED}
    for section, switch, parts in OFF:
        if not isinstance(at(work.tree, section), dict):
            continue
        key = f"{section.rpartition('.')[0]}.{switch[3:]}" if switch.startswith("../") else f"{section}.{switch}"
        value = at(work.tree, key)
        if value not in SWITCHED_OFF:
            if (section, switch) not in refused:
                continue
            work.problems.append(f"{key}={shown(value)} {refused[section, switch]}.")
        named = [f"{section}.{part}" for part in parts] if parts else [section]
        explicit = at(work.tree, key, "???") != "???"
        if section in ASKED and not explicit:
            continue
        for name in named:
            if at(work.tree, name, "???") != "???":
                work.tree = without(work.tree, name) if explicit else work.tree
                if not explicit:
                    work.drop(name, f"{key} is not set")
        work.tree = without(work.tree, key) if value not in SWITCHED_OFF else work.tree


def _asynchronous(work: _Work, choices: Mapping[str, str]) -> None:
    """verl's keys of asynchronous trainers. Batches are counted in prompts, as in `rollout.total_rollout_steps`."""
    mode = at(work.tree, "trainer.v1.trainer_mode")
    separate = "trainer.v1.separate_async"
    if mode != "separate_async" and at(work.tree, separate) is not None:
        switches = f"{separate}.hybrid_rollout."
        for key, _ in leaves(at(work.tree, separate), separate + "."):
            if key in work.known or key.startswith(switches):  # an unknown key stays an error
                work.drop(key, "the mode separate_async is not used")
    elif (hybrid := at(work.tree, f"{separate}.hybrid_rollout")) is not None and not hybrid.get("enable_switch"):
        work.tree = without(work.tree, f"{separate}.hybrid_rollout")
    if mode in (None, "sync"):
        _without_async_keys(work)
        return
    for name, recorded in DECOUPLED.items():
        key = f"async_training.{name}"
        if at(work.tree, key) is (not recorded):
            problem = f"{key}={shown(not recorded)} asks for log-probabilities of the weights before the update"
            work.problems.append(f"{problem}; set algorithm.rollout_correction.rollout_is=token for them.")
            work.tree = without(work.tree, key)
    if at(work.tree, "data.gen_batch_size") == 1:
        work.drop("data.gen_batch_size", "prompts start one by one")
    _prompt_counts(work)


def _without_async_keys(work: _Work) -> None:
    if "async_training" not in work.tree:
        return
    pairs = list(leaves(work.tree["async_training"], "async_training."))
    pairs = [(key, value) for key, value in pairs if key in work.known or key.endswith(ASYNC_KEYS)]
    asked = [f"{key}={shown(value)} {ASYNC}." for key, value in pairs if not work.is_default(key, value)]
    work.problems += asked[:1]
    for key, _ in pairs:
        work.tree = without(work.tree, key)


def _prompt_counts(work: _Work) -> None:
    """A step of Rally is what verl's fully asynchronous trainer does between two publications of weights."""
    batch, total = "data.train_batch_size", "rollout.total_rollout_steps"
    counts = [at(work.tree, f"async_training.{n}", 1) for n in ("trigger_parameter_sync_step", "require_batches")]
    mini = at(work.tree, f"{A}.ppo_mini_batch_size")
    if at(work.tree, batch) == 0 and all(isinstance(count, int) for count in (*counts, mini)):
        size = math.prod(counts) * mini
        work.tree = put(work.tree, batch, size)
        work.moved.append((batch, f"{batch}={size}"))
    size, prompts = at(work.tree, batch), at(work.tree, total)
    if isinstance(prompts, int) and isinstance(size, int) and size > 0:
        work.tree = without(work.tree, total)
        if at(work.tree, "trainer.total_training_steps") is None:
            steps = max(1, prompts // size)
            work.tree = put(work.tree, "trainer.total_training_steps", steps)
            work.moved.append((total, f"trainer.total_training_steps={steps}"))


def _estimator(work: _Work, choices: Mapping[str, str]) -> None:
    """Without a critic, the critic's section is off."""
    estimator = at(work.tree, "algorithm.adv_estimator", "grpo")
    if work.sft or estimator in ("gae", "turn_gae"):
        return
    why = f"{estimator} needs no critic"
    for key in ("algorithm.lam", "trainer.critic_warmup", "trainer.max_critic_ckpt_to_keep"):
        if at(work.tree, key) is not None:
            work.drop(key, why)
    for name in list(at(work.tree, "critic") or ()) if isinstance(at(work.tree, "critic"), dict) else ():
        if name != "enable":
            work.drop(f"critic.{name}", why)


def _own_arguments(work: _Work, choices: Mapping[str, str]) -> None:
    """Keys that a user's loss or estimator reads from its section are arguments of it."""
    if work.sft or not at(work.tree, f"{M}.external_lib"):
        return
    loss, estimator = at(work.tree, f"{A}.policy_loss.loss_mode"), at(work.tree, "algorithm.adv_estimator")
    for section, kwargs, own in (
        (f"{A}.policy_loss", "loss_kwargs", loss not in (None, *LOSS_MODES)),
        ("algorithm", "adv_estimator_kwargs", estimator not in (None, *ESTIMATORS)),
    ):
        written = at(work.tree, section) if own else None
        for name in [n for n in written if f"{section}.{n}" not in work.known] if isinstance(written, dict) else ():
            old, new = f"{section}.{name}", f"{section}.{kwargs}.{name}"
            value, work.tree = at(work.tree, old), without(work.tree, old)
            work.tree = put(work.tree, new, value)
            work.remarks.append(f"{old} is no key of Rally; {new} gives it to your function.")


def _losses(work: _Work, choices: Mapping[str, str]) -> None:
    if work.sft:
        return
    mode, aggregation = at(work.tree, f"{A}.policy_loss.loss_mode"), f"{A}.loss_agg_mode"
    if mode in ("gspo", "geo_mean", "gmpo") and at(work.tree, aggregation, "token-mean") == "token-mean":
        if written := at(work.tree, aggregation):  # told although it is the default: another mean is taken
            work.dropped.append(Dropped(aggregation, written, f"{mode} always averages over sequences"))
        work.tree = put(work.tree, aggregation, "seq-mean-token-mean")
    if at(work.tree, f"{A}.use_kl_loss") is False:
        for name in ("kl_loss_coef", "kl_loss_type"):
            if at(work.tree, f"{A}.{name}") is not None:
                work.drop(f"{A}.{name}", f"{A}.use_kl_loss is false")
    if at(work.tree, "algorithm.use_kl_in_reward") is False:
        for name in ("algorithm.kl_penalty", "algorithm.kl_ctrl"):
            if at(work.tree, name) is not None:
                work.drop(name, "algorithm.use_kl_in_reward is false")


def _teachers(work: _Work, choices: Mapping[str, str]) -> None:
    """Keys of a teacher's servers and GPUs: teachers are loaded in process, or their servers already run."""
    section = "distillation"
    why, running = "teachers are loaded in process", "its server is already running"
    for name in ("n_gpus_per_node", "nnodes"):
        if at(work.tree, f"{section}.{name}") is not None:
            work.drop(f"{section}.{name}", "no servers of teachers are started")
    for name in at(work.tree, f"{section}.teacher_models") or {}:
        teacher = f"{section}.teacher_models.{name}"
        served = at(work.tree, f"{teacher}.server.url") is not None
        for key in at(work.tree, f"{teacher}.inference") or {}:
            if key != ("name" if served else "dtype"):
                work.drop(f"{teacher}.inference.{key}", running if served else why)
        if at(work.tree, f"{teacher}.num_replicas") is not None:
            work.drop(f"{teacher}.num_replicas", why)
    loss = f"{section}.distillation_loss"
    mode = at(work.tree, f"{loss}.loss_mode", "k3")
    for name in ("topk", "log_prob_min_clamp"):
        if mode != "forward_kl_topk" and at(work.tree, f"{loss}.{name}") is not None:
            work.drop(f"{loss}.{name}", f"loss_mode={mode} does not use it")


def _reward_model(work: _Work, choices: Mapping[str, str]) -> None:
    """Keys of the kind of reward model that is not used."""
    section = "reward_model"
    if work.sft or at(work.tree, f"{section}.enable") is not True:
        return
    judged = any(at(work.tree, f"{name}custom_reward_function.path") for name in ("", "reward."))
    why = "a reward model beside a reward function is served to it"
    names: tuple[str, ...] = ("micro_batch_size", "micro_batch_size_per_gpu", "max_length", "model.fsdp_config")
    if not judged:
        names, why = ("rollout",), "a reward model without a reward function is a classifier, which runs in process"
    for name in names:
        if at(work.tree, f"{section}.{name}") is not None:
            work.drop(f"{section}.{name}", why)


COLLABLLM = (
    "goes on with each conversation several times, with a simulated user and judges, which is not built; write a "
    "reward function that does (custom_reward_function.path), and leave the manager out"
)


def _manager(work: _Work, choices: Mapping[str, str]) -> None:
    for key in ("reward_model.reward_manager", "reward.reward_manager.name", "reward_manager.name"):
        if at(work.tree, key) == "collabllm":
            work.problems.append(f"{key}=collabllm {COLLABLLM}.")
            work.tree = without(work.tree, key)


GREEDY = (
    "do_sample=false validates greedily, once per prompt; verl does not read do_sample and validates with these "
    "values, for which do_sample=true stands here"
)


def _validation(work: _Work, choices: Mapping[str, str]) -> None:
    if work.sft:
        return
    settings = f"{R}.val_kwargs"
    if at(work.tree, f"{settings}.do_sample") is False:
        for name in ("temperature", "top_p", "top_k", "n"):
            if at(work.tree, f"{settings}.{name}") is not None:
                work.drop(f"{settings}.{name}", GREEDY)
    same = at(work.tree, f"{R}.n", 8)
    for key in (f"{A}.rollout_n", f"{REF}.rollout_n", "critic.rollout_n"):
        if at(work.tree, key) == same:
            work.tree = without(work.tree, key)


def _nulls(work: _Work, choices: Mapping[str, str]) -> None:
    """null is false for a switch that is off by default, and nothing for keys of verl that are null by default."""
    for key, value in list(leaves(work.tree)):
        if value is None and key in work.known and (key in NULLS or look_up(work.defaults, key) is False):
            work.tree = without(work.tree, key)


def _engine(work: _Work, choices: Mapping[str, str]) -> None:
    """The embedded engine takes the place of an engine that is not built. Keys of another engine are dropped."""
    if work.sft:
        return
    name, why = str(at(work.tree, f"{R}.name", "embedded")), "it belongs to another engine"
    if name in ("hf", "trtllm"):
        work.drop(f"{R}.name", "there is no such engine here; the embedded engine samples from the same policy")
        for key in ("engine_kwargs", "checkpoint_engine", "server", "data_parallel_size", "tensor_model_parallel_size"):
            if at(work.tree, f"{R}.{key}") is not None:
                work.drop(f"{R}.{key}", why)
        return
    kwargs = at(work.tree, f"{R}.engine_kwargs")
    for engine in list(kwargs) if isinstance(kwargs, dict) else ():
        if engine in ("vllm", "sglang", "trtllm") and engine != name.removesuffix("_async"):
            work.drop(f"{R}.engine_kwargs.{engine}", why)


def _offloading(work: _Work, choices: Mapping[str, str]) -> None:
    """Offloading that has no effect on one device, or with the engine of the run."""
    count = at(work.tree, "trainer.n_gpus_per_node") or 1, at(work.tree, "trainer.nnodes") or 1
    sections = ("model.fsdp_config",) if work.sft else (f"{A}.fsdp_config", f"{REF}.fsdp_config", "critic.fsdp_config")
    if tuple(map(str, count)) != ("1", "1"):
        return
    for key in (f"{section}.{name}" for section in sections for name in ("offload_policy", "cpu_offload")):
        if key in work.known and at(work.tree, key) is True:
            work.drop(key, UNSHARDED_OFFLOAD)
    embedded = not work.sft and at(work.tree, f"{R}.name", "embedded") == "embedded"
    if embedded and at(work.tree, f"{A}.fsdp_config.param_offload") is True:
        work.drop(f"{A}.fsdp_config.param_offload", SAMPLED)


def _adapters(work: _Work, choices: Mapping[str, str]) -> None:
    for model in ("model",) if work.sft else (M, "critic.model"):
        if at(work.tree, f"{model}.lora_rank") == 0 and at(work.tree, f"{model}.lora_adapter_path") is None:
            for name in ("lora_alpha", "target_modules", "exclude_modules", "target_parameters"):
                if at(work.tree, f"{model}.{name}") is not None:
                    work.drop(f"{model}.{name}", f"{model}.lora_rank is 0")


def _checkpoints(work: _Work, choices: Mapping[str, str]) -> None:
    """A checkpoint holds more than `save_contents` may ask for, and is loaded as it was saved."""
    for section in ("trainer.checkpoint",) if work.sft else (f"{A}.checkpoint", "critic.checkpoint"):
        saved, loaded = (at(work.tree, f"{section}.{name}_contents") for name in ("save", "load"))
        if isinstance(saved, list) and saved and set(saved) <= {"model", "optimizer", "extra", "hf_model"}:
            for name in ("save", "load") if loaded == saved else ("save",):
                if not set(saved) >= {"model", "optimizer", "extra"}:
                    work.drop(f"{section}.{name}_contents", "a checkpoint always holds all that resuming needs")
    path = at(work.tree, "trainer.resume_from_path")
    if path in (False, ""):
        work.tree = without(work.tree, "trainer.resume_from_path")
    elif (
        isinstance(path, str) and at(work.tree, "trainer.resume_mode", "auto") == "auto" and missing_file(expand(path))
    ):
        why = "there is no such folder; resume_mode=auto resumes from the run folder"
        work.drop("trainer.resume_from_path", why)


def _micro_batches(work: _Work, choices: Mapping[str, str]) -> None:
    """A full file of verl sets both limits of a forward pass to none; the token budget then stays."""
    for switch, size in (
        (f"{A}.use_dynamic_bsz", f"{A}.ppo_micro_batch_size_per_gpu"),
        (f"{R}.log_prob_use_dynamic_bsz", f"{R}.log_prob_micro_batch_size_per_gpu"),
        (f"{REF}.log_prob_use_dynamic_bsz", f"{REF}.log_prob_micro_batch_size_per_gpu"),
        ("critic.use_dynamic_bsz", "critic.ppo_micro_batch_size_per_gpu"),
    ):
        both_off = at(work.tree, switch) is False and at(work.tree, size, "") is None
        if both_off and at(work.tree, size.removesuffix("_per_gpu")) is None:
            work.drop(switch, f"{size} is null, so the token budget limits a forward pass")


OLD_TESTS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}


def _correction(work: _Work, choices: Mapping[str, str]) -> None:
    """Earlier names of rejection tests, and their lower bound, in the names of today."""
    section = "algorithm.rollout_correction"
    test, high, low = (at(work.tree, f"{section}.rollout_rs{end}") for end in ("", "_threshold", "_threshold_lower"))
    if test in OLD_TESTS:
        work.tree = put(work.tree, f"{section}.rollout_rs", OLD_TESTS[test])
        work.moved.append((f"{section}.rollout_rs={test}", f"{section}.rollout_rs={OLD_TESTS[test]}"))
    if low is not None and high is not None:
        work.tree = put(
            without(work.tree, f"{section}.rollout_rs_threshold_lower"),
            f"{section}.rollout_rs_threshold",
            f"{low}_{high}",
        )
        work.moved.append((f"{section}.rollout_rs_threshold_lower", f"{section}.rollout_rs_threshold={low}_{high}"))
    if (veto := at(work.tree, f"{section}.rollout_token_veto_threshold")) is not None:
        tests = [at(work.tree, f"{section}.rollout_rs"), "seq_min_k1"]
        bounds = [at(work.tree, f"{section}.rollout_rs_threshold"), f"{veto}_inf"]
        work.tree = without(work.tree, f"{section}.rollout_token_veto_threshold")
        work.tree = put(work.tree, f"{section}.rollout_rs", ",".join(text for text in tests if text))
        work.tree = put(work.tree, f"{section}.rollout_rs_threshold", ",".join(str(b) for b in bounds if b is not None))
        work.moved.append((f"{section}.rollout_token_veto_threshold", f"{section}.rollout_rs=seq_min_k1"))
    bypass, loss = at(work.tree, f"{section}.bypass_mode"), at(work.tree, f"{section}.loss_type", "ppo_clip")
    if bypass is True and loss == "ppo_clip":
        for name in ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize"):
            if at(work.tree, f"{section}.{name}") is not None:
                work.drop(f"{section}.{name}", "with bypass_mode the clipped ratio is the correction")


def _frequencies(work: _Work, choices: Mapping[str, str]) -> None:
    """false and 0 switch validation and checkpoints between steps off, as -1 does."""
    for key in ("trainer.test_freq", "trainer.save_freq"):
        if at(work.tree, key) in (False, 0):
            work.tree = put(work.tree, key, -1)


def _switched_parts(work: _Work, choices: Mapping[str, str]) -> None:
    """Sections that are switched off in a place of their own are not validated."""
    overlong = "reward_model.reward_kwargs.overlong_buffer_cfg"
    if not work.sft and at(work.tree, f"{overlong}.enable") is False:
        work.tree = put(work.tree, overlong, {"enable": False})
    if work.sft and at(work.tree, "data.multiturn.enable") is False and at(work.tree, "data.prompt_key") is not None:
        for key in ("data.multiturn", "data.messages_key"):
            if at(work.tree, key) is not None:
                work.drop(key, "data.multiturn.enable is false, so rows are of data.prompt_key and data.response_key")


def _groups(work: _Work, choices: Mapping[str, str]) -> None:
    started, trained = (at(work.tree, f"data.{name}_batch_size") for name in ("gen", "train"))
    if started is not None and started == trained and at(work.tree, "algorithm.filter_groups.enable") is not True:
        work.drop("data.gen_batch_size", "it equals data.train_batch_size")
    estimator = at(work.tree, "algorithm.adv_estimator", "grpo")
    if not work.sft and at(work.tree, f"{R}.n") == 1 and estimator in ("grpo", "grpo_vectorized"):
        work.remarks.append(f"{R}.n=1 leaves {estimator} no group: the advantage of an episode is its reward.")
    mini = at(work.tree, f"{A}.ppo_mini_batch_size")
    if not work.sft and type(mini) is int and type(trained) is int and 0 < mini < trained and trained % mini:
        work.remarks.append(
            f"{A}.ppo_mini_batch_size={mini} does not divide data.train_batch_size={trained}: the last optimizer step "
            f"of each batch has only {trained % mini} prompts."
        )


def _loggers(work: _Work, choices: Mapping[str, str]) -> None:
    from rally.config.checks.unsupported import LOGGERS

    key = "trainer.logger"
    written = at(work.tree, key)
    named = written if isinstance(written, list) else [written]
    unbuilt = [name for name in named if name in ("swanlab", "vemlp_wandb", "clearml", "trackio", "rl_insight")]
    if unbuilt:
        why = "this tracker is not built; metrics go to metrics.jsonl in the run folder"
        work.dropped += [Dropped(key, name, why) for name in unbuilt]
        work.tree = put(work.tree, key, [name for name in named if name in LOGGERS] or ["console", "file"])


def _ray(work: _Work, choices: Mapping[str, str]) -> None:
    """What Ray would give its workers is given to the run itself."""
    section = "ray_kwargs.ray_init.runtime_env"
    for key, value in list(leaves(at(work.tree, section) or {}, f"{section}.")):
        name = key.removeprefix(f"{section}.").removeprefix("env_vars.")
        if value is None or hint_for(key, HINTS) is not None:
            continue
        if ".env_vars." in key:
            work.problems.append(
                f"{key}={shown(value)} sets a variable of Ray's workers, and Rally passes its own environment on; "
                f"leave it out and set {name} in the environment of the run."
            )
            work.tree = without(work.tree, key)
        elif name in ("working_dir", "py_modules"):
            work.problems.append(
                f"{key}={shown(value)} says where Ray's workers find files, and Rally uses its working directory; "
                "leave it out and start the run in that folder."
            )
            work.tree = without(work.tree, key)


WEIGHT_BACKEND = f"{R}.checkpoint_engine.backend"
ROLLOUT_NODES = (f"{R}.nnodes", f"{R}.n_gpus_per_node")
RAY_KEYS = (
    "trainer.ray_wait_register_center_timeout",
    *("ray_kwargs.ray_init.address", "ray_kwargs.ray_init.num_cpus"),
    *ROLLOUT_NODES,
)
"""Keys that have an effect if the run uses Ray, and are hints otherwise."""


def _takes_broadcasts(tree: Any) -> bool:
    """Whether rollouts are sampled by servers on GPUs of their own that take weights by broadcast."""
    name, mode = at(tree, f"{R}.name"), at(tree, "trainer.v1.trainer_mode")
    return name == "rally" or (mode == "separate_async" and name in (None, "embedded", "vllm", "vllm_async"))


def _on_ray(tree: Any) -> bool:
    launcher, nodes = at(tree, "trainer.launcher"), at(tree, "trainer.nnodes")
    return launcher == "ray" or (launcher in (None, "auto") and str(nodes or 1).isdigit() and int(nodes or 1) > 1)


def _on_several_gpus(tree: Any) -> bool:
    counts = (at(tree, "trainer.nnodes"), at(tree, "trainer.n_gpus_per_node"))
    return any(str(count).isdigit() and int(count) > 1 for count in counts)


def _hints(work: _Work, choices: Mapping[str, str]) -> None:
    several = _on_several_gpus(work.tree)
    for key, value in list(leaves(work.tree)):
        hint = hint_for(key, SFT_HINTS if work.sft else HINTS)
        if key in RAY_KEYS and _on_ray(work.tree):
            continue
        if key == WEIGHT_BACKEND and _takes_broadcasts(work.tree):
            continue
        if key in ROLLOUT_NODES and at(work.tree, "trainer.v1.trainer_mode") != "separate_async":
            work.drop(key, PLACEMENT)
            continue
        if several and hint is not None and hint.why == WHOLE:
            continue
        if hint is None or (hint.values and value not in hint.values):
            continue
        if key in work.known and value == look_up(work.defaults, key):
            continue
        if key in work.known and not hint.values and not _fits(work, key, value):
            continue
        work.drop(key, hint.why)


def _fits(work: _Work, key: str, value: Any) -> bool:
    """Whether the value has the type of its key. One of a wrong type is reported and not dropped."""
    try:
        work.schema.model_validate(put({}, key, value))
    except ValidationError as error:
        return all(detail["type"] == "only" for detail in error.errors())
    return True


STEPS: tuple[Callable[[_Work, Mapping[str, str]], None], ...] = (
    *(_defaults, _backend, _switches, _moved, _switches, _asynchronous, _own_arguments, _estimator, _losses),
    *(_teachers, _reward_model),
    *(
        _manager,
        _validation,
        _micro_batches,
        _nulls,
        _engine,
        _offloading,
        _adapters,
        _checkpoints,
        _correction,
        _groups,
    ),
    *(_frequencies, _switched_parts, _loggers, _ray, _hints),
)
