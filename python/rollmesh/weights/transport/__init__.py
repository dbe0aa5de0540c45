"""Weights between processes: how a version of a trainer reaches `Weights` (updates.py).

    1  sender     takes each tensor as a host array to copy, or as GPU memory to lend
                  (tensors.py, loans.py)
    2  sender     assigns offsets and writes the manifest: names, dtypes, shapes, offsets, checksums
                  (manifest.py)
    3  sender     copies the arrays into a segment of shared memory (segment.py)
    4  sender     waits for kernels that write lent tensors, then opens a loan of the segment
                  (loans.py)
    5  sender     renames the segment to the path in an address (store.py), or names it in vLLM's
                  update_weights (rollmesh/vllm/trainer.py)
    6  receiver   checks the segment's owner, mode and nonce, and every entry of the manifest
                  (segment.py, manifest.py)
    7  receiver   reads the tensors by name in a sync; compares checksums at the first access
                  (ReceivedTensors in loans.py)
    8  receiver   checks that the loan is still open, closes the allocations, marks its byte as
                  read, commits
    9  sender     waits until all readers have closed the loan; then it may change its tensors

A trainer on another machine writes versions to a folder that both see: whole sets, and the
differences between versions (delta.py, delta_folder.py).

The locks of a process end with it. If the sender dies, a reader raises RankLostError and drops what
it has read; if a reader dies, the sender stops waiting. The package does not unpickle data or
listen on a port, and it imports torch only when it is needed.
"""
