"""Constrained decoding: outputs are valid, and the trainer computes the distribution that was sampled from."""

import asyncio
import json
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator

from benchmarks.constrained_decoding import random_schema, run, tiny_model
from rally.chat import ChatCodec, tiny_tokenizer
from rally.chat.grammars import Constraint, grammar_of
from rally.distributed.message_encoding import rows_of_arrays, rows_to_arrays
from rally.engines import EmbeddedEngine, EngineSettings
from rally.models.lm_head import HeadLogprobs
from rally.models.token_masks import GrammarError, Grammars, TokenMasks, compressed, decompressed
from rally.track.run_folder.episode_json import _segment_from_json, _segment_to_json
from rally.train.forward.logprobs import _any_head, token_logprobs
from rally.train.packing import Row, pack
from rally.types import Generation, SamplingParams, Segment

pytest.importorskip("llguidance")
TOKENIZER = tiny_tokenizer()
CODEC = ChatCodec(TOKENIZER, "hermes")
VOCABULARY = len(TOKENIZER) + 4
GRAMMARS = Grammars(TOKENIZER, VOCABULARY, CODEC.stop_ids)
MODEL = tiny_model(VOCABULARY)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 999}, "b": {"enum": ["x", "yz"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
PROMPT = CODEC.encode_prompt([{"role": "user", "content": "Go"}])


def generated(grammars: list[str], **options: Any) -> list[Generation]:
    """One generation for each grammar, "" for none, at the same time."""
    backend = options.pop("backend", "auto")
    settings = EngineSettings(max_model_len=256, max_num_seqs=8, backend=backend)
    engine = EmbeddedEngine(MODEL, settings, decode=CODEC.decode, grammars=GRAMMARS)
    defaults = {"temperature": 1.3, "max_tokens": 64, "stop_ids": CODEC.stop_ids}

    async def everything() -> list[Generation]:
        try:
            asks = [SamplingParams(**{**defaults, "seed": n, **options}, grammar=g) for n, g in enumerate(grammars)]
            return await asyncio.gather(*(engine.generate(PROMPT, ask) for ask in asks))
        finally:
            await engine.close()

    return asyncio.run(everything())


def answer_of(generation: Generation) -> str:
    return CODEC.parse(generation.ids).text


def test_random_schemas_give_valid_outputs_whose_log_probabilities_the_trainer_finds_again() -> None:
    outcome = run([random_schema(seed) for seed in range(40)])
    assert outcome.finished + outcome.cut == 40 and outcome.finished >= 35 and outcome.invalid == 0
    assert outcome.apart < 1e-5, f"rollout and trainer differ by {outcome.apart}"


@pytest.mark.parametrize("backend", ["gather", "paged"])  # the latter works one step ahead
def test_constrained_and_free_requests_share_a_batch(backend: str) -> None:
    grammar = grammar_of(Constraint(schema=SCHEMA), CODEC)
    free, *bound = generated(["", grammar, grammar, grammar], backend=backend)
    assert free.constrained is None
    assert generated(["", "", "", ""], backend=backend)[0].ids == free.ids, "the others change nothing for it"
    for one in bound:
        assert one.finish == "stop" and Draft202012Validator(SCHEMA).is_valid(json.loads(answer_of(one)))
        assert one.constrained is not None and one.constrained.grammar == grammar
        assert all(p <= 0 for p in one.logprobs) and 0.0 in one.logprobs, "a forced token has probability 1"
    assert len({one.ids for one in bound}) > 1


def test_greedy_and_filtered_sampling_stay_inside_the_grammar() -> None:
    grammar = grammar_of(Constraint(schema=SCHEMA), CODEC)
    for options in ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.3}, {"min_p": 0.9}):
        for one in generated([grammar, grammar], **options):
            assert Draft202012Validator(SCHEMA).is_valid(json.loads(answer_of(one)))


def test_a_generation_that_is_cut_ends_with_length() -> None:
    grammar = grammar_of(Constraint(schema=SCHEMA), CODEC)
    (one,) = generated([grammar], max_tokens=3)
    assert one.finish == "length" and len(one.ids) == 3
    with pytest.raises(json.JSONDecodeError):
        json.loads(answer_of(one))


def test_the_record_the_ranks_and_both_heads_agree_with_rollout() -> None:
    grammar = grammar_of(Constraint(schema=SCHEMA), CODEC)
    free, bound, other = generated(["", grammar, grammar])
    segment = Segment(prompt_ids=PROMPT).append_sampled(bound).append_observed((5, 6)).append_sampled(free)
    again = _segment_from_json(json.loads(json.dumps(_segment_to_json(segment))))
    assert again == segment and again.constrained[0].grammar == grammar
    rows = [Row.of(again, 0), Row.of(Segment(prompt_ids=PROMPT).append_sampled(other), 1)]
    assert [row.allowed for row in rows_of_arrays(rows_to_arrays(rows))] == [
        row.allowed or (None,) * len(row.sampled) for row in rows
    ]
    packed = pack(rows[1:], MODEL.device)
    with torch.no_grad():
        logp_M, entropy_M, _ = token_logprobs(MODEL, packed, 1.3, entropy_gradient=True)
        unmasked_M = token_logprobs(MODEL, pack([Row.of(_bare(other), 1)], MODEL.device), 1.3).logp_M
    assert float((logp_M - packed.old_logp_M).abs().max()) < 1e-5 and bool(entropy_M.isfinite().all())
    assert float((unmasked_M - packed.old_logp_M).abs().max()) > 0.1, "without masks it is another distribution"


def _bare(generation: Generation) -> Segment:
    plain = Generation(ids=generation.ids, logprobs=generation.logprobs, finish=generation.finish)
    return Segment(prompt_ids=PROMPT).append_sampled(plain)


def test_the_fused_head_and_autograd_give_the_same_masked_gradients() -> None:
    grammar = grammar_of(Constraint(schema=SCHEMA), CODEC)
    packed = pack([Row.of(Segment(prompt_ids=PROMPT).append_sampled(g), 0) for g in generated([grammar])], MODEL.device)
    weight = MODEL.get_output_embeddings().weight
    results = []
    for fused in (True, False):
        torch.manual_seed(1)
        hidden = torch.randn(len(packed.targets_U), weight.shape[1], requires_grad=True)
        MODEL.zero_grad()
        if fused:
            logp, entropy = HeadLogprobs.apply(hidden, weight, packed.targets_U, 1.3, 7, True, packed.masks)
        else:
            logp, entropy = _any_head(MODEL, hidden, packed.targets_U, packed.masks, 1.3, 7, True)
        (logp.sum() + 0.5 * entropy.sum()).backward()
        results.append((logp.detach(), entropy.detach(), hidden.grad, weight.grad.clone()))
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_equal_tokens_under_different_masks_are_different_pairs() -> None:
    state = GRAMMARS.state(grammar_of(Constraint(schema=SCHEMA), CODEC))
    first = state.mask()
    rows = [
        Row(ids=(*PROMPT, 9), sampled=(len(PROMPT),), logprobs=(0.0,), episode=0, allowed=(m,)) for m in (None, first)
    ]
    packed = pack(rows, torch.device("cpu"))
    assert len(packed.targets_U) == 2 and packed.masks is not None and len(packed.masks.rows_R) == 1


def test_masks_are_compressed_without_loss() -> None:
    masks = [bytes([1, 2, 3, 4]), bytes([9, 9, 9, 9]), bytes([1, 2, 3, 4])]
    assert decompressed(compressed(masks)) == masks
    with pytest.raises(GrammarError, match="damaged"):
        decompressed(compressed(masks)[:-4])
    logits = torch.zeros(3, 32)
    applied = TokenMasks.of([1], [bytes([0b101, 0, 0, 0])], logits.device).applied(logits)
    assert applied[1].gt(-1).nonzero().flatten().tolist() == [0, 2] and applied[0].eq(0).all()


@pytest.mark.drill(
    "reliability", "A JSON schema that would hang the engine", "Refused, within the limits of the library"
)
def test_hostile_and_unsupported_schemas_are_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"type": "string", "pattern": "((((((a{1,10}){1,10}){1,10}){1,10}){1,10}){1,10}"}, "cannot be applied"),
        ({"not": {"type": "string"}}, "cannot be applied"),
        ({"$ref": "http://127.0.0.1/schema.json"}, "cannot be applied"),
        ({"$ref": "#"}, "too complex"),
        ({"type": "nonsense"}, "cannot be applied"),
    ]
    for schema, message in cases:
        with pytest.raises(GrammarError, match=message):
            GRAMMARS.state(grammar_of(Constraint(schema=schema), CODEC))
