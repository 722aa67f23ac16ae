"""Schema of `trainer.*`: length, run folder, validation, checkpoints and resumption of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from rally.config.base import AsList, Count, Int, Limit, Natural, NonNegative, Only, PathText, Positive, Section, Share

Logger = Literal["console", "file", "tensorboard", "mlflow", "wandb", "swanlab", "vemlp_wandb", "clearml", "trackio"]


class GradientGuards(Section):
    """Limits on the gradient norm. A gradient beyond them stops the run before the optimizer step."""

    grad_norm_factor: Positive | None = 1000.0
    """Stop the run if a gradient norm exceeds this many times the median of the last 64 norms and this many times the
    norm it is clipped to. null is off."""
    max_grad_norm: Positive | None = None
    """Stop the run if a gradient norm, before clipping, exceeds this. null is off."""


class Guards(GradientGuards):
    """Thresholds of the warnings about a run that goes wrong slowly."""

    patience: Count = 5
    """The number of latest steps that warnings look at."""
    entropy_share: Share = 0.05
    """Warn when the entropy falls below this share of that of the first steps. 0 never warns."""
    tool_share: Share = 0.1
    """Warn when tool calls per episode fall below this share of their highest value. 0 never warns."""
    clipped_share: Share = 0.5
    """Warn when the response budget cuts off more than this share of the episodes. 1 never warns."""


class RunConfig(Section):
    """Keys that reinforcement learning and supervised fine-tuning share."""

    total_epochs: Count = 1
    """Passes over the training rows."""
    total_training_steps: Count | None = None
    """Steps after which the run ends, if total_epochs has not ended it before. null sets no such limit."""
    project_name: str = "rally"
    """The project in trackers, and part of the default run folder."""
    experiment_name: str = "default"
    """The name of the run in trackers, and part of the default run folder."""
    default_local_dir: PathText | None = None
    """The run folder. null is runs/<project_name>/<experiment_name>."""
    logger: Annotated[tuple[Logger, ...], AsList] = ("console", "file")
    """Where metrics go, one or several: the console, metrics.jsonl in the run folder (file), or a tracker
    (docs/tracking.md)."""
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """auto takes a GPU or an NPU if there is one, else the CPU. npu is Ascend through torch_npu
    (docs/accelerators.md)."""
    seed: Int = 0
    """The seed of everything random that has no seed key of its own."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """auto resumes from the newest checkpoint of the run folder, if any. resume_path resumes from resume_from_path.
    disable starts anew, and is an error if checkpoints would be overwritten."""
    resume_from_path: PathText | None = None
    """resume_mode=resume_path: the checkpoint folder to resume from."""
    guards: GradientGuards = GradientGuards()
    startup_check: bool = True
    """Before the first step, compare the forwards that the run uses with the model's own forward on the first rows of
    the data, and stop if they differ (docs/training.md). false starts without the comparison."""
    nnodes: Count = 1
    """Machines that share the policy, with n_gpus_per_node GPUs each. Above 1 they are nodes of a Ray cluster
    (docs/cluster.md)."""
    n_gpus_per_node: Count = 1
    """GPUs of each machine that share the policy, one process each (docs/cluster.md). On a machine without a GPU, 1 is
    the CPU."""
    launcher: Literal["auto", "local", "ray"] = "auto"
    """Who starts the processes of the run. local: this process, on this machine. ray: agents on the nodes of a Ray
    cluster. auto: ray if nnodes is above 1."""
    ray_wait_register_center_timeout: Count = 300
    """Seconds to wait until a Ray cluster has the resources of the run."""
    node_heartbeat_timeout: Positive = 20.0
    """Seconds without an answer after which a node of a Ray cluster is lost, and after which a loop worker is ended and
    started again."""

    default_hdfs_dir: PathText | None = None

    @property
    def world_size(self) -> int:
        """The ranks that share the policy."""
        return self.nnodes * self.n_gpus_per_node

    @property
    def on_ray(self) -> bool:
        return self.launcher == "ray" or (self.launcher == "auto" and self.nnodes > 1)

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return Path(self.default_local_dir or Path("runs") / self.project_name / self.experiment_name)


class ColocateAsync(Section):
    """How far batches are sampled ahead (docs/asynchronous.md)."""

    num_warmup_batches: NonNegative = 1.0
    """Batches that start before the update of the weights they begin with. A fraction is that share of a batch. No
    token is older than this many versions, rounded up, when it is trained."""
    fixed_lag: bool = False
    """Sample each batch as a whole with the weights of one version, one update before they are trained on. A resumed
    run is then bit-identical with rollout.deterministic=true. Otherwise episodes go on across updates."""


NO_SWITCH = "servers keep their GPUs for the whole run; leave hybrid_rollout out"


class HybridRollout(Section):
    enable_switch: Annotated[bool, Only(False, because=NO_SWITCH)] = False


class SeparateAsync(ColocateAsync):
    """trainer_mode=separate_async: rollout servers on devices that the trainer does not use."""

    parameter_sync_step: Count | None = None
    """Mini-batches between two publications of weights. null is data.train_batch_size / actor.ppo_mini_batch_size: they
    are published once per step, and another number is an error, as in verl."""
    hybrid_rollout: HybridRollout = HybridRollout()


class OffPolicySampler(Section):
    max_off_policy_threshold: Count | None = 8
    """Asynchronous modes: the most weight versions that a trajectory may span, from its first token to the update that
    trains on it. null sets no limit beside num_warmup_batches."""
    max_off_policy_strategy: Literal["drop", "wait"] = "drop"
    """Every value is correct: batches are trained in the order in which they started, so none becomes too old."""


class TrainerModes(Section):
    trainer_mode: Literal["sync", "colocate_async", "separate_async"] = "sync"
    """sync samples a batch with the current weights and then trains on it. colocate_async samples batches ahead, on the
    trainer's devices or on servers. separate_async does so on servers with devices of their own
    (docs/asynchronous.md)."""
    colocate_async: ColocateAsync = ColocateAsync()
    separate_async: SeparateAsync = SeparateAsync()
    sampler: OffPolicySampler = OffPolicySampler()


class TrainerConfig(RunConfig):
    v1: TrainerModes = TrainerModes()
    guards: Guards = Guards()
    save_freq: Limit = -1
    """Steps between checkpoints. The last step is always saved; -1 saves no other."""
    test_freq: Limit = -1
    """Steps between validations. -1 validates after the last step only. Needs data.val_files or an environment."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_only: bool = False
    """Validate once and stop, as rally eval does."""
    max_actor_ckpt_to_keep: Count | None = None
    """The number of newest checkpoints to keep. null keeps all."""
    log_val_generations: Natural = 0
    """Conversations to print after each validation."""
    rollout_data_dir: PathText | None = None
    """A folder that training episodes are written to as well. null writes them to the run folder only."""
    validation_data_dir: PathText | None = None
    """A folder that validation episodes are written to as well. null writes them to the run folder only."""
    balance_batch: bool = True
    """Accepted and has no effect: the micro-batches that ranks share are always split by number of tokens."""

    use_legacy_worker_impl: Annotated[str, Only("auto", "disable", because="there is one worker implementation")] = (
        "auto"
    )

    max_critic_ckpt_to_keep: Count | None = None
    """The number of newest checkpoints that keep their critic/ folder. Older ones can be evaluated but not resumed.
    null keeps all."""
    critic_warmup: Natural = 0
    """First steps that train the critic and not the policy."""
    esi_redundant_time: NonNegative = 0
    del_local_ckpt_after_load: bool = False


NO_SCHEDULING = "servers keep their GPUs for the whole run; servers that join and leave do so by themselves"


class AsyncTraining(Section):
    """verl's earlier keys of asynchronous training, for trainer.v1.trainer_mode=colocate_async and separate_async."""

    staleness_threshold: NonNegative | None = None
    """Batches that are sampled ahead; the same as num_warmup_batches of the mode."""
    partial_rollout: bool = True
    """Let episodes go on across an update. false waits until none is running before each update."""
    trigger_parameter_sync_step: Count | None = None
    """Times require_batches, the mini-batches between two publications of weights, which must be those of a step. null
    is that number."""
    require_batches: Count = 1
    """Mini-batches that verl waits for at a time. It only counts together with trigger_parameter_sync_step: an update
    always trains on data.train_batch_size prompts."""
    use_dynamic_resource_scheduling: Annotated[bool, Only(False, because=NO_SCHEDULING)] = False


class GlobalProfiler(Section):
    tool: str | None = None
    steps: tuple[Int, ...] | None = None
    profile_continuous_steps: bool = False
    save_path: PathText | None = None
    global_tool_config: dict[str, Any] | None = None


class TransferQueue(Section):
    enable: bool = False


class RayInit(Section):
    address: str | None = None
    """The address of the Ray cluster. null: RAY_ADDRESS, or the cluster of this machine."""
    num_cpus: Count | None = None
    """CPUs of a Ray cluster that the run starts by itself, for trainer.launcher=ray without a running one."""


class RayKwargs(Section):
    ray_init: RayInit = RayInit()
    timeline_json_file: PathText | None = None
