"""The wording of the tag protocol's prompts and of its corrective observations."""

SEARCH_R1 = """\
Answer the question at the end. Reason first, between <think> and </think>, each time you are \
told something \
new. If your reasoning shows that you lack a fact, ask the search engine for it by writing a \
query between \
<search> and </search>; the passages it finds will be given to you between <information> and \
</information>. \
You may search several times. As soon as you know enough, write the answer between <answer> and \
</answer>: \
only the short answer itself, no explanation, as in <answer> Lisbon </answer>.
Question: {question}
"""

TOOLS = """\
Answer the question at the end. Reason first, between <think> and </think>, each time you are told \
something new. For whatever you can't be sure of by yourself, call a tool by writing what it is to \
work on between its tags: {tools}. What it brings will be given to you between <information> and \
</information>. You may call tools several times. As soon as you know enough, write the answer \
between <answer> and </answer>: only the short answer itself, no explanation, as in <answer> \
Lisbon </answer>.
Question: {question}
"""

CORRECTIVE_OF_TOOLS = """
That was neither a call of a tool nor an answer. To call a tool, I put what it is to work on \
between its tags: {tags}. To finish, I put the answer between <answer> and </answer>. I will try \
again.
"""

CORRECTIVE = """
That was neither a search nor an answer. To search, I put the query between <search> and \
</search>. To \
finish, I put the answer between <answer> and </answer>. I will try again.
"""

FEW_SHOT = """\
Answer the question. To look something up, write a query between <search> and </search>; passages \
come back \
between <information> and </information>. Then write the short answer between <answer> and \
</answer>.

Question: Which ocean lies to the west of the country whose capital is Lisbon?
<think> Lisbon is the capital of Portugal. I need the ocean to its west. </think>
<search> Portugal coast ocean </search>
<information>Doc 1(Title: Portugal) Portugal is a country on the Iberian Peninsula. It is \
bordered by Spain \
to the north and east and by the Atlantic Ocean to the west and south.</information>
<think> The passage names the ocean. </think>
<answer> Atlantic Ocean </answer>

Question: Who wrote the novel Frankenstein?
<think> I should look up the novel. </think>
<search> Frankenstein novel author </search>
<information>Doc 1(Title: Frankenstein) Frankenstein; or, The Modern Prometheus is an 1818 novel \
written by \
the English author Mary Shelley.</information>
<think> The author is Mary Shelley. </think>
<answer> Mary Shelley </answer>

Question: {question}
"""

SHORT = "Question: {question}\n"

SHORT_CORRECTIVE = "<information>No search.</information>"

SHORT_NO_CALL = "<information>No call.</information>"
