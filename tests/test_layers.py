"""Imports run one way, so that a kernel can be read, tested and replaced without the parts around
it: every module stands in a room, and every room imports only what stands before it."""

import ast
import graphlib
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("stratified", "configs", "experiments")

# The rooms in the order of imports: each line may import what stands on the lines above it, and a
# package its own modules. Two rooms on one line know nothing of each other.
ORDER = [
  ("types", "files"),
  ("config", "made_up"),
  ("sharding", "imports", "progress", "outside"),
  ("losses", "advantages", "rewards"),
  ("strata",),
  ("policy", "encoder"),
  ("retrieval",),
  ("tools",),
  ("algorithms",),
  ("learner", "sampling"),
  ("agents",),
  ("data",),
  ("tasks",),
  ("evaluation",),
  ("runs",),
  ("reports",),
  ("planning",),
  ("configs",),
  ("experiments",),
]
RANK = {room: rank for rank, rooms in enumerate(ORDER) for room in rooms}

# What stands before a room and is none of its business all the same.
NEVER = {
  "tools": ("policy", "encoder"),
  "algorithms": ("policy", "encoder", "retrieval", "tools"),
  "learner": ("rewards", "strata", "encoder", "retrieval", "tools"),
  "sampling": ("advantages", "rewards", "strata", "encoder", "retrieval", "tools", "algorithms"),
  "agents": ("policy", "encoder", "algorithms", "learner", "rewards", "strata"),
  "data": ("policy", "encoder", "algorithms", "learner", "agents", "sampling"),
  "tasks": ("policy", "encoder", "algorithms", "learner"),
  "evaluation": ("policy", "encoder", "algorithms", "learner", "sampling"),
  "reports": ("policy", "encoder", "algorithms", "learner", "sampling", "retrieval"),
  "configs": ("policy", "learner", "sampling", "tasks", "agents"),
}

# Rooms, or modules of rooms, that start without JAX: plain Python and NumPy, whatever they reach.
WITHOUT_JAX = [
  "types",
  "config",
  "files",
  "imports",
  "progress",
  "outside",
  "made_up",
  "rewards",
  "strata",
  "retrieval",
  "tools",
  "agents",
  "data",
  "tasks",
  "evaluation",
  "reports",
  "sampling.interface",
  *(
    f"sampling.sglang.{name}"
    for name in ("wire", "http", "server", "members", "errors", "fleet", "admission", "torch_wire")
  ),
  "runs.workdir",
  "runs.command_line",
]
JAX = ("jax", "jaxlib", "flax", "optax", "orbax", "chex")

# library -> the modules of `stratified` that may import it; programs and presets may as well.
ONLY = {"ml_collections": ["stratified.config"], "torch": [], "sglang": [], "transformers": []}


def module_name(path: pathlib.Path) -> str:
  parts = path.relative_to(ROOT).with_suffix("").parts
  return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST, name: str, is_package: bool, *, late: bool = True):
  """Every module a file names in an import statement; without `late` only where it stands outside
  functions, and so runs when the file is imported."""
  todo = [tree]
  while todo:
    node = todo.pop()
    if late or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
      todo += ast.iter_child_nodes(node)
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      base = node.module or ""
      if node.level:
        parts = name.split(".")
        base = ".".join([*parts[: len(parts) - node.level + is_package], *filter(None, [base])])
      yield from (f"{base}.{alias.name}" for alias in node.names)


def read_all(*, late: bool) -> dict[str, set[str]]:
  """{module of the project: what it names in its imports}."""
  found = {}
  for path in (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))):
    name, tree = module_name(path), ast.parse(path.read_text())
    found[name] = set(imported(tree, name, path.name == "__init__.py", late=late))
  return found


ALL, AT_START = read_all(late=True), read_all(late=False)


def within(name: str, parts) -> bool:
  return any(name == part or name.startswith(part + ".") for part in parts)


def with_parents(name: str) -> list[str]:
  parts = name.split(".")
  return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def modules(imports, *parts: str) -> list[str]:
  return [name for name in imports if within(name, [f"stratified.{part}" for part in parts])]


def room(name: str) -> str:
  """The room of a module: its first name below `stratified`, or the package beside it."""
  parts = name.split(".")
  return parts[0] if parts[0] != "stratified" else "".join(parts[1:2])


def own(imports, name: str) -> set[str]:
  """The project's modules that a module imports: `from stratified import x` names both in one."""
  found = set()
  for target in imports[name]:
    while target and target not in imports:
      target = target.rpartition(".")[0]
    found.add(target)
  return found - {"", "stratified", name}


def against_the_order(imports) -> list[str]:
  """The imports of a room on the same line, or on one below."""
  pairs = ((name, target) for name in imports for target in own(imports, name))
  return [
    f"{name} imports {target}"
    for name, target in pairs
    if room(name) != room(target) and RANK[room(target)] >= RANK[room(name)]
  ]


def forbidden(imports) -> list[str]:
  """The imports that NEVER names."""
  pairs = ((name, target) for name in imports for target in own(imports, name))
  return [
    f"{name} imports {target}"
    for name, target in pairs
    if room(target) in NEVER.get(room(name), ())
  ]


def circle(graph) -> list[str]:
  """The nodes of a circle, the first again at its end; nothing where there is none."""
  try:
    graphlib.TopologicalSorter(graph).prepare()
  except graphlib.CycleError as error:
    return error.args[1]
  return []


def graph_of_modules(imports) -> dict[str, set[str]]:
  """Each module with what must be imported first, the packages around that included."""
  return {
    name: {
      before
      for target in own(imports, name)
      for before in with_parents(target)
      if before in imports and before not in with_parents(name)
    }
    for name in imports
  }


def graph_of_rooms(imports) -> dict[str, set[str]]:
  graph = {}
  for name in imports:
    others = {room(target) for target in own(imports, name)} - {room(name)}
    graph.setdefault(room(name), set()).update(others)
  return graph


def reached(imports, start: str) -> set[str]:
  """All that importing a module brings in: its imports, theirs, and the packages that hold them."""
  seen, todo = set(), [start]
  while todo:
    for target in imports.get(todo.pop(), ()):
      new = set(with_parents(target)) - seen
      seen |= new
      todo += new
  return seen


def users(imports, library: str) -> list[str]:
  """The modules of the package that import a library."""
  return [
    name
    for name in imports
    if within(name, ["stratified"]) and any(within(target, [library]) for target in imports[name])
  ]


###  The rules  ###


def test_every_module_stands_in_a_room_and_every_room_has_modules():
  rooms = {room(name) for name in ALL} - {""}  # "" is the package itself, which imports nothing
  assert rooms == set(RANK)
  assert not ALL["stratified"]
  assert {room for _, others in NEVER.items() for room in others} | set(NEVER) <= rooms
  for part in WITHOUT_JAX:
    assert modules(ALL, part), part


def test_no_module_imports_against_the_order():
  assert against_the_order(ALL) == []


def test_no_module_imports_what_is_none_of_its_business():
  assert forbidden(ALL) == []


def test_no_circle_among_modules():
  assert circle(graph_of_modules(ALL)) == []


def test_no_circle_among_rooms():
  assert circle(graph_of_rooms(ALL)) == []


@pytest.mark.parametrize("part", WITHOUT_JAX)
def test_reaches_no_jax(part):
  for name in modules(ALL, part):
    assert not [target for target in reached(AT_START, name) if within(target, JAX)], name


def test_what_reaches_no_jax_is_not_everything():
  assert "jax" in reached(AT_START, "stratified.learner.update")
  assert "stratified.learner.update" in reached(AT_START, "experiments.train")


@pytest.mark.parametrize("library", ONLY)
def test_a_library_is_imported_only_where_it_may_be(library):
  assert users(ALL, library) == ONLY[library]


def test_importing_agents_tasks_and_reports_does_not_load_jax():
  rooms = ("agents", "data", "evaluation", "reports", "retrieval", "tasks", "tools")
  names = modules(ALL, *rooms, "rewards", "strata", "runs.workdir")
  program = (
    f"import sys\nimport {', '.join(names)}\n"
    "print(sorted(m for m in sys.modules if m.split('.')[0] in "
    "('jax', 'jaxlib', 'flax', 'torch', 'transformers')))"
  )
  found = subprocess.run(
    [sys.executable, "-c", program], capture_output=True, text=True, check=True
  )
  assert found.stdout.strip() == "[]"


###  The rules see what breaks them  ###


def table(**imports) -> dict[str, set[str]]:
  """{"stratified.agents.loop": {"stratified.learner.update"}} from agents__loop=["..."]."""
  found = {"stratified." + name.replace("__", "."): set(given) for name, given in imports.items()}
  parents = {parent: set() for name in found for parent in with_parents(name)}
  return parents | found


def test_an_import_against_the_order_is_found():
  learner = table(learner__update=[], agents__loop=["stratified.learner.update.make"])
  assert against_the_order(learner) == []
  agents = table(learner__update=["stratified.agents.loop.collect"], agents__loop=[])
  assert against_the_order(agents) == ["stratified.learner.update imports stratified.agents.loop"]
  beside = table(losses=["stratified.rewards"], rewards=[])
  assert against_the_order(beside) == ["stratified.losses imports stratified.rewards"]


def test_a_forbidden_import_is_found():
  agents = table(learner__update=[], agents__loop=["stratified.learner.update.make"])
  assert forbidden(agents) == ["stratified.agents.loop imports stratified.learner.update"]


def test_a_circle_within_a_room_is_found_also_through_its_package():
  a, b = "stratified.policy.layers", "stratified.policy.decoder"
  straight = table(policy__layers=[b + ".hidden"], policy__decoder=[])
  assert circle(graph_of_modules(straight)) == []
  both = table(policy__layers=[b + ".hidden"], policy__decoder=[a])
  assert sorted(set(circle(graph_of_modules(both)))) == [b, a]
  package = table(policy__families=["stratified.policy.decoder"], policy__families__llama=[])
  package["stratified.policy.decoder"] = {"stratified.policy.families.llama.NAMES"}
  assert len(circle(graph_of_modules(package))) == 3


def test_a_circle_of_rooms_is_found():
  found = table(
    policy__layers=["stratified.learner.state"],
    learner__state=[],
    learner__update=["stratified.policy.decoder"],
    policy__decoder=[],
  )
  assert circle(graph_of_modules(found)) == []
  assert sorted(set(circle(graph_of_rooms(found)))) == ["learner", "policy"]


def test_what_a_module_reaches_is_found_through_others_and_through_packages():
  found = table(agents__loop=["stratified.tools.base.run"], tools__base=[])
  assert not within("jax", reached(found, "stratified.agents.loop"))
  found["stratified.tools"] = {"jax.numpy"}
  assert "jax" in reached(found, "stratified.agents.loop")


def test_a_user_of_a_library_is_found():
  found = table(agents__loop=["torch.nn"], tools__base=["torchvision"])
  assert users(found, "torch") == ["stratified.agents.loop"]


def test_the_search_for_imports_sees_every_form():
  text = (
    "import a.b\nfrom c import d\ndef f():\n  from . import e\n  from .g import h\n"
    "class C:\n  import i\n  def m(self):\n    import j\nif a:\n  import k\n"
  )
  late, start = {"p.q.e", "p.q.g.h", "j"}, {"a.b", "c.d", "i", "k"}
  assert set(imported(ast.parse(text), "p.q.m", False)) == start | late
  assert set(imported(ast.parse(text), "p.q", True)) == start | late
  assert set(imported(ast.parse(text), "p.q.m", False, late=False)) == start
