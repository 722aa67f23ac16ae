"""Checks of the rollout servers' keys: valid combinations load, others give one sentence."""

from pathlib import Path

import pytest

from rally import redact as redact_module
from rally.config import ConfigError, load_config
from rally.config.checks.servers import TOKEN_VARIABLE
from rally.engines.remote import server_api

R = "actor_rollout_ref.rollout"


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redact_module, "_known", {})


def error_text(*lines: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=[f"{R}.{line}" for line in lines])
    return "\n".join(caught.value.problems)


@pytest.mark.parametrize(
    "lines",
    [
        ("name=vllm", "port_start=30100", "log_level=DEBUG"),
        (
            "name=sglang_async",
            "mode=async",
            "tensor_model_parallel_size=2",
            "engine_kwargs.sglang.attention_backend=fa3",
        ),
        ("name=vllm", "mode=standalone", "data_parallel_size=4", "server.python=/opt/vllm/bin/python", "top_p=0.9"),
        ("name=sglang", "mode=server", "server.url=http://10.0.0.1:30000", "temperature=0.7", "top_p=0.9"),
        ("name=vllm", "mode=server", "server.urls=[http://a:1, http://b:1]", "server.timeout=60"),
        ("name=vllm", "checkpoint_engine.update_weights_bucket_megabytes=512", "temperature=0.7"),
    ],
)
def test_valid_combinations_load(lines: tuple[str, ...]) -> None:
    load_config(overrides=[f"{R}.{line}" for line in lines])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("mode=server",), "mode=server needs a server; set"),
        (("port_start=30100",), "port_start has no effect with actor_rollout_ref.rollout.name=embedded"),
        (("data_parallel_size=2",), "data_parallel_size has no effect"),
        (("name=vllm", "mode=server"), "set actor_rollout_ref.rollout.server.url"),
        (("name=vllm", "mode=server", "server.url=10.0.0.1"), "write it as http://10.0.0.1:8000"),
        (("name=vllm", "mode=server", "server.urls=[http://a, http://a]"), "contains a server twice"),
        (
            ("name=vllm", "mode=server", "server.url=http://a", "port_start=1"),
            "port_start has no effect on servers that",
        ),
        (("name=vllm", "server.url=http://a"), "set it to server"),
        (("name=vllm", "engine_kwargs.vllm.port=1"), "engine_kwargs.vllm.port is set by the run itself"),
        (("name=vllm", "temperature=0.7", "top_p=0.9"), "cannot report the policy's log-probs"),
        (("name=sglang", "deterministic=true"), "deterministic has no effect with"),
        (
            ("name=rally", "tensor_model_parallel_size=2"),
            "size has no effect with actor_rollout_ref.rollout.name=rally",
        ),
        (("name=rally", "enforce_eager=true"), "enforce_eager has no effect with actor_rollout_ref.rollout.name=rally"),
        (("name=rally", "log_level=DEBUG"), "log_level has no effect with actor_rollout_ref.rollout.name=rally"),
        (("name=rally", "checkpoint_engine.backend=ipc"), "backend has no effect with"),
        (("name=vllm", "checkpoint_engine.backend=delta"), "vllm loads whole models and cannot apply deltas; use"),
        (("name=rally", "checkpoint_engine.full_every=3"), "full_every has no effect with"),
        (
            ("name=rally", "checkpoint_engine.backend=nccl", "checkpoint_engine.full_every=3"),
            "full_every has no effect",
        ),
    ],
)
def test_an_invalid_combination_is_one_sentence(lines: tuple[str, ...], message: str) -> None:
    problem = error_text(*lines)
    assert message in problem and "\n" not in problem


@pytest.mark.parametrize("adapters", ["lora_rank=8", "lora_adapter_path=adapters"])
def test_ipc_needs_a_policy_without_adapters(adapters: str) -> None:
    lines = [f"{R}.name=vllm", f"{R}.checkpoint_engine.backend=ipc", f"actor_rollout_ref.model.{adapters}"]
    with pytest.raises(ConfigError, match=r"in which LoRA adapters are not merged; leave it out"):
        load_config(overrides=lines)


@pytest.mark.parametrize("url", ["http://a:x", "http://a:99999", "http://a:0", "http://[::1", "ftp://a"])
def test_an_invalid_address_is_reported(url: str) -> None:
    assert f"server.url={url} is not a valid address" in error_text("name=vllm", "mode=server", f"server.url='{url}'")


@pytest.mark.parametrize("url", ["http://ada:pa/ss-word@a:1", "ada:pa/ss-word@a:1", "ftp://ada:pa/ss-word@a:1"])
def test_an_invalid_address_is_reported_without_its_password(url: str) -> None:
    problem = error_text("name=vllm", "mode=server", f"server.url={url}")
    assert "***@a:1 is not a valid address" in problem and "pa/ss" not in problem and "ada" not in problem


def test_a_password_and_a_token_together_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert server_api.TOKEN_VARIABLE == TOKEN_VARIABLE
    monkeypatch.setenv(TOKEN_VARIABLE, "token-of-the-engine")
    lines = ("mode=server", "server.urls=[http://a:1, http://ada:pass-word@b:1]")
    problem = error_text("name=rally", *lines)
    assert problem.endswith("RALLY_ENGINE_TOKEN is set, but a request can carry only one of them; remove one.")
    assert "pass-word" not in problem and "token-of" not in problem
    load_config(overrides=[f"{R}.{line}" for line in ("name=vllm", *lines)])
    monkeypatch.delenv(TOKEN_VARIABLE)
    load_config(overrides=[f"{R}.{line}" for line in ("name=rally", *lines)])


def test_one_server_with_and_without_a_user_is_a_duplicate() -> None:
    assert "contains a server twice" in error_text(
        "name=vllm", "mode=server", "server.urls=[http://a, http://ada:b@a/]"
    )


@pytest.mark.parametrize("written", ["http://ada:pass-word@a:1", "http://a:p@a:1", "http://ada:${oc.env:SHORT}@a:1"])
def test_a_saved_address_contains_no_password(written: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHORT", "pw")
    config = load_config(overrides=[f"{R}.name=vllm", f"{R}.mode=server", f"{R}.server.url={written}"])
    saved = tmp_path / "config.yaml"
    saved.write_text(config.to_yaml(), encoding="utf-8")
    assert "url: http://***@a:1\n" in saved.read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match="are not saved with a run; write them again"):
        load_config(saved)


def test_a_password_from_the_environment_is_saved_by_its_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GATE", "ada:pass-word")
    url = f"{R}.server.url=http://${{oc.env:GATE}}@a:1"
    saved = tmp_path / "config.yaml"
    saved.write_text(load_config(overrides=[f"{R}.name=vllm", f"{R}.mode=server", url]).to_yaml(), encoding="utf-8")
    assert "url: http://${oc.env:GATE}@a:1\n" in saved.read_text(encoding="utf-8")
    assert load_config(saved).rollout.server_urls == ("http://ada:pass-word@a:1",)
