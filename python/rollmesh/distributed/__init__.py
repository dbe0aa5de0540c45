"""The ranks of a mesh.

    mesh       Mesh: the degrees of parallelism
    comm       how ranks reach each other: shared memory, torch.distributed, NCCL
    spmd       one rank of several processes, behind the calls of an engine
    wire       values as bytes, for messages between ranks
    traffic    the bytes that a decode step sends, from the configuration alone
"""
