"""Keys of rollout servers: what fits together loads, and what would have no effect is said in one sentence."""

import pytest

from rally.config import ConfigError, load_config

R = "actor_rollout_ref.rollout"


def told(*lines: str) -> str:
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
def test_what_fits_together_loads(lines: tuple[str, ...]) -> None:
    load_config(overrides=[f"{R}.{line}" for line in lines])


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (("mode=server",), "mode=server needs a server; set"),
        (("port_start=30100",), "port_start has no effect with actor_rollout_ref.rollout.name=embedded"),
        (("data_parallel_size=2",), "data_parallel_size has no effect"),
        (("name=vllm", "mode=server"), "set actor_rollout_ref.rollout.server.url"),
        (("name=vllm", "mode=server", "server.url=10.0.0.1"), "write it as http://10.0.0.1:8000"),
        (("name=vllm", "mode=server", "server.urls=[http://a, http://a]"), "names a server twice"),
        (
            ("name=vllm", "mode=server", "server.url=http://a", "port_start=1"),
            "port_start has no effect on servers that",
        ),
        (("name=vllm", "server.url=http://a"), "set it to server"),
        (("name=vllm", "engine_kwargs.sglang.x=1"), "engine_kwargs.sglang has no effect"),
        (("name=vllm", "engine_kwargs.vllm.port=1"), "engine_kwargs.vllm.port is set by the run itself"),
        (("name=vllm", "engine_kwargs.trtllm.x=1"), "not built yet"),
        (("name=vllm", "stop_strings=[x]"), "knows token ids alone"),
        (("name=vllm", "temperature=0.7", "top_p=0.9"), "cannot report the policy's log-probs"),
        (("name=sglang", "deterministic=true"), "deterministic has no effect with"),
        (
            ("name=rally", "tensor_model_parallel_size=2"),
            "size has no effect with actor_rollout_ref.rollout.name=rally",
        ),
        (("name=rally", "enforce_eager=true"), "enforce_eager has no effect with actor_rollout_ref.rollout.name=rally"),
        (("name=rally", "log_level=DEBUG"), "log_level has no effect with actor_rollout_ref.rollout.name=rally"),
        (("name=rally", "checkpoint_engine.backend=ipc"), "backend has no effect with"),
        (("name=vllm", "mode=sync"), "not built yet; leave it out, every engine is asynchronous"),
    ],
)
def test_what_does_not_is_one_sentence(lines: tuple[str, ...], words: str) -> None:
    problem = told(*lines)
    assert words in problem and "\n" not in problem


@pytest.mark.parametrize("adapters", ["lora_rank=8", "lora_adapter_path=adapters"])
def test_handles_are_for_policies_without_adapters(adapters: str) -> None:
    lines = [f"{R}.name=vllm", f"{R}.checkpoint_engine.backend=ipc", f"actor_rollout_ref.model.{adapters}"]
    with pytest.raises(ConfigError, match=r"where adapters \(LoRA\) are not merged; leave it out"):
        load_config(overrides=lines)
