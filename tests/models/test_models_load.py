"""Loading from folders, GGUF files and hub names; the tokenizer follows its file; mistakes are one error sentence."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_gguf import write_gguf
from small_models import make_model
from train_cases import Paper, run_config, write_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
)

from rally.chat import ChatCodec, tiny_tokenizer
from rally.demo.training_stages import small_model
from rally.engines.embedded import EngineCore, EngineSettings
from rally.models.load import (
    LoadError,
    check_vocabulary,
    load_model,
    load_tokenizer,
    pick_device,
    reloading_problem,
    save_tokenizer,
)
from rally.runs.train import train
from rally.types import SamplingParams

GGUF = Path(__file__).resolve().parents[2] / "models" / "smollm2-135m.gguf"


def test_the_tokenizer_file_beats_the_class_that_the_model_family_suggests(tmp_path):
    """A Qwen2 folder with another tokenizer, which transformers' automatic class reads wrongly."""
    tokenizer = tiny_tokenizer()
    make_model("qwen2").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    text = 'user\nWhat is 12*34?\n<tool_call>{"name": "calculator"'
    expected = tokenizer(text)["input_ids"]
    assert load_tokenizer(str(tmp_path))(text)["input_ids"] == expected
    assert AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] != expected, "the trap is gone; drop the check"


def test_a_gguf_file_has_the_model_and_the_tokenizer(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=259, num_key_value_heads=2, max_position_embeddings=64, **sizes)
    written = Qwen2ForCausalLM(config).eval()
    write_gguf(written, tmp_path / "tiny.gguf")
    path = str(tmp_path / "tiny.gguf")
    model, tokenizer = load_model(path), load_tokenizer(path)
    text = "ab: 12*34 é"
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    assert tokenizer.decode(ids[0]) == text and len(ids[0]) == len(text.encode()) - 1
    with torch.no_grad():
        assert torch.equal(model(ids).logits, written(ids).logits)
        model.save_pretrained(tmp_path / "saved")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        assert torch.equal(model(ids).logits, again(ids).logits)


@pytest.mark.long
def test_a_real_gguf_model_loads_answers_and_saves(tmp_path):
    if not GGUF.is_file():
        reason = f"no {GGUF.name} in models/ (make models)"
        pytest.fail(reason) if os.environ.get("RALLY_REQUIRE_SHARED") else pytest.skip(reason)
    model, codec = load_model(str(GGUF)), ChatCodec(load_tokenizer(str(GGUF)))
    core = EngineCore(model, EngineSettings(max_model_len=128), num_pages=16)
    prompt = codec.encode_prompt([{"role": "user", "content": "What is the capital of France?"}])
    request = core.add(prompt, SamplingParams(temperature=0, max_tokens=12, stop_ids=codec.stop_ids))
    while core.busy:
        core.step()
    assert "Paris" in codec.decode(request.ids[len(prompt) :])
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.tensor([request.ids])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/nowhere/at/all", "/nowhere/at/all does not exist; give a folder, .* as model.path"),
        ("no-such-owner/no-such-model", "cannot be loaded"),
    ],
)
def test_a_model_that_cannot_be_had_is_one_sentence(path, words):
    for load in (load_model, load_tokenizer):
        with pytest.raises(LoadError, match=words) as caught:
            load(path)
        assert "\n" not in str(caught.value)


def test_missing_gguf_and_missing_gpu_are_said():
    with pytest.raises(LoadError, match="no GGUF file"):
        load_model("/nowhere/model.gguf")
    if not torch.cuda.is_available():
        with pytest.raises(LoadError, match="no GPU"):
            pick_device("cuda")


def test_a_given_template_replaces_the_own_one_and_goes_into_checkpoints(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    file = tmp_path / "other.jinja"
    file.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}", encoding="utf-8")
    for given in (str(file), file.read_text(encoding="utf-8")):
        load_tokenizer(str(tmp_path / "model"), chat_template=given).save_pretrained(tmp_path / "saved")
        loaded = load_tokenizer(str(tmp_path / "saved"))
        assert loaded.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "[hi]"
    with pytest.raises(LoadError, match=r"none\.jinja cannot be read \(No such file or directory\); give another file"):
        load_tokenizer(str(tmp_path / "model"), chat_template="none.jinja")
    with pytest.raises(
        LoadError, match=r"'mine/template.j2' is neither the text of a template nor the path of a .jinja file"
    ):
        load_tokenizer(str(tmp_path / "model"), chat_template="mine/template.j2")


def test_a_checkpoint_and_a_folder_without_a_model_say_what_to_name(tmp_path):
    (tmp_path / "global_step_2" / "actor").mkdir(parents=True)
    for load in (load_model, load_tokenizer):
        with pytest.raises(LoadError, match=r"is a whole checkpoint; give the model in it: .*global_step_2/actor$"):
            load(str(tmp_path / "global_step_2"))
        with pytest.raises(
            LoadError, match=r"a folder without (tokenizer_)?config\.json; set .* to the folder that has it"
        ):
            load(str(tmp_path))


def drop_tokenizer_json(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def drop_vocabulary(folder: Path) -> None:
    stored = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    stored["model"]["vocab"] = {"<unk>": 0}
    stored["added_tokens"] = []
    (folder / "tokenizer.json").write_text(json.dumps(stored), encoding="utf-8")


def shuffle_vocabulary(folder: Path) -> None:
    """All letters are there, but the decoder is lost."""
    stored = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    stored["decoder"] = {"type": "Replace", "pattern": {"String": "e"}, "content": "x"}
    (folder / "tokenizer.json").write_text(json.dumps(stored), encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop_tokenizer_json, "characters become no token at all, and there is no tokenizer.json"),
        (drop_vocabulary, "tokens of an English text are <unk>"),
        (shuffle_vocabulary, "comes back as"),
    ],
)
@pytest.mark.drill("reliability", "A model folder lacks its tokenizer.json", "The run stops with one sentence")
def test_a_tokenizer_that_does_not_encode_text_is_refused(
    tmp_path: Path, change: Callable[[Path], None], words: str
) -> None:
    folder = write_model(tmp_path / "model")
    load_tokenizer(str(folder))
    change(folder)
    with pytest.raises(LoadError, match="does not encode text: .*" + words):
        load_tokenizer(str(folder))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"3", b"\xff\xfe", b"{", b"\0" * 100, b"[" * 100_000, b"{}"])
def test_a_damaged_file_of_a_tokenizer_is_one_sentence(tmp_path: Path, name: str, content: bytes) -> None:
    folder = write_model(tmp_path / "model")
    (folder / name).write_bytes(content)
    try:
        load_tokenizer(str(folder))
    except LoadError as error:
        assert str(error).count("\n") == 0
    else:  # what it says is not needed to encode
        assert name != "tokenizer.json"


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    model = load_model(str(write_model(tmp_path / "model")))
    larger = tiny_tokenizer([f"word{n}" for n in range(9)])
    check_vocabulary(model, tiny_tokenizer(), [0, 123])
    with pytest.raises(LoadError, match=r"has the token 132, but the embedding of the model has only 124 rows"):
        check_vocabulary(model, larger, [])
    with pytest.raises(LoadError, match=r"has the token 124, but the embedding"):
        check_vocabulary(model, tiny_tokenizer(), [124])


def test_a_run_with_the_tokenizer_of_another_model_stops(home: Path, tmp_path: Path) -> None:
    save_tokenizer(tiny_tokenizer([f"word{n}" for n in range(9)]), tmp_path / "tokenizer")
    config = run_config(home, tmp_path / "run", f"actor_rollout_ref.model.tokenizer_path={tmp_path / 'tokenizer'}")
    with pytest.raises(LoadError, match="the embedding of the model has only 124 rows"):
        train(config, Paper().console)


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_2"])
def test_a_real_tokenizer_is_the_same_after_saving_in_transformers_alone(shared: Path, name: str) -> None:
    config = {"qwen2_5": Qwen2Config, "qwen3": Qwen3Config, "llama3_2": LlamaConfig}[name]()
    assert reloading_problem(load_tokenizer(str(shared / "tokenizers" / name)), config) is None


def test_what_the_demo_writes_is_encoded_equally_by_transformers_alone(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    model = small_model(tokenizer, 0)
    assert reloading_problem(tokenizer, model.config) is None
    model.save_pretrained(tmp_path)
    save_tokenizer(tokenizer, tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "What is 28*99+97?"}]
    asked = loaded.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert asked == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    written = {path.name for path in tmp_path.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"} <= written
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"


@pytest.mark.drill(
    "reliability", "transformers loads a saved tokenizer as another class", "The run warns with the token counts"
)
def test_a_tokenizer_that_transformers_loads_differently_is_reported(home: Path, tmp_path: Path, paper: Paper) -> None:
    problem = reloading_problem(tiny_tokenizer(), Qwen2Config())
    assert problem and "as Qwen2Tokenizer and encodes" in problem
    train(run_config(home, tmp_path, "trainer.total_training_steps=1", "data.val_files=null"), paper.console)
    assert f"warning: {problem}" in paper.text
