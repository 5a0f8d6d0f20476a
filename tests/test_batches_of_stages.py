"""What the sources of a run's stages put into a batch, without a run around them."""

import dataclasses
import types

import numpy as np
import pytest
from small_rollouts import OneCharacterEach
from test_pairs import rollout

from stratified.agents import tags
from stratified.algorithms.base import Trained
from stratified.algorithms.guide import GuideSettings
from stratified.algorithms.pairs import Mined, Pair, PairSettings
from stratified.algorithms.search_e1 import Distillation, DistillationSettings
from stratified.algorithms.supervised import Supervised
from stratified.learner import batching
from stratified.learner.packing import Packing
from stratified.losses import DivergenceSettings
from stratified.runs import examples, settings, stages
from stratified.runs import pairs as pair_files
from stratified.types import Question, Segment

TOKENIZER = OneCharacterEach()
GUIDE = GuideSettings(before="[", after="]")
QUESTIONS = [Question(f"q{n}", f"Who{n}?", (f"Ada{n}", "Eve")) for n in range(30)]


def told(sample, turns, question=QUESTIONS[0], searched=()):
  """A rollout of prompt, then turns by the policy, each but the last with a document behind it."""
  one = rollout(sample, *searched, question=question)
  encode = lambda text: tuple(TOKENIZER.encode(text))
  segments = [Segment(encode(TAGS.prompt(question.text)), "prompt")]
  for number, text in enumerate(turns):
    segments.append(Segment(encode(text), "policy", (0.0,) * len(text)))
    if number < len(turns) - 1:
      segments.append(Segment(encode("(doc)"), "observation"))
  return dataclasses.replace(one, segments=tuple(segments))


TAGS = tags.Tags(template="Q:{question}\n")
RIGHT = told(0, ["<c>x</c>", "<a>Ada</a>"], searched=["x"])
WRONG = told(1, ["<c>yy</c>", "<a>B</a>"], searched=["yy"])
OTHER = told(2, ["<a>C</a>"])


def source(loss="divergence", contrast=0.0, pairs=3, cycle=1, config=None, **changed):
  """The source of a distillation's batches, of one pair unless others are given it."""
  algorithm = Distillation(
    DistillationSettings(loss=loss, **changed),
    DivergenceSettings(),
    PairSettings(contrast=contrast, num_questions=5, samples_per_question=3),
    GUIDE,
  )
  packing = Packing.for_rollouts(
    pairs, length=64, teacher_length=96 if algorithm.teacher else 0, rows=pairs
  )
  stage = types.SimpleNamespace(
    algorithm=algorithm, cycle=cycle, trained=Trained({}, None, pairs), name="d"
  )
  parts = types.SimpleNamespace(stage=stage, packing=packing, first=10)
  config = config or settings.default_config()
  task = types.SimpleNamespace(tokenizer=TOKENIZER, protocol=TAGS)
  run = types.SimpleNamespace(task=task, config=config)
  around = types.SimpleNamespace(run=run, workdir=None)
  return pair_files.Pairs(parts, around, lambda state: "policy")


def texts(batch, tokens="token", segments=None):
  """The texts that lie in a batch, of whatever rows."""
  art = getattr(batch, f"{tokens}_art") if segments is None else batch.teacher_art[tokens]
  segment = batch.segment_art if segments is None else batch.teacher_art[segments]
  found = []
  for ids, owner in zip(art.reshape(-1, art.shape[-1]), segment.reshape(-1, art.shape[-1])):
    for number in range(1, owner.max() + 1):
      found.append(TOKENIZER.decode(ids[owner == number].tolist()))
  return found


def counted(batch):
  """The texts of a batch's tokens that count in its loss."""
  chosen = batch.stream_art["distillation"] > 0
  return TOKENIZER.decode(batch.token_art[chosen].tolist())


def batch_of(found, pairs):
  found._mined = Mined(pairs, {"pairs/count": float(len(pairs))})
  batch, row = found.take(11, None)
  assert row == {"pairs/count": len(pairs)}
  return batch


PAIR = Pair(RIGHT, WRONG, 1.0, 0.0, (0, 1.0, 0), 0.25, OTHER)


def test_a_teacher_reads_the_reference_and_both_read_the_student():
  batch = batch_of(source(pairs=1), [PAIR])
  rest = "<c>yy</c>(doc)<a>B</a>"
  assert texts(batch) == [f"Q:Who0?\n{rest}"]
  shown = "<c>x</c>(doc)<a>Ada</a>"
  assert texts(batch, "token", "segment") == [f"Q:Who0?[{shown}]\n{rest}"]
  assert not [name for name in batch.teacher_art if name.startswith("other")]
  assert counted(batch) == "<c>yy</c><a>B</a>"
  assert batch.array_qk["weight"].tolist() == [[1]]


def test_a_contrast_reads_the_other_wrong_rollout():
  batch = batch_of(source(pairs=1, contrast=1.0), [PAIR])
  rest = "<c>yy</c>(doc)<a>B</a>"
  assert texts(batch, "other_token", "other_segment") == [f"Q:Who0?[<a>C</a>]\n{rest}"]
  at, there = batch.teacher_art["other_at"], batch.teacher_art["other_token"]
  own = batch.stream_art["distillation"] > 0
  a, r, _ = np.nonzero(own)
  assert (there[a, r, at[own]] == batch.token_art[own]).all()


def test_imitation_is_of_the_reference_and_has_no_teacher():
  batch = batch_of(source(pairs=1, loss="imitation"), [PAIR])
  assert texts(batch) == ["Q:Who0?\n<c>x</c>(doc)<a>Ada</a>"] and not batch.teacher_art
  assert counted(batch) == "<c>x</c><a>Ada</a>"


@pytest.mark.parametrize(
  "changed, text, weight",
  [
    ({"span": "search"}, "yy", 1),
    ({"span": "think_search"}, "<c>yy</c>", 1),
    ({"prefix": 0.5}, "<c>yy</c>"[:9], 1),
    ({"weight": "mixed"}, "<c>yy</c><a>B</a>", 0.75),
  ],
)
def test_span_prefix_and_weight_reach_the_batch(changed, text, weight):
  batch = batch_of(source(pairs=1, **changed), [PAIR])
  assert counted(batch) == text and batch.array_qk["weight"].tolist() == [[weight]]


def test_each_pass_takes_every_pair_once_in_an_order_of_its_own():
  pairs = [PAIR._replace(student=told(n, [f"<a>{n:02d}</a>"])) for n in range(1, 8)]

  def order(cycle, seed=0):
    config = settings.default_config()
    config.seed = seed
    found = source(cycle=cycle, config=config)
    found._mined = Mined(pairs, {})
    return [one.student.sample for step in range(7) for one in found._chosen(step)]

  passes = [order(1)[at : at + 7] for at in (0, 7, 14)]
  assert all(sorted(one) == list(range(1, 8)) for one in passes)
  assert len({tuple(one) for one in passes}) == 3
  assert order(1) == order(1) and order(2) != order(1) != order(1, seed=1)


def test_without_pairs_nothing_counts():
  batch = batch_of(source(pairs=2), [])
  assert not batch.valid_qk.any() and not batch.segment_art.any()


def test_rollouts_for_pairs_are_of_the_policy_that_the_stage_begins_with(monkeypatch):
  """They have random keys of their own, and as many questions and samples as are asked for."""
  found, asked, loaded = source(), [], []
  around = found._around
  around.run.config.data.questions_per_step = 3
  around.run.task.questions_at = lambda step: QUESTIONS[3 * (step - 10) :][:3]
  around.run.task.tools = around.run.task.limits = None
  around.run.reward = lambda one: types.SimpleNamespace(total=float(one.sample == 0))
  around.stop = types.SimpleNamespace(agreed=lambda: False)
  around.sampler = types.SimpleNamespace(
    load=lambda policy, step: loaded.append((policy, step)), release=lambda: None
  )

  def collect(task, questions, **how):
    asked.append((how["step"], how["weight_version"], how["samples_per_question"]))
    return [[told(k, [f"<a>{k}</a>"], q) for k in range(3)] for q in questions]

  monkeypatch.setattr(pair_files.rollouts, "collect", collect)
  mined = found._mine(lambda: "policy")
  assert loaded == [("policy", 10)]
  assert asked == [(pair_files.FIRST_KEY + step, 10, 3) for step in (10, 11)]
  assert [pair.student.question for pair in mined.pairs] == QUESTIONS[:5]
  assert mined.stats["pairs/sampled_tokens"] == 5 * 3 * len("<a>0</a>")


def test_reinforcement_keeps_the_rollouts_of_its_last_steps(monkeypatch):
  kept, config = [], settings.default_config()
  config.logging.trajectories_every = 0
  packing = Packing.for_rollouts(1, length=64, rows=1)
  stage = types.SimpleNamespace(name="r_1", cycle=1, num_steps=5, keeps=2)
  parts = types.SimpleNamespace(stage=stage, first=4, packing=packing)
  task = types.SimpleNamespace(row_at=lambda step: {})
  run = types.SimpleNamespace(config=config, task=task)
  writer = types.SimpleNamespace(write=lambda row, **tokens: None)
  around = types.SimpleNamespace(run=run, sampler=None, writer=writer, workdir="w")
  source = stages.Reinforcement(parts, around, None)
  monkeypatch.setattr(stages.pairs, "keep", lambda folder, step, groups: kept.append(step))
  monkeypatch.setattr(stages.held_out, "due", lambda config, parts, step: False)
  batch = batching.collate(
    [[RIGHT]], packing=packing, algorithm=Supervised(), rewards=[[0]], strata=[[0]], num_strata=1
  )
  known = ("time/update_s", "rollout/policy_tokens", "reward/mean", "rollout/searches_mean")
  for step in range(5, 10):
    source._sampled = [[RIGHT]], [[0.0]], [[0]]
    source.finish(step, None, {"advantage_qk": [[0.0]]}, batch, dict.fromkeys(known, 1.0))
  assert kept == [8, 9]


###  Demonstrations and examples  ###


def supervised(demonstrations, config, name="warm_start"):
  packing = Packing.for_rollouts(40, length=128, rows=8)
  stage = types.SimpleNamespace(algorithm=Supervised(name=name), name=name, cycle=0)
  parts = types.SimpleNamespace(stage=stage, packing=packing, first=0)
  task = types.SimpleNamespace(
    tokenizer=TOKENIZER,
    protocol=TAGS,
    demonstrations=demonstrations,
    questions_at=lambda step: QUESTIONS[step : step + 2],
  )
  reward = lambda one: types.SimpleNamespace(total=float(one.sample % 2))
  run = types.SimpleNamespace(task=task, config=config, reward=reward)
  return parts, types.SimpleNamespace(run=run, writer=None), None


def test_a_share_of_the_demonstrations_shows_itself_and_which_hangs_on_the_step_alone():
  config = settings.default_config()
  config.update_from_flattened_dict({"guide.share": 0.25, "guide.before": "[", "guide.after": "]"})
  play = lambda step: [[told(n, [f"<a>{n:02d}</a>"])] for n in range(40)]
  made = stages.Demonstrations(*supervised(play, config))
  found = [one for step in range(5) for one in texts(made.take(step, None)[0])]
  guided = [one for one in found if "[" in one]
  assert 0.15 < len(guided) / len(found) < 0.35 and len(found) == 200
  for one in guided:
    shown, rest = one.removeprefix("Q:Who0?[").split("]\n")
    assert shown == rest and rest.startswith("<a>")
  assert texts(made.take(3, None)[0]) == texts(made.take(3, None)[0])
  config.guide.share = 0.0
  plain = stages.Demonstrations(*supervised(play, config))
  assert not [one for one in texts(plain.take(0, None)[0]) if "[" in one]


def test_sft_takes_the_golden_answer_right_after_the_question():
  config = settings.default_config()
  config.update_from_flattened_dict({"sft.targets": "answers", "rollout.max_tokens": 64})
  made = examples.Examples(*supervised(None, config, "sft"))
  batch, row = made.take(7, None)
  assert texts(batch) == [f"Q:Who{n}?\n<answer> Ada{n}</answer>" for n in (7, 8)]
  answers = TOKENIZER.decode(batch.token_art[batch.stream_art["imitation"] > 0].tolist())
  assert answers == "<answer> Ada7</answer><answer> Ada8</answer>" and row["sft/kept_share"] == 1
  config.rollout.max_tokens = 20
  batch, row = made.take(7, None)
  assert not batch.valid_qk.any() and row["sft/kept_share"] == 0


def test_sft_keeps_the_demonstrations_that_are_right():
  config = settings.default_config()
  config.sft.targets = "demonstrations"
  play = lambda step: [[told(n, [f"<a>{n:02d}</a>"])] for n in range(6)]
  made = examples.Examples(*supervised(play, config, "sft"))
  batch, row = made.take(0, None)
  assert sorted(one[-6:-4] for one in texts(batch)) == ["01", "03", "05"]
  assert batch.valid_qk[:, 0].tolist() == [0, 1, 0, 1, 0, 1] and row["sft/kept_share"] == 0.5
