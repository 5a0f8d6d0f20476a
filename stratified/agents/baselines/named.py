"""Names the methods that learn nothing and are compared with a trained search agent.

    direct     answers at once
    cot        reasons, then answers
    rag        searches once, with the question
    ircot      searches with each sentence
    search_o1  searches inside the reasoning; condenses what was found

Each is a protocol with the generator of its rollout beside `agent.run`, and has two wordings:
`NAME_few_shot` shows worked examples to a model that follows no instruction.
"""

from stratified.agents.baselines import direct, ircot, rag, search_o1

# name -> a function of `render` (see tags.Tags)
PROTOCOLS = direct.PROTOCOLS | rag.PROTOCOLS | ircot.PROTOCOLS | search_o1.PROTOCOLS
