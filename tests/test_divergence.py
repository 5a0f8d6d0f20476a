"""The divergence of teacher and student against loops in float64: values, gradients, meshes."""

import dataclasses
import itertools
import json
import math
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_rollouts import decoder_config

from stratified.policy.divergence import DivergenceSettings, token_divergence

ROWS, LENGTH, WIDTH, VOCAB = 2, 6, 5, 13
DIVERGENCES = ("forward", "reverse", "jensen_shannon")
# LLVM at its fastest; the program itself stays the same.
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
FORMS = ("entry", "position", "scaled", "none")
every = pytest.mark.parametrize(
  "name, form, top_k", list(itertools.product(DIVERGENCES, FORMS, (0, 3)))
)


def compute(student_rtd, teacher_rtd, student_vd, teacher_vd, settings, chunk=None, tied=False):
  """The Divergence, and the gradients of all four arrays of sum(weight x loss), where position i
  of the flattened rows has the weight 1 + i / 10."""
  config = decoder_config(vocab_size=student_vd.shape[0], tied_embeddings=tied)
  name = "embed" if tied else "head"

  def loss(*arrays):
    student_rtd, teacher_rtd, student_vd, teacher_vd = arrays
    found = token_divergence(
      config,
      {name: student_vd},
      {name: teacher_vd},
      student_rtd,
      teacher_rtd,
      settings=settings,
      chunk=chunk,
    )
    return (found.loss * weights(found.loss.shape)).sum(), found

  arrays = student_rtd, teacher_rtd, student_vd, teacher_vd
  gradients, found = jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(*arrays)
  return found, gradients


STATIC = ("settings", "chunk", "tied")
compared = jax.jit(compute, static_argnames=STATIC, compiler_options=FAST)
compared_as_in_a_run = jax.jit(compute, static_argnames=STATIC)


def weights(shape):
  return 1 + np.arange(math.prod(shape), dtype=np.float32).reshape(shape) / 10


def problem(seed=0, distance=0.6, vocab=VOCAB):
  """Hidden states and output weights of student and teacher, near each other."""
  rng = np.random.default_rng(seed)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  teacher_rtd, teacher_vd = normal(ROWS, LENGTH, WIDTH), normal(vocab, WIDTH)
  near = lambda x: x + np.float32(distance) * normal(*x.shape)
  return near(teacher_rtd), teacher_rtd, near(teacher_vd), teacher_vd


###  The definition, by loops in float64  ###


def softmax(z):
  top = max(z)
  total = sum(math.exp(x - top) for x in z)
  return [math.exp(x - top) / total for x in z]


def entries(teacher_z, top_k):
  """Lists of token ids: each of the teacher's likeliest alone, then all others together."""
  order = sorted(range(len(teacher_z)), key=lambda v: (-teacher_z[v], v))
  chosen = order[: top_k or len(order)]
  others = [v for v in order if v not in chosen]
  return [[v] for v in chosen] + ([others] if others else [])


def terms(settings, student_z, teacher_z):
  """(teacher's mass, term) of each entry."""
  q, p = (softmax([x / settings.temperature for x in z]) for z in (student_z, teacher_z))
  found = []
  for entry in entries(teacher_z, settings.top_k):
    of_p, of_q = sum(p[v] for v in entry), sum(q[v] for v in entry)
    beta = settings.jensen_shannon_beta
    mixed = beta * of_p + (1 - beta) * of_q
    term = {
      "forward": of_p * math.log(of_p / of_q),
      "reverse": of_q * math.log(of_q / of_p),
      "jensen_shannon": beta * of_p * math.log(of_p / mixed)
      + (1 - beta) * of_q * math.log(of_q / mixed),
    }[settings.divergence]
    found.append((of_p, term))
  return found


def position(settings, student_z, teacher_z):
  """Loss, value, clipped share, kept mass, reversed and d loss / d logits of one position."""
  clip, found = settings.clip, terms(settings, student_z, teacher_z)
  value = sum(term for _, term in found)
  beyond = value > clip
  clipped = {
    "entry": [term > clip for _, term in found],
    "position": [beyond] * len(found),
    "scaled": [beyond] * len(found),
    "none": [False] * len(found),
  }[settings.clip_form]
  loss = {
    "entry": sum(min(term, clip) for _, term in found),
    "position": min(value, clip),
    "scaled": min(value, clip),
    "none": value,
  }[settings.clip_form]
  factor = clip / value if beyond and settings.clip_form == "scaled" else 1.0

  def trained(z):  # what is differentiated: a factor whose gradient is stopped stays as it is
    at_z = terms(settings, z, teacher_z)
    if settings.clip_form == "entry":
      return sum(min(term, clip) for _, term in at_z)
    total = sum(term for _, term in at_z)
    return min(total, clip) if settings.clip_form == "position" else factor * total

  step, gradient = 1e-5, []
  for j in range(len(student_z)):
    up, down = list(student_z), list(student_z)
    up[j], down[j] = up[j] + step, down[j] - step
    gradient.append((trained(up) - trained(down)) / (2 * step))
  heavy = [cut for (mass, _), cut in zip(found, clipped) if mass > 0.1]
  share = sum(heavy) / len(heavy) if heavy else 0.0
  kept = sum(mass for (mass, _), cut in zip(found, clipped) if not cut)
  kept = factor if settings.clip_form == "scaled" else kept
  q, p = (softmax([x / settings.temperature for x in z]) for z in (student_z, teacher_z))
  top = [v for v, mass in enumerate(p) if mass == max(p)]
  against = any(q[v] < p[v] and gradient[v] > 1e-9 for v in top)
  return [loss, value, share, kept, float(against)], gradient


def reference(settings, student_rtd, teacher_rtd, student_vd, teacher_vd):
  """What `compared` should give: five arrays [R, T], the gradients of the student's two arrays."""
  student_rtd, teacher_rtd, student_vd, teacher_vd = (
    np.float64(x) for x in (student_rtd, teacher_rtd, student_vd, teacher_vd)
  )
  found, dz = np.zeros((5, ROWS, LENGTH)), np.zeros((ROWS, LENGTH, len(student_vd)))
  for r, t in itertools.product(range(ROWS), range(1, LENGTH)):
    student_z, teacher_z = student_vd @ student_rtd[r, t - 1], teacher_vd @ teacher_rtd[r, t - 1]
    found[:, r, t], gradient = position(settings, student_z.tolist(), teacher_z.tolist())
    dz[r, t - 1] = weights((ROWS, LENGTH))[r, t] * np.array(gradient)
  return found, dz @ student_vd, np.einsum("rtv,rtd->vd", dz, student_rtd)


###  Against the definition  ###


def combination(name, form, top_k):
  """Settings, chunk and tied of a combination: every pair of choices occurs, each is compiled
  once."""
  settings = DivergenceSettings(
    divergence=name,
    clip_form=form,
    top_k=top_k,
    clip=(0.05 if form == "entry" else 0.35) / (4 if name == "jensen_shannon" else 1),
    jensen_shannon_beta=0.3,
    temperature=0.8,
  )
  index = DIVERGENCES.index(name) + FORMS.index(form) + (top_k > 0)
  return settings, (None, 3)[index % 2], bool((index + DIVERGENCES.index(name)) // 2 % 2)


def check_equal(arrays, settings, chunk, tied, rtol=2e-5):
  found, gradients = compared(*arrays, settings, chunk, tied)
  expected, hidden, weight = reference(settings, *arrays)
  for array, wanted, field in zip(found, expected, found._fields):
    assert array.dtype == jnp.float32
    np.testing.assert_allclose(array, wanted, rtol=rtol, atol=3e-6, err_msg=field)
  for array, wanted in ((gradients[0], hidden), (gradients[2], weight)):
    most = max(np.abs(wanted).max(), 1)
    np.testing.assert_allclose(array, wanted, rtol=rtol, atol=1e-5 * most)
  assert not gradients[1].any() and not gradients[3].any(), "nothing reaches the teacher"
  return expected


@every
def test_values_and_gradients_equal_loops_in_float64(name, form, top_k):
  expected = check_equal(problem(), *combination(name, form, top_k))
  cut = expected[2][:, 1:]
  if form == "none":
    assert not cut.any()
  else:
    assert 0 < cut.mean() < 1, "some are clipped, some are not"


def check_nothing(function, *combination, rounding=0.0):
  _, hidden, _, weight = problem()
  found, gradients = function(hidden, hidden.copy(), weight, weight.copy(), *combination)
  for array in (found.loss, found.value, found.clipped_share, found.reversed, *gradients):
    np.testing.assert_allclose(array, 0, atol=rounding)
  np.testing.assert_array_equal(found.kept_mass[:, 1:], 1)


@every
def test_identical_passes_give_exactly_nothing(name, form, top_k):
  # Compiled without optimisation, (p + p) / 2 is not p to the last bit.
  rounding = 1e-7 if name == "jensen_shannon" else 0.0
  check_nothing(compared, *combination(name, form, top_k), rounding=rounding)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_identical_passes_give_exactly_nothing_when_compiled_as_in_a_run(name):
  check_nothing(compared_as_in_a_run, *combination(name, "entry", 3))


@every
def test_certain_teachers_and_students_give_finite_numbers(name, form, top_k):
  """Logits of +-80 and one of 0: probabilities of exactly 0 and 1 in float32."""
  weight = np.zeros((VOCAB, WIDTH), np.float32)
  weight[:, 0], weight[0, 0], weight[1, 0], weight[2, 1] = -1, 1, 0, 1
  at = np.zeros((ROWS, LENGTH, WIDTH), np.float32)
  signs = np.resize([80, -80, 80, -80], (ROWS, LENGTH))
  sure, other = at.copy(), at.copy()
  sure[..., 0], other[..., 0], other[..., 1] = 80, signs, np.resize([0, 0, 80, 80], signs.shape)
  settings = combination(name, form, top_k)
  for arrays in ((other, sure, weight, weight), (sure, other, weight, weight)):
    found, gradients = compared(*arrays, *settings)
    assert all(np.isfinite(x).all() for x in (*found, *gradients))
    assert found.value.max() > (0.3 if name == "jensen_shannon" else 20)


def test_equal_logits_count_in_the_order_of_their_ids():
  student_rtd, teacher_rtd, student_vd, teacher_vd = problem(1)
  teacher_vd = teacher_vd[np.array([0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0])]
  check_equal(
    (student_rtd, teacher_rtd, student_vd, teacher_vd), *combination("forward", "entry", 3)
  )


@pytest.mark.parametrize("chunk", [2, 100])
def test_a_chunk_changes_nothing(chunk):
  settings, *_ = combination("forward", "entry", 3)
  for one, other in zip(
    jax.tree.leaves(compared(*problem(), settings, None)),
    jax.tree.leaves(compared(*problem(), settings, chunk)),
  ):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_top_k_of_the_whole_vocabulary_is_the_whole_vocabulary():
  settings, chunk, tied = combination("forward", "entry", 0)
  more = compared(*problem(), dataclasses.replace(settings, top_k=VOCAB), chunk, tied)
  for one, other in zip(
    jax.tree.leaves(compared(*problem(), settings, chunk, tied)), jax.tree.leaves(more)
  ):
    np.testing.assert_array_equal(one, other)


def test_hidden_states_in_bfloat16_give_float32_values():
  settings, chunk, tied = combination("forward", "entry", 0)
  rounded = [np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32) for x in problem()]
  student_rtd, teacher_rtd, student_vd, teacher_vd = problem()
  found, gradients = compared(
    *(jnp.asarray(x, jnp.bfloat16) for x in (student_rtd, teacher_rtd)),
    student_vd,
    teacher_vd,
    settings,
    chunk,
    tied,
  )
  expected, hidden, weight = reference(settings, *rounded)
  for array, wanted in zip(found, expected):
    assert array.dtype == jnp.float32
    np.testing.assert_allclose(array, wanted, rtol=1e-4, atol=1e-5)
  assert (gradients[0].dtype, gradients[2].dtype) == (jnp.bfloat16, jnp.float32)
  for array, wanted in ((gradients[0], hidden), (gradients[2], weight)):
    np.testing.assert_allclose(np.float32(array), wanted, rtol=0, atol=0.01 * np.abs(wanted).max())


###  Three tokens, worked out by hand  ###


@pytest.mark.parametrize(
  "form, loss, gradient, share, kept, reversed_",
  [
    ("entry", -0.1985, (0.09, -0.08, -0.01), 0.5, 0.3, 1),  # terms .5931, -.1386, -.1099
    ("position", 0.05, (0, 0, 0), 1, 0, 0),
    ("scaled", 0.05, (-0.05804, 0.02902, 0.02902), 1, 0.14509, 0),  # x .05 / .3446
    ("none", 0.3446, (-0.4, 0.2, 0.2), 0, 1, 0),
  ],
)
def test_three_tokens(form, loss, gradient, share, kept, reversed_):
  """P = .7 .2 .1, Q = .3 .4 .3, logits as hidden states; the mass of .1 is not above .1."""
  student, teacher = (
    np.log(np.array([[row, row]], np.float32)) for row in ((0.3, 0.4, 0.3), (0.7, 0.2, 0.1))
  )
  teacher[..., 2] -= 1e-6
  identity = np.eye(3, dtype=np.float32)
  settings = DivergenceSettings(clip_form=form)
  found, gradients = compared(student, teacher, identity, identity, settings)
  values = [float(x[0, 1]) for x in found]
  np.testing.assert_allclose(values, [loss, 0.3446, share, kept, reversed_], atol=6e-5)
  np.testing.assert_allclose(gradients[0][0, 0] / 1.1, gradient, atol=1e-5)
  for array in (*(x[0, 0] for x in found), *gradients[0][0, 1]):
    assert array == 0, "the first token is predicted from nothing, the last state predicts nothing"


def test_a_mass_near_0_is_kept_precisely():
  """A teacher all but certain of a clipped token: what is left of its mass is no rounding."""
  student = np.log(np.array([[[0.3, 0.4, 0.3]] * 2], np.float32))
  teacher = np.array([[[0, -20, -20]] * 2], np.float32)
  identity = np.eye(3, dtype=np.float32)
  found, gradients = compared(student, teacher, identity, identity, DivergenceSettings())
  m = 2 * math.exp(-20) / (1 + 2 * math.exp(-20))
  np.testing.assert_allclose(found.kept_mass[0, 1], m, rtol=1e-5)
  np.testing.assert_allclose(gradients[0][0, 0, 0] / 1.1, 0.3 * m, rtol=1e-5)
  assert found.reversed[0, 1] == 1


###  On meshes  ###


@pytest.fixture(scope="module")
def meshes(tmp_path_factory):
  """Arrays by "mesh/case/name", and programs by "mesh/case", of one process for all meshes."""
  path = tmp_path_factory.mktemp("divergence") / "found.npz"
  script = pathlib.Path(__file__).with_name("sharded_divergence.py")
  done = subprocess.run([sys.executable, str(script), str(path)], capture_output=True, text=True)
  assert done.returncode == 0, done.stderr[-3000:]
  arrays = dict(np.load(path))
  return arrays, json.loads(str(arrays.pop("programs")))


@pytest.mark.parametrize("label", ["1x8x1", "2x2x2"])
def test_meshes_equal_one_device(meshes, label):
  arrays, _ = meshes
  alone = [name for name in arrays if name.startswith("1x1x1/")]
  assert 3 * len(alone) == len(arrays)
  for name in alone:
    other = arrays[name.replace("1x1x1", label, 1)]
    np.testing.assert_allclose(other, arrays[name], rtol=0, atol=1e-5, err_msg=name)
    if name.endswith(("loss", "value", "gradient of hidden", "gradient of weight")):
      assert np.abs(arrays[name]).max() > 1e-3, name


def logits(program):
  """Arrays of the compiled program over all positions of a device's rows and its part, 52, of the
  vocabulary."""
  return [name for name, size, shape in program["arrays"] if 52 in shape and size >= 4 * 12 * 52]


def test_no_array_of_tokens_by_vocabulary_is_held_nor_a_whole_weight_gathered(meshes):
  _, programs = meshes
  assert logits(programs["2x2x2/whole"]), "what is looked for is found without chunks"
  for case in ("forward, tied, top 3", "reverse, top 30"):
    assert not logits(programs[f"2x2x2/{case}"])
    gathered = [size for kind, size in programs[f"2x2x2/{case}"]["sent"] if kind == "all-gather"]
    assert gathered and max(gathered) < 104 * 16, "no weight along an axis"
    assert "all-to-all" in [kind for kind, _ in programs[f"2x2x2/{case}"]["sent"]]


###  Refusals  ###


def test_what_does_not_fit_is_refused():
  settings = DivergenceSettings()
  with pytest.raises(ValueError, match="chunk=4 does not divide the row length 6; choose a div"):
    compared(*problem(), settings, 4)
  student, teacher, *heads = problem()
  with pytest.raises(ValueError, match=r"\(2, 6, 5\) and of the teacher \(2, 4, 5\).*align"):
    compared(student, teacher[:, :4], *heads, settings)


@pytest.mark.parametrize(
  "field, value, sentence",
  [
    ("clip", 0.0, "distillation.clip=0.0 must be above 0"),
    ("clip_form", "entries", "distillation.clip_form='entries' is unknown"),
    ("top_k", -1, "distillation.top_k=-1 must be at least 0"),
    ("jensen_shannon_beta", 1.0, "distillation.jensen_shannon_beta=1.0 must be"),
  ],
)
def test_settings_out_of_range_are_refused(field, value, sentence):
  with pytest.raises(ValueError, match=sentence):
    DivergenceSettings(**{field: value})
