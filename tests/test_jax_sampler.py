"""The in-process sampler: it samples what the trainer's model says, whatever its lanes, blocks and
rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_rollouts import decoder_config, OneCharacterEach, parameters, ThreeCharactersEach

from stratified.policy import decoder, log_probs
from stratified.sampling import in_process
from stratified.sampling.in_process import JaxSampler, SamplerConfig
from stratified.sampling.interface import Request
from stratified.sampling.lane_programs import nucleus, sample

MODEL = decoder_config(vocab_size=27)
PARAMS = parameters(MODEL, scale=4.0)
NO_END = OneCharacterEach(27, eos_id=-1)  # a tokenizer whose end-of-text token is never sampled
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)


def sampler_of(tokenizer=NO_END, params=PARAMS, model=MODEL, **changes):
  settings = dict(lanes=4, length=48, block=3, rows=2, temperature=1.0, seed=5) | changes
  made = JaxSampler(model, SamplerConfig(**settings), tokenizer)
  made.load(params, 0)
  return made


def request(sample=0, tokens=PROMPT, new=12, question=0, step=0, **fields):
  return Request((step, question, sample), tuple(tokens), new, **fields)


@functools.partial(jax.jit, static_argnums=2)
def _full(params, token, temperature):
  x = decoder.hidden(MODEL, params, token, jnp.arange(token.shape[1])[None], jnp.ones_like(token))
  logp, _ = log_probs.token_log_probs(MODEL, params, x, token, temperature=temperature)
  return decoder.logits(MODEL, params, x)[0], logp[0]


def full(tokens, temperature=1.0):
  """Logits [T, V] and the trainer's log-probs [T] of one whole text, padded so that one shape is
  compiled."""
  token = np.zeros((1, 48), np.int32)
  token[0, : len(tokens)] = tokens
  logits, logp = _full(PARAMS, token, temperature)
  return np.asarray(logits)[: len(tokens)], np.asarray(logp)[: len(tokens)]


def of_new(prompt, completion, temperature=1.0):
  """Logits before, and log-probs of, each sampled token."""
  logits, logp = full([*prompt, *completion.token_ids], temperature)
  return logits[len(prompt) - 1 : -1], logp[len(prompt) :]


class Padded(OneCharacterEach):
  """Has no token for some of the model's ids."""

  def gaps(self, size):
    return ((4, 9), (20, size))


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.0}, {"top_p": 0.9}])
def test_ids_without_a_token_are_never_drawn_and_log_probs_are_the_trainers(changes):
  prompts = [PROMPT, (2,), (7, 7), tuple(range(1, 20))]
  requests = [request(tokens=prompt, question=q, new=25) for q, prompt in enumerate(prompts)]
  drawn = {True: set(), False: set()}
  for padded, tokenizer in {True: Padded(27, eos_id=-1), False: NO_END}.items():
    for prompt, completion in zip(prompts, sampler_of(tokenizer, **changes).generate(requests)):
      drawn[padded] |= set(completion.token_ids)
      _, logp = of_new(prompt, completion)
      np.testing.assert_allclose(completion.log_probs, logp, atol=4e-4)
  without = {*range(4, 9), *range(20, 27)}
  assert drawn[False] & without and not drawn[True] & without


# --- What is sampled is what the model says ---


def test_greedy_decoding_takes_the_argmax_of_full_forward_passes():
  prompts = [PROMPT, (2,), (7, 7), tuple(range(1, 20))]
  requests = [request(tokens=prompt, question=q, new=25) for q, prompt in enumerate(prompts)]
  distinct = set()
  for prompt, completion in zip(prompts, sampler_of(temperature=0.0).generate(requests)):
    logits, logp = of_new(prompt, completion)
    chosen = logits[np.arange(25), completion.token_ids]
    assert (logits.max(1) - chosen <= 1e-4).all()
    np.testing.assert_allclose(completion.log_probs, logp, atol=1e-4)
    distinct |= set(completion.token_ids)
  assert len(distinct) > 5


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_log_probs_are_the_trainers_at_the_same_temperature(temperature):
  for completion in sampler_of(temperature=temperature).generate(
    [request(k, new=30) for k in range(4)]
  ):
    np.testing.assert_allclose(
      completion.log_probs, of_new(PROMPT, completion, temperature)[1], atol=1e-4
    )


def test_a_turn_that_goes_on_after_a_stop_is_the_one_that_was_never_stopped():
  (whole,) = sampler_of().generate([request(new=12)])
  made = sampler_of()
  (first,) = made.generate([request(new=5)])
  (rest,) = made.generate([request(tokens=PROMPT + first.token_ids, new=7)])
  assert first.token_ids + rest.token_ids == whole.token_ids
  np.testing.assert_allclose(first.log_probs + rest.log_probs, whole.log_probs, atol=1e-5)


def chi_square(counts, probabilities):
  """Pearson's statistic over outcomes expected at least 5 times, and its 99.9 % point (Wilson and
  Hilferty, 1931)."""
  expected = probabilities * counts.sum()
  kept = expected >= 5
  statistic = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
  freedom = kept.sum() - 1
  return statistic, freedom * (1 - 2 / (9 * freedom) + 3.0902 * np.sqrt(2 / (9 * freedom))) ** 3


def test_draws_follow_the_softmax():
  logits = jnp.asarray(np.random.default_rng(0).normal(0, 1.5, 12), jnp.float32)
  keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(1), i))(jnp.arange(20_000))
  drawn = np.asarray(jax.jit(sample)(keys, jnp.broadcast_to(logits, (20_000, 12))))
  statistic, bound = chi_square(
    np.bincount(drawn, minlength=12), np.asarray(jax.nn.softmax(logits))
  )
  assert statistic < bound


def test_the_rollouts_of_a_question_are_independent_draws_from_the_models_distribution():
  made = sampler_of(lanes=256, length=12, block=1, rows=1, params=parameters(MODEL, scale=2.0))
  first, second = np.asarray(
    [c.token_ids for c in made.generate([request(k, new=2, last=True) for k in range(1500)])]
  ).T
  logits, _ = _full(
    parameters(MODEL, scale=2.0), np.pad(np.int32([PROMPT]), ((0, 0), (0, 40))), 1.0
  )
  probabilities = np.asarray(jax.nn.softmax(logits[len(PROMPT) - 1]))
  statistic, bound = chi_square(np.bincount(first, minlength=27), probabilities)
  assert statistic < bound
  # Neighbouring samples share nothing: the agreement of samples k and k + 1 is that of independent
  # draws.
  agree, chance = (first[1:] == first[:-1]).mean(), (probabilities**2).sum()
  assert abs(agree - chance) < 4 * np.sqrt(chance * (1 - chance) / 1499)
  assert len(set(zip(first, second))) > len(set(first))


def test_nucleus_keeps_the_smallest_set_that_holds_the_mass():
  # Masses 0.5, 0.25, 0.15, 0.1 in mixed order.
  logits = jnp.log(jnp.float32([[0.15, 0.5, 0.1, 0.25]]))
  for top_p, kept in (
    (0.4, [1]),
    (0.6, [1, 3]),
    (0.8, [0, 1, 3]),
    (0.95, [0, 1, 2, 3]),
    (1.0, [0, 1, 2, 3]),
  ):
    found = np.asarray(nucleus(logits, top_p))[0]
    assert np.nonzero(np.isfinite(found))[0].tolist() == kept
    np.testing.assert_array_equal(found[kept], np.asarray(logits)[0, kept])


def test_top_p_never_leaves_the_nucleus_and_reports_log_probs_before_the_cut():
  probability_outside = 0.0
  for completion in sampler_of(top_p=0.5, temperature=1.3).generate(
    [request(k, new=30) for k in range(4)]
  ):
    logits, logp = of_new(PROMPT, completion, 1.3)
    np.testing.assert_allclose(completion.log_probs, logp, atol=1e-4)
    probabilities = np.exp(logits / 1.3 - np.logaddexp.reduce(logits / 1.3, axis=1, keepdims=True))
    for p, token in zip(probabilities, completion.token_ids):
      assert p[p > p[token]].sum() < 0.5 + 1e-5
      probability_outside += 1 - p[p >= p[token]].sum()
  assert probability_outside > 1  # the cut had something to cut


# --- What it must not depend on ---


MIXED = [
  request(k, PROMPT[: 3 + q], new=5 + 4 * k + q, question=q) for q in range(3) for k in range(3)
]


@functools.cache
def mixed_alone():
  """Each of MIXED generated by a sampler with nothing else to do."""
  made = sampler_of(lanes=1, block=1, rows=1)
  return [made.generate([one])[0] for one in MIXED]


@pytest.mark.parametrize(
  "changes",
  [dict(lanes=9, block=4, rows=16), dict(lanes=2, block=7, rows=1), dict(lanes=4, block=3, rows=3)],
  ids=str,
)
def test_lanes_blocks_rows_and_company_do_not_change_what_is_sampled(changes):
  found = sampler_of(**changes).generate(MIXED)
  for one, alone, wanted in zip(found, mixed_alone(), MIXED):
    assert (
      one.key == wanted.key
      and len(one.token_ids) == wanted.max_new_tokens
      and one.finish == "length"
    )
    assert one.token_ids == alone.token_ids
    np.testing.assert_allclose(one.log_probs, alone.log_probs, atol=1e-4)


def test_the_order_of_requests_does_not_change_what_is_sampled():
  found = sampler_of(lanes=2, block=4).generate(MIXED[::-1])
  assert [c.token_ids for c in found[::-1]] == [c.token_ids for c in mixed_alone()]


def test_samples_steps_questions_and_seeds_draw_differently_and_greedy_decoding_does_not():
  variants = [request(0), request(1), request(0, question=1), request(0, step=1)]
  drawn = [c.token_ids for c in sampler_of().generate(variants)]
  assert len(set(drawn)) == 4
  assert sampler_of(seed=6).generate([request(0)])[0].token_ids not in drawn
  assert len({c.token_ids for c in sampler_of(temperature=0.0).generate(variants)}) == 1


# --- Prompts, turns, lanes ---


def test_a_groups_prompt_is_run_once_and_other_prompts_beside_it():
  made = sampler_of()
  made.generate([request(k) for k in range(4)])
  assert made.stats["prefilled"] == len(PROMPT) - 1
  made = sampler_of()
  made.generate([request(k, PROMPT[: 4 + q], question=q) for q in range(2) for k in range(2)])
  assert made.stats["prefilled"] == 3 + 4


def test_more_requests_than_lanes_are_all_served_and_counted():
  made = sampler_of(lanes=2, block=4)
  done = made.generate([request(k, new=6) for k in range(7)])
  assert [len(c.token_ids) for c in done] == [6] * 7 and made.stats["decoded"] == 42


OBSERVATION = (11, 12, 13, 14, 15)


def two_turns(made, samples):
  """[(second context, second completion)] of rollouts that are fed an observation between two
  turns."""
  firsts = made.generate([request(k, new=5 + k) for k in range(samples)])
  context = [(*PROMPT, *first.token_ids, *OBSERVATION) for first in firsts]
  return list(zip(context, made.generate([request(k, context[k], new=6) for k in range(samples)])))


def test_a_continued_turn_equals_a_fresh_prefill_of_the_same_context():
  made = sampler_of()
  turns = two_turns(made, 3)
  # The prompt once, then of each rollout what its lane has not run: the last sampled token, the
  # observation but for its end.
  assert made.stats["prefilled"] == len(PROMPT) - 1 + 3 * len(OBSERVATION)
  fresh = sampler_of()
  for k, (context, second) in enumerate(turns):
    (alone,) = fresh.generate([request(k, context, new=6)])
    assert second.token_ids == alone.token_ids
    np.testing.assert_allclose(second.log_probs, alone.log_probs, atol=1e-4)


def test_a_rollout_that_lost_its_lane_while_it_waited_goes_on_the_same():
  roomy, crowded = sampler_of(lanes=5), sampler_of(lanes=2)
  assert [c.token_ids for _, c in two_turns(roomy, 5)] == [
    c.token_ids for _, c in two_turns(crowded, 5)
  ]
  assert crowded.stats["prefilled"] > roomy.stats["prefilled"]


def test_a_context_that_does_not_continue_its_lane_is_run_anew():
  made = sampler_of()
  made.generate([request()])
  changed = (*PROMPT[:4], 20, 21, 22)
  assert made.generate([request(tokens=changed)]) == sampler_of().generate(
    [request(tokens=changed)]
  )


def test_last_frees_the_lane_and_poll_returns_what_has_ended():
  made = sampler_of(lanes=2, block=2)
  for one in (request(0, new=2, last=True), request(1, new=9), request(2, new=2, last=True)):
    made.submit(one)
  assert [c.key[2] for c in made.poll()] == [0]
  assert [c.key[2] for c in made.poll()] == [2]
  assert [c.key[2] for c in made.poll()] == [1]
  assert made.poll() == []


def test_new_parameters_forget_what_the_old_ones_cached():
  """A rollout that goes on under new parameters, of whose context the lane holds the old keys."""
  made, other = sampler_of(), parameters(MODEL, seed=3, scale=4.0)
  (first,) = made.generate([request()])
  further = request(tokens=[*PROMPT, *first.token_ids])
  made.load(other, 1)
  assert made.generate([further]) == sampler_of(params=other).generate([further])


def test_a_context_of_several_chunks_is_prefilled_in_its_order(monkeypatch):
  """As one longer than 1,024 tokens is; chunks of 8 tokens, of which some rows need fewer."""
  prompts = [tuple(np.random.default_rng(n).integers(0, 27, n).tolist()) for n in (30, 9, 17)]
  requests = [request(tokens=prompt, question=q) for q, prompt in enumerate(prompts)]
  monkeypatch.setattr(in_process, "CHUNK", 8)
  for prompt, completion in zip(prompts, sampler_of().generate(requests), strict=True):
    np.testing.assert_allclose(completion.log_probs, of_new(prompt, completion)[1], atol=4e-4)


# --- Where a generation ends ---


@functools.cache
def free_running():
  return sampler_of().generate([request(k, new=24) for k in range(4)])


@pytest.mark.parametrize("block", [1, 5, 24])
def test_generation_ends_with_the_token_that_completes_a_stop_string(block):
  for k, free in enumerate(free_running()):
    text = NO_END.decode(free.token_ids)
    stop = text[9:12]
    end = text.index(stop) + 3
    (completion,) = sampler_of(block=block).generate([request(k, new=24, stop=("\x7f\x7f", stop))])
    assert completion.finish == "stop"
    assert completion.token_ids == free.token_ids[:end]
    np.testing.assert_allclose(completion.log_probs, free.log_probs[:end], atol=1e-4)


@pytest.mark.parametrize("block", [1, 5])
def test_the_token_that_completes_a_stop_string_is_kept_whole(block):
  tokenizer = ThreeCharactersEach(27, eos_id=-1)
  for k, free in enumerate(free_running()):
    text = tokenizer.decode(free.token_ids)
    stop = text[28:34]  # from the second character of token 9 to the first of token 11
    end = -(-(text.index(stop) + 6) // 3)
    (completion,) = sampler_of(tokenizer, block=block).generate([request(k, new=24, stop=(stop,))])
    assert (completion.token_ids, completion.finish) == (free.token_ids[:end], "stop")


def test_a_stop_string_in_the_prompt_or_across_its_end_does_not_count():
  free = free_running()[0]
  across = NO_END.decode([PROMPT[-1], *free.token_ids[:2]])
  assert across not in NO_END.decode(free.token_ids)
  (completion,) = sampler_of().generate([request(0, new=24, stop=(NO_END.decode(PROMPT), across))])
  assert completion.token_ids == free.token_ids


@pytest.mark.parametrize("block", [1, 5])
def test_the_end_of_text_token_ends_a_generation_and_is_kept(block):
  free = free_running()[1]
  eos = free.token_ids[7]
  end = free.token_ids.index(eos) + 1
  (completion,) = sampler_of(OneCharacterEach(27, eos_id=eos), block=block).generate(
    [request(1, new=24)]
  )
  assert (completion.token_ids, completion.finish) == (free.token_ids[:end], "stop")


def test_lengths_from_one_token_to_a_full_lane():
  made = sampler_of()
  for question, (tokens, new) in enumerate(
    [(PROMPT, 1), (PROMPT, 40), ((4,), 47), ((*range(1, 25), *range(23)), 1)]
  ):
    (completion,) = made.generate([request(tokens=tokens, new=new, question=question)])
    assert len(completion.token_ids) == new and completion.finish == "length"
    np.testing.assert_allclose(completion.log_probs, of_new(tokens, completion)[1], atol=1e-4)


def test_parameters_that_are_not_finite_are_a_fault_and_leave_no_trace_for_the_next():
  made = sampler_of(
    params=PARAMS | {"attention_norm": np.full_like(PARAMS["attention_norm"], np.nan)}
  )
  for completion in made.generate([request(k) for k in range(5)]):
    assert completion.finish == "fault" and "not finite" in completion.fault
  made.load(PARAMS, 1)
  assert made.generate([request(k) for k in range(5)]) == sampler_of().generate(
    [request(k) for k in range(5)]
  )


# --- What is refused ---


def test_requests_that_cannot_be_served_are_refused_in_words():
  made = sampler_of()
  for bad, sentence in (
    (request(new=0), "at least 1"),
    (request(tokens=()), "needs a context"),
    (request(new=41), r"8 tokens and 41 new ones exceed the lane length 48; raise it"),
  ):
    with pytest.raises(ValueError, match=sentence):
      made.submit(bad)
  assert made.poll() == []


def test_parameters_come_first_and_not_in_the_middle_of_a_generation():
  made = JaxSampler(MODEL, SamplerConfig(lanes=2, length=48), NO_END)
  with pytest.raises(RuntimeError, match=r"submit\(\) before load\(\)"):
    made.submit(request())
  made.load(PARAMS, 0)
  made.submit(request())
  with pytest.raises(RuntimeError, match="while generations are running"):
    made.load(PARAMS, 1)


@pytest.mark.parametrize(
  "changes",
  [
    dict(lanes=0),
    dict(length=1),
    dict(block=0),
    dict(rows=0),
    dict(temperature=-0.1),
    dict(top_p=0.0),
    dict(top_p=1.5),
  ],
  ids=str,
)
def test_settings_out_of_range_are_refused_in_words(changes):
  ((name, value),) = changes.items()
  with pytest.raises(ValueError, match=f"{name}={value} (must be|tokens is too short)"):
    SamplerConfig(**dict(lanes=2, length=8) | changes)
