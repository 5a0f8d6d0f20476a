"""Imports run one way, so that a kernel can be read, tested and replaced without the parts around
it."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("stratified", "configs", "experiments")


def module_name(path: pathlib.Path) -> str:
  parts = path.relative_to(ROOT).with_suffix("").parts
  return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST, name: str, is_package: bool):
  """Every module a file names in an import statement, wherever it stands in it."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      base = node.module or ""
      if node.level:
        parts = name.split(".")
        base = ".".join([*parts[: len(parts) - node.level + is_package], *filter(None, [base])])
      yield from (f"{base}.{alias.name}" for alias in node.names)


def read_all():
  files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
  found = {}
  for path in files:
    name = module_name(path)
    found[name] = set(imported(ast.parse(path.read_text()), name, path.name == "__init__.py"))
  return found


IMPORTS = read_all()


def within(name: str, parts) -> bool:
  return any(name == part or name.startswith(part + ".") for part in parts)


def modules(*parts):
  return [name for name in IMPORTS if within(name, [f"stratified.{part}" for part in parts])]


def reached(start: str) -> set[str]:
  """All that importing a module brings in: its imports, theirs, and the packages that hold them."""
  seen, todo = set(), [start]
  while todo:
    name = todo.pop()
    for target in IMPORTS.get(name, ()):
      for module in _with_parents(target):
        if module not in seen:
          seen.add(module)
          todo.append(module)
  return seen


def _with_parents(target: str):
  parts = target.split(".")
  return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


# Plain Python and NumPy, whatever they reach: a sampler behind HTTP, a report or a data script
# starts without JAX.
WITHOUT_JAX = [
  "types",
  "rewards",
  "strata",
  "data",
  "retrieval",
  "rollout.loop",
  "rollout.agent",
  "rollout.tags",
  "rollout.limits",
  "rollout.prompts",
  "rollout.sampler",
  "evaluate",
  "metrics",
  "progress",
  "report",
  "charts",
  "figures",
  "alarms",
  "transcripts",
  "scores",
  "statistics",
  "tables",
  "answers",
  "rollout.chat",
  "rollout.methods",
  "rollout.method_prompts",
  "rollout.tool_calls",
  *(
    f"rollout.sglang.{name}"
    for name in (
      "wire",
      "http",
      "server",
      "members",
      "places",
      "fleet",
      "group",
      "torch_wire",
      "errors",
    )
  ),
]
JAX = ("jax", "jaxlib", "flax", "optax", "orbax", "chex")

# module or package: what of the project it may import itself.
MAY_IMPORT = {
  "types": [],
  "rewards": ["types"],
  "strata": ["types"],
  "advantages": ["advantages"],
  "theory": ["advantages"],
  "losses": [],
  "sharding": [],
  "optimizer": ["sharding"],
  "hlo": [],
  "costs": ["policy"],
  "processes": ["types"],
  "progress": [],
  "hidden": [],
  "policy": ["policy", "sharding"],
  "encoder": ["encoder_weights", "sharding"],
  "encoder_weights": [],
  "batching": ["types", "sharding"],
  "update": ["types", "losses", "theory", "sharding", "policy"],
  "retrieval": ["types", "retrieval", "progress", "hidden"],
  "data": ["types", "data", "retrieval.corpus", "rollout.sampler"],
  "evaluate": ["types", "rewards", "statistics"],
  "statistics": [],
  "tables": [],
  "answers": ["types", "evaluate", "metrics"],
  "rollout.loop": ["types", "rollout", "retrieval.corpus"],
  "rollout.agent": ["types", "rollout", "retrieval.corpus"],
  "rollout.tags": ["types", "rollout", "retrieval.corpus"],
  "rollout.limits": ["types", "rollout"],
  "rollout.prompts": [],
  "rollout.methods": ["types", "rollout", "retrieval.corpus"],
  "rollout.method_prompts": [],
  "rollout.chat": [],
  "rollout.sampler": [],
  "rollout.jax_sampler": ["rollout.sampler", "rollout.lane_programs", "policy", "sharding"],
  "rollout.lane_programs": ["policy"],
  "rollout.tool_calls": ["rollout", "retrieval.corpus"],
  "rollout.sglang_sampler": ["rollout"],
  "rollout.sglang": ["rollout", "policy"],
}


def test_the_rules_speak_of_modules_that_exist():
  for part in {*WITHOUT_JAX, *MAY_IMPORT}:
    assert modules(part), part
  assert "stratified.learner.update" in reached("experiments.train") and "jax" in reached(
    "stratified.learner.update"
  )


@pytest.mark.parametrize("part", WITHOUT_JAX)
def test_reaches_no_jax(part):
  for name in modules(part):
    assert not [target for target in reached(name) if within(target, JAX)], name


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_imports_of_the_project_only_what_lies_below_it(part):
  allowed = ["stratified." + other for other in ("config", *MAY_IMPORT[part])]
  for name in modules(part):
    own = [t for t in IMPORTS[name] if within(t, ["stratified"])]
    # `from stratified import x` names the package and the module in one.
    assert [t for t in own if not within(t, allowed)] == [], name


def test_only_programs_and_the_module_of_settings_know_ml_collections():
  users = [
    name for name, targets in IMPORTS.items() if any(within(t, ["ml_collections"]) for t in targets)
  ]
  assert "stratified.config" in users
  assert [name for name in users if not within(name, ["configs", "experiments"])] == [
    "stratified.config"
  ]


def test_the_library_imports_neither_configs_nor_experiments_nor_torch():
  for name in [name for name in IMPORTS if within(name, ["stratified"])]:
    assert not [
      t for t in IMPORTS[name] if within(t, ["configs", "experiments", "torch", "sglang"])
    ], name


def test_the_search_for_imports_sees_every_form(tmp_path):
  text = "import a.b\nfrom c import d\ndef f():\n  from . import e\n  from .g import h\n"
  assert set(imported(ast.parse(text), "p.q.m", False)) == {"a.b", "c.d", "p.q.e", "p.q.g.h"}
  assert set(imported(ast.parse(text), "p.q", True)) == {"a.b", "c.d", "p.q.e", "p.q.g.h"}


def test_importing_the_agent_loop_does_not_load_jax():
  program = (
    "import sys\nimport stratified.agents.loop, stratified.retrieval.bm25, stratified.rewards, "
    "stratified.strata\n"
    "import stratified.data.demonstrations, stratified.data.readers, stratified.evaluation.score, "
    "stratified.report\n"
    "print(sorted(m for m in sys.modules if m.split('.')[0] in ('jax', 'jaxlib', 'flax')))"
  )
  found = subprocess.run(
    [sys.executable, "-c", program], capture_output=True, text=True, check=True
  )
  assert found.stdout.strip() == "[]"
