"""`rally merge`: merges adapters into their base, weights in several files, or FSDP shards, into one model folder.

The folder is written under a temporary name and loaded with transformers before it gets its own: no weight may be
missing.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from rally.models.load import (
    INDEX,
    UNREADABLE,
    WHOLE,
    LoadError,
    load_model,
    load_model_config,
    load_tokenizer,
    reloading_problem,
    save_tokenizer,
)
from rally.models.lora import CONFIG, LoraSettings, add_adapters, is_adapter_folder, merged_weights, plain_twin
from rally.models.vision import set_patches
from rally.models.vision_loading import auto_class, patches_for, processor_files
from rally.types import RallyError
from rally.util.checksums import MANIFEST, damage, reason, seal, weights_damage

NAME = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
HF = "huggingface"
"""The folder beside the shards with the model's configuration and tokenizer."""


class ShardError(RallyError):
    """FSDP shards that are missing or inconsistent."""


def has_shards(folder: Path) -> bool:
    return any(NAME.fullmatch(file.name) for file in folder.iterdir())


def joined_shards(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the model, joined from all shards."""
    ranks = [_read(file) for file in shard_files(folder)]
    if odd := next((name for rank in ranks for name in rank.keys() ^ ranks[0].keys()), None):
        raise ShardError(f"{odd} is in some shards of {folder} and not in others; copy all shards of one run")
    return {name: _joined(name, [rank[name] for rank in ranks]) for name in ranks[0]}


def shard_files(folder: Path) -> list[Path]:
    """The files of all ranks, in order. All must exist."""
    files = {int(match[2]): (file, int(match[1])) for file in folder.iterdir() if (match := NAME.fullmatch(file.name))}
    worlds = {world for _, world in files.values()}
    if len(worlds) != 1:
        raise ShardError(f"{folder} holds shards of runs on {sorted(worlds)} devices; keep those of one run")
    [world] = worlds
    if lost := sorted(set(range(world)) - files.keys()):
        raise ShardError(f"{folder} lacks the shard of rank {lost[0]} of {world}; copy all of them")
    return [files[rank][0] for rank in range(world)]


def _read(file: Path) -> Mapping[str, Any]:
    try:
        state: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ShardError(f"{file} cannot be read ({reason}); merge it with the program that wrote it") from error
    if not isinstance(state, Mapping):
        raise ShardError(f"{file} holds no tensors by name; merge it with the program that wrote it")
    return state


def _joined(name: str, pieces: Sequence[Any]) -> Tensor:
    first = pieces[0]
    if not isinstance(first, DTensor):
        whole: Tensor = first.clone()  # tied weights share memory in the file of a single device
        return whole
    sharded = [placement for placement in first.placements if isinstance(placement, Shard)]
    if len(sharded) > 1:
        raise ShardError(f"{name} is sharded along several dimensions; merge it with the program that wrote it")
    # the other dimensions of the mesh hold replicas: one of them is enough
    along = [slice(None) if isinstance(placement, Shard) else slice(0, 1) for placement in first.placements]
    ranks = first.device_mesh.mesh[tuple(along)].flatten().tolist()
    own: list[Tensor] = [pieces[rank].to_local() for rank in ranks]
    return torch.cat(own, dim=sharded[0].dim) if sharded else own[0].clone()


PROCESSOR = "preprocessor_config.json"


class MergeError(RallyError):
    """There is nothing to merge, or it cannot be merged."""


class Merged(NamedTuple):
    folder: Path
    what: str
    warning: str | None
    """What a user of the folder must know about its tokenizer."""


def merge(checkpoint: Path, out: Path | None = None, base: str | None = None) -> Merged:
    """Merge a checkpoint or model folder into one model at `out`."""
    target = out or checkpoint / "merged"
    source = checkpoint / "actor" if (checkpoint / "actor").is_dir() else checkpoint
    _refuse(source, target)
    _check_contents(checkpoint, source)
    work = target.with_name(f".writing_{target.name}_{os.getpid()}")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        if is_adapter_folder(source):
            _merge_adapters(source, work, base)
            what = "adapters merged into their base"
        elif has_shards(source):
            what = f"shards of {_merge_fsdp(source, work)} devices merged into one model"
        else:
            what = f"{_merge_shards(source, work)} files merged into one"
        warning = _check_whole(work)
        if target.is_dir():  # it holds the configuration and tokenizer of the shards
            os.replace(work / WHOLE, target / WHOLE)
        else:
            seal(work)
            work.rename(target)
    except SafetensorError as problem:  # a damaged file or a full disk
        raise MergeError(
            f"{source} cannot be merged into {target} ({problem}); free disk space, or copy a damaged file again"
        ) from problem
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return Merged(target, what, warning)


def _refuse(source: Path, target: Path) -> None:
    if not source.is_dir():
        raise MergeError(f"there is no folder {source}; name a checkpoint, such as checkpoints/global_step_20")
    if target.exists() and not _awaits_weights(source, target):
        raise MergeError(f"{target} already exists; remove it, or choose another folder with --out")
    if is_adapter_folder(source) or (source / INDEX).is_file() or has_shards(source):
        return
    if (source / WHOLE).is_file():
        raise MergeError(f"{source} is already a single model; load it as it is")
    raise MergeError(
        f"{source} holds neither {CONFIG} nor {INDEX}; name a folder with adapters or with a model in several files"
    )


def _check_contents(checkpoint: Path, source: Path) -> None:
    """MergeError for a checkpoint, or a model of one, whose files differ from their checksums."""
    problem = weights_damage(source)
    if problem is None and (checkpoint / MANIFEST).is_file():
        problem = damage(checkpoint)
    if problem is not None:
        raise MergeError(f"{checkpoint} is damaged ({problem}); copy it again, or merge another checkpoint")


def _awaits_weights(source: Path, target: Path) -> bool:
    """Whether `target` is the folder beside FSDP shards that has everything of the model but its weights."""
    return target.resolve() == (source / HF).resolve() and has_shards(source) and not (target / WHOLE).exists()


def _merge_fsdp(source: Path, target: Path) -> int:
    described = source / HF
    if not (described / "config.json").is_file():
        raise MergeError(f"{described / 'config.json'} is missing and describes the model; copy it there")
    dtype = getattr(torch, _stored_dtype(str(described)))
    weights = {name: value.to(dtype).contiguous() for name, value in joined_shards(source).items()}
    save_file(weights, target / WHOLE, metadata={"format": "pt"})
    for file in described.iterdir():
        if file.is_file():
            shutil.copy2(file, target / file.name)
    return len(shard_files(source))


def _merge_adapters(source: Path, target: Path, base: str | None) -> None:
    recorded = json.loads((source / CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    path = base or recorded
    if not path:
        raise MergeError(f"{source / CONFIG} does not name the base model; name it with --base")
    try:
        model = load_model(path, dtype=_stored_dtype(path), option="--base")
    except LoadError as problem:
        raise MergeError(f"the base model of the adapters cannot be loaded: {problem}") from problem
    add_adapters(model, LoraSettings(start=str(source)), path)
    plain_twin(model).save_pretrained(target, state_dict=merged_weights(model))
    tokenizer = source if (source / "tokenizer_config.json").is_file() else path
    save_tokenizer(load_tokenizer(str(tokenizer)), target)
    seen = str(source if (source / PROCESSOR).is_file() else path)
    if patches := patches_for(model.config, seen, {}, tokenizer_path=str(tokenizer)):
        set_patches(model, patches)
    for name, data in processor_files(model).items():
        (target / name).write_bytes(data)


def _stored_dtype(path: str) -> str:
    """The dtype of the base on disk, to which the merged weights are rounded once."""
    if path.endswith(".gguf"):
        return "float32"
    stored = load_model_config(path, option="--base").dtype
    return str(stored or "float32").removeprefix("torch.")


def _merge_shards(source: Path, target: Path) -> int:
    """Write all tensors into one file and copy all other files. Returns how many weight files there were."""
    places: dict[str, str] = json.loads((source / INDEX).read_text(encoding="utf-8"))["weight_map"]
    shards = sorted(set(places.values()))
    weights: dict[str, Tensor] = {}
    for shard in shards:
        if not (source / shard).is_file():
            raise MergeError(f"{source / shard} is missing, so the model cannot be merged; copy all its files")
        with safe_open(source / shard, framework="pt") as file:
            weights |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    if lost := sorted(places.keys() - weights.keys()):
        raise MergeError(f"{lost[0]} is in none of the files that {INDEX} names; copy all files of the model again")
    save_file(weights, target / WHOLE, metadata={"format": "pt"})
    for file in source.iterdir():
        if file.is_file() and file.name not in {INDEX, *shards}:
            shutil.copy2(file, target / file.name)
    return len(shards)


def _check_whole(folder: Path) -> str | None:
    """Load the merged folder: transformers would silently initialize missing weights at random. Returns a warning if
    transformers loads its tokenizer differently."""
    try:
        config = load_model_config(str(folder))
        loaded: Any = auto_class(config).from_pretrained(folder, output_loading_info=True, dtype="auto")
    except UNREADABLE as problem:
        raise MergeError(f"the merged model does not load ({reason(problem)}); no folder was written") from problem
    info = loaded[1]
    wrong = [name for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for name in info[kind]]
    if wrong:
        raise MergeError(f"the merged model does not load correctly ({wrong[0]}); no folder was written")
    if not (folder / "tokenizer_config.json").is_file():
        return "the merged folder has no tokenizer, because its source has none; copy the files of the tokenizer there"
    return reloading_problem(load_tokenizer(str(folder)), config)
