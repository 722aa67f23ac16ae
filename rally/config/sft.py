"""`SftConfig` describes a supervised fine-tuning run fully: conversations in, a model that has seen them out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from rally.config.actor import CheckpointConfig, FsdpConfig
from rally.config.base import (
    Count,
    Files,
    Int,
    Limit,
    Natural,
    NonNegative,
    Only,
    PathText,
    Positive,
    Root,
    Section,
    Share,
    Texts,
)
from rally.config.data import CustomClass
from rally.config.errors import ConfigError
from rally.config.model import Dtype, LoraKeys
from rally.config.trainer import RunConfig

MODEL = ("model.path", "model.partial_pretrain")
MESSAGES = ("data.messages_key", "data.multiturn.messages_key")
TOOLS = ("data.tools_key", "data.multiturn.tools_key")
THINKING = ("data.enable_thinking_key", "data.multiturn.enable_thinking_key")
SFT_SPELLINGS = (MODEL, MESSAGES, TOOLS, THINKING)
"""Keys that mean the same. Any one of them may be written; two that differ are an error."""


class SftFsdp(FsdpConfig):
    cpu_offload: bool = False
    offload_params: bool = False


class Multiturn(Section):
    enable: Annotated[bool, Only(True, because="rows are always conversations")] = True
    messages_key: str | None = None
    tools_key: str | None = None
    enable_thinking_key: str | None = None


class SftData(Section):
    train_files: Files = ()
    val_files: Files = ()
    train_max_samples: Limit = -1
    val_max_samples: Limit = -1
    train_batch_size: Count = 32
    """Conversations per step. The ecosystem's 256 is for a cluster."""
    max_length: Count = 1024
    max_token_len_per_gpu: Count = 8192
    micro_batch_size_per_gpu: Count | None = None
    """At most so many conversations in one forward pass, besides the token budget."""
    truncation: Literal["error", "left", "right"] = "error"
    messages_key: str | None = None
    tools_key: str | None = None
    enable_thinking_key: str | None = None
    multiturn: Multiturn = Multiturn()
    tool_format: str = "hermes"
    """How tool calls are written in the text of an assistant turn."""
    apply_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    shuffle: bool = True
    seed: Int | None = None
    """None takes trainer.seed."""

    micro_batch_size: Count | None = None
    """The same as micro_batch_size_per_gpu."""
    use_dynamic_bsz: bool = True
    """False takes the token budget away, so that micro_batch_size_per_gpu alone says how much a pass holds."""
    pad_mode: Literal["no_padding", "right"] = "no_padding"
    """There is never any padding, so both values are right."""
    num_workers: Natural = 8
    """Conversations lie in memory and nothing is loaded in the background, so all values are right."""
    balance_dp_token: Annotated[bool, Only(False, because="there is one device")] = False
    use_shm: Annotated[bool, Only(False, because="files are read where they lie")] = False

    prompt_key: str | None = None
    """With response_key: rows hold one question and one answer instead of messages."""
    response_key: str | None = None
    prompt_dict_keys: Texts = ()
    """Keys to follow inside the column prompt_key, to the question."""
    response_dict_keys: Texts = ()
    """Keys to follow inside the column response_key, to the answer."""

    ignore_input_ids_mismatch: bool = False
    chat_template: str | None = None
    custom_cls: CustomClass = CustomClass()
    image_key: str = "images"
    video_key: str = "videos"


class SftModel(LoraKeys):
    path: PathText | None = None
    partial_pretrain: PathText | None = None
    """The same as path."""
    tokenizer_path: PathText | None = None
    custom_chat_template: str | None = None
    """Instead of the tokenizer's own: the text of a template, or the path of a .jinja file; kept in checkpoints."""
    spelled_tokens: Texts = ()
    """Added tokens to be written out in ordinary ones, for a model that never learned them; kept in checkpoints."""
    enable_gradient_checkpointing: bool = True
    trust_remote_code: bool = False
    override_config: dict[str, Any] = Field(default_factory=dict)
    dtype: Dtype = "auto"

    use_remove_padding: bool = True
    """There is never any padding, so both values are right."""
    use_shm: Annotated[bool, Only(False, because="weights are read where they lie")] = False

    strategy: Literal["single", "fsdp", "fsdp2", "megatron"] = "single"
    fsdp_config: SftFsdp = SftFsdp()
    external_lib: str | None = None
    use_liger: bool = False


class SftOptim(Section):
    lr: Positive = 1e-5
    betas: tuple[Share, Share] = (0.9, 0.95)
    weight_decay: NonNegative = 0.01
    clip_grad: Positive = 1.0
    lr_warmup_steps: Annotated[Int, Field(ge=-1)] = -1
    """-1 takes lr_warmup_steps_ratio of all steps."""
    lr_warmup_steps_ratio: Share = 0.0
    warmup_steps_ratio: Share | None = None
    """The same as lr_warmup_steps_ratio."""
    lr_scheduler: Literal["constant", "cosine", "linear"] = "cosine"
    min_lr_ratio: Share = 0.0

    @property
    def lr_scheduler_type(self) -> str:
        """What the same key is called in training by reinforcement."""
        return self.lr_scheduler

    @property
    def num_cycles(self) -> float:
        """Half a cosine, from its top to its bottom."""
        return 0.5


class SftTrainer(RunConfig):
    max_ckpt_to_keep: Count | None = None
    """None keeps all."""
    checkpoint: CheckpointConfig = CheckpointConfig()


class SftConfig(Root):
    """A supervised fine-tuning run."""

    data: SftData = SftData()
    model: SftModel = SftModel()
    optim: SftOptim = SftOptim()
    trainer: SftTrainer = SftTrainer()

    use_remove_padding: bool = True
    """There is never any padding, so both values are right."""
    ulysses_sequence_parallel_size: Count = 1

    @property
    def model_path(self) -> str | None:
        """The model to start from, whichever way it was spelled."""
        written: str | None = self.first_written(MODEL)
        return written

    @property
    def messages_key(self) -> str:
        """The column of conversations."""
        return self.first_written(MESSAGES) or "messages"

    @property
    def question_path(self) -> tuple[str, ...]:
        """Where a row holds its question, if rows are questions and answers."""
        return (self.data.prompt_key, *self.data.prompt_dict_keys) if self.data.prompt_key else ()

    @property
    def answer_path(self) -> tuple[str, ...]:
        """Where a row holds its answer, if rows are questions and answers."""
        return (self.data.response_key, *self.data.response_dict_keys) if self.data.response_key else ()

    @property
    def tools_key(self) -> str:
        """The column of tool schemas, which a file may lack."""
        return self.first_written(TOOLS) or "tools"

    @property
    def enable_thinking_key(self) -> str:
        """The column that says whether a conversation thinks aloud, which a file may lack."""
        return self.first_written(THINKING) or "enable_thinking"

    @property
    def run_dir(self) -> Path:
        """The folder that holds everything this run writes."""
        return self.trainer.run_dir

    def require_training(self) -> None:
        """Raise unless everything is named without which no training can begin."""
        missing = [] if self.model_path else ["model.path is not set; name a model folder or a Hub model."]
        if not self.data.train_files:
            missing.append("data.train_files is not set; name a .parquet or .jsonl file of conversations.")
        if missing:
            raise ConfigError(missing)
