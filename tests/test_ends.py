"""Every end token of a model ends a turn, and what its tokenizer begins texts with comes once."""

import json

import pytest
from small_rollouts import decoder_config, OneCharacterEach, parameters
from test_tool_calls import QUESTION, WIDE
from test_tool_calls import Tokenizer as Bytes
from tokenizers import processors

from stratified.agents import agent, rollout_setting, tags
from stratified.data import tokenizer as tokenizers_
from stratified.sampling.in_process import JaxSampler, SamplerConfig
from stratified.sampling.interface import Request

BEGIN = "<|begin|>"


def saved(folder, *, begins: bool, ends=None):
  """A tokenizer's directory, with a post-processor that prepends BEGIN if asked."""
  made = tokenizers_.from_pieces([" who", "a"], fixed=[BEGIN])
  made.backend.add_special_tokens([BEGIN, "<|eot|>"])
  if begins:
    made.backend.post_processor = processors.TemplateProcessing(
      single=f"{BEGIN} $A", special_tokens=[(BEGIN, made.backend.token_to_id(BEGIN))]
    )
  made.save(folder / "tokenizer.json")
  if ends is not None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
  return tokenizers_.Tokenizer.from_file(folder / "tokenizer.json", "<|endoftext|>")


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("template", ["Question: {question}", BEGIN + "Question: {question}"])
def test_what_the_tokenizer_prepends_stands_once_at_the_beginning(tmp_path, begins, template):
  made = saved(tmp_path, begins=begins)
  setting = rollout_setting.Setting.of(made, tags.Tags(template), WIDE)
  (pieces,) = rollout_setting.prompt_pieces(setting, "who a?")
  begin = made.backend.token_to_id(BEGIN)
  expected = 1 if begins or template.startswith(BEGIN) else 0
  assert pieces.count(begin) == expected and (pieces[0] == begin) == bool(expected)
  assert made.encode("a").count(begin) == 0  # nothing that is fed later begins so


def test_a_model_directory_names_its_end_tokens(tmp_path):
  made = saved(tmp_path, begins=False)
  assert made.other_ends == ()
  eot = made.backend.token_to_id("<|eot|>")
  assert saved(tmp_path, begins=False, ends=[made.eos_id, eot, eot]).other_ends == (eot,)
  assert saved(tmp_path, begins=False, ends=eot).other_ends == (eot,)
  assert saved(tmp_path, begins=False, ends=[True, "x", None, -1]).other_ends == ()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["", '{"version": "1.0", "mod', "[1]"])
def test_a_damaged_tokenizer_is_refused_by_its_file(tmp_path, name, content):
  saved(tmp_path, begins=False)
  (tmp_path / name).write_text(content)
  with pytest.raises(ValueError, match=f"{name}.* damaged.*copy or download it again") as caught:
    tokenizers_.Tokenizer.from_file(tmp_path / "tokenizer.json")
  assert len(str(caught.value).splitlines()) == 1


class TwoEnds(OneCharacterEach):
  other_ends = (5,)


def test_the_sampler_stops_at_each_of_them():
  model = decoder_config(vocab_size=27)
  settings = SamplerConfig(lanes=4, length=48, block=3, rows=2, temperature=1.0, seed=5)
  made = JaxSampler(model, settings, TwoEnds(27, eos_id=3))
  made.load(parameters(model, scale=1.0), 0)
  found = made.generate([Request((0, q, 0), (2, 6), 40) for q in range(24)])
  ended = [completion.token_ids for completion in found if completion.finish == "stop"]
  assert {ids[-1] for ids in ended} == {3, 5}
  assert not [ids for ids in ended if {3, 5} & {*ids[:-1]}]


def test_the_agent_takes_each_of_them_for_the_end_of_a_turn():
  class Other(Bytes):
    other_ends = (Bytes.control["<|im_start|>"],)

  setting = rollout_setting.Setting.of(Other(), tags.Tags("{question}"), WIDE)
  one = agent.Agent(setting, QUESTION, (0, 0, 0), (1,))
  assert one.decode((*b"hm", Other.other_ends[0])) == "hm" and one.decode(tuple(b"hm")) == "hm"
  with pytest.raises(agent.Fault, match="the end-of-text token"):
    one.check_end((Other.other_ends[0], 65), Request((0, 0, 0), (1,), 5))
