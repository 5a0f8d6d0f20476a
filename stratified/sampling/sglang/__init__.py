"""Samples on SGLang servers; sampler.py puts the parts together.

    wire.py         what is sent, and how an answer is read and checked
    http.py         connections
    server.py       one server's routes
    errors.py       what can go wrong, by what is to be done about it
    admission.py    which server runs a generation
    members.py      one server of several: how it gets weights and proves that it holds them
    fleet.py        several servers as one: routing, loss, return
    publish.py      the trainer's parameters on their way to the servers
    torch_wire.py   tensors in PyTorch's serialisation, written without PyTorch
    broadcast.py    weights broadcast in a torch.distributed group, by a helper process in the
                    servers' environment
    probe.py        the trainer's log-probs of a fixed prompt

Only publish.py and probe.py import jax.
"""
