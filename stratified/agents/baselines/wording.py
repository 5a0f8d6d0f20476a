"""The wording of the methods in methods.py: an instruction each, and worked examples for a model
that needs them.

The examples are the two of prompts.FEW_SHOT, so that no method sees another fact than its rivals.
"""

DIRECT = """\
Answer the question with the short answer alone: no explanation, no whole sentence. Write it between <answer> and \
</answer>, as in <answer> Lisbon </answer>.
Question: {question}
"""

DIRECT_FEW_SHOT = """\
Answer each question. Write the short answer between <answer> and </answer>.

Question: Which ocean lies to the west of the country whose capital is Lisbon?
<answer> Atlantic Ocean </answer>

Question: Who wrote the novel Frankenstein?
<answer> Mary Shelley </answer>

Question: {question}
"""

COT = """\
Answer the question. First think it through step by step between <think> and </think>. Then write the answer between \
<answer> and </answer>: only the short answer itself, as in <answer> Lisbon </answer>.
Question: {question}
"""

COT_FEW_SHOT = """\
Answer each question. Think first, then write the short answer between <answer> and </answer>.

Question: Which ocean lies to the west of the country whose capital is Lisbon?
<think> Lisbon is the capital of Portugal. The ocean to the west of Portugal is the Atlantic Ocean. </think>
<answer> Atlantic Ocean </answer>

Question: Who wrote the novel Frankenstein?
<think> Frankenstein is a novel of 1818. Its author is Mary Shelley. </think>
<answer> Mary Shelley </answer>

Question: {question}
"""

RAG = """\
Answer the question. These passages were found for it; they may help, or be about something else:
{passages}
Write the short answer alone, between <answer> and </answer>, as in <answer> Lisbon </answer>: no explanation, no \
whole sentence.
Question: {question}
"""

_PORTUGAL = """\
<information>Doc 1(Title: Portugal) Portugal is a country on the Iberian Peninsula. It is bordered by Spain to the \
north and east and by the Atlantic Ocean to the west and south.</information>"""

_FRANKENSTEIN = """\
<information>Doc 1(Title: Frankenstein) Frankenstein; or, The Modern Prometheus is an 1818 novel written by the \
English author Mary Shelley.</information>"""

RAG_FEW_SHOT = (
  f"""\
Answer each question from the passages between <information> and </information>. Write the short answer between \
<answer> and </answer>.

Question: Which ocean lies to the west of the country whose capital is Lisbon?
{_PORTUGAL}
<answer> Atlantic Ocean </answer>

Question: Who wrote the novel Frankenstein?
{_FRANKENSTEIN}
<answer> Mary Shelley </answer>

"""
  + """\
Question: {question}
{passages}
"""
)

IRCOT = """\
Answer the question by reasoning in short sentences, one a line. Each sentence states one fact that follows from the \
passages or from what you know. After a sentence you may be given new passages between <information> and \
</information>; they were found with it. When the facts suffice, write on a line of its own: So the answer is: \
<answer> the short answer </answer>
{passages}Question: {question}
"""

IRCOT_FEW_SHOT = (
  f"""\
Answer each question. Write one fact on each line; passages found for it come back between <information> and \
</information>. Then write the short answer between <answer> and </answer>.

Question: Which ocean lies to the west of the country whose capital is Lisbon?
<information>Doc 1(Title: Lisbon) Lisbon is the capital and the largest city of Portugal.</information>
Lisbon is the capital of Portugal.
{_PORTUGAL}
The Atlantic Ocean lies to the west of Portugal.
So the answer is: <answer> Atlantic Ocean </answer>

Question: Who wrote the novel Frankenstein?
{_FRANKENSTEIN}
The author of Frankenstein is Mary Shelley.
So the answer is: <answer> Mary Shelley </answer>

"""
  + """\
Question: {question}
{passages}"""
)

SEARCH_O1 = """\
Answer the question at the end. Reason step by step. Whenever you are not sure of a fact, stop and ask a search engine \
for it: write a query between <search> and </search>. What its pages say about the query is summed up for you between \
<information> and </information>; then go on reasoning. You may search several times. When you know the answer, write \
it between <answer> and </answer>: only the short answer itself, as in <answer> Lisbon </answer>.
Question: {question}
"""

DIGEST = """\
Somebody reasons towards the answer of a question and has searched for a fact that the reasoning needs. Read the \
passages that the search found and write down, in a few sentences, only what they say that answers the query or helps \
with the next step. Use the passages alone. If nothing in them helps, write exactly: No helpful information found.

Question: {question}

Reasoning so far: {reasoning}

Query: {query}

Passages:
{passages}

What the passages say:"""

SEARCH_O1_FEW_SHOT = """\
Answer the question. To look something up, write a query between <search> and </search>; the fact that was found comes \
back between <information> and </information>. Then write the short answer between <answer> and </answer>.

Question: Which ocean lies to the west of the country whose capital is Lisbon?
<think> Lisbon is the capital of Portugal. I need the ocean to its west. </think>
<search> Portugal coast ocean </search>
<information>Portugal is bordered by the Atlantic Ocean to the west and south.</information>
<think> The fact names the ocean. </think>
<answer> Atlantic Ocean </answer>

Question: Who wrote the novel Frankenstein?
<think> I should look up the novel. </think>
<search> Frankenstein novel author </search>
<information>Frankenstein is a novel of 1818 by the English author Mary Shelley.</information>
<think> The author is Mary Shelley. </think>
<answer> Mary Shelley </answer>

Question: {question}
"""

DIGEST_FEW_SHOT = """\
Read the passages. Write in one sentence the fact that the search was for.

Search: Portugal coast ocean
Passages: Doc 1(Title: Portugal) Portugal is a country on the Iberian Peninsula. It is bordered by Spain to the north \
and east and by the Atlantic Ocean to the west and south.
Fact: Portugal is bordered by the Atlantic Ocean to the west and south.

Search: Frankenstein novel author
Passages: Doc 1(Title: Frankenstein) Frankenstein; or, The Modern Prometheus is an 1818 novel written by the English \
author Mary Shelley.
Fact: Frankenstein is a novel of 1818 by the English author Mary Shelley.

Search: {query}
Passages: {passages}
Fact:"""
