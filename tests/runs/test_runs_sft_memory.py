"""The memory plan of `rally sft` agrees with counted bytes, and refuses before weights are loaded."""

from pathlib import Path

import numpy as np
import pytest
from live_bytes import LiveBytes
from transformers import Qwen2Config, Qwen2ForCausalLM

from rally.chat import tiny_tokenizer
from rally.config import SftConfig, load_sft_config
from rally.data import write_rows
from rally.models import attention
from rally.runs import host_memory
from rally.runs import sft as sft_run
from rally.runs import sft_memory as planning
from rally.runs.build.run_inputs import RunError
from rally.runs.build.update_settings import offload_settings, optimizer_settings
from rally.runs.host_memory import checkpoint_bytes
from rally.runs.sft_memory import sft_memory
from rally.sft.training import sft_step
from rally.track import RunConsole
from rally.train import offload as offloading
from rally.train.divergence import GradientLimits
from rally.train.packing import Row
from rally.train.policy import Policy

SMALL = Qwen2Config(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=512,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)


def rows_of(count: int = 8, length: int = 256) -> list[Row]:
    return [
        Row(
            ids=np.arange(i, i + length, dtype=np.int32) % 512,
            sampled=np.arange(1, length, dtype=np.int32),
            logprobs=np.zeros(length - 1, np.float32),
            episode=i,
        )
        for i in range(count)
    ]


def config_of(tmp_path: Path, *keys: str) -> SftConfig:
    SMALL.save_pretrained(tmp_path)
    given = [f"model.path={tmp_path}", "data.train_batch_size=8", "data.max_token_len_per_gpu=2056"]
    return load_sft_config(overrides=[*given, "trainer.device=cpu", *keys])


def counted_peak(config: SftConfig, rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> int:
    """The most bytes that two steps held at once, without what was in main memory."""
    keys = config.model
    with LiveBytes() as live:
        monkeypatch.setattr(offloading, "host_copy", live.uncounted)
        model = Qwen2ForCausalLM(SMALL)
        for parameter in model.parameters():
            live.add(parameter)
        attention.install(model)
        policy = Policy(
            model,
            optimizer_settings(config.optim, 1.0, GradientLimits()),
            2,
            gradient_checkpointing=keys.enable_gradient_checkpointing,
            recompute=keys.recompute_num_layers,
            offload=offload_settings(keys.fsdp_config, keys.enable_activation_offload, 1),
        )
        live.peak = live.now
        for _ in range(2):
            sft_step(policy, rows, sft_run.sft_settings_of(config))
        return live.peak


@pytest.mark.parametrize(
    "keys",
    [
        (),
        ("model.enable_gradient_checkpointing=false",),
        ("model.recompute_num_layers=3",),
        ("model.fsdp_config.optimizer_offload=true",),
        ("optim.optimizer=AdamW8bit",),
        ("data.micro_batch_size_per_gpu=2", "model.enable_gradient_checkpointing=false"),
        ("data.max_token_len_per_gpu=512", "model.enable_gradient_checkpointing=false"),
    ],
    ids=["checkpointing", "all activations", "three layers", "optimizer offloaded", "8 bits", "two rows", "512 tokens"],
)
def test_the_plan_is_within_a_tenth_of_the_counted_peak(
    keys: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, rows = config_of(tmp_path, *keys), rows_of()
    planned = sum(one.bytes for one in sft_memory(config, rows).on_device())
    assert planned == pytest.approx(counted_peak(config, rows, monkeypatch), rel=0.1)


def test_what_cannot_fit_is_refused_before_weights_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    messages = [{"role": "user", "content": "2+3"}, {"role": "assistant", "content": "5"}]
    write_rows([{"messages": messages}] * 4, tmp_path / "rows.jsonl")
    files = (f"data.train_files={tmp_path}/rows.jsonl", f"trainer.default_local_dir={tmp_path}/run")
    monkeypatch.setattr(planning, "on_accelerator", lambda device: True)
    monkeypatch.setattr(sft_run, "sft_policy_of", lambda *given: pytest.fail("weights are loaded"))
    for memory, free, sentence in (
        (
            10**6,
            10**9,
            r"an update needs about .* set model\.fsdp_config\.optimizer_offload=true, or set optim\.optimizer=",
        ),
        (10**9, 10**6, r"the run needs about .* of main memory .* copy of a checkpoint\); set optim\.optimizer="),
    ):
        monkeypatch.setattr(planning, "memory_info", lambda device, memory=memory: (memory, memory))
        monkeypatch.setattr(planning, "free_bytes", lambda device, free=free: free)
        with pytest.raises(RunError, match=sentence) as told:
            sft_run.sft(config_of(tmp_path, *files), RunConsole())
        assert "actor." not in str(told.value) and "data.max_prompt" not in str(told.value)


def test_the_dry_run_prints_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    messages = [{"role": "user", "content": "2+3"}, {"role": "assistant", "content": "5"}]
    write_rows([{"messages": messages}] * 4, tmp_path / "rows.jsonl")
    sft_run.show(config_of(tmp_path, f"data.train_files={tmp_path}/rows.jsonl"), RunConsole())
    told = capsys.readouterr().out
    for what in ("memory plan", "Adam's two moments", "activations of the update", "main memory: the copy of a chec"):
        assert what in told


def test_the_plan_knows_ranks_and_offload_keys(tmp_path: Path) -> None:
    def plan(*keys: str) -> dict[str, int]:
        memory = sft_memory(config_of(tmp_path, *keys), rows_of())
        return {cost.what: cost.bytes for cost in (*memory.on_device(), *memory.in_main_memory())}

    whole, two = plan(), plan("trainer.n_gpus_per_node=2")
    assert two["weights"] == pytest.approx(whole["weights"] / 2, rel=0.01)
    assert "gathered layers" in two and "engine's copy of the policy" not in two
    gathered = plan("trainer.n_gpus_per_node=2", "model.fsdp_config.offload_policy=true")
    assert "weights" not in gathered and gathered["what training keeps there"] > whole["weights"]
    lora = plan("model.lora_rank=4")
    assert lora["Adam's two moments"] < whole["Adam's two moments"] / 4
    assert plan("model.enable_activation_offload=true")["activations of the update"] < 2 * whole["weights"]


def test_a_checkpoint_takes_as_much_of_the_disk_as_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    messages = [{"role": "user", "content": "2+3"}, {"role": "assistant", "content": "5"}]
    write_rows([{"messages": messages}] * 4, tmp_path / "rows.jsonl")
    folder = tmp_path / "run"
    files = (f"data.train_files={tmp_path}/rows.jsonl", f"trainer.default_local_dir={folder}")
    config = config_of(tmp_path, *files, "trainer.total_training_steps=1")
    Qwen2ForCausalLM(SMALL).save_pretrained(tmp_path)
    sft_run.sft(config, RunConsole())
    written = sum(file.stat().st_size for file in (folder / "checkpoints/global_step_1").rglob("*") if file.is_file())
    planned = checkpoint_bytes(*sft_memory(config, rows_of(length=4)))
    assert 0.95 * written < planned < written
    (folder / "config.yaml").unlink()
    monkeypatch.setattr(
        host_memory.shutil, "disk_usage", lambda path: type("Usage", (), {"total": 10**9, "free": planned - 1})
    )
    with pytest.raises(RunError, match=r"a checkpoint takes about .* free space, or set trainer.default_local_dir"):
        sft_run.sft(config_of(tmp_path, *files, "trainer.total_training_steps=2"), RunConsole())
