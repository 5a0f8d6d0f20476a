"""Files and folders are put in place whole or not at all; odd JSON is refused or left out."""

import pytest

from stratified import files


def test_a_block_that_raises_leaves_the_old_file_and_nothing_beside_it(tmp_path):
  files.write_atomic(tmp_path / "a", "old")
  with pytest.raises(KeyError), files.replacing(tmp_path / "a") as part:
    part.write_text("half")
    assert (tmp_path / "a").read_text() == "old"
    raise KeyError
  assert (tmp_path / "a").read_text() == "old" and len(list(tmp_path.iterdir())) == 1
  with files.replacing(tmp_path / "a") as part:
    part.write_text("new")
  assert (tmp_path / "a").read_text() == "new" and len(list(tmp_path.iterdir())) == 1


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
  (tmp_path / "f.part").mkdir()
  (tmp_path / "f.part" / "of a killed run").touch()
  with pytest.raises(KeyError), files.replacing_folder(tmp_path / "f") as part:
    (part / "x").touch()
    raise KeyError
  assert not list(tmp_path.iterdir())
  with files.replacing_folder(tmp_path / "f") as part:
    (part / "x").touch()
    assert not (tmp_path / "f").exists()
  assert [path.name for path in (tmp_path / "f").iterdir()] == ["x"]


@pytest.mark.parametrize(
  "text", ["", "{", "[1]", '{"a": ' + "[" * 200_000, '{"a": ' + "9" * 5000 + "}"]
)
def test_what_is_no_object_is_named_or_left_out(tmp_path, text):
  (tmp_path / "x").write_text(text)
  with pytest.raises(ValueError, match="x is no"):
    files.read_object(tmp_path / "x")
  assert files.find_object(tmp_path / "x") is None and files.parse_object(text) is None
  assert files.find_object(tmp_path / "absent") is None
  assert files.read_rows(tmp_path / "x") == ([], 1 if text else 0)


def test_a_torn_line_is_cut_and_whole_ones_stay(tmp_path):
  files.append_rows(tmp_path / "x", [{"a": 1}, {"a": 2}])
  whole = (tmp_path / "x").read_bytes()
  (tmp_path / "x").write_bytes(whole + b'{"a')
  files.cut_torn_line(tmp_path / "x")
  assert (tmp_path / "x").read_bytes() == whole
  files.cut_torn_line(tmp_path / "absent")
  with pytest.raises(ValueError):
    files.append_rows(tmp_path / "x", [{"a": float("nan")}])
