"""Renders messages by a model's own chat template: the text that the model was trained to see.

The template is a Jinja program that comes with the weights, so it runs in Jinja's immutable
sandbox. It has no clock: a template that asks for today's date takes its own default, and a prompt
never changes overnight.

transformers would do the same; importing its tokenizers and configs alone takes 2.8 CPU seconds of
every start, jinja2 and tokenizers 0.1. The tests compare with it.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import json
import os
import pathlib
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
  """A Jinja template and the special tokens that it may name.

  source: the template's text. special_tokens: pairs such as ("bos_token", "<s>").
  """

  source: str
  special_tokens: tuple[tuple[str, str], ...] = ()

  def render(
    self,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **variables,
  ) -> str:
    """Renders a conversation, and after it what opens the assistant's turn unless told otherwise.

    messages: {"role", "content", ...} each. tools: JSON schemas of functions. variables: what else
      this template reads (`enable_thinking`, say).
    Raises ValueError, one sentence, where the template refuses the conversation or does not
    compile.
    """
    known = dict(self.special_tokens) | variables
    try:
      return _compiled(self.source).render(
        messages=[dict(message) for message in messages],
        tools=[dict(tool) for tool in tools] if tools else None,
        documents=None,
        add_generation_prompt=add_generation_prompt,
        **known,
      )
    except (jinja2.TemplateError, TypeError, KeyError, AttributeError, IndexError) as error:
      roles = ", ".join(str(message.get("role")) for message in messages)
      raise ValueError(
        f"the model's chat template refuses a conversation of the roles {roles}: {error}; train "
        "without it (rollout.chat_template = False) or mend the model directory's template"
      ) from error

  def user(self, message: str, system: str = "") -> str:
    """Renders one user message and the opening of the assistant's turn, as a protocol wants it.

    system: stands in a system message before it, where it is given.
    """
    told = [{"role": "system", "content": system}] if system else []
    return self.render([*told, {"role": "user", "content": message}])


def load(directory: str | os.PathLike) -> ChatTemplate:
  """Loads the template of a model directory: chat_template.jinja, else tokenizer_config.json's.

  Of several named templates it takes the one called "default".

  Raises FileNotFoundError where the directory has no template, ValueError where its files are
  damaged.
  """
  folder = pathlib.Path(directory)
  config = _json_object(folder / "tokenizer_config.json")
  tokens = _json_object(folder / "special_tokens_map.json") | config
  alone = folder / "chat_template.jinja"
  template = (
    alone.read_text(encoding="utf-8") if alone.exists() else _named(config.get("chat_template"))
  )
  if not isinstance(template, str) or not template.strip():
    raise FileNotFoundError(
      f"{folder} has no chat template (neither chat_template.jinja nor chat_template in "
      "tokenizer_config.json); "
      "a base model has none: set rollout.chat_template = False"
    )
  special = [(name, _token(tokens.get(name))) for name in SPECIAL_TOKENS]
  return ChatTemplate(
    template, tuple((name, token) for name, token in special if token is not None)
  )


def _named(value):
  """tokenizer_config.json holds one template, or a list of {"name", "template"}."""
  if isinstance(value, list):
    by_name = {
      entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)
    }
    return by_name.get("default", next(iter(by_name.values()), None))
  return value


def _token(value) -> str | None:
  token = value.get("content") if isinstance(value, dict) else value
  return token if isinstance(token, str) else None


def _json_object(path: pathlib.Path) -> dict:
  if not path.exists():
    return {}
  try:
    found = json.loads(path.read_text(encoding="utf-8"))
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{path} is not JSON ({error}); get the model directory again") from error
  if not isinstance(found, dict):
    raise ValueError(
      f"{path} is a JSON {type(found).__name__}, but it must be an object; get it again"
    )
  return found


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
  )
  environment.filters["tojson"] = _to_json  # Jinja's own escapes <, > and & for HTML
  environment.globals["raise_exception"] = _refuse
  return environment.from_string(source)


class _Generation(jinja2.ext.Extension):
  """Renders what stands in `{% generation %} ... {% endgeneration %}`, marks of some templates."""

  tags = {"generation"}

  def parse(self, parser):
    next(parser.stream)
    return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
  return json.dumps(
    value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
  )


def _refuse(message):
  raise jinja2.TemplateError(message)
