"""What can't run is refused in one sentence before the workdir belongs to it."""

import dataclasses
import errno
import json

import pytest
from test_train import config, run

from stratified.data import tokenizer
from stratified.runs import build, trainer
from stratified.tasks.encyclopedia import vocabulary

FIELDS = ("strata.name", "reward.name", "advantage.name", "task.name", "tools", "algorithm.name")
SPECS = (
  "os:getcwd",
  "os:environ",
  "os.path:join",
  "builtins:str",
  "builtins:exit",
  "builtins:Exception",
  "sys:foo",
  "nosuch:f",
  ".x:f",
  ":f",
  "f:",
  "a:b:c",
)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("field", FIELDS)
def test_what_is_nothing_of_ones_own_is_a_sentence_that_names_its_field(field, spec):
  with pytest.raises(ValueError) as caught:
    build.build(config(**{field: spec}))
  if field != "tools":  # what is loaded but no tool is named itself
    assert field in str(caught.value) and spec.removesuffix(":c") in str(caught.value)
  assert len(str(caught.value).splitlines()) == 1


def test_tokens_without_an_embedding_and_embeddings_without_a_token_are_known():
  made = tokenizer.from_pieces([" a", " b"])
  size = made.vocab_size
  made.backend.add_tokens(["<x>", "<y>"])
  assert made.gaps(size + 5) == ((size + 2, size + 5),) and made.gaps(size + 2) == ()
  made.check_embedded(size + 2)
  with pytest.raises(
    ValueError, match=f"2 tokens without an embedding, the first '<x>' .* {size};"
  ):
    made.check_embedded(size)


def test_a_run_whose_tokenizer_outgrew_its_model_is_refused(monkeypatch):
  opened = build.open_task

  def with_more(config):
    own = vocabulary.build.__wrapped__()  # not the one that every other run here shares
    own.backend.add_tokens(["<x>"])
    return dataclasses.replace(opened(config), tokenizer=own)

  monkeypatch.setattr(build, "open_task", with_more)
  with pytest.raises(ValueError, match="the tokenizer has 1 token without an embedding"):
    build.build(config())


MODEL = {
  "architectures": ["LlamaForCausalLM"],
  "vocab_size": 97,
  "hidden_size": 24,
  "intermediate_size": 40,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
}


@pytest.mark.parametrize(
  "changes, weights, sentence",
  [
    ({}, b"\xff" * 99, "model/model.safetensors is damaged or cut short"),
    ({"num_hidden_layers": 10**9}, b"", "model/config.json: num_hidden_layers=1000000000 must be"),
    ({"rms_norm_eps": float("nan")}, b"", "model/config.json: rms_norm_eps=nan must be a number"),
  ],
)
def test_a_damaged_model_directory_is_refused_before_the_claim(
  tmp_path, changes, weights, sentence
):
  folder = tmp_path / "model"
  folder.mkdir()
  (folder / "config.json").write_text(json.dumps(MODEL | changes))
  (folder / "model.safetensors").write_bytes(weights)
  done = run(tmp_path / "run", **{"policy.checkpoint": folder})
  assert done.returncode == 1 and sentence in done.stderr and "Traceback" not in done.stderr
  assert not (tmp_path / "run").exists()


def test_a_full_disk_is_a_sentence_wherever_a_file_is_written(tmp_path, monkeypatch):
  def full(*unused):
    raise OSError(errno.ENOSPC, "No space left on device", f"{tmp_path}/run/metrics.jsonl")

  monkeypatch.setattr(trainer, "train", full)
  done = run(tmp_path / "run")
  assert done.returncode == 1 and "report:" not in done.stdout and "Traceback" not in done.stderr
  assert (
    "metrics.jsonl" in done.stderr and "GB are free there. Make room, and the same" in done.stderr
  )


@pytest.mark.parametrize(
  "changes, sentence",
  [
    ({"rollout.max_observation_tokens": 2}, "max_observation_tokens is 2"),
    ({"rollout.max_tokens": 8, "rollout.answer_tokens": 4}, "raise it to at least"),
    ({"strata.name": "builtins:str"}, "strata.name is 'builtins:str'"),
  ],
)
def test_a_refused_config_leaves_no_workdir(tmp_path, changes, sentence):
  done = run(tmp_path / "run", **changes)
  assert done.returncode == 1 and sentence in done.stderr and "Traceback" not in done.stderr
  assert not (tmp_path / "run").exists()
