"""Weights between processes: the way of a version from a trainer into `Weights` (updates.py).

    1  sender     takes each tensor as a host array to copy, or as GPU memory to lend
       tensors.py, loans.py
    2  sender     assigns offsets and writes the manifest: names, dtypes, shapes, offsets, checksums
       manifest.py
    3  sender     copies the arrays into a segment of shared memory, or a bucket of a group of ranks
       segment.py, carriers.py
    4  sender     waits for kernels that write lent tensors, then opens a loan of the segment
       loans.py
    5  sender     tells the receiver: by renaming the segment to the path in an address (store.py),
       by vLLM's update_weights
                  (rollmesh/vllm/trainer.py), or by a collective (stream.py; gloo_group.py for
                  vLLM's workers on other machines)
    6  receiver   checks the segment's owner, mode and nonce, and every entry of the manifest
       segment.py, manifest.py
    7  receiver   a sync reads the tensors by name; checksums are compared at the first access
       loans.py (ReceivedTensors)
    8  receiver   checks that the loan is still open, closes the allocations, marks its byte as
       read, commits
    9  sender     waits until no reader has the loan open; then it may change its tensors

A process that dies leaves no lock behind: a reader raises RankLostError and drops what it has read,
a sender stops waiting. Nothing here unpickles, listens on a port before a distributed send, or
imports torch before it is needed.
"""
