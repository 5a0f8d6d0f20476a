"""examples/my_engine.py answers in the wire format that a run speaks."""

import importlib.util
import pathlib

from starlette.testclient import TestClient

from stratified.retrieval import server

EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "my_engine.py"


def test_lines_of_a_file_are_found_by_their_words(tmp_path):
  spec = importlib.util.spec_from_file_location("my_engine", EXAMPLE)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  notes = tmp_path / "notes.txt"
  notes.write_text("The engine burns peat.\nOtto Brand paid for the engine.\nNothing here.\n")
  with TestClient(server.make_app(module.Engine(str(notes)))) as client:
    asked = {"queries": ["who paid for the engine", "zebra"], "topk": 2, "return_scores": True}
    reply = client.post("/retrieve", json=asked)
    assert client.get("/health").json()["manifest"]["count"] == 3
  first, second = reply.json()["result"]
  assert [(one["document"]["id"], one["score"]) for one in first] == [("1", 3.0), ("0", 2.0)]
  assert first[0]["document"]["contents"] == "Otto Brand paid for the engine." and second == []
