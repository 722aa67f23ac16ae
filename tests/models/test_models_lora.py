"""LoRA trains only the adapters: the engine samples from them, the reference is the base model, PEFT loads the
files."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import make_model
from train_cases import KeepingPolicy, Paper, difference, run_config, same, small_policy, uneven_episodes, weights
from transformers import AutoModelForCausalLM, PreTrainedModel

from rally.chat import tiny_tokenizer
from rally.engines.base import EngineError
from rally.engines.embedded import EngineCore, EngineSettings
from rally.models.fused_layers import fusable
from rally.models.load import LoadError, load_model
from rally.models.lora import LoraError, LoraSettings, add_adapters, merged_weights, plain_twin, without_adapters
from rally.runs.evaluate import evaluate
from rally.runs.train import train
from rally.train.batch import build_batch
from rally.train.checkpoint.store import CheckpointStore, open_checkpoint
from rally.train.forward.deterministic_logprobs import exact_decoder
from rally.train.forward.logprobs import token_logprobs
from rally.train.packing import Row, pack
from rally.train.policy import Policy
from rally.train.reference import BaseOfPolicy, FrozenModel
from rally.train.update import UpdateSettings, update_policy
from rally.types import SamplingParams
from rally.util.checksums import seal

peft = pytest.importorskip("peft")
IDS = torch.arange(20)[None]
M = "actor_rollout_ref.model"
WITH_KL = UpdateSettings(mini_batch_groups=8, kl_coef=0.7)


def adapted(dtype: torch.dtype = torch.float32, trained: bool = True, **settings: Any) -> PreTrainedModel:
    """A small model with adapters that have an effect if `trained`."""
    model = make_model()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    add_adapters(model, LoraSettings(**{"rank": 4, "alpha": 8} | settings), "somewhere")
    if trained:
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data = (0.1 * torch.randn(parameter.shape)).to(dtype)
    return model


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=IDS).logits


def test_new_adapters_change_nothing_and_switched_off_ones_are_the_base() -> None:
    base = logits(make_model())
    assert torch.equal(logits(adapted(trained=False)), base)
    model = adapted()
    assert not torch.allclose(logits(model), base, atol=1e-2)
    with without_adapters(model):
        assert torch.equal(logits(model), base)
    assert not torch.allclose(logits(model), base, atol=1e-2) and not model.training


def test_new_adapters_are_a_function_of_the_seed() -> None:
    first, again, other = (adapted(trained=False, seed=seed) for seed in (3, 3, 4))
    assert same(weights(first), weights(again)) and not same(weights(first), weights(other))
    torch.manual_seed(5)
    drawn = torch.rand(())
    model = make_model()
    torch.manual_seed(5)
    add_adapters(model, LoraSettings(rank=2), "somewhere")
    plain_twin(model)
    assert torch.equal(torch.rand(()), drawn), "nobody else's random numbers depend on it"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_adapters_move_and_their_masters_are_float32(dtype: torch.dtype) -> None:
    policy = small_policy(adapted(dtype, trained=False), lr=1e-2)
    before = weights(policy.model)
    update_policy(policy, build_batch(uneven_episodes()), UpdateSettings(mini_batch_groups=1))
    moved = {name for name, value in weights(policy.model).items() if not torch.equal(value, before[name])}
    assert moved and all("lora_" in name for name in moved)
    assert all(master.dtype == torch.float32 for master in policy.masters.values())
    assert policy.masters.keys() == {name for name in before if "lora_" in name}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_base_as_reference_gives_the_gradient_of_a_second_model(checkpointing: bool) -> None:
    """The adapters are switched off between the policy's forward and its backward."""
    kept = []
    for second in (False, True):
        policy = KeepingPolicy(adapted(), gradient_checkpointing=checkpointing)
        reference = FrozenModel(make_model()) if second else BaseOfPolicy(policy.model)
        metrics = update_policy(policy, build_batch(uneven_episodes()), WITH_KL, reference=reference)
        kept.append(policy.kept[0])
        assert metrics["actor/kl_loss"] > 1e-3
    assert difference(*kept) == 0


def test_a_bfloat16_policy_ends_where_it_would_with_a_second_model() -> None:
    frozen = make_model()
    for parameter in frozen.parameters():
        parameter.data = parameter.data.bfloat16()
    ends = []
    for second in (False, True):
        policy = small_policy(adapted(torch.bfloat16), lr=1e-3)
        reference = FrozenModel(frozen) if second else BaseOfPolicy(policy.model)
        for seed in (1, 2):
            update_policy(policy, build_batch(uneven_episodes(seed)), WITH_KL, reference=reference)
        ends.append({name: master.detach() for name, master in policy.masters.items()})
    assert same(*ends)


def generate(model: PreTrainedModel, **settings: Any) -> tuple[list[int], list[float]]:
    core = EngineCore(model, EngineSettings(max_model_len=64, max_num_seqs=4, **settings), num_pages=32)
    request = core.add(list(range(12)), SamplingParams(max_tokens=20, seed=3))
    while core.busy:
        core.step()
    result = request.result()
    return list(result.ids), list(result.logprobs)


@pytest.mark.parametrize("backend", ["gather", "paged"])
@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "down_proj"), ("lm_head",), ("embed_tokens",)])
def test_the_engine_samples_from_the_adapted_policy(backend: str, targets: tuple[str, ...]) -> None:
    model = adapted(targets=targets)
    if targets == ("embed_tokens",):  # the first matrix of an embedding's adapter is the one that begins at zero
        torch.nn.init.normal_(model.model.embed_tokens.lora_embedding_A["default"], std=0.1)
    ids, found = generate(model, backend=backend)
    whole = torch.tensor([list(range(12)) + ids])
    with torch.no_grad():
        expected = torch.log_softmax(model(input_ids=whole).logits[0].float(), -1)
    told = [float(expected[11 + i, token]) for i, token in enumerate(ids)]
    assert found == pytest.approx(told, abs=2e-5)
    with without_adapters(model), torch.no_grad():
        bare = torch.log_softmax(model(input_ids=whole).logits[0].float(), -1)
    assert max(abs(float(bare[11 + i, t]) - p) for i, (t, p) in enumerate(zip(ids, found, strict=True))) > 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_moves_what_the_engine_holds(dtype: torch.dtype, tmp_path: Path) -> None:
    """CUDA graphs and packed products hold addresses: an update, a reference and a checkpoint must not move tensors."""
    model = adapted(dtype)
    policy = small_policy(model, lr=1e-2)
    core = EngineCore(model, EngineSettings(max_model_len=64, max_num_seqs=4, backend="paged"), num_pages=32)
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    packed = core.runner.fused.layers[0].qkv.inner  # type: ignore[attr-defined]
    before = packed.clone()
    update_policy(policy, build_batch(uneven_episodes()), WITH_KL, reference=BaseOfPolicy(model))
    saved = open_checkpoint(CheckpointStore(tmp_path, warn=print).save(1, policy, tiny_tokenizer()))
    policy.load_state(saved.state())
    assert places == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    assert not torch.equal(packed, before), "the optimizer wrote where the engine reads"
    again = make_model()
    for parameter in again.parameters():
        parameter.data = parameter.data.to(dtype)
    add_adapters(again, LoraSettings(rank=4, alpha=8), "somewhere", str(saved.actor))
    assert same(weights(again), weights(model))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("eager", [False, True])
def test_the_engine_samples_from_the_adapted_policy_on_a_gpu(eager: bool) -> None:
    """Through CUDA graphs, and after an update that writes the adapters in place."""
    model = adapted(torch.bfloat16).cuda()
    core = EngineCore(model, EngineSettings(max_model_len=64, max_num_seqs=4, eager=eager), num_pages=32)
    for change in (0.0, 0.05):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.add_(change if "lora_B" in name else 0.0)
        core.drain()
        core.commit_weights()
        request = core.add(list(range(12)), SamplingParams(max_tokens=20, seed=3))
        while core.busy:
            core.step()
        result = request.result()
        row = Row(ids=(*range(12), *result.ids), sampled=tuple(range(12, 32)), logprobs=result.logprobs, episode=0)
        with torch.no_grad():
            trained = token_logprobs(model, pack([row], model.device)).logp_M
            with without_adapters(model):
                bare = token_logprobs(model, pack([row], model.device)).logp_M
        sampled = torch.tensor(result.logprobs, device=model.device)
        assert float((trained - sampled).abs().mean()) < 0.03 < float((bare - sampled).abs().mean())


def test_a_deterministic_forward_passes_over_no_adapters() -> None:
    assert fusable(make_model(), invariant=True)
    for targets in (("all-linear",), ("lm_head",), ("embed_tokens",), ("o_proj",)):
        model = adapted(targets=targets)
        assert fusable(model) and not fusable(model, invariant=True)
        with pytest.raises(EngineError, match=r"without adapters"):
            exact_decoder(model)
        with pytest.raises(EngineError, match=r"without adapters"):
            generate(model, backend="paged", deterministic=True)


def test_training_and_rollout_agree() -> None:
    model = adapted()
    ids, found = generate(model)
    row = Row(ids=(*range(12), *ids), sampled=tuple(range(12, 32)), logprobs=tuple(found), episode=0)
    packed = pack([row], torch.device("cpu"))
    assert token_logprobs(model, packed).logp_M.tolist() == pytest.approx(found, abs=2e-5)


def test_merged_weights_compute_the_same() -> None:
    for targets in (("all-linear",), ("lm_head", "q_proj")):
        model = adapted(targets=targets)
        plain = make_model()
        plain.load_state_dict(merged_weights(model))
        assert torch.allclose(logits(plain), logits(model), atol=2e-5)


def test_a_pattern_names_modules_too() -> None:
    model = adapted(targets=(r".*layers\.[01]\..*q_proj",), trained=False)
    trained = {name.partition(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {f"model.layers.{i}.self_attn.q_proj" for i in (0, 1)}
    model = adapted(targets=("q_proj", "k_proj"), excluded=("layers.1.self_attn.k_proj",), trained=False)
    trained = {name.partition(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 5 and "model.layers.1.self_attn.k_proj" not in trained


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"targets": ("q_proj", "w_proj")},
            r"model.target_modules=w_proj matches no module .*; use down_proj",
        ),
        ({"targets": ("q_proj",), "excluded": ("x",)}, "model.exclude_modules=x matches no module"),
        ({"targets": (".*nothing",)}, "LoRA cannot be added to this model .*; change model.target_modules"),
        ({"start": "."}, "contains no adapter_config.json; set model.lora_adapter_path to a folder"),
    ],
)
def test_mistakes_are_told(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(LoraError, match=words):
        adapted(**settings)


def test_tied_embeddings_are_not_adapted(home: Path) -> None:
    model = load_model(str(home / "model"))
    with pytest.raises(LoraError, match=r"embeddings are tied to its LM head"):
        add_adapters(model, LoraSettings(rank=4, targets=("embed_tokens",)), "somewhere")


LORA = (
    f"{M}.lora_rank=4",
    f"{M}.lora_alpha=8",
    "actor_rollout_ref.actor.optim.lr=0.01",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.kl_loss_coef=0.1",
    "actor_rollout_ref.rollout.deterministic=true",
    "trainer.save_freq=2",
    "trainer.total_training_steps=4",
    "trainer.val_before_train=false",
)


@pytest.fixture(scope="module")
def finished(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with LoRA, checkpoints after 2 and 4 with the merged model in them."""
    out = tmp_path_factory.mktemp("lora")
    contents = "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]"
    train(run_config(home, out, *LORA, contents), Paper().console)
    return out


def actor_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"global_step_{step}" / "actor"


def metrics_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_trains_adapters_that_rollout_and_trainer_agree_about(finished: Path) -> None:
    last = metrics_of(finished)[-1]
    assert last["actor/rollout_mismatch_max"] < 1e-4 and last["actor/kl_loss"] > 0
    names = {path.name for path in actor_of(finished, 4).iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "huggingface"} <= names
    assert "model.safetensors" not in names


def test_saved_adapters_load_with_peft_and_merged_ones_with_transformers(home: Path, finished: Path) -> None:
    actor = actor_of(finished, 4)
    base = AutoModelForCausalLM.from_pretrained(home / "model").eval()
    plain = logits(base)
    loaded = peft.PeftModel.from_pretrained(base, actor).eval()
    assert not torch.allclose(logits(loaded), plain, atol=1e-3), "four steps must have moved something"
    whole, found = AutoModelForCausalLM.from_pretrained(actor / "huggingface", output_loading_info=True)
    assert not any(found.values())
    assert torch.allclose(logits(whole), logits(loaded), atol=1e-5)
    config = json.loads((actor / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str((home / "model").resolve())
    assert (config["r"], config["lora_alpha"], config["task_type"]) == (4, 8, "CAUSAL_LM")


def test_resuming_with_adapters_is_exact(home: Path, finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "global_step_4")
    train(run_config(home, tmp_path / "run", *LORA), Paper().console)
    ours, theirs = (actor_of(run, 4) / "adapter_model.safetensors" for run in (tmp_path / "run", finished))
    assert ours.read_bytes() == theirs.read_bytes()
    assert not (actor_of(tmp_path / "run", 4) / "huggingface").exists()


def test_a_run_may_begin_with_adapters_and_evaluate_them(home: Path, finished: Path, tmp_path: Path) -> None:
    path = f"{M}.lora_adapter_path={actor_of(finished, 4)}"
    name = "val-core/rally/arithmetic/reward/mean@1"
    outcome = evaluate(run_config(home, tmp_path / "eval", path), Paper().console)
    assert outcome.metrics[name] == metrics_of(finished)[-1][name]
    with pytest.raises(LoraError, match=r"have model.lora_rank=4, not 8; set model.lora_rank=4"):
        evaluate(run_config(home, tmp_path / "other", path, f"{M}.lora_rank=8"), Paper().console)


def test_a_checkpoint_goes_on_the_way_it_was_trained(home: Path, finished: Path, tmp_path: Path) -> None:
    longer = "trainer.total_training_steps=6"
    shutil.copytree(finished, tmp_path / "run")
    with pytest.raises(LoraError, match=r"was trained with LoRA; set model.lora_rank=4 to resume it"):
        train(run_config(home, tmp_path / "run", longer), Paper().console)
    with pytest.raises(LoraError, match=r"have model.lora_alpha=8, not 16"):
        train(run_config(home, tmp_path / "run", longer, f"{M}.lora_rank=4"), Paper().console)
    whole = actor_of(finished, 4) / "huggingface"
    shutil.rmtree(actor_of(tmp_path / "run", 4))
    shutil.copytree(whole, actor_of(tmp_path / "run", 4))
    seal(tmp_path / "run" / "checkpoints" / "global_step_4")
    with pytest.raises(LoraError, match=r"was trained without LoRA; leave model.lora_rank out"):
        train(run_config(home, tmp_path / "run", longer, *LORA[:2]), Paper().console)


def test_adapters_are_no_model(finished: Path) -> None:
    with pytest.raises(LoadError, match=r"contains LoRA adapters, not a whole model; .* rally merge"):
        load_model(str(actor_of(finished, 4)))


def test_a_bfloat16_run_resumes_from_its_masters(tmp_path: Path) -> None:
    def policy_of(saved: Path | None = None) -> Policy:
        model = make_model()
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
        add_adapters(model, LoraSettings(rank=4), "somewhere", str(saved) if saved else None)
        return small_policy(model, lr=1e-3)

    def steps(policy: Policy, *seeds: int) -> None:
        for seed in seeds:
            update_policy(policy, build_batch(uneven_episodes(seed)), UpdateSettings(mini_batch_groups=2))

    policy = policy_of()
    steps(policy, 1, 2)
    found = open_checkpoint(CheckpointStore(tmp_path, warn=print).save(2, policy, tiny_tokenizer()))
    steps(policy, 3)
    resumed = policy_of(found.actor)
    resumed.load_state(found.state())
    steps(resumed, 3)
    assert same(weights(resumed.model), weights(policy.model))
