"""Tokens of the chat format that a model never learned are reported before a run, and can be spelled out."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from train_cases import Paper, run_config, write_model
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from rally.chat import ChatCodec
from rally.config import load_sft_config
from rally.data import write_rows
from rally.doctor.doctor import examine
from rally.models.load import PROBE, LoadError, load_tokenizer
from rally.models.untrained_tokens import advice, chat_ids, untrained_tokens
from rally.runs.evaluate import evaluate
from rally.runs.sft import sft
from rally.runs.train import train
from rally.tools.builtin.calculator import Calculator

TAGS = ("<tool_call>", "</tool_call>")
EMBEDDING = "model.embed_tokens.weight"
KEY = "actor_rollout_ref.model.spelled_tokens"


@pytest.fixture
def blind(tmp_path: Path) -> Path:
    """A model with twenty unused embedding rows at the end, whose rows of the two tags are like them."""
    folder = write_model(tmp_path / "blind")
    tokenizer, model = load_tokenizer(str(folder)), AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(tokenizer) + 20)
    rows = model.get_input_embeddings().weight.data
    rows[len(tokenizer) :] = torch.randn(rows.shape[1]) + torch.randn(20, rows.shape[1]) * 1e-3
    rows[tokenizer.convert_tokens_to_ids(list(TAGS))] = rows[-1] * 1.01
    model.save_pretrained(folder)
    return folder


def test_a_token_like_the_unused_ones_was_never_learned(blind: Path) -> None:
    tokenizer = load_tokenizer(str(blind))
    everything = range(len(tokenizer) + 100)
    assert untrained_tokens(str(blind), tokenizer, everything) == TAGS
    assert untrained_tokens(str(blind), tokenizer, tokenizer("What is 2+3?<tool_response>").input_ids) == ()


def test_it_is_read_from_several_files_too(blind: Path) -> None:
    with safe_open(blind / "model.safetensors", "pt") as whole:
        weights = {name: whole.get_tensor(name) for name in whole.offset_keys()}
    save_file({EMBEDDING: weights.pop(EMBEDDING)}, blind / "model-2.safetensors")
    save_file(weights, blind / "model-1.safetensors")
    where = {**dict.fromkeys(weights, "model-1.safetensors"), EMBEDDING: "model-2.safetensors"}
    (blind / "model.safetensors").unlink()
    (blind / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    tokenizer = load_tokenizer(str(blind))
    assert untrained_tokens(str(blind), tokenizer, tokenizer("<tool_call>").input_ids) == TAGS[:1]


@pytest.mark.parametrize("name", ["h.wte.weight", "gpt_neox.embed_in.weight", "h.word_embeddings.weight"])
def test_families_call_the_embedding_by_other_names(blind: Path, name: str) -> None:
    with safe_open(blind / "model.safetensors", "pt") as whole:
        rows_VH = whole.get_tensor(EMBEDDING)
    save_file({name: rows_VH}, blind / "model.safetensors")
    tokenizer = load_tokenizer(str(blind))
    assert untrained_tokens(str(blind), tokenizer, range(len(tokenizer))) == TAGS


def test_an_index_is_read_only_where_transformers_would_read_it(blind: Path) -> None:
    index = blind / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {EMBEDDING: "model-2.safetensors"}}))
    tokenizer = load_tokenizer(str(blind))
    assert untrained_tokens(str(blind), tokenizer, range(len(tokenizer))) == TAGS
    (blind / "model.safetensors").unlink()
    assert untrained_tokens(str(blind), tokenizer, range(len(tokenizer))) == (), "the file is still being fetched"


def test_the_tokens_around_a_tool_answer_are_looked_at_too(blind: Path) -> None:
    tokenizer = load_tokenizer(str(blind))
    ids = set(chat_ids(ChatCodec(tokenizer, "hermes", tools=[Calculator().tool_schema])))
    assert set(tokenizer.convert_tokens_to_ids([*TAGS, "<tool_response>", "</tool_response>"])) < ids


def test_each_kind_of_token_is_told_what_can_be_done_for_it(home: Path) -> None:
    tokenizer = load_tokenizer(str(home / "model"))
    taught = "; control tokens can only be trained, with `rally sft` on conversations that contain them"
    both, steering = advice(["<|im_end|>", *TAGS], tokenizer, KEY), advice(["<|im_end|>"], tokenizer, KEY)
    cure = f"spell <tool_call> and </tool_call> out in tokens that it knows: '{KEY}=[<tool_call>,</tool_call>]'"
    assert both.endswith(cure + taught)
    assert steering.endswith(taught) and KEY not in steering


@pytest.mark.parametrize("model", ["nobody/has-this", "/nowhere", "model.gguf"])
def test_of_weights_that_are_not_here_nothing_is_said(blind: Path, model: str) -> None:
    assert untrained_tokens(model, load_tokenizer(str(blind)), range(500)) == ()


def test_of_a_vocabulary_without_unused_rows_nothing_is_said(home: Path) -> None:
    tokenizer = load_tokenizer(str(home / "model"))
    assert untrained_tokens(str(home / "model"), tokenizer, range(len(tokenizer))) == ()


def test_every_command_that_samples_or_teaches_tells(home: Path, blind: Path, tmp_path: Path) -> None:
    path, out = f"actor_rollout_ref.model.path={blind}", tmp_path / "out"
    told = "the model has never learned <tool_call> and </tool_call>"
    cure = f"'{KEY}=[<tool_call>,</tool_call>]'"
    for act in (train, evaluate):
        paper = Paper()
        act(run_config(home, out, path, "trainer.total_training_steps=1", "trainer.save_freq=-1"), paper.console)
        assert paper.text.count(told) == 1 and cure in paper.text
    config = tmp_path / "run.yaml"
    config.write_text(run_config(home, out, path).to_yaml(), encoding="utf-8")
    [finding] = [one for one in examine(config) if told in one.text]
    assert finding.status == "warning" and cure in finding.text
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "2+3"}}}
    said = [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    plain = [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"}]
    write_rows([{"messages": plain}, {"messages": said}], tmp_path / "said.parquet")
    paper = Paper()
    tree = {"model": {"path": str(blind)}, "data": {"train_files": str(tmp_path / "said.parquet")}}
    keys = ["data.train_batch_size=1", "trainer.total_training_steps=1", f"trainer.default_local_dir={tmp_path / 's'}"]
    sft(load_sft_config(base=tree, overrides=keys), paper.console)
    assert told in paper.text and "'model.spelled_tokens=[<tool_call>,</tool_call>]'" in paper.text


def test_a_spelled_token_is_ordinary_text_in_checkpoints_too_and_calls_are_read(shared: Path, tmp_path: Path) -> None:
    folder = str(shared / "tokenizers" / "qwen2_5")
    whole, spelled = load_tokenizer(folder), load_tokenizer(folder, spelled=TAGS)
    tags = set(whole.convert_tokens_to_ids(list(TAGS)))
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "2+3"}}}
    said = {"role": "assistant", "content": "Let me see.", "tool_calls": [call]}
    spelled.save_pretrained(tmp_path)
    for tokenizer in (spelled, load_tokenizer(str(tmp_path)), load_tokenizer(str(tmp_path), spelled=TAGS)):
        codec = ChatCodec(tokenizer, "hermes", tools=[Calculator().tool_schema])
        ids = codec.encode_assistant(said)
        assert not tags & set(ids) and not tags & set(codec.encode_prompt([{"role": "user", "content": "2+3?"}]))
        assert [(c.name, c.arguments) for c in codec.parse(ids).tool_calls] == [("calculator", {"expression": "2+3"})]
        assert codec.probe().append_only
    before = ChatCodec(whole, "hermes")
    assert tags < set(before.encode_assistant(said))
    assert before.decode(before.encode_assistant(said)) == ChatCodec(spelled, "hermes").decode(
        ChatCodec(spelled, "hermes").encode_assistant(said)
    )


def test_all_other_tokens_keep_their_numbers_in_checkpoints_too(shared: Path, tmp_path: Path) -> None:
    folder = str(shared / "tokenizers" / "qwen3")
    before = {token: number for token, number in load_tokenizer(folder).get_vocab().items() if token not in TAGS}
    spelled = load_tokenizer(folder, spelled=TAGS)
    spelled.save_pretrained(tmp_path)
    for tokenizer in (spelled, load_tokenizer(str(tmp_path))):
        assert before.items() <= tokenizer.get_vocab().items()
        assert tokenizer.decode([before["<think>"]]) == "<think>"


def test_a_token_that_is_an_ordinary_word_too_cannot_be_spelled_out(tmp_path: Path) -> None:
    vocabulary = ["<unk>", "call", *sorted(set(PROBE.split()))]
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(vocabulary)}, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    words.add_tokens(["call"])
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(tmp_path)
    with pytest.raises(LoadError, match=r"contains call, which the tokenizer encodes as one token even as"):
        load_tokenizer(str(tmp_path), spelled=["call"])


def test_what_steers_the_model_cannot_be_spelled_out(shared: Path) -> None:
    with pytest.raises(LoadError, match=r"contains <\|im_end\|>, which are control tokens"):
        load_tokenizer(str(shared / "tokenizers" / "qwen2_5"), spelled=("<|im_end|>", "<tool_call>"))
