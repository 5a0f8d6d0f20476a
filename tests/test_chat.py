"""A model's chat template, rendered as transformers renders it, and kept in its sandbox."""

import json

import pytest

from stratified.agents import chat, tags
from stratified.agents.baselines import named as methods

CHATML = (
  "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
  "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
  "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor "
  "%}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = """\
{%- if tools %}
    {{- bos_token + '[TOOLS]' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
    {%- if message.content is none %}{%- continue %}{%- endif %}
    {%- set ns.last = loop.index %}
    {%- if message.role == "assistant" %}
        {%- generation %}{{- message.content + eos_token }}{%- endgeneration %}
    {%- else %}
        {{- '[' + message.role + ']' + message.content | trim }}
    {%- endif %}
{%- endfor %}
{{- ns.last }}
{%- if enable_thinking is defined and enable_thinking is false %}
    {{- '<think></think>' }}
{%- endif %}
"""
CHAT = [
  {"role": "user", "content": " Wer ist <b>Ådne</b> & 東京? \n"},
  {"role": "assistant", "content": "I."},
  {"role": "user", "content": "{{ 7 * 7 }}"},
]
TOOL = {
  "type": "function",
  "function": {
    "name": "search",
    "description": "Sucht <fast> & 'gut' \u00e9",
    "parameters": {"type": "object", "properties": {}},
  },
}


def directory(path, template=None, *, alone=None, **config):
  config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}} | config
  (path / "tokenizer_config.json").write_text(
    json.dumps(config | ({"chat_template": template} if template else {}))
  )
  if alone:
    (path / "chat_template.jinja").write_text(alone)
  return path


@pytest.mark.parametrize("template", [CHATML, TOOLS])
@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("opened", [True, False])
def test_renders_as_transformers_does(tmp_path, template, tools, opened):
  tokenizers = pytest.importorskip("tokenizers")
  transformers = pytest.importorskip("transformers")
  backend = tokenizers.Tokenizer(
    tokenizers.models.WordLevel({"x": 0, "<s>": 1, "</s>": 2}, unk_token="x")
  )
  theirs = transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend, bos_token="<s>", eos_token="</s>"
  )
  theirs.chat_template = template
  theirs.save_pretrained(tmp_path)
  ours = chat.load(tmp_path)
  for extra in ({}, {"enable_thinking": False}):
    expected = theirs.apply_chat_template(
      CHAT, tools=tools, tokenize=False, add_generation_prompt=opened, **extra
    )
    assert ours.render(CHAT, tools=tools, add_generation_prompt=opened, **extra) == expected


def test_one_user_message_is_what_a_protocol_takes(tmp_path):
  template = chat.load(directory(tmp_path, CHATML))
  protocol = tags.search_r1(render=template.user)
  text = protocol.prompt("Who?")
  assert text.startswith(
    "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nAnswer the question"
  )
  assert text.endswith("Question: Who?\n<|im_end|>\n<|im_start|>assistant\n")
  before, after = methods.PROTOCOLS["rag"](render=template.user).parts("Who?")
  assert "<|im_start|>user" in before and after.endswith(
    "Who?\n<|im_end|>\n<|im_start|>assistant\n"
  )


def test_the_template_is_found_where_directories_keep_it(tmp_path):
  user = [{"role": "user", "content": "x"}]
  assert chat.load(directory(tmp_path, "A{{ bos_token }}")).render(user) == "A<s>"
  named = [
    {"name": "tool_use", "template": "B"},
    {"name": "default", "template": "C{{ eos_token }}"},
  ]
  assert chat.load(directory(tmp_path, named)).render(user) == "C</s>"
  assert chat.load(directory(tmp_path, "A", alone="D")).render(user) == "D"


def test_a_directory_without_a_template_is_refused_with_the_way_out(tmp_path):
  with pytest.raises(
    FileNotFoundError, match="has no chat template.*set rollout.chat_template = False"
  ):
    chat.load(directory(tmp_path))
  (tmp_path / "tokenizer_config.json").write_text("{")
  with pytest.raises(ValueError, match="tokenizer_config.json is not JSON"):
    chat.load(tmp_path)
  (tmp_path / "tokenizer_config.json").write_text("[]")
  with pytest.raises(ValueError, match="a JSON list, but it must be an object"):
    chat.load(tmp_path)


@pytest.mark.parametrize(
  "template",
  [
    "{{ raise_exception('roles must alternate') }}",
    "{% for x in %}",
    "{{ messages[5]['content'] + 1 }}",
    "{{ ().__class__.__bases__[0].__subclasses__()[0] + '' }}",
    "{{ messages.append({}) }}",
    "{{ messages.__class__.__mro__[1].__init__.__globals__ + 1 }}",
  ],
)
def test_a_template_that_fails_or_reaches_out_of_its_sandbox_is_one_sentence(template):
  with pytest.raises(
    ValueError,
    match="the model's chat template refuses a conversation of the roles user: .*mend the model",
  ):
    chat.ChatTemplate(template).render([{"role": "user", "content": "x"}])


def test_a_prompt_does_not_change_with_the_day():
  asks = "{% if strftime_now is defined %}{{ strftime_now('%d') }}{% else %}fixed{% endif %}"
  assert chat.ChatTemplate(asks).render([]) == "fixed"
