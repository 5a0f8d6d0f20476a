"""Against real SGLang servers: the same tokens as in process, the trainer's log-probs, every way of
giving weights."""

import collections
import dataclasses
import json
import time
import urllib.request

from conftest import LENGTH
import numpy as np
import pytest

from stratified.agents import loop, tags
from stratified.agents.limits import Limits
from stratified.retrieval.bm25 import BM25
from stratified.sampling.in_process import JaxSampler, SamplerConfig
from stratified.sampling.interface import Request
from stratified.sampling.sglang import wire
from stratified.sampling.sglang.errors import SamplerError
from stratified.sampling.sglang.probe import trainer_log_probs
from stratified.sampling.sglang.sampler import Sampling, SglangSampler
from stratified.tasks.encyclopedia import pages as encyclopedia
from stratified.tasks.encyclopedia import questions as generated
from stratified.tools.search import Search

# Logits are sums of hundreds of float32 products in another order: 1e-5 is usual, the contract is
# 1e-4.
CLOSE = 1e-4
LIMITS = Limits(
  max_turns=3, max_turn_tokens=24, max_observation_tokens=64, max_tokens=LENGTH, answer_tokens=10
)


@pytest.fixture(scope="module")
def world():
  book = encyclopedia.make(encyclopedia.EncyclopediaConfig(entities=200), 0)
  return generated.training_questions(book, seed=0, step=0, count=6, hop_shares=(0.25,) * 4), BM25(
    book.passages
  )


def requests(count, tokens=24, step=0):
  return [
    Request(
      (step, i // 4, i % 4),
      tuple(range(20 + i // 4, 44 + i // 4)),
      tokens,
      ("</search>", "</answer>"),
    )
    for i in range(count)
  ]


def in_process(model, tokenizer, params, temperature=0.0):
  sampler = JaxSampler(
    model, SamplerConfig(lanes=12, length=LENGTH, temperature=temperature), tokenizer
  )
  sampler.load(params, 0)
  return sampler


def reference(model, params, ids):
  """The trainer's log-probs of ids[1:]; padded, which changes nothing before the padding, so that
  one shape is compiled."""
  return np.asarray(trainer_log_probs(model, params, (*ids, *(1,) * (LENGTH - len(ids)))))[
    : len(ids) - 1
  ]


def gap(model, params, context, completion):
  """Largest difference of a generation's log-probs from the trainer's."""
  theirs = reference(model, params, (*context, *completion.token_ids))[len(context) - 1 :]
  return np.max(np.abs(np.subtract(theirs, completion.log_probs)))


@pytest.mark.smoke
@pytest.mark.parametrize("sync", ["disk", "tensor", "group"])
def test_weights_arrive_by_every_way_at_every_server(real_servers, connect, model, params_of, sync):
  with connect(real_servers, sync=sync) as servers:
    sampler = SglangSampler(servers, Sampling())
    for n in (1, 2):
      sampler.load(params_of(n), 10 * n)
      assert len(servers.usable) == 2 and servers.stats["probe_gap"] < CLOSE
      versions = {
        json.load(urllib.request.urlopen(s.url + "/model_info"))["weight_version"]
        for s in real_servers
      }
      assert versions == {f"{servers.publisher.run}-{n}"}
      wanted = requests(8)
      for request, completion in zip(wanted, sampler.generate(wanted)):
        assert gap(model, params_of(n), request.token_ids, completion) < CLOSE
        assert set(completion.weight_versions) == {10 * n}


def test_the_prefix_cache_does_not_survive_an_update(real_servers, connect, model, params_of):
  with connect(real_servers[:1]) as servers:
    sampler = SglangSampler(servers, Sampling())
    request = requests(1)[0]
    for n in range(3):
      sampler.load(params_of(n), n)
      first, again = sampler.generate([request]) + sampler.generate(
        [request]
      )  # the second meets the cache
      for completion in (first, again):
        assert gap(model, params_of(n), request.token_ids, completion) < CLOSE


def test_parameters_on_a_mesh_are_given_too(real_servers, connect, params_of, model):
  import jax

  from stratified import sharding
  from stratified.policy import decoder

  mesh = sharding.make_mesh(1, 1, 1, devices=jax.devices()[:1])
  axes = decoder.logical_axes(model)
  placed = {
    name: jax.device_put(value, sharding.named(mesh, axes[name]))
    for name, value in params_of(1).items()
  }
  for sync in ("disk", "tensor"):
    with connect(real_servers, sync=sync, mesh=mesh) as servers:
      servers.load(placed, 0)
      assert len(servers.usable) == 2


def test_two_generations_of_the_weights_are_kept_and_none_at_the_end(
  real_servers, connect, params_of, tmp_path
):
  with connect(real_servers[:1], directory=tmp_path) as servers:
    for n in range(4):
      servers.load(params_of(n), n)
    (run,) = tmp_path.iterdir()
    assert sorted(path.name for path in run.iterdir()) == ["weights-000003", "weights-000004"]
  assert list(tmp_path.iterdir()) == []


def test_weights_that_are_not_the_trainers_are_refused(real_servers, connect, params_of):
  with connect(real_servers) as servers:
    weights = servers.publisher.publish(params_of(1))
    weights.probe_log_probs = tuple(value - 0.01 for value in weights.probe_log_probs)
    with pytest.raises(
      SamplerError, match="does not: it gives token .* the trainer .*probe_tolerance=0.001"
    ):
      servers.wait(servers.fleet.update(weights), 60)


@pytest.mark.smoke
def test_greedy_rollouts_with_searches_are_the_same_through_both_samplers(
  real_servers, connect, model, tokenizer, params_of, world
):
  questions, retriever = world
  limits = dataclasses.replace(LIMITS, forced_searches=2)
  collect = lambda sampler: loop.collect(
    questions,
    sampler=sampler,
    tools=(Search(retriever, 1),),
    tokenizer=tokenizer,
    protocol=tags.short(),
    limits=limits,
    samples_per_question=1,
    step=0,
  )
  with connect(real_servers) as servers:
    judge = SglangSampler(servers, Sampling(0.0))
    judge.load(params_of(0), 0)
    theirs = collect(judge)
  ours = collect(in_process(model, tokenizer, params_of(0)))
  for (a,), (b,) in zip(ours, theirs):
    assert a.num_searches == 2 and a.fault is None and b.fault is None
    assert a.token_ids == b.token_ids and a.turns == b.turns and a.answer == b.answer
    for left, right in zip(a.segments, b.segments):
      np.testing.assert_allclose(left.log_probs, right.log_probs, atol=CLOSE)


@pytest.mark.smoke
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_what_the_server_was_fed_is_what_is_trained_on(
  real_servers, connect, model, tokenizer, params_of, world, monkeypatch, temperature
):
  questions, retriever = world
  sent, build = collections.defaultdict(list), wire.generate_body

  def recorded(request, *rest):
    sent[request.key].append(build(request, *rest))
    return sent[request.key][-1]

  monkeypatch.setattr(wire, "generate_body", recorded)
  with connect(real_servers) as servers:
    sampler = SglangSampler(servers, Sampling(temperature))
    sampler.load(params_of(0), 7)
    groups = loop.collect(
      questions,
      sampler=sampler,
      tools=(Search(retriever, 1),),
      tokenizer=tokenizer,
      protocol=tags.short(),
      limits=dataclasses.replace(LIMITS, forced_searches=2),
      samples_per_question=4,
      step=7,
    )
  scaled = params_of(0) | {
    "final_norm": params_of(0)["final_norm"] / temperature
  }  # logits / temperature
  for q, group in enumerate(groups):
    assert len({tuple(one.token_ids) for one in group}) == 4  # no clones
    for k, one in enumerate(group):
      assert one.fault is None, one.fault
      tokens, fed, at = tuple(one.token_ids), sent[7, q, k], 0
      starts = []
      for segment in one.segments:
        if segment.origin == "policy":
          starts.append(at)
          assert segment.weight_versions == (7,) * len(segment.token_ids)
        at += len(segment.token_ids)
      assert [len(body["input_ids"]) for body in fed] == starts
      assert all(tokens[: len(body["input_ids"])] == tuple(body["input_ids"]) for body in fed)
      assert all("sampling_seed" not in body["sampling_params"] for body in fed)
      expected = reference(model, scaled, tokens)
      at = 0
      for segment in one.segments:
        if segment.origin == "policy":
          np.testing.assert_allclose(
            segment.log_probs, expected[at - 1 : at - 1 + len(segment.token_ids)], atol=CLOSE
          )
        at += len(segment.token_ids)


def test_generations_end_with_the_token_that_completes_a_stop(
  real_servers, connect, tokenizer, params_of
):
  stops = (" a", "e", "?")  # common in random text
  with connect(real_servers) as servers:
    sampler = SglangSampler(servers, Sampling())
    sampler.load(params_of(0), 0)
    wanted = [
      dataclasses.replace(request, stop=stops, max_new_tokens=60) for request in requests(12)
    ]
    done = sampler.generate(wanted)
  assert sum(completion.finish == "stop" for completion in done) > 6
  for completion in done:
    before = tokenizer.decode(completion.token_ids[:-1])
    assert (
      not any(stop in before for stop in stops)
      and tokenizer.eos_id not in completion.token_ids[:-1]
    )
    if completion.finish == "length":
      assert len(completion.token_ids) == 60


def test_weights_change_under_running_generations_and_each_token_knows_its_own(
  real_servers, connect, model, params_of
):
  with connect(real_servers, interrupt=True) as servers:
    sampler = SglangSampler(servers, Sampling())
    sampler.load(params_of(0), 0)
    wanted = [Request((0, i, 0), tuple(range(30 + i, 50 + i)), 200) for i in range(8)]
    for request in wanted:
      sampler.submit(request)
    for n in (1, 2):
      time.sleep(0.15)
      sampler.load(params_of(n), n)
    done = {}
    while len(done) < len(wanted):
      done |= {completion.key: completion for completion in sampler.poll()}
  mixed = 0
  for request in wanted:
    completion = done[request.key]
    assert completion.fault is None and list(completion.weight_versions) == sorted(
      completion.weight_versions
    )
    mixed += len(set(completion.weight_versions)) > 1
    ids = (*request.token_ids, *completion.token_ids)
    for n in set(completion.weight_versions):
      theirs = reference(model, params_of(n), ids)[len(request.token_ids) - 1 :]
      own = np.asarray(completion.weight_versions) == n
      assert np.max(np.abs(theirs - completion.log_probs)[own]) < CLOSE
  assert mixed > 0


def test_memory_is_given_back_right_after_a_step_and_taken_again(
  real_servers, connect, model, params_of
):
  """That memory becomes free shows on a GPU only; here, that the server survives being asked at
  once, and goes on."""
  with connect(real_servers) as servers:
    sampler = SglangSampler(servers, Sampling())
    for n in range(3):
      sampler.load(params_of(n), n)
      wanted = requests(8)
      for request, completion in zip(wanted, sampler.generate(wanted)):
        assert gap(model, params_of(n), request.token_ids, completion) < CLOSE
      sampler.generate(wanted)
      servers.release()
      assert len(servers.usable) == 2


def test_aborted_generations_keep_their_tokens(real_servers, connect, model, params_of):
  with connect(real_servers) as servers:
    sampler = SglangSampler(servers, Sampling())
    sampler.load(params_of(0), 0)
    wanted = [Request((0, i, 0), tuple(range(30 + i, 50 + i)), 220) for i in range(4)]
    for request in wanted:
      sampler.submit(request)
    time.sleep(0.1)
    sampler.abort()
    done = []
    while len(done) < len(wanted):
      done += sampler.poll()
  aborted = [completion for completion in done if completion.finish == "fault"]
  assert aborted
  for completion in aborted:
    assert len(completion.token_ids) == len(completion.log_probs) < 220
    if completion.token_ids:
      assert gap(model, params_of(0), wanted[completion.key[1]].token_ids, completion) < CLOSE


def test_a_rollout_with_tool_calls_is_exact_token_by_token(
  real_servers, connect, tokenizer, params_of, world
):
  from chat_templates import QWEN25

  from stratified.agents.chat import ChatTemplate
  from stratified.agents.tool_calls import ToolCalls

  questions, retriever = world
  # the encyclopedia's tokenizer knows one control token: it ends turns here
  protocol = ToolCalls(
    ChatTemplate(QWEN25.replace("<|im_end|>", "<|endoftext|>")),
    "<|endoftext|>",
    template="{question}",
    corrective_text="No.",
  )
  limits = dataclasses.replace(
    LIMITS, max_tokens=2048, max_observation_tokens=400, forced_searches=1
  )
  sent = collections.defaultdict(list)

  class Recording(SglangSampler):
    def submit(self, request):
      sent[request.key].append(request.token_ids)
      super().submit(request)

  with connect(real_servers) as servers:
    sampler = Recording(servers, Sampling())
    sampler.load(params_of(0), 0)
    groups = loop.collect(
      questions[:3],
      sampler=sampler,
      tools=(Search(retriever, 1),),
      tokenizer=tokenizer,
      protocol=protocol,
      limits=limits,
      samples_per_question=2,
      step=0,
    )
  for q, group in enumerate(groups):
    for k, one in enumerate(group):
      assert one.fault is None
      for ids in sent[0, q, k]:
        assert tuple(one.token_ids[: len(ids)]) == ids
      fed = tokenizer.decode(
        [i for s in one.segments if s.origin == "observation" for i in s.token_ids]
      )
      assert fed.count("<tool_response>") == fed.count("</tool_response>")


def test_the_server_reads_our_tool_calls_as_we_do(real_servers):
  """SGLang's own parser on text that ours calls a search."""
  from stratified.agents.calls import read_call
  from stratified.agents.tool_calls import described

  call = '{"name": "search", "arguments": {"query_list": ["a", "b"]}}'
  body = {
    "text": f"x\n<tool_call>\n{call}\n</tool_call>",
    "tool_call_parser": "qwen",
    "tools": [described(Search)],
  }
  answer = json.load(
    urllib.request.urlopen(
      urllib.request.Request(
        real_servers[0].url + "/parse_function_call",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
      )
    )
  )
  (found,) = answer["calls"]
  assert found["name"] == "search" and tuple(
    json.loads(found["parameters"])["query_list"]
  ) == tuple(query for _, query in read_call(call, (Search,)))
