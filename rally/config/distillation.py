"""Schema of `distillation.*`: on-policy distillation from one or several teachers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rally.config.base import Count, NonNegative, PathText, Positive, Section, Share

LossMode = Literal[
    "kl",
    "k1",
    "abs",
    "mse",
    "k2",
    "low_var_kl",
    "k3",
    "forward_kl_topk",
    "forward_kl_full",
    "reverse_kl_full",
    "jsd_full",
]


class TeacherServer(Section):
    url: str | None = None
    """A running server of the teacher, as http://HOST:PORT. inference.name says which: rally (`rally serve engine`),
    vllm or sglang. null loads the teacher in process."""
    timeout: Positive = 600.0
    """Seconds that the server may take for one row."""
    max_connections: Count = 32
    """Rows that are sent at once."""


class TeacherModel(Section):
    key: str | None = None
    """Which rows it teaches: those whose teacher_key column has this value. A single teacher teaches all rows."""
    model_path: PathText | None = None
    """A model folder or a Hub name, with the tokenizer of the policy. It is loaded in process unless server.url is
    set; the server must then serve this model."""
    server: TeacherServer = TeacherServer()
    num_replicas: int | None = None
    """Accepted and has no effect: a teacher is loaded once, or its server is already running."""
    inference: dict[str, Any] = Field(default_factory=dict)
    """inference.dtype is the dtype of a teacher in process, inference.name the kind of a running server. verl's other
    keys of a teacher's server have no effect."""


class DistillationLossKeys(Section):
    loss_mode: LossMode = "k3"
    """From the sampled token: k1 (kl), k2 (mse), k3 (low_var_kl) or abs, as estimates of KL(student || teacher). Over
    the teacher's likeliest tokens: forward_kl_topk. Over the whole vocabulary, on one GPU: forward_kl_full,
    reverse_kl_full, jsd_full."""
    topk: Count = 32
    """loss_mode=forward_kl_topk: how many of the teacher's likeliest tokens are compared."""
    use_task_rewards: bool = True
    """Add the distillation loss to the policy loss. false trains on the distillation loss alone; episodes are still
    scored, for the metrics."""
    distillation_loss_coef: NonNegative = 1.0
    """The weight of the distillation loss beside the policy loss."""
    loss_max_clamp: Positive | None = None
    """Bounds the loss of a token on both sides. null is no bound."""
    log_prob_min_clamp: float | None = None
    """loss_mode=forward_kl_topk: log-probabilities of both models are raised to this. null is no bound."""
    use_policy_gradient: bool = False
    """Use the negative loss of a token as its advantage in a clipped policy gradient. Needed by loss_mode=k1."""
    policy_loss_mode: Literal["vanilla"] = "vanilla"
    """The objective of that policy gradient."""
    clip_ratio: Positive = 0.2
    """The clip of that policy gradient."""
    clip_ratio_low: Positive | None = None
    """The lower clip. null is clip_ratio."""
    clip_ratio_high: Positive | None = None
    """The upper clip. null is clip_ratio."""
    jsd_beta: Share = 0.5
    """loss_mode=jsd_full: the teacher's share of the mixture."""
    use_chunked_topk: bool = False
    """Accepted and has no effect: logits are always computed in chunks."""
    chunked_topk_chunk_size: Count = 4096
    """Accepted and has no effect: logits are always computed in chunks."""


class DistillationConfig(Section):
    enabled: bool = False
    """Compare the policy with a teacher at the tokens that the policy sampled."""
    teacher_models: dict[str, TeacherModel] = Field(default_factory=dict)
    """The teachers by a name of your choice, each with model_path and, if there are several, key."""
    teacher_key: str = "data_source"
    """The column of a row, or the key of its extra_info, that names its teacher."""
    distillation_loss: DistillationLossKeys = DistillationLossKeys()
    param_offload: bool = False
    """Keep teachers in main memory outside the update. With several teachers, one at a time is on the device."""

    @property
    def teachers(self) -> dict[str, TeacherModel]:
        """The teachers that have a model."""
        return {name: teacher for name, teacher in self.teacher_models.items() if teacher.model_path}
