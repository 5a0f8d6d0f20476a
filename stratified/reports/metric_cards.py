"""Lists the curves that every run may have, by card of the page, and what each of them tells."""

# By card: title, percent, (key, name) of each curve, what the plot tells.
CARDS = {
  "Learning signal": (
    (
      "Rollouts with zero advantage",
      True,
      (("advantage/zero_share", "share"),),
      "These teach nothing. Near 100 % the run stands still.",
    ),
    (
      "Advantage, root mean square",
      False,
      (("advantage/rms", "rms"),),
      "The size of the push. Runs are only comparable at like sizes.",
    ),
    (
      "Gradient norm before clipping",
      False,
      (("grad/norm", "norm"),),
      "Steady is good; a jump to ten times its usual size is an alarm.",
    ),
    (
      "Policy loss",
      False,
      (("loss/policy", "loss"),),
      "Its level means little in policy gradient; look for jumps.",
    ),
    (
      "Value loss",
      False,
      (("value/loss", "loss"),),
      "How far the critic is from the returns; it should fall.",
    ),
    (
      "Variance explained by the critic",
      True,
      (("value/explained_variance", "share"),),
      "100 % is a perfect critic, 0 no better than the mean.",
    ),
    (
      "Likelihood loss",
      False,
      (("loss/likelihood", "loss"),),
      "What keeps correct rollouts from becoming less likely.",
    ),
  ),
  "Distillation": (
    (
      "Distillation loss, nats a token",
      False,
      (("distillation/loss", "loss"),),
      "Falls where the student learns. A clip can take it below 0 while the KL rises.",
    ),
    (
      "True KL to the teacher, nats a token",
      False,
      (("distillation/kl", "KL"),),
      "What the loss stands for; it should fall with it.",
    ),
    (
      "Clipped entries",
      True,
      (("distillation/clipped_share", "clipped"),),
      "Of those with a tenth of the teacher's mass; many mean that the clip decides.",
    ),
    (
      "Reversed positions",
      True,
      (("distillation/reversed_share", "reversed"),),
      "Where the teacher's first choice is lowered; should stay near 0.",
    ),
    (
      "Teacher's mass that is kept",
      True,
      (("distillation/kept_mass", "kept mass"),),
      "On entries below the clip. Near 0 a position teaches almost nothing.",
    ),
  ),
  "Policy": (
    (
      "Policy entropy, nats a token",
      False,
      (("policy/entropy", "entropy"),),
      "Falls slowly while the policy learns; near 0 it no longer explores.",
    ),
    (
      "KL to the reference, nats a token",
      False,
      (("loss/kl", "KL"),),
      "How far the policy has moved from its start.",
    ),
    (
      "Clipped tokens",
      True,
      (("policy/clip_share", "share"),),
      "Zero with a single update a batch; with several, a few percent is usual.",
    ),
    (
      "Mean |log-prob gap|",
      False,
      (("policy/logp_gap_mean", "mean"),),
      "Sampler against trainer. About 0 is on-policy; growth is an alarm.",
    ),
    (
      "Largest |log-prob gap|",
      False,
      (("policy/logp_gap_max", "max"),),
      "The same at the worst token of a step.",
    ),
  ),
  "Strata": (
    (
      "Strata a question",
      False,
      (("strata/count", "strata"),),
      "With one stratum a question the stratified estimators are the group one.",
    ),
    (
      "Rollouts alone in their stratum",
      True,
      (("strata/singleton_share", "share"),),
      "A rollout alone has nothing to be compared with inside its stratum.",
    ),
    (
      "Offset between strata, rms",
      False,
      (("theory/cross_stratum_offset_rms", "rms"),),
      "The bias that a global baseline adds to a rollout for its stratum alone.",
    ),
    (
      "Reward variance between strata",
      False,
      (("theory/between_stratum_variance", "variance"),),
      "What stratification removes from the advantage.",
    ),
    (
      "Normalisation effect",
      False,
      (("theory/normalization_effect", "effect"),),
      "How dividing by the spread of each stratum shifts the variance.",
    ),
  ),
  "Rollouts": (
    (
      "Invalid actions a rollout",
      False,
      (("rollout/invalid_actions", "actions"),),
      "Turns that were neither a call nor an answer; should go to 0.",
    ),
    (
      "Lost rollouts",
      False,
      (("rollout/failed", "rollouts"),),
      "Lost to faults of a server or a tool, and masked out.",
    ),
    (
      "Staleness of the rollouts, steps",
      False,
      (("rollout/staleness", "steps"),),
      "How many updates older than the trainer's the sampler's weights were.",
    ),
  ),
  "Speed": (
    (
      "Sampled tokens a second",
      False,
      (("rollout/tokens_per_second", "rollout"),),
      "Sampling and searching together. A fall: longer contexts, or a slower search.",
    ),
    (
      "Updated tokens a second",
      False,
      (("update/tokens_per_second", "update"),),
      "Steady is good; padding and re-compilation lower it.",
    ),
    (
      "Padding in the update",
      True,
      (("update/padding_share", "share"),),
      "Computed for nothing; other sizes of packing.* may lower it.",
    ),
  ),
}
# What every reinforcement step records; a page names what is missing.
ESSENTIAL = (
  "advantage/zero_share",
  "policy/entropy",
  "loss/kl",
  "grad/norm",
  "policy/logp_gap_mean",
)
