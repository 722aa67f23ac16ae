"""Distillation trains on exactly the sampled tokens with the teacher's exact distribution, in every layout and run."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from train_cases import (
    Gradients,
    KeepingPolicy,
    Paper,
    assert_equal,
    calm_model,
    run_config,
    same,
    small_policy,
    uneven_episodes,
    weights,
    write_model,
)
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from rally.algos.distillation import DistillationSettings
from rally.algos.losses import token_weights
from rally.chat.tiny_tokenizer import tiny_tokenizer
from rally.config import ConfigError
from rally.runs.train import train
from rally.track import RunFolder
from rally.train.batch import TrainBatch, build_batch
from rally.train.reference import FrozenModel
from rally.train.startup_check import check_frozen, compared_rows
from rally.train.teacher import TeacherError, Teachers, check_shared_vocabulary
from rally.train.update import UpdateSettings, update_policy

MODES = ("k2", "k3", "forward_kl_topk", "forward_kl_full", "reverse_kl_full", "jsd_full")


def larger_model(seed: int = 9) -> PreTrainedModel:
    """A teacher of another size, with more rows in its embedding than the student's."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=calm_model().config.vocab_size + 8,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    return Qwen2ForCausalLM(config).eval()


def settings_of(mode: str, **changes: object) -> UpdateSettings:
    distillation = DistillationSettings(mode=mode, topk=5, with_rewards=False, **changes)  # type: ignore[arg-type]
    return UpdateSettings(mini_batch_groups=100, distillation=distillation, temperature=0.8)


def teachers_of(settings: UpdateSettings, **models: PreTrainedModel) -> Teachers:
    assert settings.distillation is not None
    found = {name: FrozenModel(model, offload=True) for name, model in (models or {"default": larger_model()}).items()}
    return Teachers(found, settings.distillation, calm_model().config.vocab_size)


def gradient(batch: TrainBatch, settings: UpdateSettings) -> Gradients:
    policy = KeepingPolicy(calm_model())
    update_policy(policy, batch, settings, teachers=teachers_of(settings))
    [kept] = policy.kept
    return kept


def dense_gradient(batch: TrainBatch, settings: UpdateSettings) -> Gradients:
    """From plain forwards, row by row, over the full vocabulary."""
    student, teacher, chosen = calm_model(), larger_model(), settings.distillation
    assert chosen is not None
    weights_N = token_weights(batch.tokens_N, settings.aggregation)
    size = student.config.vocab_size
    for row in batch.rows:
        ids = torch.tensor([row.ids.tolist()])
        at = torch.tensor(row.sampled.tolist())
        q = torch.log_softmax(student(input_ids=ids).logits[0, at - 1] / settings.temperature, -1)
        with torch.no_grad():
            logits = teacher(input_ids=ids).logits[0, at - 1]
        p, common = torch.log_softmax(logits, -1), torch.log_softmax(logits[:, :size], -1)
        mine, theirs = (x.gather(1, ids[0, at][:, None])[:, 0] for x in (q, p))
        if chosen.mode == "k2":
            loss = 0.5 * (mine - theirs) ** 2
        elif chosen.mode == "k3":
            loss = ((theirs - mine).exp() - (theirs - mine) - 1).clamp(-10, 10)
        elif chosen.mode == "forward_kl_topk":
            top, where = p[:, :size].topk(chosen.topk)
            loss = (top.exp() * (top - q.gather(1, where))).sum(-1).clamp_min(0)
        elif chosen.mode == "forward_kl_full":
            loss = (common.exp() * (common - q)).sum(-1)
        elif chosen.mode == "reverse_kl_full":
            loss = (q.exp() * (q - common)).sum(-1)
        else:
            m = (0.5 * common.exp() + 0.5 * q.exp()).log()
            loss = 0.5 * (common.exp() * (common - m)).sum(-1) + 0.5 * (q.exp() * (q - m)).sum(-1)
        (loss * weights_N[row.episode]).sum().backward()
    return {name: p.grad for name, p in student.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mode", MODES)
def test_packed_equals_plain_forwards_row_by_row(mode: str) -> None:
    batch = build_batch(uneven_episodes())
    settings = settings_of(mode)
    whole = gradient(batch, settings)
    assert_equal(whole, dense_gradient(batch, settings), 2e-6)
    assert_equal(gradient(batch, replace(settings, max_tokens=40)), whole, 2e-6)


def test_the_loss_is_added_to_the_policy_loss_with_its_coefficient() -> None:
    batch = build_batch(uneven_episodes())
    alone = settings_of("k3")
    assert alone.distillation is not None
    both = replace(alone, distillation=replace(alone.distillation, with_rewards=True, coefficient=0.5))
    policy = KeepingPolicy(calm_model())
    update_policy(policy, batch, replace(alone, distillation=None))
    [rewards], distilled = policy.kept, gradient(batch, alone)
    zero = torch.zeros(())
    summed = {name: rewards.get(name, zero) + 0.5 * distilled[name] for name in distilled}
    assert_equal(gradient(batch, both), summed, 2e-6)


def test_each_row_is_compared_with_the_teacher_of_its_key() -> None:
    episodes = uneven_episodes()
    keys = {group: f"source{i % 2}" for i, group in enumerate(dict.fromkeys(e.group for e in episodes))}
    episodes = [replace(e, task=replace(e.task, data_source=keys[e.group])) for e in episodes]
    settings = settings_of("k3")
    models = {"source0": larger_model(1), "source1": larger_model(2)}

    def kept(chosen: list[int], **teachers: PreTrainedModel) -> Gradients:
        policy, found = KeepingPolicy(calm_model()), teachers_of(settings, **teachers)
        batch = found.assigned(build_batch(episodes), episodes)
        left = [row for row in batch.rows if row.episode in chosen]
        update_policy(policy, replace(batch, rows=left), settings, teachers=found)
        return policy.kept[0]

    by_key = [[i for i, e in enumerate(episodes) if e.task.data_source == key] for key in models]
    assert all(by_key)
    parts = [kept(some, only=model) for some, model in zip(by_key, models.values(), strict=True)]
    summed = {name: parts[0][name] + parts[1][name] for name in parts[0]}
    assert_equal(kept(list(range(len(episodes))), **models), summed, 2e-6)
    with pytest.raises(TeacherError, match="no teacher has the key 'source1'"):
        teachers_of(settings, source0=models["source0"], other=models["source1"]).assigned(
            build_batch(episodes), episodes
        )


def test_the_student_approaches_its_teacher() -> None:
    settings = settings_of("reverse_kl_full")
    policy, teachers = small_policy(calm_model(), lr=3e-3, total=40), teachers_of(settings)
    batch = build_batch(uneven_episodes())
    losses = [update_policy(policy, batch, settings, teachers=teachers)["distillation/loss"] for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]


def test_a_teacher_must_have_the_ids_of_the_policy() -> None:
    ours = tiny_tokenizer().get_vocab()
    check_shared_vocabulary(ours, dict(ours), len(ours) + 3, "the teacher")
    with pytest.raises(TeacherError, match="embedding has 4 rows"):
        check_shared_vocabulary(ours, ours, 4, "the teacher")
    more = ours | {"<new>": len(ours)}
    check_shared_vocabulary(ours, more, len(more), "the teacher")
    with pytest.raises(TeacherError, match=r"'<new>' has the id .* in the policy and none here; .*choose a teacher"):
        check_shared_vocabulary(more, ours, len(more), "the teacher")


def test_the_packed_forward_of_a_teacher_is_compared_with_its_own() -> None:
    model = larger_model()
    rows = compared_rows([list(range(5, 40)), list(range(40, 70))], 128)
    check_frozen(FrozenModel(model), rows, 128, "the teacher")
    assert all(not p.requires_grad for p in model.parameters())


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A larger random teacher with the tokenizer of the fixture `home`."""
    folder = write_model(tmp_path_factory.mktemp("teacher"), seed=5)
    stored = Qwen2Config.from_pretrained(folder).to_dict()
    config = Qwen2Config(**{**stored, "num_hidden_layers": 3, "layer_types": None})
    torch.manual_seed(4)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def words(teacher: Path, **loss: object) -> list[str]:
    return [
        "distillation.enabled=True",
        "distillation.n_gpus_per_node=8",
        f"distillation.teacher_models.teacher_model.model_path={teacher}",
        "distillation.teacher_models.teacher_model.inference.name=vllm",
        *(f"distillation.distillation_loss.{name}={value}" for name, value in loss.items()),
    ]


def test_two_steps_of_verls_distillation_and_a_resumed_run_are_the_same(
    home: Path, teacher: Path, tmp_path: Path, paper: Paper
) -> None:
    keys = words(
        teacher,
        loss_mode="k1",
        topk=64,
        use_task_rewards=False,
        use_policy_gradient=True,
        loss_max_clamp=10.0,
        log_prob_min_clamp=-10.0,
    )
    final = [AutoModelForCausalLM.from_pretrained(home / "model")]
    keys.append("actor_rollout_ref.rollout.deterministic=true")
    for out, stops in ((tmp_path / "whole", (2,)), (tmp_path / "resumed", (1, 2))):
        for steps in stops:
            train(run_config(home, out, *keys, f"trainer.total_training_steps={steps}"), paper.console)
        final.append(AutoModelForCausalLM.from_pretrained(out / "checkpoints" / "global_step_2" / "actor"))
    start, whole, resumed = (weights(model) for model in final)
    assert same(whole, resumed) and not same(start, whole)
    metrics = [row.metrics for row in RunFolder(tmp_path / "whole").read_metrics() if row.step]
    assert len(metrics) == 2 and all(row["distillation/abs_loss"] > 0 for row in metrics)
    assert all(row["distillation/pg_clipfrac"] == 0 for row in metrics)  # one mini-batch: on policy


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["distillation.enabled=true"], "needs a teacher"),
        ([*words(Path("t"), loss_mode="k1")], "does not depend on the teacher"),
        ([*words(Path("t"), use_task_rewards=False), "actor_rollout_ref.actor.entropy_coeff=0.1"], "has no effect"),
        ([*words(Path("t"), policy_loss_mode="gspo")], "policy_loss_mode"),
        ([*words(Path("t")), "distillation.teacher_models.b.model_path=u"], "several teachers"),
        (
            [*words(Path("t")), "distillation.teacher_models.teacher_model.inference.dtype=bf16"],
            "use one of auto, float",
        ),
        ([*words(Path("t"), loss_mode="jsd_full"), "trainer.n_gpus_per_node=2"], "one GPU only"),
    ],
)
def test_what_cannot_be_distilled_is_refused(home: Path, tmp_path: Path, changes: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_config(home, tmp_path, *changes)
