"""Weights between processes: how a version gets from a trainer into `Weights` (updates.py), written once.

    1  sender     takes each tensor as an array of the host, or as memory of a GPU that can be lent       tensors.py, loans.py
    2  sender     lays the arrays out in a block and writes the manifest: what lies where, with sums      manifest.py
    3  sender     fills the block: a segment of shared memory, or a bucket of a group of ranks            segment.py, carriers.py
    4  sender     opens a loan of the segment for what stays on GPUs; waits first for what writes it      loans.py
    5  sender     tells the receiver: by renaming the segment to the path in an address (store.py), by vLLM's update_weights
                  (rollmesh/vllm/trainer.py), or by a collective (stream.py; gloo_group.py for vLLM's workers on other machines)
    6  receiver   checks owner, mode and nonce of the segment and every place in the manifest             segment.py, manifest.py
    7  receiver   is a mapping of names to tensors, that a sync reads; sums are compared then             loans.py (ReceivedTensors)
    8  receiver   looks whether the loan is open still, closes what it has opened, marks that it has read, commits
    9  sender     waits until nobody has the loan open; then its tensors are its own again

Who dies in between leaves no lock: a reader gets RankLostError and drops what it has read, a sender stops waiting. Nothing here unpickles,
listens on a port before a distributed send, or imports torch before it is needed.
"""
