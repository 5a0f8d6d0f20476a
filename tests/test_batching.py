"""Rollouts become packed rows of fixed shapes, and nothing is lost or moved on the way."""

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import numpy as np
import pytest
from small_rollouts import family, random_groups, trajectory

from stratified import advantages
from stratified.algorithms.grpo import Grpo, PolicyLossSettings
from stratified.algorithms.supervised import Supervised
from stratified.learner import batching
from stratified.learner.packing import deal, first_fit, Packing

PACKING = Packing(length=8, rows=2, micro=2)

# Two questions with two rollouts each, of 7, 3, (lost) and 4 tokens. Longest first into rows of 8:
# the first rollout fills row 0 but for one place, the fourth and the second share row 1.
GROUPS = [
  [
    trajectory(
      ("prompt", [1, 2]),
      ("policy", [3, 4], [-0.1, -0.2]),
      ("observation", [5, 6]),
      ("policy", [7], [-0.3]),
    ),
    trajectory(("prompt", [1, 2]), ("policy", [8], [-0.4])),
  ],
  [
    trajectory(
      ("prompt", [9]), ("policy", [10], [-9.0]), stop="fault", fault="the retriever did not answer"
    ),
    trajectory(("prompt", [9]), ("policy", [11, 12, 13], [-0.5, -0.6, -0.7])),
  ],
]
ZERO = [[0] * 8] * 2


def collate(
  groups=GROUPS,
  packing=PACKING,
  rewards=((1, 0), (0, 0.5)),
  strata=((1, 0), (0, 2)),
  num_strata=3,
  algorithm=None,
):
  return batching.collate(
    groups,
    packing=packing,
    algorithm=algorithm or family(),
    rewards=rewards,
    strata=strata,
    num_strata=num_strata,
  )


def test_every_array_of_a_batch_made_by_hand():
  batch = collate()
  expected = {
    "token_art": [[1, 2, 3, 4, 5, 6, 7, 0], [9, 11, 12, 13, 1, 2, 8, 0]],
    "position_art": [[0, 1, 2, 3, 4, 5, 6, 0], [0, 1, 2, 3, 0, 1, 2, 0]],
    "segment_art": [[1, 1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 2, 2, 2, 0]],
    "policy_art": [[0, 0, 1, 1, 0, 0, 1, 0], [0, 1, 1, 1, 0, 0, 1, 0]],
    "sampler_logp_art": [[0, 0, -0.1, -0.2, 0, 0, -0.3, 0], [0, -0.5, -0.6, -0.7, 0, 0, -0.4, 0]],
    "trajectory_art": [[0, 0, 0, 0, 0, 0, 0, 0], [3, 3, 3, 3, 1, 1, 1, 0]],
  }
  for name, rows in expected.items():
    dtype = np.float32 if name in ("policy_art", "sampler_logp_art") else np.int32
    found = getattr(batch, name)
    assert found.dtype == dtype, name
    np.testing.assert_array_equal(found, np.asarray([rows, ZERO], dtype), err_msg=name)
  assert batch.first_m.tolist() == [0, 1] and batch.first_m.dtype == np.int32
  np.testing.assert_array_equal(batch.mass_qk["policy"], [[3, 1], [0, 3]])
  np.testing.assert_array_equal(batch.reward_qk, np.float32([[1, 0], [0, 0.5]]))
  np.testing.assert_array_equal(batch.stratum_qk, [[1, 0], [0, 2]])
  np.testing.assert_array_equal(batch.valid_qk, [[1, 1], [0, 1]])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(1, 20), max_size=30))
def test_first_fit_loses_nothing_overfills_nothing_and_opens_a_bin_only_when_it_must(lengths):
  bins = first_fit(lengths, 20)
  assert sorted(item for items in bins for item in items) == list(range(len(lengths)))
  assert all(sum(lengths[item] for item in items) <= 20 for items in bins)
  order = [item for items in bins for item in items]
  for index, items in enumerate(bins):
    for earlier in bins[:index]:
      # What stood in an earlier bin when this item came is what is at least as long as it (longest
      # first).
      for item in items:
        before = [i for i in earlier if (-lengths[i], i) < (-lengths[item], item)]
        assert sum(lengths[i] for i in before) + lengths[item] > 20
  assert order == [] or lengths[order[0]] == max(lengths)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
  questions=st.integers(1, 4),
  samples=st.integers(1, 4),
  rows=st.integers(1, 5),
  seed=st.integers(0, 1000),
  lost=st.integers(0, 3),
)
def test_each_rollout_can_be_read_back_from_the_rows(questions, samples, rows, seed, lost):
  groups = random_groups(questions, samples, seed=seed)
  groups[0][:lost] = [dataclasses.replace(t, fault="lost") for t in groups[0][:lost]]
  packing = Packing.for_rollouts(questions * samples, length=20, rows=rows)
  zeros = np.zeros((questions, samples), int)
  batch = collate(groups, packing, zeros, zeros)
  assert batch.token_art.shape == (-(-questions * samples // rows), rows, 20)
  assert (batch.segment_art[int(batch.first_m[-1]) :] == 0).all()
  flat = {
    name: getattr(batch, name).reshape(-1, 20)
    for name in batch._fields
    if name.endswith("_art") and name not in ("stream_art", "teacher_art")
  }
  found = {}
  for row, segments in enumerate(flat["segment_art"]):
    for number in range(1, segments.max() + 1):
      at = np.nonzero(segments == number)[0]
      np.testing.assert_array_equal(flat["position_art"][row, at], np.arange(len(at)))
      assert (np.diff(at) == 1).all() and len(set(flat["trajectory_art"][row, at])) == 1
      found[int(flat["trajectory_art"][row, at[0]])] = tuple(
        flat[name][row, at].tolist() for name in ("token_art", "policy_art", "sampler_logp_art")
      )
  kept = {i: t for i, t in enumerate(t for group in groups for t in group) if t.fault is None}
  assert found.keys() == kept.keys()
  for index, (tokens, mask, logp) in found.items():
    segments = kept[index].segments
    assert tokens == kept[index].token_ids
    assert mask == [float(s.origin == "policy") for s in segments for _ in s.token_ids]
    assert logp == [
      float(np.float32(x)) for s in segments for x in (s.log_probs or [0.0] * len(s.token_ids))
    ]


def test_a_lost_rollout_takes_no_tokens_and_a_wholly_lost_step_is_one_empty_micro_batch():
  lost = [[dataclasses.replace(t, fault="lost") for t in group] for group in GROUPS]
  batch = collate(lost)
  assert batching.num_tokens(batch) == 0 and batch.first_m[-1] == 1
  np.testing.assert_array_equal(batch.valid_qk, np.zeros((2, 2)))


def test_the_reward_of_a_lost_rollout_may_be_anything():
  assert np.isinf(collate(rewards=((1, 0), (np.inf, 0))).reward_qk[1, 0])


def test_padding_share_counts_only_the_micro_batches_that_run():
  batch = collate()
  assert batching.padding_share(batch) == pytest.approx(2 / 16)
  assert batching.num_tokens(batch) == 14


def test_for_rollouts_has_room_for_rollouts_that_fill_a_row_each():
  assert Packing.for_rollouts(9, length=8, rows=4) == Packing(length=8, rows=4, micro=3)
  full = [
    [trajectory(("prompt", [1] * 4), ("policy", [2] * 4)) for _ in range(3)] for _ in range(3)
  ]
  zeros = np.zeros((3, 3), int)
  batch = collate(full, Packing.for_rollouts(9, length=8, rows=4), zeros, zeros)
  assert batch.first_m[-1] == 3 and batching.num_tokens(batch) == 72


def test_what_a_demonstration_read_counts_its_weight_except_the_first_token():
  batch = collate(algorithm=Supervised(0.25))
  np.testing.assert_array_equal(
    batch.stream_art["imitation"],
    np.float32([[[0, 0.25, 1, 1, 0.25, 0.25, 1, 0], [0, 1, 1, 1, 0, 0.25, 1, 0]], ZERO]),
  )
  # 3 + 3 x 0.25, 1 + 0.25, nothing of the lost one, 3.
  np.testing.assert_array_equal(batch.mass_qk["imitation"], np.float32([[3.75, 1.25], [0, 3]]))
  # The mask of what the policy wrote says nothing of it.
  np.testing.assert_array_equal(batch.policy_art, collate().policy_art)


def test_mini_batches_are_packed_apart_by_questions_in_their_order():
  groups = [[trajectory(("prompt", [q + 1]), ("policy", [9] * (q + 1)), sample=k) for k in range(2)]
            for q in range(4)]  # fmt: skip
  zeros = np.zeros((4, 2), int)
  packing = Packing.for_rollouts(8, length=8, rows=2, mini_batches=2)
  assert packing.micro == 4
  batch = collate(groups, packing, zeros, zeros)
  assert batch.first_m.tolist() == [0, 1, 3]
  own = [set((batch.trajectory_art[low:high][batch.segment_art[low:high] > 0] // 2).tolist())
         for low, high in ((0, 1), (1, 3))]  # fmt: skip
  assert own == [{0, 1}, {2, 3}]


def test_streams_of_another_length_than_the_rollout_are_refused():
  class Short(Grpo):
    def streams(self, trajectory, reward):
      return {"policy": [1.0]}

  algorithm = Short(advantages.AdvantageSettings(), PolicyLossSettings(), 3, 8)
  with pytest.raises(ValueError, match="Short.streams gives 1 numbers under 'policy'.*one a token"):
    collate(algorithm=algorithm)


def test_a_batch_without_rollouts_has_the_shapes_of_one_with_them(mesh):
  packing = Packing(length=8, rows=2, micro=2)
  described = batching.abstract(mesh, packing, Supervised(0.5), 2, 2)
  made = batching.place(mesh, collate(packing=packing, algorithm=Supervised(0.5)))
  for one, other in zip(jax.tree.leaves(described), jax.tree.leaves(made), strict=True):
    assert (one.shape, one.dtype, one.sharding) == (other.shape, other.dtype, other.sharding)


@pytest.mark.parametrize(
  "changes, sentence",
  [
    (dict(groups=[GROUPS[0], GROUPS[1][:1]]), r"groups of \[1, 2\] rollouts.*same number.*fault"),
    (dict(strata=((0, 1), (2, 3))), r"from 0 to 3, outside \[0, 3\).*cap the partition"),
    (dict(strata=((0, -1), (2, 1))), r"from -1 to 2, outside \[0, 3\)"),
    (
      dict(rewards=((1, float("nan")), (0, 1))),
      r"rollout 1 of question 'q' has the reward nan.*finite number",
    ),
    (dict(rewards=((1e20, 0), (0, 1))), r"rollout 0 of question 'q' has the reward 1e\+20"),
    (
      dict(packing=Packing(length=6, rows=2, micro=2)),
      r"a rollout of 7 tokens.*row of 6.*rollout\.max_tokens",
    ),
    (dict(packing=Packing(length=8, rows=1, micro=1)), r"2 rows are needed, 1 are planned"),
  ],
)
def test_what_does_not_fit_is_refused_in_words(changes, sentence):
  with pytest.raises(ValueError, match=sentence):
    collate(**changes)


def test_place_splits_nothing_on_one_device_and_keeps_every_value(mesh):
  batch = collate()
  placed = batching.place(mesh, batch)
  for value, found in zip(jax.tree.leaves(batch), jax.tree.leaves(placed), strict=True):
    np.testing.assert_array_equal(np.asarray(found), value)
    assert found.sharding.mesh == mesh


def search_lengths(count=2048, seed=0):
  """Lengths as of search rollouts: a prompt of 250 tokens, 0 to 4 searches of about 620 tokens, an
  answer, at most 4,096."""
  rng = np.random.default_rng(seed)
  searches = rng.choice(5, count, p=[0.1, 0.35, 0.3, 0.15, 0.1])
  return (
    np.clip(250 + searches * rng.normal(620, 120, count) + rng.gamma(2, 60, count), 260, 4096)
    .astype(int)
    .tolist()
  )


def test_padding_of_search_rollouts_in_rows_of_4096_is_under_five_percent():
  lengths = search_lengths()
  bins = first_fit(lengths, 4096)
  for rows in (8, 16, 32):
    assert 1 - sum(lengths) / (-(-len(bins) // rows) * rows * 4096) < 0.05, rows


@pytest.mark.parametrize("rows", [16, 32])
def test_micro_batches_give_every_data_shard_like_numbers_of_tokens(rows):
  """Within a hundredth but in the last one, whose bins are those that are left: there no shard has
  one row more than another."""
  lengths, packing = search_lengths(), Packing(length=4096, rows=rows, micro=0, shards=8)
  bins = first_fit(lengths, 4096)
  dealt = deal(bins, lengths, packing)
  assert sorted(items for items in dealt if items) == sorted(bins)
  by_shard = lambda size: (
    np.array([size(items) for items in dealt]).reshape(-1, 8, rows // 8).sum(-1)
  )
  tokens, used = by_shard(lambda items: sum(lengths[i] for i in items)), by_shard(bool)
  assert (tokens[:-2].min(1) / tokens[:-2].max(1)).min() > 0.99
  assert used[-1].max() - used[-1].min() <= 1
