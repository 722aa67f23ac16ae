"""Schema of `data.*`: the rows that are read, their order, and the lengths of prompts and responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rally.config.base import Count, Files, Float, Int, Limit, Natural, Only, PathText, Section, Share


class CustomClass(Section):
    path: PathText | None = None
    """A Python file or an importable module."""
    name: str | None = None
    """The name of a class in `path`."""


class Sampler(Section):
    class_path: PathText | None = None
    """A Python file or an importable module that holds a sampler class of your own."""
    class_name: str | None = None
    """The class in class_path; it derives from rally.data.RowSampler, or from verl's AbstractSampler."""


class Curriculum(Section):
    by: Literal["field", "success"] | None = None
    """null draws all rows equally often. field goes from easy to hard by a number in the row. success prefers rows that
    are solved some of the time."""
    field: str = "extra_info.difficulty"
    """by=field: the row's difficulty, a number where larger is harder. Dots lead into nested mappings."""
    start_share: Share = 0.2
    """by=field: the share of the rows, easiest first, that the first step draws from."""
    grow_steps: Count | None = None
    """by=field: steps until all rows are drawn from. null is half of the run."""
    low: Share = 0.2
    """by=success: rows with a lower success rate are not targeted."""
    high: Share = 0.8
    """by=success: rows with a higher success rate are not targeted."""
    explore: Share = 0.5
    """by=success: the share of a batch for rows that were never tried, or not for the longest time."""
    solved_at: Float = 0.5
    """by=success: an episode counts as solved if its acc, or else its reward, is at least this."""


class DataConfig(Section):
    train_files: Files = ()
    """Training rows: .parquet, .jsonl or .json files, read in this order."""
    val_files: Files = ()
    """Validation rows: .parquet, .jsonl or .json files. Empty means no validation."""
    train_max_samples: Limit = -1
    """Training rows to use; -1 uses all. A smaller number takes a random choice by seed if shuffle is true, else the
    first rows."""
    val_max_samples: Limit = -1
    """Validation rows to use; -1 uses all. A smaller number takes the first rows, or a random choice with
    validation_shuffle=true."""
    prompt_key: str = "prompt"
    """The column that holds the messages of the prompt."""
    reward_fn_key: str = "data_source"
    """The column that names the data source, which selects the reward function."""
    max_prompt_length: Count = 512
    """Tokens a prompt may have. Longer ones follow filter_overlong_prompts and truncation."""
    max_response_length: Count = 512
    """Tokens of the whole response of an episode: sampled, tool and user tokens together."""
    train_batch_size: Count = 32
    """Prompts per step. verl's default of 1024 needs a cluster."""
    gen_batch_size: Count | None = None
    """Prompts that a step starts with if algorithm.filter_groups.enable is true. null takes train_batch_size."""
    val_batch_size: Count | None = None
    """Prompts validated at a time. null validates the whole file at once."""
    tool_config_path: PathText | None = None
    """The tool YAML. The same as actor_rollout_ref.rollout.multi_turn.tool_config_path."""
    function_tool_path: PathText | None = None
    """A Python file of @function_tool functions. The same as
    actor_rollout_ref.rollout.multi_turn.function_tool_path."""
    shuffle: bool = True
    """Shuffle the training rows anew in every epoch. false keeps the order of the files."""
    seed: Int | None = None
    """The seed of row order and row selection. null takes trainer.seed."""
    validation_shuffle: bool = False
    """Choose the val_max_samples validation rows at random, by seed, instead of taking the first. The choice is the
    same at every step."""
    filter_overlong_prompts: bool = False
    """Leave out rows whose prompt exceeds max_prompt_length, and report how many. false applies truncation to them."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What happens to a prompt over max_prompt_length: error stops the run; left, right and middle remove tokens on
    that side."""
    apply_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Extra arguments of the chat template, such as {enable_thinking: false}."""
    need_tools_kwargs: bool = False
    """Reject rows without extra_info.tools_kwargs."""
    sampler: Sampler = Sampler()
    """A sampler class of your own, derived from rally.data.RowSampler or from verl's AbstractSampler."""
    curriculum: Curriculum = Curriculum()

    return_raw_chat: bool = True
    """Accepted and has no effect: the messages of a row are always kept."""
    return_raw_input_ids: Annotated[bool, Only(False, because="loops render prompts from messages")] = False
    return_full_prompt: Annotated[bool, Only(False, because="loops render prompts from messages")] = False
    filter_prompts: Annotated[bool, Only(True, because="filter_overlong_prompts controls this")] = True
    tokenizer: Annotated[str | None, Only(None, because="actor_rollout_ref.model.tokenizer_path sets it")] = None
    trust_remote_code: Annotated[
        bool, Only(False, because="actor_rollout_ref.model.trust_remote_code also controls the tokenizer")
    ] = False
    use_shm: Annotated[bool, Only(False, because="files are read from their own folder")] = False
    dataloader_num_workers: Natural = 0
    """Accepted and has no effect: rows are held in memory, so there are no loader processes."""
    filter_overlong_prompts_workers: Count | None = None
    """Threads that measure prompt lengths before training. null uses one per core, 16 at most."""

    custom_cls: CustomClass = CustomClass()
    """A class of your own that builds rows from the files."""
    datagen: CustomClass = CustomClass()
    chat_template_func: str | None = None
    cache_dir: PathText | None = None
    image_key: str = "images"
    """The column of images, which replace `<image>` in the row's messages in order."""
    video_key: str = "videos"
    audio_key: str = "audios"
    image_patch_size: Count = 14
    return_multi_modal_inputs: bool = True
    """Accepted and has no effect: pixel values are computed from an episode's images where they are needed."""
    mm_processor_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Extra settings of the model's image processor, such as {max_pixels: 200704}."""
