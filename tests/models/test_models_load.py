"""Loading from folders, GGUF files and hub names; the tokenizer follows its file; mistakes are one error sentence."""

import os
from pathlib import Path

import pytest
import torch
from small_models import make_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from rally.chat import ChatCodec, tiny_tokenizer
from rally.engines.embedded import EngineCore, EngineSettings
from rally.models.load import LoadError, load_model, load_tokenizer, pick_device
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


@pytest.mark.parametrize("path", ["/nowhere/at/all", "no-such-owner/no-such-model"])
def test_a_model_that_cannot_be_had_is_one_sentence(path):
    for load in (load_model, load_tokenizer):
        with pytest.raises(LoadError, match="cannot be loaded") as caught:
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
