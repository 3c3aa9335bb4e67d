"""The pool's blocks as KV events for routers of others: vLLM's schema over ZMQ, from the Conductor's process.

What is in the pool the Conductor's directory says; what a block is of (its parent and its token ids) the nodes say when
they are asked. Where nobody wants events none of this runs, and no block costs anything.
"""
