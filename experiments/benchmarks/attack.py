"""Attacks the product and counts what it held: a policy's outputs, kills, bits, clients, files.

    python experiments/benchmarks/attack.py --what=outputs --count=100000 [--seed=1]
    python experiments/benchmarks/attack.py --what=all

Prints a line of JSON for each kind: tried, held, the first failures, seconds. Ends by itself, with
status 1 where something was not held. The same seed attacks in the same way, but for kills, whose
moments are the clock's. docs/faults.md has the counts that were reached.

    outputs   fuzz for every protocol's parser; one in fifty plays a whole rollout
    kills     SIGKILL of the smallest run, resumed each time: in the end nothing differs
    flips     a flipped bit in any file of the newest checkpoint
    clients   broken, slow and lying clients of a retriever server on 127.0.0.1
    files     damaged configs, metrics, questions, corpora, model directories
"""

import json
import sys
import time

from absl import flags

from experiments.benchmarks.attacks import checkpoints, clients, damage, outputs
from stratified.runs import command_line

# what -> (function, attacks unless --count says otherwise)
KINDS = {
  "outputs": (outputs.attack, 20_000),
  "kills": (checkpoints.kills, 3),
  "flips": (checkpoints.flips, 60),
  "clients": (clients.attack, 200),
  "files": (damage.attack, 2000),
}
SHOWN = 5  # failures of a kind

_WHAT = flags.DEFINE_enum("what", "all", [*KINDS, "all"], "What is attacked.")
_COUNT = flags.DEFINE_integer("count", 0, "Attacks of each kind; 0 is its own.", lower_bound=0)
_SEED = flags.DEFINE_integer("seed", 0, "What the attacks are drawn with.", lower_bound=0)


def main(_) -> None:
  lost = 0
  for name in KINDS if _WHAT.value == "all" else [_WHAT.value]:
    attack, usual = KINDS[name]
    start = time.perf_counter()
    found = attack(_COUNT.value or usual, _SEED.value)
    row = {"what": name, "seed": _SEED.value, "tried": found.tried, "held": found.held}
    row |= {"failed": len(found.failed), "failures": found.failed[:SHOWN]} | found.notes
    print(json.dumps(row | {"seconds": round(time.perf_counter() - start, 1)}), flush=True)
    lost += len(found.failed)
  sys.exit(1 if lost else 0)


if __name__ == "__main__":
  command_line.run(main)
