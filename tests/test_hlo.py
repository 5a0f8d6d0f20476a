"""Reading compiled programs: loops, groups, bytes; each on text written by hand, whose answer is
known."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from stratified.planning import hlo

PROGRAM = """HloModule jit_step, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%started (p: bf16[4,8]) -> bf16[32,8] {
  %p = bf16[4,8]{1,0} parameter(0)
  ROOT %gather.1 = bf16[32,8]{1,0:T(8,128)} all-gather(%p), channel_id=7, \
replica_groups=[1,8]<=[8], dimensions={0}
}

%body (t: (s32[], f32[16])) -> (s32[], f32[16]) {
  %t = (s32[], f32[16]{0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[16]{0} get-tuple-element(%t), index=1
  %two = s32[] constant(2)
  %next = s32[] add(%i, %two)
  %kernel = f32[16]{0} custom-call(%x), backend_config={"notes": "
}}, of a kernel
"}
  %reduced = f32[16]{0} all-reduce(%kernel), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, \
to_apply=%sum, metadata={op_name="layer"}
  %f1 = bf16[32,8]{1,0} fusion(%x), kind=kLoop, calls=%started
  %f2 = bf16[32,8]{1,0} fusion(%x), kind=kLoop, calls=%started
  ROOT %out = (s32[], f32[16]{0}) tuple(%next, %reduced)
}

%condition (t: (s32[], f32[16])) -> pred[] {
  %t = (s32[], f32[16]{0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %n = s32[] constant(36)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%open_body (t: (s32[], s32[])) -> (s32[], s32[]) {
  %t = (s32[], s32[]) parameter(0)
  %sent = (f32[2,3]{1,0}, f32[2,3]{1,0}, u32[], u32[]) collective-permute-start(%t), \
channel_id=3, source_target_pairs={{0,1}}
  ROOT %out = (s32[], s32[]) tuple(%t, %t)
}

%open_condition (t: (s32[], s32[])) -> pred[] {
  %t = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %n = s32[] get-tuple-element(%t), index=1
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (p: f32[16]) -> f32[16] {
  %p = f32[16]{0} parameter(0)
  %layers = (s32[], f32[16]{0}) while(%p), condition=%condition, body=%body
  %micro = (s32[], s32[]) while(%p), condition=%open_condition, body=%open_body
  %alone = f32[16]{0} all-reduce(%p), channel_id=9, replica_groups={{0},{1}}, to_apply=%sum
  %scattered = f32[5]{0} reduce-scatter(%p), channel_id=4, \
replica_groups=mesh['a'=2,'b'=4] {'b'}, dimensions={0}, to_apply=%sum
  ROOT %r = f32[16]{0} get-tuple-element(%layers), index=1
}
"""


def found(dynamic=1.0):
  return {each.kind: each for each in hlo.collectives(PROGRAM, dynamic=dynamic, num_devices=8)}


def test_a_loop_counts_as_often_as_it_runs_and_by_its_own_step():
  assert found()["all-reduce"].count == 18  # 36 by steps of 2


def test_a_loop_of_open_length_is_given_one():
  assert found(dynamic=5)["collective-permute"].count == 5


def test_a_collective_in_several_fusions_of_one_channel_is_one():
  assert sum(each.kind == "all-gather" for each in hlo.collectives(PROGRAM, num_devices=8)) == 1


COPIES = """HloModule jit_step

%begun (p: bf16[4,8]) -> bf16[32,8] {
  %p = bf16[4,8]{1,0} parameter(0)
  ROOT %g.1 = bf16[32,8]{1,0} all-gather(%p), channel_id=7, replica_groups=[1,8]<=[8], \
dimensions={0}
}

%fed (p: bf16[4,8]) -> bf16[32,8] {
  %p = bf16[4,8]{1,0} parameter(0)
  ROOT %g.2 = bf16[32,8]{1,0:T(8,128)} all-gather(%p), channel_id=7, replica_groups=[1,8]<=[8], \
dimensions={0}
}

%other (p: bf16[4,8]) -> bf16[32,8] {
  %p = bf16[4,8]{1,0} parameter(0)
  ROOT %g.3 = bf16[32,8]{1,0} all-gather(%p), channel_id=8, replica_groups=[1,8]<=[8], \
dimensions={0}
}

ENTRY %main (p: bf16[4,8]) -> bf16[32,8] {
  %p = bf16[4,8]{1,0} parameter(0)
  %f1 = bf16[32,8]{1,0} fusion(%p), kind=kOutput, calls=%begun
  %f2 = bf16[32,8]{1,0} fusion(%p), kind=kCustom, calls=%fed
  %f3 = bf16[32,8]{1,0} fusion(%p), kind=kCustom, calls=%other
  %whole = bf16[64,8]{1,0} all-gather(%f1), channel_id=1, replica_groups=[4,2]<=[8], dimensions={0}
  ROOT %again = bf16[64,8]{1,0} all-gather(%f3), channel_id=1, replica_groups=[4,2]<=[8], \
dimensions={0}
}
"""


def test_copies_in_fusions_are_one_and_others_of_one_channel_are_each_their_own():
  sizes = sorted(str(each.array) for each in hlo.collectives(COPIES, num_devices=8))
  assert sizes == ["bf16[32,8]", "bf16[32,8]", "bf16[64,8]", "bf16[64,8]"]


SHARD_MAP = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax
from stratified.planning import hlo
mesh = jax.make_mesh((4,), ("a",), axis_types=(jax.sharding.AxisType.Explicit,))
with jax.set_mesh(mesh):
  gather = lambda x: jax.lax.all_gather(x, "a", tiled=True)
  local = lambda x, y: (gather(x) * 2, gather(y) + 1, gather(gather(x)[:2] * x[0]))
  step = jax.jit(jax.shard_map(local, in_specs=(jax.P("a"), jax.P("a")), out_specs=jax.P("a")))
  split = jax.NamedSharding(mesh, jax.P("a"))
  of = lambda *shape: jax.ShapeDtypeStruct(shape, "float32", sharding=split)
  text = step.lower(of(4, 5), of(8, 7)).compile().as_text()
print(sorted(str(each.array) for each in hlo.collectives(text, num_devices=4)))
"""


def test_no_gather_of_a_real_shard_map_is_missed():
  done = subprocess.run([sys.executable, "-c", SHARD_MAP], capture_output=True, text=True)
  assert done.stdout.strip() == "['f32[4,5]', 'f32[8,5]', 'f32[8,7]']", done.stderr[-2000:]


def test_a_collective_over_one_device_is_none():
  assert all(each.group > 1 for each in hlo.collectives(PROGRAM, num_devices=8))
  assert len(hlo.collectives(PROGRAM, num_devices=8)) == 4


@pytest.mark.parametrize(
  "kind, array, group, each_time",
  [
    (
      "all-reduce",
      "f32[16]",
      4,
      2 * 3 / 4 * 64,
    ),  # a ring sends (n - 1)/n of the array to sum, and again to share
    ("all-gather", "bf16[32,8]", 8, 7 / 8 * 512),
    ("reduce-scatter", "f32[5]", 4, 3 * 20),  # its result is 1/n of what goes in
    ("collective-permute", "f32[2,3]", 8, 24),
  ],
)
def test_bytes_sent_are_those_of_a_ring(kind, array, group, each_time):
  one = found()[kind]
  assert (str(one.array), one.group) == (array, group)
  assert one.wire_bytes == pytest.approx(one.count * each_time)


def test_where_it_comes_from_is_kept():
  assert found()["all-reduce"].where == "layer"


def test_arrays_are_those_of_every_instruction_also_after_a_kernels_own_text():
  assert {"f32[16]", "bf16[4,8]", "bf16[32,8]", "f32[2,3]", "pred[]"} <= {
    str(array) for array in hlo.arrays(PROGRAM)
  }


def test_a_real_scan_is_read():
  """XLA's own text of a scan over 9 steps: its length is stated there."""
  step = lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c @ c), None), x, length=9)[0]
  program, entry = hlo.computations(jax.jit(step).lower(jnp.ones((8, 8))).compile().as_text())
  assert 9 in hlo.counts(program, entry, 1.0).values()


def test_text_that_is_no_program_is_refused():
  with pytest.raises(ValueError, match="no ENTRY.*as_text"):
    hlo.collectives("hello")
