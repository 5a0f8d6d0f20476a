"""The parts of the sampler that speaks to SGLang servers: stratified/sampling/sglang/sampler.py
puts them together.

    wire.py         what is sent, and how an answer is read and checked
    http.py         connections
    server.py       one server's routes
    members.py      one server of several: how it gets weights and proves that it holds them
    fleet.py        several servers as one: routing, loss, return
    torch_wire.py   tensors in PyTorch's serialisation, written without PyTorch
    group.py        weights broadcast in a torch.distributed group, by a helper in the servers'
                    environment
    publish.py      the trainer's parameters on their way to the servers
    probe.py        the trainer's log-probs of a fixed prompt

Only publish.py and probe.py import jax.
"""
