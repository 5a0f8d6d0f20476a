"""Pages and docstrings name only what exists: links, paths, programs, flags, fields, presets.

Each check takes a text and returns complaints, so that the last test can plant an error of every
kind and see it found.
"""

import ast
import functools
import importlib.util
import pathlib
import re

import pytest

from stratified.runs import settings

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [
  ROOT / "README.md",
  ROOT / "BUILD.md",
  ROOT / "CHANGELOG.md",
  *sorted((ROOT / "docs").glob("*.md")),
  *sorted((ROOT / "third_party").glob("*/README.md")),
  *sorted((ROOT / "experiments").rglob("*.md")),
]
ROOMS = ("stratified", "experiments", "configs", "docs", "tests", "third_party", "examples")
MODULES = [
  path
  for room in (*ROOMS, ".")
  for path in sorted(ROOT.joinpath(room).glob("*.py" if room == "." else "**/*.py"))
  if "standins" not in path.parts
]
FIELDS = settings.rules()
SECTIONS = {name.partition(".")[0] for name in FIELDS if "." in name}
PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*")


def named(path: pathlib.Path) -> str:
  return str(path.relative_to(ROOT))


###  Links  ###


def slug(heading: str) -> str:
  """The anchor of a heading: lower case, punctuation dropped, spaces as hyphens."""
  text = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).strip().lower()
  return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(text: str) -> set[str]:
  return {slug(match) for match in re.findall(r"^#+ (.+)$", without_blocks(text), re.MULTILINE)}


def without_blocks(text: str) -> str:
  return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def bad_links(text: str, page: pathlib.Path) -> list[str]:
  found = []
  for target in re.findall(r"\]\(([^)\s]+)\)", without_blocks(text)):
    if re.match(r"https?:", target):
      continue
    file, _, anchor = target.partition("#")
    path = (page.parent / file).resolve() if file else page
    if not path.exists():
      found.append(f"the link {target} leads nowhere")
    elif anchor and anchor not in anchors(text if path == page else path.read_text()):
      found.append(f"the link {target} has no such heading")
  return found


###  Paths  ###


def bad_paths(text: str, page: pathlib.Path) -> list[str]:
  """Paths of the project that do not exist, wherever they stand; file names in backticks."""
  paths = re.findall(rf"(?<![\w./-])((?:{'|'.join(ROOMS)})/[\w./*-]*[\w*/])", text)
  found = [
    f"the path {path} does not exist"
    for path in dict.fromkeys(paths)
    if not exists(path, page) and not is_made(path)
  ]
  files = re.findall(r"`([\w*-]+\.(?:py|sh))`", text)
  known = {path.name for path in [*MODULES, *(ROOT / "third_party").rglob("*.sh")]}
  for name in dict.fromkeys(files):
    if name not in known and not any(pathlib.Path(one).match(name) for one in known):
      if not name.startswith("my_"):  # a reader's own
        found.append(f"no file is called {name}")
  return found


def exists(path: str, page: pathlib.Path) -> bool:
  return any(any(base.glob(path.rstrip("/"))) for base in (ROOT, page.parent))


def is_made(path: str) -> bool:
  """Whether the name stands for files that a reader makes, or for several."""
  return bool(re.search(r"\b[A-Z]{3,}\b", path))


def bad_modules(text: str, page: pathlib.Path) -> list[str]:
  """`stratified.a.b`: each part must be a package, a module, or a name that the module binds."""
  found = []
  for dotted in dict.fromkeys(re.findall(r"(?<![\w.\"/])(stratified(?:\.\w+)+)", text)):
    path, rest = ROOT, dotted.split(".")
    while rest and (path / rest[0]).is_dir():
      path /= rest.pop(0)
    if rest and (module := path / f"{rest[0]}.py").exists():
      rest.pop(0)
    else:
      module = path / "__init__.py"
    if rest and not re.search(rf"\b{rest[0]}\b", module.read_text()):
      found.append(f"there is no {dotted}")
  return found


###  Commands  ###


def commands(text: str) -> list[tuple[str, str]]:
  """(program, what follows it up to the end of the command) of every program that is run."""
  joined = re.sub(r"\\+\n\s*", " ", text)
  joined = re.sub(r"\n\s+(?=\[?--)", " ", joined)
  return re.findall(r"(?<![\w/.-])((?:[\w.-]+/)+[\w-]+\.(?:py|sh))\b([^\n`#]*)", joined)


@functools.cache
def flags_of(program: pathlib.Path) -> frozenset[str]:
  """The flags that a program's source defines."""
  text = program.read_text()
  if program.suffix == ".sh":
    return frozenset(re.findall(r"--([\w-]+)", text))
  found = {"help"}
  for node in ast.walk(ast.parse(text)):
    if not isinstance(node, ast.Call) or not node.args:
      continue
    name, first = getattr(node.func, "attr", ""), node.args[0]
    if name.startswith("DEFINE_") or name in ("add_argument", "define_choice", "define_step"):
      if isinstance(first, ast.Constant):
        found.add(str(first.value).lstrip("-"))
        if name in ("DEFINE_bool", "DEFINE_boolean"):
          found.add("no" + first.value)
  if "SETTINGS" in text and "add_argument" in text:  # build_index: a flag for each setting
    block = re.search(r"^SETTINGS = \((.*?)\)", text, re.DOTALL | re.MULTILINE)
    found |= {name.replace("_", "-") for name in re.findall(r'"(\w+)"', block[1])}
  return frozenset(found)


def bad_commands(text: str, page: pathlib.Path) -> list[str]:
  found = []
  for program, rest in commands(text):
    path = ROOT / program
    if not path.exists():
      if program.split("/")[0] in ROOMS:
        found.append(f"the program {program} does not exist")
      continue
    known = flags_of(path)
    rest = re.sub(r'"[^"]*"', "", rest.split(" -- ")[0])
    for flag in re.findall(r"(?<![\w-])--([A-Za-z][\w-]*)(?![\w.-])", rest):
      if flag not in known:
        found.append(f"{program} has no flag --{flag}")
    found += bad_sweeps(program, rest)
  blocks = re.findall(r"^```.*?^```", text, re.DOTALL | re.MULTILINE)
  made = [target for block in blocks for target in re.findall(r"(?m)^make ([\w-]+)", block)]
  for target in dict.fromkeys(made + re.findall(r"`make ([\w-]+)", text)):
    if target not in targets():
      found.append(f"the Makefile has no target {target}")
  return found


@functools.cache
def targets() -> set[str]:
  return set(re.search(r"\.PHONY: (.*)", (ROOT / "Makefile").read_text())[1].split())


def bad_sweeps(program: str, rest: str) -> list[str]:
  config, swept = re.search(r"--config=([\w/]+\.py)", rest), re.search(r"--sweep=([\w,]+)", rest)
  if not config or not swept or not (ROOT / config[1]).exists():
    return []
  known = (name for name in dir(load(config[1])) if name.startswith("sweep_"))
  missing = set(swept[1].split(",")) - {name.removeprefix("sweep_") for name in known}
  return [f"{config[1]} has no sweep {name}" for name in missing if not PLACEHOLDER.fullmatch(name)]


###  Fields and presets  ###


def bad_fields(text: str, page: pathlib.Path) -> list[str]:
  """`--config.a.b=value` anywhere; on a page also `a.b` and `a.b=value` in backticks."""
  pairs = re.findall(r"--config\.([a-z][\w.]*)(?:=([\w.-]+))?", text)
  for name, value in re.findall(r"`([a-z]\w*\.[a-z]\w*)(?: ?= ?([\w.-]+))?`", text):
    if (
      page.suffix == ".md"
      and name.partition(".")[0] in SECTIONS
      and not name.endswith((".py", ".sh", ".json", ".jsonl"))
    ):
      pairs.append((name, value))
  found = []
  for name, value in dict.fromkeys(pairs):
    if name not in FIELDS:
      if name not in SECTIONS:
        found.append(f"{name} is no field of a config")
    elif value and FIELDS[name].choices and not PLACEHOLDER.fullmatch(value):
      if value not in map(str, FIELDS[name].choices):
        found.append(f"{name} can't be {value}")
  return found


@functools.cache
def load(config: str):
  spec = importlib.util.spec_from_file_location("a_config", ROOT / config)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def bad_presets(text: str, page: pathlib.Path) -> list[str]:
  found = []
  for config, preset in dict.fromkeys(re.findall(r"(configs/\w+\.py):([\w:]*\w)", text)):
    words = preset.split(":")
    if not (ROOT / config).exists():
      found.append(f"{config} does not exist")
    elif not any(PLACEHOLDER.fullmatch(word) for word in words):
      try:
        load(config).get_config(preset)
      except ValueError as error:
        found.append(f"{config}:{preset} is no preset ({error})")
  return found


###  Tests  ###

OF_TEXT = (bad_paths, bad_commands, bad_fields, bad_presets)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_a_page_names_only_what_exists(page):
  text = page.read_text()
  checks = [*OF_TEXT, bad_links, *([bad_modules] * (page.name != "CHANGELOG.md"))]
  assert [complaint for check in checks for complaint in check(text, page)] == []


def docstrings(path: pathlib.Path) -> str:
  kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
  nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]
  return "\n\n".join(ast.get_docstring(node) or "" for node in nodes)


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_name_only_what_exists(room):
  found = []
  for path in MODULES:
    if path.relative_to(ROOT).parts[0] == room and path != pathlib.Path(__file__):
      text = docstrings(path)
      found += [f"{named(path)}: {c}" for check in OF_TEXT for c in check(text, path)]
      found += [f"{named(path)}: {c}" for c in bad_modules(text, path)]
  assert found == []


def test_the_readme_leads_to_every_page():
  linked = re.findall(r"\]\(([^)#\s]+)", (ROOT / "README.md").read_text())
  for page in sorted((ROOT / "docs").glob("*.md")):
    assert f"docs/{page.name}" in linked


@pytest.mark.parametrize(
  "check, text, complaint",
  [
    (bad_links, "[a](docs/absent.md)", "docs/absent.md leads nowhere"),
    (bad_links, "[a](BUILD.md#absent)", "no such heading"),
    (bad_links, "# Here\n[a](#there)", "no such heading"),
    (bad_paths, "see stratified/absent.py", "stratified/absent.py does not exist"),
    (bad_paths, "see `stratified/absent/`", "stratified/absent/ does not exist"),
    (bad_paths, "see `absent.py`", "no file is called absent.py"),
    (bad_modules, "see `stratified.absent`", "no stratified.absent"),
    (bad_modules, "see `stratified.losses.absent_loss`", "no stratified.losses.absent_loss"),
    (bad_commands, "python experiments/absent.py", "experiments/absent.py does not exist"),
    (bad_commands, "python experiments/train.py --absent=1", "no flag --absent"),
    (bad_commands, "python experiments/train.py \\\n  --absent=1", "no flag --absent"),
    (bad_commands, "python experiments/build_index.py --code-byte=2", "no flag --code-byte"),
    (bad_commands, "third_party/sglang/launch.sh MODEL --absent", "no flag --absent"),
    (bad_commands, "```\nmake absent\n```", "no target absent"),
    (bad_commands, "`make absent`", "no target absent"),
    (
      bad_commands,
      "python experiments/sweep.py --config=configs/baselines.py:grpo --sweep=absent",
      "no sweep absent",
    ),
    (bad_fields, "--config.advantage.absent=1", "advantage.absent is no field"),
    (bad_fields, "`advantage.absent`", "advantage.absent is no field"),
    (bad_fields, "`loss.aggregation=median`", "loss.aggregation can't be median"),
    (bad_presets, "configs/search_r1.py:absent", "search_r1.py:absent is no preset"),
    (bad_presets, "configs/baselines.py:grpo:absent", "baselines.py:grpo:absent is no preset"),
    (bad_presets, "configs/absent.py:tiny", "configs/absent.py does not exist"),
  ],
)
def test_an_error_of_each_kind_is_found(check, text, complaint):
  assert any(complaint in found for found in check(text, ROOT / "README.md"))
