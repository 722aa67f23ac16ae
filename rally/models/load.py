"""Models and tokenizers come in from a folder, a hub name or a GGUF file; what comes out can be saved again."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import LocalEntryNotFoundError
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from rally.hub import is_name, on_disk_alone, why_unreachable
from rally.models.lora import is_adapter_folder
from rally.models.vision_io import auto_class
from rally.types import RallyError

WEIGHTS = WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""In the order in which transformers looks for them: beside the one, the other is not read."""
PATH_KEY = "model.path"


class LoadError(RallyError):
    """A model or tokenizer that cannot be had, in one sentence."""


def pick_device(name: str = "auto", called: str = "trainer.device") -> torch.device:
    """`called`: what the user calls it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name != "cpu" and not re.fullmatch(r"cuda(:\d+)?", name):
        raise LoadError(f"{called}={name} is no device that Rally knows; choose auto, cpu, cuda or one GPU, as cuda:1")
    device, gpus = torch.device(name), torch.cuda.device_count()
    if device.type == "cuda" and gpus == 0:
        raise LoadError(f"{called}={name}, but torch sees no GPU here; use {called}=cpu or leave it out")
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise LoadError(f"{called}={name}, but the last GPU that torch sees here is cuda:{gpus - 1}; choose that")
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bf16 on a GPU that has it; elsewhere float32, because on most CPUs bf16 is slower."""
    if name != "auto":
        dtype = getattr(torch, name)
        assert isinstance(dtype, torch.dtype)
        return dtype
    fast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if fast else torch.float32


def load_model(
    path: str,
    *,
    device: torch.device | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    overrides: dict[str, Any] | None = None,
    kind: Any = None,
    called: str = PATH_KEY,
) -> PreTrainedModel:
    """A causal language model, which may also see images, or what else `kind` is, in eval mode. `called`: what the user
    calls its path."""
    device = device or torch.device("cpu")
    kwargs: dict[str, Any] = {
        "dtype": pick_dtype(dtype, device),
        "trust_remote_code": trust_remote_code,
        "adapter_kwargs": on_disk_alone(path),
        **(overrides or {}),
    }
    if is_adapter_folder(path):
        apart = f"name its base as {PATH_KEY} and this folder as model.lora_adapter_path, or "
        told = f"{path} holds LoRA adapters, not a whole model; {apart if called == PATH_KEY else ''}"
        raise LoadError(f"{told}make it whole with: rally merge {path}")
    where, found = _locate(path, called)
    if kind is None:
        kind = auto_class(load_model_config(path, trust_remote_code=trust_remote_code, called=called))
    try:
        model: Any = kind.from_pretrained(where, **kwargs, **found)
    except (OSError, ValueError, ImportError) as problem:
        raise LoadError(_sentence("model", path, problem, called)) from problem
    if "gguf_file" in found:
        model = _without_quantization(model)
    model = _in_own_memory(model.to(device)).eval()
    assert isinstance(model, PreTrainedModel)
    return model


def _in_own_memory(model: Any) -> Any:
    """On a CPU a loaded weight is a view of its file, and begins wherever it begins there. In memory of its own it does
    not change when somebody touches the file, and sums over it do not depend on how long the file's header is."""
    for parameter in model.parameters():
        if parameter.device.type == "cpu":
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
    return model


def load_model_config(
    path: str,
    *,
    trust_remote_code: bool = False,
    overrides: dict[str, Any] | None = None,
    called: str = PATH_KEY,
) -> PreTrainedConfig:
    """What a model is, without its weights."""
    where, found = _locate(path, called)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            where, trust_remote_code=trust_remote_code, **found, **(overrides or {})
        )
    except (OSError, ValueError, ImportError) as problem:
        raise LoadError(_sentence("configuration of the model", path, problem, called)) from problem
    return config


def load_tokenizer(
    path: str,
    *,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
    spelled: Sequence[str] = (),
    called: str = PATH_KEY,
) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, a hub name or a GGUF file; a tokenizer.json in the folder is the truth.

    A template in place of its own, as text or as the path of a .jinja file, goes wherever the tokenizer goes: into
    checkpoints and to servers too. So does it that added tokens are spelled out in ordinary ones.
    """
    where, found = _locate(path, called)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            where, trust_remote_code=trust_remote_code, **found
        )
        if not _agrees(tokenizer, Path(where) / "tokenizer.json"):
            tokenizer = _plain_tokenizer(where)
    except (OSError, ValueError, ImportError) as problem:
        raise LoadError(_sentence("tokenizer", path, problem, called)) from problem
    if chat_template is not None:
        tokenizer.chat_template = _template(chat_template)
    if spelled:
        _spell_out(tokenizer, spelled)
    return tokenizer


def _spell_out(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> None:
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise LoadError(f"model.spelled_tokens needs a tokenizer.json, and {tokenizer.name_or_path} has none")
    told = json.loads(tokenizer.backend_tokenizer.to_str())
    named = [one for one in told["added_tokens"] if one["content"] in tokens]
    if control := [one["content"] for one in named if one["special"]]:
        raise LoadError(
            f"model.spelled_tokens names {', '.join(control)}, which the model is steered with; name only tokens that "
            "are part of what it writes"
        )
    own = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
    for one in named:
        if one["content"] in own:
            told["added_tokens"].remove(one)
        else:  # a number that nobody has would be given to the next token, and so all after it would move
            one.update(content=f"<|spelled_{one['id']}|>", special=True)
    spelled = Tokenizer.from_str(json.dumps(told))  # it can be given tokens, but they cannot be taken away
    if whole := [text for text in tokens if own.get(text) in spelled.encode(text, add_special_tokens=False).ids]:
        raise LoadError(
            f"model.spelled_tokens names {', '.join(whole)}, which the tokenizer writes whole also as ordinary text; "
            "leave that out and teach the model with `rally sft`"
        )
    tokenizer._tokenizer = spelled


def weights_folder(path: str) -> Path | None:
    """Where a model's weights lie on this machine as safetensors; of a name on a hub, in its cache."""
    folder = Path(path).expanduser()
    if any((folder / name).is_file() for name in WEIGHTS):
        return folder
    cached = (try_to_load_from_cache(path, name) for name in WEIGHTS) if is_name(path) else ()
    return next((Path(found).parent for found in cached if isinstance(found, str)), None)


def _template(given: str) -> str:
    if "{{" in given or "{%" in given:
        return given
    if not given.endswith(".jinja"):
        told = "is neither the text of one nor the path of a .jinja file; name one"
        raise LoadError(f"the chat template {given!r} {told}")
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except OSError as problem:
        raise LoadError(f"the chat template {given} cannot be read ({problem.strerror}); name another file") from None


def _agrees(tokenizer: PreTrainedTokenizerBase, truth: Path) -> bool:
    """transformers may choose a class by model family that replaces the file's own pre-tokenizer, silently."""
    if not truth.is_file():
        return True
    text = 'user\nWhat is 12*34? {"name": "x"}  é\n'
    ids = Tokenizer.from_file(str(truth)).encode(text, add_special_tokens=False).ids
    return bool(ids == tokenizer(text, add_special_tokens=False)["input_ids"])


def _plain_tokenizer(where: str) -> PreTrainedTokenizerBase:
    plain: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(where)
    return plain


def _locate(path: str, called: str) -> tuple[str, dict[str, Any]]:
    """Where to load from, and how: the name of a GGUF file inside that folder, or from the disk alone."""
    file = Path(path).expanduser()
    if path.endswith(".gguf"):
        if not file.is_file():
            raise LoadError(f"there is no GGUF file at {path}; correct {called}")
        return str(file.resolve().parent), {"gguf_file": file.name}
    return (str(file) if file.exists() else path), on_disk_alone(path)


def _without_quantization(model: PreTrainedModel) -> PreTrainedModel:
    """A model read from GGUF is dequantised but refuses to be saved; the same weights in a plain module do not."""
    config = model.config
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")
    plain: Any = type(model)(config)
    plain = plain.to(model.dtype)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    assert isinstance(plain, PreTrainedModel)
    return plain


def _sentence(kind: str, path: str, problem: Exception, called: str) -> str:
    first = str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
    if isinstance(problem, ImportError) and path.endswith(".gguf"):
        return f'reading {path} needs the gguf package: pip install "rally-rl[gguf]"'
    if (trained := Path(path) / "actor").is_dir():
        return f"{path} is a whole checkpoint; name the model in it: {trained}"
    file = "tokenizer_config.json" if kind == "tokenizer" else "config.json"
    if Path(path).is_dir() and not (Path(path) / file).exists():
        told = f"the {kind} cannot be loaded from {path}, a folder without {file}"
        return f"{told}; name the folder that holds it as {called}"
    if is_name(path) and (why := why_unreachable()):
        absent = isinstance(problem.__cause__, LocalEntryNotFoundError)
        first = f"{'it is not on this machine' if absent else first}, and {why}"
    fetch = f"fetch it with `hf download {path}`, or " if _is_hub_name(path) else ""
    hint = f"{fetch}give a folder, a hub name that can be reached, or a .gguf file as {called}"
    return f"the {kind} {path!r} cannot be loaded ({first}); {hint}"


def _is_hub_name(path: str) -> bool:
    return path.count("/") == 1 and path[0] not in "./~" and not path.endswith(".gguf") and not Path(path).exists()
