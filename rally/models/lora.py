"""LoRA adapters: adding, computing, saving and merging them. With adapters disabled the module is its base model.

PEFT's layers replace the linear layers of the module, so the engine, the trainer and the reference share one copy of
the base. Adapters have the dtype of the base weights and, like all trained parameters, float32 masters in the
optimizer.

Shapes: T tokens, C features in, F features out, R rank.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from rally.models.sharding import model_state, ranks_of
from rally.models.vision import image_parts_of
from rally.platforms import fork_rng
from rally.types import RallyError

NAME = "default"  # PEFT's name for the only adapter of a module


class Adapter(NamedTuple):
    """The two matrices of an adapter; it adds scale * (x A^T) B^T."""

    a_RC: Tensor
    b_FR: Tensor
    scale: float


class PlainLinear(NamedTuple):
    """A linear layer and its enabled adapter, if any."""

    base: nn.Linear
    adapter: Adapter | None


def plain_linear(layer: nn.Module) -> PlainLinear | None:
    """The parts of a linear layer with at most one plain adapter; None for any other layer."""
    if type(layer) is nn.Linear:
        return PlainLinear(layer, None)
    if not hasattr(layer, "lora_A"):
        return None
    from peft.tuners.lora import Linear  # an optional dependency, installed if the layer is PEFT's

    if type(layer) is not Linear or type(layer.base_layer) is not nn.Linear or layer.merged:
        return None
    if layer.disable_adapters:
        return PlainLinear(layer.base_layer, None)
    return PlainLinear(layer.base_layer, _adapter(layer)) if _is_plain(layer) else None


def _is_plain(layer: Any) -> bool:
    """Whether the layer has one active adapter, in the dtype of the base, without dropout or a variant."""
    if layer.active_adapters != [NAME] or NAME not in layer.lora_A:
        return False
    weights = (layer.base_layer.weight, layer.lora_A[NAME].weight, layer.lora_B[NAME].weight)
    drops = layer.training and not isinstance(layer.lora_dropout[NAME], nn.Identity)
    special = drops or layer.fan_in_fan_out or layer.lora_variant or layer.lora_B[NAME].bias is not None
    return not special and len({(weight.dtype, weight.device) for weight in weights}) == 1


def _adapter(layer: Any) -> Adapter:
    return Adapter(layer.lora_A[NAME].weight, layer.lora_B[NAME].weight, layer.scaling[NAME])


def switches(model: nn.Module) -> list[tuple[bool, bool]]:
    """For each adapted layer: whether its adapters are disabled, and whether they are merged into its weight."""
    return [(m.disable_adapters, m.merged) for m in model.modules() if hasattr(m, "lora_A")]  # type: ignore[misc]


def add_adapted(y_TF: Tensor, h_TR: Tensor, b_FR: Tensor, scale: float) -> None:
    """Add an adapter's output, from h = x A^T, to the base layer's output in place."""
    y_TF.addmm_(h_TR, b_FR.t(), alpha=scale)


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
KEY = "model.lora_adapter_path"
MAMBA = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
"""Models whose out_proj PEFT does not adapt."""


class LoraError(RallyError):
    """Adapters that cannot be made or used with these settings."""


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """New adapters of `rank`; or, with `start`, those of a folder, whose rank then applies."""

    rank: int = 0
    alpha: int = 16
    targets: tuple[str, ...] = ("all-linear",)
    excluded: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    start: str | None = None
    seed: int = 0


def add_adapters(model: PreTrainedModel, settings: LoraSettings, base: str, saved: str | None = None) -> None:
    """Freeze the module and add adapters to it: those `saved` by a checkpoint, or as the settings say.

    New ones do not change the output yet, because the second matrix of each is zero. `base` is the path or hub name of
    the module.
    """
    peft = _peft()
    folder = saved or settings.start
    config = _read_config(folder, settings) if folder else _new_config(_linear_layers_only(model, settings))
    _check_names(model, settings)
    try:
        with (
            fork_rng(model.device),
            nullcontext() if folder and _has_old_names(Path(folder)) else _names_as_they_are(),
        ):
            torch.manual_seed(settings.seed)
            model.add_adapter(config, NAME)
    except ValueError as problem:
        raise LoraError(f"LoRA cannot be added to this model ({problem}); change model.target_modules") from problem
    _check_tied(model)
    config.base_model_name_or_path = str(Path(base).resolve()) if Path(base).exists() else base
    if folder:
        result = peft.set_peft_model_state_dict(model, peft.utils.load_peft_weights(folder, "cpu"), NAME)
        mismatched = [name for name in result.missing_keys if "lora_" in name] + list(result.unexpected_keys)
        if mismatched:
            raise LoraError(
                f"the adapters in {folder} do not fit this model ({mismatched[0]}); set model.path to their base"
            )
    model.eval()


@contextmanager
def _names_as_they_are() -> Iterator[None]:
    """A context in which PEFT takes target names as those of this model. By default it reads them as names of
    transformers 4, where experts were linear layers: all-linear would adapt experts and routers, and down_proj of a
    dense layer would mean the experts."""
    try:
        from peft.utils import transformers_weight_conversion as conversion
    except ImportError:  # older versions of PEFT
        yield
        return
    convert = conversion.convert_peft_config_for_transformers
    conversion.convert_peft_config_for_transformers = lambda *_, **__: None
    try:
        yield
    finally:
        conversion.convert_peft_config_for_transformers = convert


def _has_old_names(folder: Path) -> bool:
    """Whether the adapters are those of single experts, as transformers 4 names them."""
    if not (folder / WEIGHTS).is_file():
        return False
    with safe_open(folder / WEIGHTS, "pt") as weights:
        return any(re.search(r"\.experts\.\d+\.", name) for name in weights.keys())  # noqa: SIM118


def lora_rank(settings: LoraSettings) -> int:
    """The rank of the adapters: as configured, or that of the folder they come from."""
    return settings.rank or int(_stored(Path(settings.start))["r"] if settings.start else 0)


def has_adapters(model: PreTrainedModel) -> bool:
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def is_adapter_folder(path: str | Path) -> bool:
    return (Path(path) / CONFIG).is_file()


@contextmanager
def without_adapters(model: PreTrainedModel) -> Iterator[None]:
    """Disable the adapters inside the block, in eval mode: the policy before any training."""
    training = model.training
    model.disable_adapters()
    model.eval()
    try:
        yield
    finally:
        model.enable_adapters()
        model.train(training)


def adapter_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors of the adapters, by PEFT's names."""
    state = _peft().get_peft_model_state_dict(model, adapter_name=NAME, save_embedding_layers=False)
    return {f"base_model.model.{name}": value for name, value in state.items()}


def save_adapters(model: PreTrainedModel, weights: dict[str, Tensor], folder: Path) -> None:
    """Write a folder in PEFT's layout; `weights` come from `adapter_weights`, now or earlier."""
    folder.mkdir(parents=True, exist_ok=True)
    model.peft_config[NAME].save_pretrained(folder)
    save_file({name: value.contiguous() for name, value in weights.items()}, folder / WEIGHTS, {"format": "pt"})


@torch.no_grad()
def merged_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights of an equivalent model without adapters, up to one rounding to the dtype of the weights."""
    from peft.tuners.lora import LoraLayer

    layers: dict[str, Any] = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    state, merged = model_state(model), {}
    if ranks_of(model).rank > 0:
        return {}  # only rank 0 has the whole tensors
    parameters = {f"{_unwrapped(name)}.{x.parameter_name}": x for name, x in layers.items() if _adapts_parameter(x)}
    for key, value in state.items():
        if "lora_" in key:
            continue
        owner, inside, kind = key.rpartition(".base_layer.")
        plain = _unwrapped(key)
        if plain in parameters:
            value = (value.float() + parameters[plain].get_delta_weight(NAME).float()).to(value.dtype).cpu()
        elif inside and kind == "weight":
            value = (value.float() + _delta(owner, layers[owner], state)).to(value.dtype).cpu()
        merged[plain] = value
    return merged


def _unwrapped(name: str) -> str:
    return name.replace(".base_layer", "")


def _adapts_parameter(layer: Any) -> bool:
    """Whether the layer is PEFT's wrapper of one parameter of a module; several are nested."""
    return hasattr(layer, "parameter_name")


def unadapted_experts(model: PreTrainedModel) -> str | None:
    """A sentence if the model has LoRA adapters but none on its experts, which are parameters and not linear layers."""
    adapted = {_unwrapped(name) for name, layer in model.named_modules() if _adapts_parameter(layer)}
    experts = {
        f"{module}.{name}": parameter.numel()
        for module, layer in model.named_modules()
        for name, parameter in layer.named_parameters(recurse=False)
        if parameter.ndim == 3 and _unwrapped(module) not in adapted
    }
    if not has_adapters(model) or not experts:
        return None
    kinds = sorted({".".join(name.split(".")[-3:]) for name in experts})
    share = sum(experts.values()) / sum(p.numel() for p in model.parameters())
    return (
        f"the experts of this model, {share:.0%} of its weights, get no LoRA adapters, because they are parameters and "
        f"not linear layers; model.target_parameters=[{','.join(kinds)}] adapts them"
    )


def _delta(owner: str, layer: Any, state: Mapping[str, Tensor]) -> Tensor:
    """What an adapter adds to its base weight, from the whole tensors: a layer may hold only a shard."""
    is_embedding = f"{owner}.lora_embedding_A.{NAME}" in state
    kind = f"lora_embedding_{{}}.{NAME}" if is_embedding else f"lora_{{}}.{NAME}.weight"
    a, b = (state[f"{owner}.{kind.format(matrix)}"].float() for matrix in "AB")
    delta: Tensor = (b @ a) * layer.scaling[NAME]
    return delta.T if is_embedding or layer.fan_in_fan_out else delta


def plain_twin(model: PreTrainedModel) -> PreTrainedModel:
    """The model without adapters, on the meta device: used to save weights that are passed to it."""
    with torch.device("meta"):
        twin: Any = type(model)(copy.deepcopy(model.config))
    twin = twin.to(model.dtype)
    if model.can_generate():
        twin.generation_config = model.generation_config
    assert isinstance(twin, PreTrainedModel)
    return twin


def check_resumable(actor: Path, lora: LoraSettings | None) -> None:
    """Raise LoraError unless the checkpoint and the run agree on using LoRA."""
    adapters = is_adapter_folder(actor)
    if adapters and lora is None:
        raise LoraError(f"{actor} was trained with LoRA; set model.lora_rank={_stored(actor).get('r')} to resume it")
    if lora is not None and not adapters:
        raise LoraError(f"{actor} was trained without LoRA; leave model.lora_rank out, or start a new run with it")


def _peft() -> Any:
    try:
        import peft
    except ImportError as missing:
        raise LoraError('LoRA needs the peft package: pip install "rally-rl[lora]"') from missing
    return peft


def _new_config(settings: LoraSettings) -> Any:
    return _peft().LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=_names(settings.targets),
        exclude_modules=_names(settings.excluded) if settings.excluded else None,
        target_parameters=list(settings.parameters) or None,
        task_type="CAUSAL_LM",
    )


def _linear_layers_only(model: PreTrainedModel, settings: LoraSettings) -> LoraSettings:
    """With the default targets, exclude the vision tower, routers and other special linear layers, and the layers of
    Mamba that PEFT does not adapt. Explicit targets may include them."""
    if settings.targets != LoraSettings.targets:
        return settings
    parts = image_parts_of(model)
    patterns = [rf"({'|'.join(map(re.escape, parts))})(\..*)?"] if parts else []
    special = (name for name, m in model.named_modules() if isinstance(m, nn.Linear) and type(m) is not nn.Linear)
    patterns += map(re.escape, special)
    if model.config.get_text_config().model_type in MAMBA:
        patterns.append(r"(.*\.)?out_proj")
    if settings.excluded:
        own = _names(settings.excluded)
        patterns.append(own if isinstance(own, str) else rf"(.*\.)?({'|'.join(map(re.escape, own))})")
    return replace(settings, excluded=("|".join(f"({p})" for p in patterns),)) if patterns else settings


def _read_config(folder: str, settings: LoraSettings) -> Any:
    if not is_adapter_folder(folder):
        raise LoraError(f"{folder} contains no {CONFIG}; set {KEY} to a folder of LoRA adapters")
    stored = _stored(Path(folder))
    if stored.get("peft_type") != "LORA" or stored.get("use_dora") or stored.get("modules_to_save"):
        raise LoraError(
            f"{folder} contains adapters other than plain LoRA, which are not supported; train new ones, without {KEY}"
        )
    configured = {"r": settings.rank or None, "lora_alpha": None if settings.start else settings.alpha}
    for name, value in configured.items():
        if value is not None and value != stored[name]:
            key = "model.lora_rank" if name == "r" else "model.lora_alpha"
            raise LoraError(
                f"the adapters in {folder} have {key}={stored[name]}, not {value}; set {key}={stored[name]}"
            )
    config = _peft().LoraConfig.from_pretrained(folder)
    config.inference_mode = False
    return config


def _stored(folder: Path) -> dict[str, Any]:
    stored = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    assert isinstance(stored, dict)
    return stored


def _names(texts: Sequence[str]) -> str | list[str]:
    """PEFT's form of module names: a single text that is not a name is a pattern, names match suffixes."""
    pattern = len(texts) == 1 and (texts[0] == "all-linear" or not _is_name(texts[0]))
    return texts[0] if pattern else list(texts)


def _is_name(text: str) -> bool:
    return re.fullmatch(r"[\w.]+", text) is not None


def _check_names(model: PreTrainedModel, settings: LoraSettings) -> None:
    """Raise LoraError for a name that matches no module: PEFT ignores it silently if another one matches."""
    if settings.start:
        return
    modules = [name for name, _ in model.named_modules()]
    known = [name for name, _ in model.named_parameters()]
    for text in settings.parameters:
        if not any(name == text or name.endswith(f".{text}") for name in known):
            experts = sorted({".".join(n.split(".")[-3:]) for n, p in model.named_parameters() if p.ndim == 3})
            advice = f"use {', '.join(experts)}" if experts else "this model has no experts; leave it out"
            raise LoraError(f"model.target_parameters={text} matches no parameter of this model; {advice}")
    for key, texts in (("target_modules", settings.targets), ("exclude_modules", settings.excluded)):
        for text in texts if isinstance(_names(texts), list) else ():
            if not any(name == text or name.endswith(f".{text}") for name in modules):
                linear = sorted({n.rpartition(".")[2] for n, m in model.named_modules() if type(m) is torch.nn.Linear})
                raise LoraError(f"model.{key}={text} matches no module of this model; use {', '.join(linear)}")


def _check_tied(model: PreTrainedModel) -> None:
    """Raise LoraError for adapters on tied weights: they change one use of the matrix, and merging changes all."""
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    if tied and any(hasattr(e, "base_layer") for e in embeddings):
        raise LoraError("this model's embeddings are tied to its LM head, so LoRA cannot adapt either; leave them out")
    users: dict[int, str] = {}
    for name, layer in model.named_modules():
        weight = getattr(getattr(layer, "base_layer", None), "weight", None)
        if not isinstance(weight, Tensor) or _adapts_parameter(layer):
            continue
        other = users.setdefault(id(weight), name)
        if other != name:
            raise LoraError(
                f"{other} and {name} of this model share one weight, so LoRA cannot adapt either; name other layers in "
                "model.target_modules"
            )
