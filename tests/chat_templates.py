"""A chat template in Qwen2.5's format, written from the format: none of the packages that tests may
fetch ships it.

Messages stand between <|im_start|>role and <|im_end|>; a system message always comes first and
lists the tools as JSON lines; results of tools that follow each other share one user message, each
in <tool_response>.
"""

QWEN25 = """\
{%- set first = messages[0] %}
{%- set has_system = first.role == 'system' %}
{{- '<|im_start|>system\\n' + (first.content if has_system else 'Be helpful.') }}
{%- if tools %}
{{- '\\n\\n# Tools\\n\\nFunctions that may be called, as JSON between <tools> and </tools>:' }}
{{- '\\n<tools>' }}
{%- for tool in tools %}
{{- '\\n' }}{{ tool | tojson }}
{%- endfor %}
{{- '\\n</tools>\\n\\nA call is a JSON object with name and arguments between <tool_call> ' }}
{{- 'and </tool_call>.' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
{{- '<|im_start|>user' }}
{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- elif not (loop.first and has_system) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
