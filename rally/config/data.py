"""`data.*`: which rows are read, in which order, and how long prompts and responses may be."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rally.config.base import Count, Files, Float, Int, Limit, Natural, Only, PathText, Section, Share


class CustomClass(Section):
    path: PathText | None = None
    """A Python file, or a module."""
    name: str | None = None
    """A class in it."""


class Sampler(Section):
    class_path: PathText | None = None
    class_name: str | None = None


class Curriculum(Section):
    by: Literal["field", "success"] | None = None
    """None draws rows evenly; field goes from easy to hard; success keeps to rows that are solved now and then."""
    field: str = "extra_info.difficulty"
    """by=field: a number in every row, more is harder; dots lead into mappings."""
    start_share: Share = 0.2
    """by=field: the share of the rows, easiest first, that the first step draws from."""
    grow_steps: Count | None = None
    """by=field: steps until all rows are open. None is half of the run."""
    low: Share = 0.2
    """by=success: rows solved less often are not targeted."""
    high: Share = 0.8
    """by=success: rows solved more often are not targeted."""
    explore: Share = 0.5
    """by=success: the share of a batch for rows never tried, or not for long."""
    solved_at: Float = 0.5
    """by=success: an episode is solved if its acc, or else its reward, is at least this."""


class DataConfig(Section):
    train_files: Files = ()
    val_files: Files = ()
    train_max_samples: Limit = -1
    val_max_samples: Limit = -1
    prompt_key: str = "prompt"
    reward_fn_key: str = "data_source"
    max_prompt_length: Count = 512
    max_response_length: Count = 512
    """Tokens of the whole response of an episode: sampled, tool and user tokens together."""
    train_batch_size: Count = 32
    """Prompts per step. The ecosystem's 1024 needs a cluster."""
    gen_batch_size: Count | None = None
    """Prompts that a step begins with if algorithm.filter_groups is on. None takes train_batch_size."""
    val_batch_size: Count | None = None
    """Prompts validated at a time; None takes the whole file."""
    tool_config_path: PathText | None = None
    function_tool_path: PathText | None = None
    shuffle: bool = True
    seed: Int | None = None
    """None takes trainer.seed."""
    validation_shuffle: bool = False
    filter_overlong_prompts: bool = False
    truncation: Literal["error", "left", "right", "middle"] = "error"
    apply_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    need_tools_kwargs: bool = False
    """Refuse rows that bring no extra_info.tools_kwargs."""
    sampler: Sampler = Sampler()
    """A class of your own, derived from rally.data.RowSampler."""
    curriculum: Curriculum = Curriculum()

    return_raw_chat: bool = True
    """A row's messages are always kept, so both values are right."""
    return_raw_input_ids: Annotated[bool, Only(False, because="loops render prompts from messages")] = False
    return_full_prompt: Annotated[bool, Only(False, because="loops render prompts from messages")] = False
    filter_prompts: Annotated[bool, Only(True, because="filter_overlong_prompts is the switch")] = True
    tokenizer: Annotated[str | None, Only(None, because="actor_rollout_ref.model.tokenizer_path sets it")] = None
    trust_remote_code: Annotated[
        bool, Only(False, because="actor_rollout_ref.model.trust_remote_code is the switch for the tokenizer too")
    ] = False
    use_shm: Annotated[bool, Only(False, because="files are read where they lie")] = False
    dataloader_num_workers: Natural = 0
    """Rows lie in memory and nothing is loaded in the background, so all values are right."""
    filter_overlong_prompts_workers: Count | None = None
    """Threads that measure prompts before training; None takes one for each core, sixteen at most."""

    custom_cls: CustomClass = CustomClass()
    """A class of your own that makes rows of the files."""
    datagen: CustomClass = CustomClass()
    chat_template_func: str | None = None
    cache_dir: PathText | None = None
    image_key: str = "images"
    """The column whose images replace `<image>` in a row's messages, in order."""
    video_key: str = "videos"
    audio_key: str = "audios"
    image_patch_size: Count = 14
    return_multi_modal_inputs: bool = True
    """Either is fine: pixels are made from an episode's images wherever they are needed."""
    mm_processor_kwargs: dict[str, Any] = Field(default_factory=dict)
    """What the model's image processor is told beside its own settings, such as {max_pixels: 200704}."""
