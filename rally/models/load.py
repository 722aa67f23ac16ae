"""Loads models, configurations and tokenizers from a folder, a hub name or a GGUF file.

Loaded models can be saved again, GGUF ones too. `option` is the name of the user's option, for error messages.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch import nn
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
from rally.models.vision_loading import auto_class, keep_processor_files
from rally.platforms import PLATFORMS, named_platform, platform_of
from rally.types import RallyError
from rally.util import checksums
from rally.util.checksums import weights_damage

WEIGHTS = WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""In the order in which transformers looks for them: if the first exists, the second is not read."""
PATH_KEY = "model.path"
TRAINING_NOISE = ("jitter_noise", "input_jitter_noise", "moe_jitter_eps")
"""Attributes of routers. Others with similar names are thresholds that evaluation uses too."""
RANDOM_IN_TRAINING = ("PhimoeTopKRouter",)
"""Modules that draw random numbers in train mode; they stay in eval mode."""
BALANCE_LOSS = ("output_router_logits", "router_aux_loss_coef", "aux_loss_alpha", "router_z_loss_coef")
"""Settings of the auxiliary loss in a class's own loss function."""
UNREADABLE = (*checksums.UNREADABLE, SafetensorError, ImportError)
"""What transformers raises for damaged or foreign files."""


class LoadError(RallyError):
    """A model or tokenizer that cannot be loaded."""


def pick_device(name: str = "auto", option: str = "trainer.device") -> torch.device:
    """The torch device for `name`; LoadError if it does not exist here."""
    if name == "auto":
        platform = named_platform(name)
        return torch.device(platform.device_type if platform.device_count() else "cpu")
    kind, _, index = name.partition(":")
    if name == "cpu":
        return torch.device(name)
    if kind not in PLATFORMS or not (index.isdecimal() or name == kind):
        raise LoadError(f"{option}={name} is not a device; choose auto, cpu, cuda, npu or one GPU such as cuda:1")
    platform = PLATFORMS[kind]
    count = platform.device_count()
    if count == 0:
        raise LoadError(f"{option}={name}, but {platform.missing()}; use {option}=cpu or leave it out")
    if int(index or 0) >= count:
        last = f"{kind}:{count - 1}"
        raise LoadError(f"{option}={name}, but the last GPU that torch finds is {last}; choose one up to that")
    return torch.device(name)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bf16 on a GPU that supports it, otherwise float32, because bf16 is slower on most CPUs."""
    if name != "auto":
        dtype = getattr(torch, name)
        assert isinstance(dtype, torch.dtype)
        return dtype
    platform = platform_of(device)
    return torch.bfloat16 if platform is not None and platform.supports_bfloat16() else torch.float32


def load_model(
    path: str,
    *,
    device: torch.device | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    overrides: dict[str, Any] | None = None,
    kind: Any = None,
    option: str = PATH_KEY,
    verified: bool = False,
) -> PreTrainedModel:
    """A causal or vision-language model in eval mode; `kind` is another transformers class to load with. `verified`:
    the checksums of the folder, if it has any, have been compared already."""
    device = device or torch.device("cpu")
    if noisy := [name for name, value in (overrides or {}).items() if value and ("drop" in name or "jitter" in name)]:
        raise LoadError(
            f"model.override_config sets {', '.join(noisy)}, and models are trained without dropout or noise, because "
            "the rollout has none; leave it out"
        )
    if balance := [name for name, value in (overrides or {}).items() if value and name in BALANCE_LOSS]:
        raise LoadError(
            f"model.override_config sets {', '.join(balance)}, and the load-balancing loss of experts is not part of "
            "the objective; leave it out"
        )
    kwargs: dict[str, Any] = {
        "dtype": pick_dtype(dtype, device),
        "trust_remote_code": trust_remote_code,
        "adapter_kwargs": on_disk_alone(path),
        **(overrides or {}),
    }
    if is_adapter_folder(path):
        apart = f"set {PATH_KEY} to its base model and model.lora_adapter_path to this folder, or "
        hint = f"{apart if option == PATH_KEY else ''}merge it into a whole model with: rally merge {path}"
        raise LoadError(f"{path} contains LoRA adapters, not a whole model; {hint}")
    where, source = _locate(path, option)
    if not verified and (damage := weights_damage(Path(where))):
        raise LoadError(f"the model {path} is damaged ({damage}); copy it again, or set {option} to another one")
    if kind is None:
        kind = auto_class(load_model_config(path, trust_remote_code=trust_remote_code, option=option))
    try:
        model, info = kind.from_pretrained(where, output_loading_info=True, **kwargs, **source)
    except torch.OutOfMemoryError:
        raise
    except UNREADABLE as problem:
        raise LoadError(_load_error("model", path, problem, option)) from problem
    # transformers initializes missing weights at random
    if absent := sorted(info["missing_keys"]):
        raise LoadError(
            f"the weights in {path} are not those of the model that its config.json describes: {absent[0]} is missing"
            f"{f', and {len(absent) - 1} more' if len(absent) > 1 else ''}; copy both from one model"
        )
    if "gguf_file" in source:
        model = _without_quantization(model)
    model = _copied_from_file(_moved(model, device)).eval()
    assert isinstance(model, PreTrainedModel)
    turn_off_dropout(model)
    keep_processor_files(model, Path(where))
    return model


def turn_off_dropout(model: nn.Module) -> None:
    """Set every dropout, and the noise that routers add in training, to 0. Rollout, reference and update must be the
    same function of the weights. The configuration, which is saved with the weights, keeps its values."""
    for module in model.modules():
        if type(module).__name__ in RANDOM_IN_TRAINING:
            module.register_forward_pre_hook(_evaluate)
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or name in TRAINING_NOISE):
                setattr(module, name, 0.0)
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0


def _evaluate(module: nn.Module, args: Any) -> None:
    module.training = False


def _moved(model: Any, device: torch.device) -> Any:
    """The module on a device. Some devices have tensors of a class of their own: torch then makes a new parameter for
    each name, and tied weights would be trained apart."""
    first: dict[int, str] = {}
    tied = [(name, first.setdefault(id(p), name)) for name, p in model.named_parameters(remove_duplicate=False)]
    model.to(device)
    for name, known in tied:
        if name != known and model.get_parameter(name) is not model.get_parameter(known):
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, model.get_parameter(known))
    return model


def _copied_from_file(model: Any) -> Any:
    """Copy CPU weights, which are views of the mapped file. A copy does not change with the file, and its alignment, on
    which the rounding of sums depends, does not follow from the length of the file's header."""
    for parameter in model.parameters():
        if parameter.device.type == "cpu":
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
    return model


def load_model_config(
    path: str,
    *,
    trust_remote_code: bool = False,
    overrides: dict[str, Any] | None = None,
    option: str = PATH_KEY,
) -> PreTrainedConfig:
    """The configuration of a model, without its weights."""
    where, source = _locate(path, option)
    if path.endswith(".gguf") and not overrides:
        file = Path(path).expanduser().resolve()
        key = (file.stat().st_mtime_ns, file.stat().st_size)
        if _gguf_configs.get(file, (None,))[0] != key:
            _gguf_configs[file] = (key, _read_config(path, where, source, trust_remote_code, {}, option))
        return copy.deepcopy(_gguf_configs[file][1])
    return _read_config(path, where, source, trust_remote_code, overrides or {}, option)


_gguf_configs: dict[Path, tuple[tuple[int, int], PreTrainedConfig]] = {}
"""Configurations of GGUF files with the time and size of the file. They are read with its vocabulary, in seconds."""


def _read_config(
    path: str,
    where: str,
    source: Mapping[str, Any],
    trust_remote_code: bool,
    overrides: Mapping[str, Any],
    option: str,
) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            where, trust_remote_code=trust_remote_code, **source, **overrides
        )
    except UNREADABLE as problem:
        raise LoadError(_load_error("configuration of the model", path, problem, option)) from problem
    return config


def load_tokenizer(
    path: str,
    *,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
    spelled: Sequence[str] = (),
    option: str = PATH_KEY,
) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, a hub name or a GGUF file. A tokenizer.json in the folder takes precedence.

    `chat_template`, text or the path of a .jinja file, replaces the tokenizer's own. `spelled` are added tokens to be
    encoded as ordinary ones. Both are saved with the tokenizer, into checkpoints and for servers.
    """
    where, source = _locate(path, option)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            where, trust_remote_code=trust_remote_code, **source
        )
        if not _agrees(tokenizer, Path(where) / "tokenizer.json"):
            tokenizer = _plain_tokenizer(where)
    except Exception as problem:  # the package tokenizers raises Exception itself
        raise LoadError(_load_error("tokenizer", path, problem, option)) from problem
    if flaw := _flaw(tokenizer):
        bare = Path(where).is_dir() and not (Path(where) / "tokenizer.json").is_file()
        why = f"{flaw}, and there is no tokenizer.json" if bare else flaw
        raise LoadError(
            f"the tokenizer of {path} does not encode text: {why}; copy the files of the model's tokenizer there, or "
            f"set {option} to a folder that has them"
        )
    if chat_template is not None:
        tokenizer.chat_template = _template(chat_template)
    if spelled:
        _spell_out(tokenizer, spelled)
    return tokenizer


PROBE = """\
user
What is 12*34? The quick brown fox doesn't jump over 56 lazy dogs.
{"name": "search", "arguments": {"query": "height of Mont Blanc", "top_k": 3}}
"""
"""Text that every tokenizer of a chat model encodes without loss."""
MOST_UNKNOWN = 0.1


def _flaw(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Why a tokenizer cannot be one of a language model, or None. transformers builds an empty one where its files are
    missing."""
    ids = tokenizer.encode(PROBE, add_special_tokens=False)
    if not ids:
        return f"{len(PROBE)} characters become no token at all"
    unknown = 0 if tokenizer.unk_token_id is None else ids.count(tokenizer.unk_token_id)
    if unknown > MOST_UNKNOWN * len(ids):
        return f"{unknown} of {len(ids)} tokens of an English text are {tokenizer.unk_token}"
    decoded = str(tokenizer.decode(ids))
    if _letters(decoded) != _letters(PROBE):
        return f"{PROBE[:20]!r} comes back as {decoded[:20]!r}"
    return None


def _letters(text: str) -> str:
    """Letters and digits alone: some tokenizers normalize spaces, and some write lower case."""
    return "".join(filter(str.isalnum, text)).casefold()


def check_vocabulary(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: Iterable[int], option: str = PATH_KEY
) -> None:
    """LoadError if the tokenizer has ids without a row in the model's embedding. Of added tokens only `ids`, those that
    the run uses, are compared: some models leave out the rows of tokens for other inputs."""
    embedding: Any = model.get_input_embeddings()
    rows: int = embedding.weight.shape[0]
    last = max((tokenizer.vocab_size - 1, *ids))
    if last >= rows:
        raise LoadError(
            f"the tokenizer has the token {last}, but the embedding of the model has only {rows} rows; set {option} to "
            "a folder with the model and its own tokenizer"
        )


def reloading_problem(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> str | None:
    """How the tokenizer differs once it is saved with a model of this configuration and loaded with transformers alone,
    in a sentence; None if it does not. transformers chooses a class by model family, which may replace the
    pre-tokenizer of tokenizer.json. Tokenizers and models with code of their own are not compared."""
    if getattr(config, "auto_map", None) or tokenizer.init_kwargs.get("auto_map"):
        return None
    with tempfile.TemporaryDirectory() as place:
        save_tokenizer(tokenizer, Path(place))
        config.save_pretrained(place)
        try:
            loaded = AutoTokenizer.from_pretrained(place)
        except Exception as problem:  # noqa: BLE001 - the package tokenizers raises Exception itself
            return f"transformers cannot load the tokenizer that is saved with the model ({_first_line(problem)})"
    for text in (PROBE, *_chat_probe(tokenizer)):
        own, other = (one.encode(text, add_special_tokens=False) for one in (tokenizer, loaded))
        if own != other:
            return (
                f"AutoTokenizer of transformers loads the tokenizer of this {config.model_type} model as "
                f"{type(loaded).__name__} and encodes {text[:20]!r}... as {len(other)} tokens instead of {len(own)}; "
                "load checkpoints of this run with transformers.PreTrainedTokenizerFast or with Rally"
            )
    if tokenizer.chat_template != loaded.chat_template:
        return "transformers loads another chat template than the one that is saved with the model"
    return None


def _chat_probe(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """A conversation by the chat template, and the special tokens; nothing that the template cannot render."""
    special = [" ".join(tokenizer.all_special_tokens)] if tokenizer.all_special_tokens else []
    messages = [{"role": "user", "content": PROBE}, {"role": "assistant", "content": PROBE}]
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
    except Exception:  # noqa: BLE001 - no template, or one that raises; the codec reports it
        return special
    return [*special, str(rendered)]


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the tokenizer's files so that transformers 4 reads them too: it does not know the class TokenizersBackend,
    and fails on a list of extra_special_tokens."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    stored = json.loads(path.read_text(encoding="utf-8"))
    if stored.get("tokenizer_class") == "TokenizersBackend":
        stored["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(stored.get("extra_special_tokens"), list):
        stored["additional_special_tokens"] = stored.pop("extra_special_tokens")
    path.write_text(json.dumps(stored, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _spell_out(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> None:
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise LoadError(
            f"model.spelled_tokens needs a tokenizer.json, and {tokenizer.name_or_path} has none; leave the key out"
        )
    stored = json.loads(tokenizer.backend_tokenizer.to_str())
    named = [one for one in stored["added_tokens"] if one["content"] in tokens]
    if control := [one["content"] for one in named if one["special"]]:
        raise LoadError(
            f"model.spelled_tokens contains {', '.join(control)}, which are control tokens; list only tokens that are "
            "part of the text that the model writes"
        )
    own = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
    for one in named:
        if one["content"] in own:
            stored["added_tokens"].remove(one)
        else:  # keep the id in use: a free one would go to the next token and shift all later ids
            one.update(content=f"<|spelled_{one['id']}|>", special=True)
    spelled = Tokenizer.from_str(json.dumps(stored))  # rebuilt, because added tokens cannot be removed
    if whole := [text for text in tokens if own.get(text) in spelled.encode(text, add_special_tokens=False).ids]:
        raise LoadError(
            f"model.spelled_tokens contains {', '.join(whole)}, which the tokenizer encodes as one token even as "
            "ordinary text; leave that out and train the model on it with `rally sft`"
        )
    tokenizer._tokenizer = spelled


def weights_folder(path: str) -> Path | None:
    """The local folder of a model's safetensors; for a hub name, in the cache. None if there is none."""
    folder = Path(path).expanduser()
    if any((folder / name).is_file() for name in WEIGHTS):
        return folder
    cached = (try_to_load_from_cache(path, name) for name in WEIGHTS) if is_name(path) else ()
    return next((Path(file).parent for file in cached if isinstance(file, str)), None)


def _template(text_or_path: str) -> str:
    if "{{" in text_or_path or "{%" in text_or_path:
        return text_or_path
    if not text_or_path.endswith(".jinja"):
        raise LoadError(
            f"the chat template {text_or_path!r} is neither the text of a template nor the path of a .jinja file; give "
            "one of the two"
        )
    try:
        return Path(text_or_path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise LoadError(
            f"the chat template {text_or_path} cannot be read ({checksums.reason(problem)}); give another file"
        ) from None


def _agrees(tokenizer: PreTrainedTokenizerBase, file: Path) -> bool:
    """Whether the tokenizer encodes as tokenizer.json does: transformers may choose a class by model family that
    silently replaces the pre-tokenizer."""
    if not file.is_file():
        return True
    text = 'user\nWhat is 12*34? {"name": "x"}  é\n'
    ids = Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False).ids
    return bool(ids == tokenizer(text, add_special_tokens=False)["input_ids"])


def _plain_tokenizer(where: str) -> PreTrainedTokenizerBase:
    plain: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(where)
    return plain


def _locate(path: str, option: str) -> tuple[str, dict[str, Any]]:
    """Where to load from, and the keyword arguments for it: the name of a GGUF file, or to use only local files."""
    file = Path(path).expanduser()
    if path.endswith(".gguf"):
        if not file.is_file():
            raise LoadError(f"there is no GGUF file at {path}; correct {option}")
        return str(file.resolve().parent), {"gguf_file": file.name}
    return (str(file) if file.exists() else path), on_disk_alone(path)


def _without_quantization(model: PreTrainedModel) -> PreTrainedModel:
    """A model loaded from GGUF is dequantised but cannot be saved, so copy its weights into a plain module."""
    config = model.config
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")
    plain: Any = type(model)(config)
    plain = plain.to(model.dtype)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    assert isinstance(plain, PreTrainedModel)
    return plain


def _load_error(kind: str, path: str, problem: Exception, option: str) -> str:
    first = _first_line(problem)
    if isinstance(problem, ImportError) and path.endswith(".gguf"):
        return f'reading {path} needs the gguf package: pip install "rally-rl[gguf]"'
    places = f"a folder, a hub name that can be reached, or a .gguf file as {option}"
    if path.startswith(("/", ".", "~")) and not Path(path).expanduser().exists():
        return f"{path} does not exist; give {places}"
    if (trained := Path(path) / "actor").is_dir():
        return f"{path} is a whole checkpoint; give the model in it: {trained}"
    file = "tokenizer_config.json" if kind == "tokenizer" else "config.json"
    if Path(path).is_dir() and not (Path(path) / file).exists():
        return (
            f"the {kind} cannot be loaded from {path}, a folder without {file}; set {option} to the folder that has it"
        )
    if is_name(path) and (why := why_unreachable()):
        absent = isinstance(problem.__cause__, LocalEntryNotFoundError)
        first = f"{'it is not on this machine' if absent else first}, and {why}"
    fetch = f"fetch it with `hf download {path}`, or " if _is_hub_name(path) else ""
    return f"the {kind} {path!r} cannot be loaded ({first}); {fetch}give {places}"


def _first_line(problem: Exception) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0]


def _is_hub_name(path: str) -> bool:
    return path.count("/") == 1 and path[0] not in "./~" and not path.endswith(".gguf") and not Path(path).exists()
