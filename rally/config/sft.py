"""`SftConfig`: the whole configuration of a supervised fine-tuning run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from rally.config.actor import CheckpointConfig, FsdpConfig, OptimizerName
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
"""Groups of equivalent keys. Any one of a group may be set; different values in a group are an error."""


class SftFsdp(FsdpConfig):
    cpu_offload: bool = False
    """With offload_params=true, the same as offload_policy."""
    offload_params: bool = False
    """With cpu_offload=true, the same as offload_policy; no effect without it."""

    @property
    def uses_offload_policy(self) -> bool:
        return self.offload_policy or (self.cpu_offload and self.offload_params)


class Multiturn(Section):
    enable: Annotated[bool, Only(True, because="rows are always conversations")] = True
    messages_key: str | None = None
    """The same as data.messages_key."""
    tools_key: str | None = None
    """The same as data.tools_key."""
    enable_thinking_key: str | None = None
    """The same as data.enable_thinking_key."""


class SftData(Section):
    train_files: Files = ()
    """Training conversations: .parquet, .jsonl or .json files, read in this order."""
    val_files: Files = ()
    """Validation conversations. Empty means no validation."""
    train_max_samples: Limit = -1
    """Training conversations to use, the first of the files; -1 uses all."""
    val_max_samples: Limit = -1
    """Validation conversations to use, the first of the files; -1 uses all."""
    train_batch_size: Count = 32
    """Conversations per optimizer step. verl's default of 256 is for a cluster."""
    max_length: Count = 1024
    """Tokens a conversation may have. Longer ones follow truncation."""
    max_token_len_per_gpu: Count = 8192
    """The most tokens in one packed forward pass, on each GPU."""
    micro_batch_size_per_gpu: Count | None = None
    """The most conversations in one forward pass, in addition to the token budget. null sets no such limit."""
    truncation: Literal["error", "left", "right"] = "error"
    """What happens to a conversation over max_length: error stops the run; left and right remove tokens on that
    side."""
    messages_key: str | None = None
    """The column of conversations. null is messages."""
    tools_key: str | None = None
    """The column of tool schemas, which a file may lack. null is tools."""
    enable_thinking_key: str | None = None
    """The column with the template's enable_thinking for each conversation, which a file may lack. null is
    enable_thinking."""
    multiturn: Multiturn = Multiturn()
    tool_format: str = "auto"
    """How tool calls are written in assistant turns; the same choices as rollout.multi_turn.format."""
    tool_format_path: PathText | None = None
    """A Python file, or pkg:// and a module, that registers tool-call formats. null is none."""
    apply_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Extra arguments of the chat template, such as {enable_thinking: false}."""
    shuffle: bool = True
    """Shuffle the conversations anew in every epoch. false keeps the order of the files."""
    seed: Int | None = None
    """The seed of the order. null takes trainer.seed."""

    micro_batch_size: Count | None = None
    """The same as micro_batch_size_per_gpu."""
    use_dynamic_bsz: bool = True
    """Limit a forward pass by max_token_len_per_gpu tokens. false limits it by micro_batch_size_per_gpu alone."""
    pad_mode: Literal["no_padding", "right"] = "no_padding"
    """Accepted and has no effect: sequences are packed, so there is never any padding."""
    num_workers: Natural = 8
    """Accepted and has no effect: conversations are held in memory, so there are no loader processes."""
    balance_dp_token: Annotated[bool, Only(False, because="micro-batches are always split by tokens")] = False
    use_shm: Annotated[bool, Only(False, because="files are read from their own folder")] = False

    prompt_key: str | None = None
    """The column of the question, for rows of one question and one answer instead of messages. Needs response_key."""
    response_key: str | None = None
    """The column of the answer, for rows of one question and one answer. Needs prompt_key."""
    prompt_dict_keys: Texts = ()
    """Keys to follow inside the column prompt_key to reach the question."""
    response_dict_keys: Texts = ()
    """Keys to follow inside the column response_key to reach the answer."""

    ignore_input_ids_mismatch: bool = False
    chat_template: str | None = None
    custom_cls: CustomClass = CustomClass()
    image_key: str = "images"
    """The column of images, which replace `<image>` in the messages in order."""
    video_key: str = "videos"


class SftModel(LoraKeys):
    path: PathText | None = None
    """The model to start from: a folder or a Hub name."""
    partial_pretrain: PathText | None = None
    """The same as path."""
    tokenizer_path: PathText | None = None
    """The tokenizer: a folder or a Hub name. null takes the model's own."""
    custom_chat_template: str | None = None
    """A chat template that replaces the tokenizer's own: its text, or the path of a .jinja file. Checkpoints keep
    it."""
    spelled_tokens: Texts = ()
    """Added tokens to write out as ordinary ones, for a model that was never trained on them. Checkpoints keep the
    setting."""
    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass instead of keeping them: less memory, more time."""
    recompute_num_layers: Natural | None = None
    """With gradient checkpointing: how many layers are computed again; the others keep their activations. null: on one
    GPU as few as its free memory allows, else all. The results are the same."""
    enable_activation_offload: bool = False
    """Keep what the backward pass needs in main memory: with gradient checkpointing the inputs of the layers, else all
    large activations. Less memory on the device, more time."""
    trust_remote_code: bool = False
    """Allow Python code in the folder of the model or tokenizer to run."""
    override_config: dict[str, Any] = Field(default_factory=dict)
    """Values that replace those of the model's config.json."""
    dtype: Dtype = "auto"
    """The dtype of the weights. auto is bfloat16 on a GPU that supports it, else float32."""

    use_remove_padding: bool = True
    """Accepted and has no effect: sequences are packed, so there is never any padding."""
    use_shm: Annotated[bool, Only(False, because="weights are read from their own folder")] = False

    strategy: Literal["single", "fsdp", "fsdp2", "megatron"] = "single"
    """single, fsdp and fsdp2 all mean the same: one device holds the whole model, several share it by FSDP2."""
    fsdp_config: SftFsdp = SftFsdp()
    external_lib: Texts = ()
    """Your modules to import at the start, in every process: names on the import path or Python files. They register,
    for instance, classes of models with transformers."""
    use_liger: bool = False


class SftOptim(Section):
    optimizer: OptimizerName = "AdamW"
    """AdamW8bit stores the two moments of a parameter in 2 bytes instead of 8 (docs/training.md)."""
    lr: Positive = 1e-5
    """The learning rate of AdamW, after warm-up."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """AdamW's two moment coefficients."""
    weight_decay: NonNegative = 0.01
    """AdamW's weight decay."""
    clip_grad: Positive = 1.0
    """The norm that gradients are clipped to."""
    lr_warmup_steps: Annotated[Int, Field(ge=-1)] = -1
    """Steps of linear warm-up. -1 takes lr_warmup_steps_ratio of all steps."""
    lr_warmup_steps_ratio: Share = 0.0
    """The share of all steps that is warm-up, if lr_warmup_steps is -1."""
    warmup_steps_ratio: Share | None = None
    """The same as lr_warmup_steps_ratio."""
    lr_scheduler: Literal["constant", "cosine", "linear"] = "cosine"
    """The learning rate after warm-up: constant, or falling by a cosine or a line until the last step."""
    min_lr_ratio: Share = 0.0
    """The lowest learning rate of cosine and linear, as a share of lr."""

    @property
    def lr_scheduler_type(self) -> str:
        """The same value under its name in `OptimConfig`."""
        return self.lr_scheduler

    @property
    def num_cycles(self) -> float:
        """Half a cosine period, from the highest to the lowest rate."""
        return 0.5


EveryEpoch = Literal["after_each_epoch"]


class SftTrainer(RunConfig):
    save_freq: Limit | EveryEpoch = -1
    """Steps between checkpoints, or after_each_epoch. The last step is always saved; -1 saves no other."""
    test_freq: Limit | EveryEpoch = -1
    """Steps between validations, or after_each_epoch. -1 validates after the last step only. Needs data.val_files."""
    max_ckpt_to_keep: Count | None = None
    """The number of newest checkpoints to keep. null keeps all."""
    checkpoint: CheckpointConfig = CheckpointConfig()


class SftConfig(Root):
    """A supervised fine-tuning run."""

    data: SftData = SftData()
    model: SftModel = SftModel()
    optim: SftOptim = SftOptim()
    trainer: SftTrainer = SftTrainer()

    use_remove_padding: bool = True
    """Accepted and has no effect: sequences are packed, so there is never any padding."""
    ulysses_sequence_parallel_size: Count = 1
    """On several GPUs: how many consecutive ones divide the tokens of each micro-batch (Ulysses, docs/cluster.md). It
    divides the number of GPUs and the attention heads. No effect on one GPU."""

    @property
    def sequence_parallel_size(self) -> int:
        """GPUs that divide the tokens of a micro-batch, by either key."""
        return max(self.ulysses_sequence_parallel_size, self.model.fsdp_config.ulysses_sequence_parallel_size)

    @property
    def model_path(self) -> str | None:
        """The model to start from, by any of its keys."""
        written: str | None = self.first_set(MODEL)
        return written

    @property
    def messages_key(self) -> str:
        """The column of conversations."""
        return self.first_set(MESSAGES) or "messages"

    @property
    def question_path(self) -> tuple[str, ...]:
        """Column and nested keys of the question, for rows of questions and answers; else empty."""
        return (self.data.prompt_key, *self.data.prompt_dict_keys) if self.data.prompt_key else ()

    @property
    def answer_path(self) -> tuple[str, ...]:
        """Column and nested keys of the answer, for rows of questions and answers; else empty."""
        return (self.data.response_key, *self.data.response_dict_keys) if self.data.response_key else ()

    @property
    def tools_key(self) -> str:
        """The column of tool schemas, which a file may lack."""
        return self.first_set(TOOLS) or "tools"

    @property
    def enable_thinking_key(self) -> str:
        """The column of the template's enable_thinking, which a file may lack."""
        return self.first_set(THINKING) or "enable_thinking"

    @property
    def external_libs(self) -> tuple[tuple[str, str], ...]:
        """The user's modules to import at the start, each with its key."""
        return tuple(("model.external_lib", name) for name in self.model.external_lib)

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return self.trainer.run_dir

    def require_training(self) -> None:
        """Raise a `ConfigError` that lists every required key that is not set."""
        missing = [] if self.model_path else ["model.path is not set; set it to a model folder or a Hub name."]
        if not self.data.train_files:
            missing.append("data.train_files is not set; set it to a .parquet or .jsonl file of conversations.")
        if missing:
            raise ConfigError(missing)
