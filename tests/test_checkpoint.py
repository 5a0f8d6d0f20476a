"""Checkpoints: whole or absent, bit for bit, on any mesh; a workdir keeps its config."""

import gc
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import cpu_devices
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from stratified.config import Rule
from stratified.policy import digest
from stratified.runs import checkpoint, claim, settings
from stratified.runs.stop import Unusable
from stratified.types import TrainState


def make_state(seed=0, size=64):
  keys = jax.random.split(jax.random.key(seed), 3)
  params = {
    "layers": {
      "kernel": jax.random.normal(keys[0], (2, size, 8)),
      "scale": jnp.full((3,), 1 / 3, jnp.bfloat16),
    },
    "embedding": jax.random.normal(keys[1], (size, 4)),
  }
  optimizer = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(0.0, 1e-3, 10))
  )
  opt_state = jax.tree.map(lambda x: x + 1, optimizer.init(params))
  return TrainState(jnp.int32(seed), params, opt_state, None, jnp.int32(1))


def with_reference(seed=0, size=64):
  """The same beside a reference that is that of every seed."""
  return make_state(seed, size)._replace(reference=make_state(0, size).params)


def copy(state):
  return jax.tree.map(lambda x: np.array(x, copy=True), state)


def assert_same_bits(got, want):
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_a_state_comes_back_bit_for_bit_with_its_types(tmp_path):
  state = make_state(3)
  with checkpoint.Checkpointer(tmp_path, every=1) as checkpointer:
    assert checkpointer.restore_latest(checkpoint.abstract(state)) is None
    assert checkpointer.save(3, state)
  with checkpoint.Checkpointer(tmp_path, every=1) as checkpointer:
    restored, step = checkpointer.restore_latest(checkpoint.abstract(state))
  assert step == 3 and isinstance(restored, TrainState)
  assert_same_bits(restored, state)


def test_only_every_nth_step_is_saved_unless_forced_and_the_newest_are_kept(tmp_path):
  with checkpoint.Checkpointer(tmp_path, every=2, keep=2) as checkpointer:
    saved = [step for step in range(1, 8) if checkpointer.save(step, make_state(step))]
    assert checkpointer.save(7, make_state(7), force=True)
    assert not checkpointer.save(7, make_state(8), force=True)
  assert saved == [2, 4, 6]
  assert sorted(os.listdir(tmp_path / "checkpoints")) == ["6", "7"]
  with checkpoint.Checkpointer(tmp_path, every=2) as checkpointer:
    restored, step = checkpointer.restore_latest(checkpoint.abstract(make_state()))
  assert step == 7
  assert_same_bits(restored, make_state(7))


def test_a_state_donated_right_after_save_is_saved_as_it_was(tmp_path):
  update = jax.jit(lambda state: jax.tree.map(lambda x: x * 2 + 1, state), donate_argnums=0)
  state = update(make_state(size=20_000))
  with checkpoint.Checkpointer(tmp_path, every=1, keep=3) as checkpointer:
    wanted = {}
    for step in range(1, 4):
      wanted[step] = copy(state)
      checkpointer.save(step, state)
      for _ in range(5):
        state = update(state)
      jax.block_until_ready(state)
      restored, _ = checkpointer.restore_latest(checkpoint.abstract(state))
      assert_same_bits(restored, wanted[step])


KILLED = """
import sys
import jax
from stratified.runs import checkpoint
sys.path.insert(0, sys.argv[2])
from test_checkpoint import with_reference
with checkpoint.Checkpointer(sys.argv[1], every=1, keep=1, once=["reference"]) as checkpointer:
  restored = checkpointer.restore_latest(checkpoint.abstract(with_reference(size=40_000)))
  step = restored[1] if restored else 0
  while True:
    step += 1
    best = step - step % 3  # every third step is better than all before
    scores = [(at, at / 3) for at in range(3, best + 1, 3)]
    state = with_reference(step, size=40_000)
    checkpointer.save(step, state, scores=scores, best=best or None)
"""


def _kill_while_saving(workdir, after):
  """Starts a process that saves step after step, kills it while one beyond `after`, or the
  reference, is half-written."""
  process = subprocess.Popen(
    [sys.executable, "-c", KILLED, str(workdir), str(pathlib.Path(__file__).parent)]
  )
  folder = workdir / "checkpoints"
  deadline = time.monotonic() + 300
  names = []
  try:
    begun = lambda name: name[:9] == "reference" if after < 0 else int(name.split(".")[0]) > after
    ours = lambda name: "tmp" in name and (after < 0) == (name[:9] == "reference")
    while not any(ours(name) and begun(name) for name in names):
      assert process.poll() is None, "the saving process ended by itself"
      assert time.monotonic() < deadline, f"no checkpoint after {after} was begun: {names}"
      time.sleep(0.001)
      names = os.listdir(folder) if folder.exists() else []
  finally:
    process.send_signal(signal.SIGKILL)
    process.wait()
  return any("tmp" in name for name in os.listdir(folder))


def test_a_process_killed_while_saving_leaves_the_last_whole_checkpoint(tmp_path):
  after, half_written = 0, 0
  abstract_state = checkpoint.abstract(with_reference(size=40_000))
  assert _kill_while_saving(tmp_path, -1)  # its first write, that of the reference
  with checkpoint.Checkpointer(tmp_path, every=1) as checkpointer:
    assert checkpointer.restore_latest(abstract_state) is None
  for _ in range(2):
    half_written += _kill_while_saving(tmp_path, after + 2)
    with checkpoint.Checkpointer(tmp_path, every=1) as checkpointer:
      restored, step = checkpointer.restore_latest(abstract_state)
    assert step > after
    assert_same_bits(restored, with_reference(step, size=40_000))
    best = checkpoint.best_step(tmp_path)
    assert best == (step - step % 3 or None)  # a first kill may come before there is any
    if best:
      found, _ = checkpoint.restore_part(tmp_path, {"params": abstract_state.params}, best)
      assert_same_bits(found["params"], make_state(best, size=40_000).params)
    assert not [name for name in os.listdir(tmp_path / "checkpoints") if "tmp" in name]
    after = step
  assert best and half_written, "no kill fell into a save, so this proved nothing"


def save_with_reference(workdir):
  with checkpoint.Checkpointer(workdir, every=1, once=["reference"]) as checkpointer:
    for step in (1, 2):
      checkpointer.save(step, with_reference(step, 400))
  (stored,) = (workdir / "checkpoints").glob("reference.*")
  return stored


def size_of(folder):
  return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_what_never_changes_is_stored_once_and_read_from_there(tmp_path):
  stored = save_with_reference(tmp_path / "once")
  whole = with_reference(2, 400)
  with checkpoint.Checkpointer(tmp_path / "whole", every=1) as checkpointer:  # as before
    checkpointer.save(2, whole)
  one = size_of(tmp_path / "once/checkpoints/2")
  assert one + size_of(stored) < 1.2 * size_of(tmp_path / "whole/checkpoints/2") and one > 1000
  for folder in ("once", "whole"):  # what was saved either way is read by both
    for once in ([], ["reference"]):
      with checkpoint.Checkpointer(tmp_path / folder, every=1, once=once) as checkpointer:
        restored, step = checkpointer.restore_latest(checkpoint.abstract(whole))
      assert step == 2
      assert_same_bits(restored, whole)
    wanted = checkpoint.abstract(whole)
    part = {"params": wanted.params, "reference": wanted.reference}
    found, _ = checkpoint.restore_part(tmp_path / folder, part)
    assert_same_bits(found["reference"], whole.reference)
    assert_same_bits(found["params"], whole.params)


def test_a_damaged_part_that_is_stored_once_is_named_and_the_rest_still_read(tmp_path):
  stored = save_with_reference(tmp_path)
  like = checkpoint.abstract(with_reference(2, 400))
  for path in stored.rglob("*"):
    if path.is_file() and path.parent.name == "d":
      data = bytearray(path.read_bytes())
      data[len(data) // 2] ^= 1
      path.write_bytes(data)
  for damage in (lambda: None, lambda: shutil.rmtree(stored)):
    damage()
    with checkpoint.Checkpointer(tmp_path, every=1, once=["reference"]) as checkpointer:
      with pytest.raises(ValueError, match=f"{stored} is damaged .*bring it back from a copy"):
        checkpointer.restore_latest(like)
    found, step = checkpoint.restore_part(tmp_path, {"params": like.params})
    assert step == 2
    assert_same_bits(found["params"], make_state(2, 400).params)
  assert {"1", "2"} <= set(os.listdir(tmp_path / "checkpoints"))  # they are not at fault
  with checkpoint.Checkpointer(tmp_path, every=1, once=["reference"]) as checkpointer:
    other = {"reference": lambda: make_state(5, 400).params}
    with pytest.raises(ValueError, match="is damaged"):  # made again, but not the same
      checkpointer.restore_latest(like, other)
    right = {"reference": lambda: make_state(0, 400).params}
    restored, step = checkpointer.restore_latest(like, right)
    assert step == 2
    assert_same_bits(restored, with_reference(2, 400))
    assert checkpointer.restore_latest(like)[1] == 2  # it lies there again


MESHES = """
import sys
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from stratified.runs import checkpoint
sys.path.insert(0, sys.argv[2])
from test_checkpoint import assert_same_bits, make_state

def place(shape, spec):
  mesh = jax.make_mesh(shape, ("data", "fsdp"), devices=jax.devices()[:shape[0] * shape[1]])
  return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec(x))), make_state(5))

states = [
    place((1, 1), lambda x: P()),
    place((2, 4), lambda x: P(None, "fsdp") if x.ndim == 3 else P("fsdp") if x.ndim == 2 else P()),
    place((4, 2), lambda x: P(None, "data", "fsdp") if x.ndim == 3 else P()),
]
for i, saved in enumerate(states):
  with checkpoint.Checkpointer(f"{sys.argv[1]}/{i}", every=1) as checkpointer:
    checkpointer.save(1, saved)
    wanted = states[i - 1]
    restored, _ = checkpointer.restore_latest(checkpoint.abstract(wanted))
  for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(wanted)):
    assert a.sharding == b.sharding, f"{a.sharding} is not {b.sharding}"
  assert_same_bits(restored, make_state(5))
print("all three")
"""


def test_a_checkpoint_moves_between_meshes_bit_for_bit(tmp_path):
  environment = os.environ | {"XLA_FLAGS": cpu_devices.flags(8), "JAX_PLATFORMS": "cpu"}
  done = subprocess.run(
    [sys.executable, "-c", MESHES, str(tmp_path), str(pathlib.Path(__file__).parent)],
    env=environment,
    capture_output=True,
    text=True,
  )
  assert done.stdout.strip() == "all three", done.stderr
  assert not [line for line in done.stderr.splitlines() if "orbax" in line and " W" not in line]


def save_two(workdir):
  with checkpoint.Checkpointer(workdir, every=1) as checkpointer:
    checkpointer.save(1, make_state(1))
    checkpointer.save(2, make_state(2))
  return sorted(path for path in (workdir / "checkpoints/2").rglob("*") if path.is_file())


def restore(workdir, like=None):
  with checkpoint.Checkpointer(workdir, every=1) as checkpointer:
    return checkpointer.restore_latest(checkpoint.abstract(like or make_state()))


def same_bits(got, want):
  try:
    assert_same_bits(got, want)
  except AssertionError:
    return False
  return True


@pytest.fixture
def collected():
  yield
  gc.collect()


def unawaited(test):
  """Orbax leaves its other reads unawaited when one fails; the message is what counts here."""
  ignored = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
  return ignored(pytest.mark.usefixtures("collected")(test))


@unawaited
@pytest.mark.parametrize("damaged", ["*/d/*", "_METADATA", "manifest.ocdbt"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before_and_is_named(tmp_path, damaged, capsys):
  paths = [path for path in save_two(tmp_path) if path.match(damaged)]
  assert paths
  for path in paths:
    path.write_bytes(b"")
  restored, step = restore(tmp_path)
  assert step == 1
  assert_same_bits(restored, make_state(1))
  said = [line for line in capsys.readouterr().out.splitlines() if "damaged" in line]
  assert len(said) == 1 and "checkpoint of step 2 is damaged (" in said[0]
  assert f"now in {tmp_path}/checkpoints/2.damaged" in said[0]
  assert "goes on from the one of step 1" in said[0]
  with checkpoint.Checkpointer(tmp_path, every=1) as checkpointer:
    assert checkpointer.latest_step == 1 and checkpointer.save(2, make_state(7))
    restored, step = checkpointer.restore_latest(checkpoint.abstract(make_state()))
  assert step == 2
  assert_same_bits(restored, make_state(7))


def test_unreadable_metadata_of_one_checkpoint_leaves_the_others(tmp_path, capsys):
  save_two(tmp_path)
  for step, left in (("2", True), ("1", False)):
    path = tmp_path / "checkpoints" / step / "_CHECKPOINT_METADATA"
    path.write_text(path.read_text().replace("item_handlers", "ktem_handlers"))
    if left:
      assert restore(tmp_path)[1] == 1
      assert "checkpoint of step 2 is damaged" in capsys.readouterr().out
  with pytest.raises(Unusable, match="are damaged .*bring them back from a copy"):
    restore(tmp_path)


@unawaited
def test_without_an_earlier_one_the_damage_is_named_with_the_way_out_and_nothing_moves(tmp_path):
  for path in save_two(tmp_path):
    path.write_bytes(b"")
  shutil.rmtree(tmp_path / "checkpoints/1")
  with pytest.raises(
    ValueError, match=r"checkpoints/2 is damaged .*remove that folder and the run"
  ):
    restore(tmp_path)
  assert os.listdir(tmp_path / "checkpoints") == ["2"]


@unawaited
def test_no_flipped_bit_of_any_file_is_loaded_silently(tmp_path, capsys):
  """A flip is harmless (the arrays are what was saved), or the checkpoint before is restored."""
  paths = save_two(tmp_path / "kept")
  random, loaded, fell_back = np.random.default_rng(0), 0, 0
  for path in paths:
    size = path.stat().st_size
    for place in {0, size // 2, size - 1, *random.integers(size, size=2).tolist()}:
      shutil.copytree(tmp_path / "kept", tmp_path / "run")
      flipped = tmp_path / "run" / path.relative_to(tmp_path / "kept")
      data = bytearray(flipped.read_bytes())
      data[place] ^= 1 << int(random.integers(8))
      flipped.write_bytes(data)
      where = f"byte {place} of {path.relative_to(tmp_path)}"
      capsys.readouterr()
      restored, step = restore(tmp_path / "run")
      said = capsys.readouterr().out
      assert same_bits(restored, make_state(step)), where
      assert step == 2 or "checkpoint of step 2 is damaged" in said, where
      fell_back += step == 1
      loaded += step == 2
      shutil.rmtree(tmp_path / "run")
  assert fell_back > 20, (fell_back, loaded)


@unawaited
def test_parts_of_a_flipped_checkpoint_are_not_read_silently(tmp_path, capsys):
  like = checkpoint.abstract(make_state())
  paths = save_two(tmp_path)
  largest = max(paths, key=lambda path: path.stat().st_size * (path.parent.name == "d"))
  original = largest.read_bytes()
  hurt = 0
  for place in range(0, len(original), 211):
    data = bytearray(original)
    data[place] ^= 4
    largest.write_bytes(data)
    capsys.readouterr()
    found, step = checkpoint.restore_part(tmp_path, {"params": like.params})
    assert same_bits(found["params"], make_state(step).params), place
    if step == 1:
      hurt += 1
      said = capsys.readouterr().out
      assert "are damaged" in said and "the one of step 1 is used" in said
      with pytest.raises(ValueError, match="checkpoints/2 is damaged .*name another step"):
        checkpoint.restore_part(tmp_path, {"params": like.params}, 2)
  assert hurt > 5 and sorted(os.listdir(tmp_path / "checkpoints")) == ["1", "2"]


def test_a_checkpoint_of_a_version_without_digests_is_read_and_said(tmp_path, capsys, monkeypatch):
  with monkeypatch.context() as patched:
    patched.setattr(checkpoint.on_disk, "digests", lambda state: None)
    save_two(tmp_path)
  restored, step = restore(tmp_path)
  assert step == 2 and "has no digests: its arrays can't be checked" in capsys.readouterr().out
  assert_same_bits(restored, make_state(2))


def test_what_says_nothing_of_the_files_moves_no_checkpoint(tmp_path, monkeypatch):
  def full(self, *unused, **others):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

  save_two(tmp_path)
  monkeypatch.setattr(checkpoint.ocp.CheckpointManager, "restore", full)
  with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory"):
    restore(tmp_path)
  assert sorted(os.listdir(tmp_path / "checkpoints")) == ["1", "2"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "int8", "bool"])
def test_a_digest_tells_every_bit_and_place_of_an_array(dtype):
  values = (jnp.arange(24) % 5).astype(dtype).reshape(2, 3, 4)
  bits = np.asarray(values)
  raw = bits.tobytes()
  seen = {digest.texts([values])[0]}
  tried = range(len(raw)) if dtype != "bool" else []
  for byte in tried:
    for bit in range(8):
      changed = bytearray(raw)
      changed[byte] ^= 1 << bit
      seen.add(digest.texts([np.frombuffer(changed, bits.dtype).reshape(bits.shape)])[0])
  seen.add(digest.texts([values[::-1]])[0])
  seen.add(digest.texts([values.transpose(2, 1, 0)])[0])
  assert len(seen) == 3 + 8 * len(tried)
  assert np.asarray(digest.digest(values)).tobytes().hex() == digest.texts([values])[0]


def test_a_checkpoint_of_another_model_is_refused_and_the_arrays_are_named(tmp_path):
  state = make_state()
  other = make_state(size=32)
  other.params["extra"] = jnp.zeros(2)
  other.params["layers"]["scale"] = jnp.zeros(3)
  with checkpoint.Checkpointer(tmp_path, every=1) as checkpointer:
    checkpointer.save(1, state)
    with pytest.raises(ValueError) as caught:
      checkpointer.restore_latest(checkpoint.abstract(other))
  for line in (
    "params.embedding: float32[64, 4] in the checkpoint, float32[32, 4] now",
    "params.extra: absent in the checkpoint, float32[2] now",
    "params.layers.scale: bfloat16[3] in the checkpoint, float32[3] now",
  ):
    assert line in str(caught.value)
  assert "step:" not in str(caught.value)


def test_intervals_below_one_are_refused(tmp_path):
  with pytest.raises(ValueError, match="checkpoint.every = 0"):
    checkpoint.Checkpointer(tmp_path, every=0)


RULES = settings.rules()
CONFIG = {
  "seed": 0,
  "num_steps": 100,
  "mesh": {"data": 1, "fsdp": 1},
  "checkpoint": {"every": 10, "keep": 2},
  "advantage": {"name": "blend", "alpha": 0.6},
  "hidden": (32, 64),
  "lora": {},
}


def _changed(**changes):
  config = json.loads(json.dumps(CONFIG))
  for key, value in changes.items():
    *parents, last = key.split("__")
    node = config
    for parent in parents:
      node = node[parent]
    node[last] = value
  return config


def test_the_first_run_stores_the_config_as_plain_json(tmp_path):
  claim.check_config(tmp_path / "new", CONFIG, RULES)
  assert json.loads((tmp_path / "new/config.json").read_text()) == json.loads(json.dumps(CONFIG))


def test_what_does_not_change_the_result_may_change_and_is_stored(tmp_path):
  claim.check_config(tmp_path, CONFIG, RULES)
  claim.check_config(tmp_path, CONFIG, RULES)
  after = _changed(mesh__data=8, mesh__tensor=2, checkpoint__every=1, num_steps=200)
  claim.check_config(tmp_path, after, RULES)
  assert json.loads((tmp_path / "config.json").read_text()) == after


def test_what_changes_the_result_is_refused_with_both_values_and_the_file_stays(tmp_path):
  claim.check_config(tmp_path, CONFIG, RULES)
  before = (tmp_path / "config.json").read_text()
  after = _changed(advantage__alpha=0.8, num_steps=50, seed=0.5, mesh__data=2, new={"name": "x"})
  del after["advantage"]["name"]
  with pytest.raises(ValueError) as caught:
    claim.check_config(tmp_path, after, RULES)
  message = str(caught.value)
  for line in (
    "advantage.alpha: 0.6 in the workdir, 0.8 now",
    'advantage.name: "blend" in the workdir, absent now',
    'new.name: absent in the workdir, "x" now',
    "num_steps: 100 in the workdir, 50 now",
    "seed: 0 in the workdir, 0.5 now",
    "Use a new --workdir",
  ):
    assert line in message
  assert "mesh" not in message
  assert (tmp_path / "config.json").read_text() == before


def test_what_is_free_is_what_the_rules_say(tmp_path):
  claim.check_config(tmp_path, CONFIG, RULES)
  free = {"advantage.alpha": Rule("", affects=())}
  claim.check_config(tmp_path, _changed(advantage__alpha=0.1), free)
  with pytest.raises(ValueError, match="mesh.data: 1 in the workdir, 4 now"):
    claim.check_config(tmp_path, _changed(advantage__alpha=0.1, mesh__data=4), {})


def test_a_value_that_json_cannot_hold_is_refused(tmp_path):
  with pytest.raises(ValueError, match="cannot be stored as JSON"):
    claim.check_config(tmp_path, {"alpha": float("nan")}, RULES)
  assert not (tmp_path / "config.json").exists()


def test_values_that_are_not_finite_are_damage_since_no_such_step_is_saved(tmp_path, capsys):
  state = make_state()
  broken = state._replace(
    params=state.params | {"embedding": state.params["embedding"].at[3, 1].set(jnp.nan)}
  )
  with checkpoint.Checkpointer(tmp_path, every=1) as checkpointer:
    checkpointer.save(1, state)
    checkpointer.save(2, broken)
    assert checkpointer.restore_latest(checkpoint.abstract(state))[1] == 1
  assert "params.embedding holds values that are not finite" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_a_config_that_is_no_json_is_named_with_the_way_out(tmp_path, text):
  (tmp_path / "config.json").write_text(text)
  with pytest.raises(
    ValueError,
    match=r"config\.json is (not JSON .*|no JSON object), so it is damaged; .*new --workdir",
  ):
    claim.check_config(tmp_path, {"a": 1}, RULES)


def test_a_field_that_is_newer_than_the_run_counts_as_its_default(tmp_path):
  rules = {"loss.new": Rule("a field of a later version", default=0.0)}
  claim.check_config(tmp_path, {"loss": {"clip": 0.2}}, {})
  with pytest.raises(ValueError, match=r"loss.new: 0.0 in the workdir, 0.5 now"):
    claim.check_config(tmp_path, {"loss": {"clip": 0.2, "new": 0.5}}, rules)
  claim.check_config(tmp_path, {"loss": {"clip": 0.2, "new": 0.0}}, rules)
