"""examples/tutorial.ipynb: it runs from top to bottom, and holds no outputs.

Cells run here one after the other in one namespace, without Jupyter: its kernel would be a process
that imports and compiles everything anew, and three more packages for every test environment.
"""

import contextlib
import json
import os
import pathlib
import tempfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "tutorial.ipynb"


def cells():
  return json.loads(NOTEBOOK.read_text())["cells"]


def run_cells(sources):
  """Runs cells of code in one namespace; returns it. An error names its cell."""
  space = {"__name__": "__main__"}
  for number, source in enumerate(sources, 1):
    exec(compile(source, f"cell {number} of {NOTEBOOK.name}", "exec"), space)
  return space


def test_it_is_stored_without_outputs_and_numbers():
  code = [cell for cell in cells() if cell["cell_type"] == "code"]
  assert len(code) > 5
  assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)


def test_an_error_names_its_cell():
  with pytest.raises(ZeroDivisionError) as error:
    run_cells(["one = 1", "one / 0"])
  assert str(error.traceback[-1].path) == f"cell 2 of {NOTEBOOK.name}"


@pytest.mark.long
def test_it_runs_from_config_to_figures(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(tempfile, "mkdtemp", lambda: str(tmp_path))
  with contextlib.chdir(os.getcwd()):
    os.chdir(NOTEBOOK.parent)  # where Jupyter starts
    space = run_cells("".join(one["source"]) for one in cells() if one["cell_type"] == "code")
  assert space["found"].finished and len(space["records"]) == 32
  said = capsys.readouterr().out
  assert "gn     [" in said and "question | " in said
  assert "<svg" in space["svg"] and (tmp_path / "smoke" / "report.html").exists()
