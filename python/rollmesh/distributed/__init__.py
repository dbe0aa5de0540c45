"""The ranks of a mesh.

mesh           Mesh: the degrees of parallelism
comm           connections between ranks: shared memory, torch.distributed, NCCL
rank_engine    the engine and the other ranks of its mesh, behind one interface
peers          the same interface if this process is one rank of several
leading        the same if rank 0 decides what the ranks do
wire           values as bytes, for messages between ranks
traffic        the bytes that a decode step sends, from the configuration alone
"""
