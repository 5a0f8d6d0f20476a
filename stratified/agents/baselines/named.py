"""The methods that are compared with a trained search agent and learn nothing, by name.

    direct     answer at once                        cot  reason, then answer
    rag        search once, with the question        ircot  search with each sentence
    search_o1  search inside the reasoning; condense what was found

Each is a protocol with the generator of its rollout beside `agent.run`, and has two wordings:
`NAME_few_shot` shows worked examples to a model that follows no instruction.
"""

from stratified.agents.baselines import direct, ircot, rag, search_o1

# name -> a function of `render` (see tags.Tags)
PROTOCOLS = direct.PROTOCOLS | rag.PROTOCOLS | ircot.PROTOCOLS | search_o1.PROTOCOLS
