"""The programs that a user runs."""

import logging

# jax says at every start that it found no TPU; only what is worth a look should reach a terminal.
logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)
