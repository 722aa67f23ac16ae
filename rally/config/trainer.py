"""`trainer.*`: how long a run lasts, where it is kept, and when it is validated, saved and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from rally.config.base import AsList, Count, Int, Limit, Natural, NonNegative, Only, PathText, Positive, Section, Share

Logger = Literal["console", "file", "tensorboard", "mlflow", "wandb", "swanlab", "vemlp_wandb", "clearml", "trackio"]


class GradientGuards(Section):
    """When a gradient stops the run, before a step is taken from it."""

    grad_norm_factor: Positive | None = 1000.0
    """How many times the median of the last 64 gradient norms, and the norm it is clipped to, a norm may be."""
    max_grad_norm: Positive | None = None
    """What a gradient norm may be at all, before clipping."""


class Guards(GradientGuards):
    """What is warned about."""

    patience: Count = 5
    """Steps that are looked at together."""
    entropy_share: Share = 0.05
    """Warn when the entropy is below this share of what it was in the first steps; 0 is never."""
    tool_share: Share = 0.1
    """Warn when tool calls an episode are below this share of what they once were; 0 is never."""
    clipped_share: Share = 0.5
    """Warn when more than this share of the episodes is cut by the response budget; 1 is never."""


class RunConfig(Section):
    """What reinforcement learning and supervised fine-tuning share."""

    total_epochs: Count = 1
    total_training_steps: Count | None = None
    """Ends the run before total_epochs do."""
    project_name: str = "rally"
    experiment_name: str = "default"
    default_local_dir: PathText | None = None
    """The run folder. None is runs/<project_name>/<experiment_name>."""
    logger: Annotated[tuple[Logger, ...], AsList] = ("console", "file")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: Int = 0
    save_freq: Limit = -1
    """Steps between checkpoints; -1 saves only the last."""
    test_freq: Limit = -1
    """Steps between validations; -1 is never."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    resume_from_path: PathText | None = None
    guards: GradientGuards = GradientGuards()
    nnodes: Count = 1
    n_gpus_per_node: Count = 1
    """How many processes hold the policy together (docs/cluster.md). On a machine without a GPU, 1 is the CPU."""

    default_hdfs_dir: PathText | None = None

    @property
    def run_dir(self) -> Path:
        """The folder that holds everything this run writes."""
        return Path(self.default_local_dir or Path("runs") / self.project_name / self.experiment_name)


class TrainerConfig(RunConfig):
    guards: Guards = Guards()
    val_before_train: bool = True
    val_only: bool = False
    max_actor_ckpt_to_keep: Count | None = None
    """None keeps all."""
    log_val_generations: Natural = 0
    rollout_data_dir: PathText | None = None
    validation_data_dir: PathText | None = None
    balance_batch: bool = True
    """On one device there is nothing to balance, so both values are right."""

    use_legacy_worker_impl: Annotated[str, Only("auto", "disable", because="there is one worker")] = "auto"

    max_critic_ckpt_to_keep: Count | None = None
    """Older checkpoints lose their critic/ folder, and can then be evaluated but not resumed. None keeps all."""
    critic_warmup: Natural = 0
    """First steps in which the critic is trained and the policy is not."""
    esi_redundant_time: NonNegative = 0
    del_local_ckpt_after_load: bool = False
    ray_wait_register_center_timeout: Count = 300


class GlobalProfiler(Section):
    tool: str | None = None
    steps: tuple[Int, ...] | None = None
    profile_continuous_steps: bool = False
    save_path: PathText | None = None
    global_tool_config: dict[str, Any] | None = None


class TransferQueue(Section):
    enable: bool = False


class RayInit(Section):
    num_cpus: Count | None = None


class RayKwargs(Section):
    ray_init: RayInit = RayInit()
    timeline_json_file: PathText | None = None
