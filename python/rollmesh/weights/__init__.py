"""The weights of a generator: how a new version comes in and which one serves.

    updates               the sets of one generator: begin, push, commit
    sync                  the ways in: a mapping, an iterator
    pieces                Piece, and what a rank has of a DTensor
    resharding            pieces from the trainer's ranks to the generator's
    self_test             do trainer and generator compute the same function?
    transport             tensors between processes: shared memory, CUDA IPC loans, streams of collectives
    safetensors_folder    a checkpoint as a mapping

Nothing is imported here: the modules above import each other through parts of the package below.
"""
