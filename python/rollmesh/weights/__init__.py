"""The weights of a generator: how a new version comes in and which one serves.

    updates               the syncs of one generator: begin, push, commit
    sync                  options and sources: a mapping, an iterator
    pieces                Piece, and the local part of a DTensor
    resharding            from the trainer's pieces to the generator's shards
    self_test             do trainer and generator compute the same function?
    transport             tensors between processes: shared memory, CUDA IPC loans, streams of
                          collectives
    safetensors_folder    a checkpoint as a mapping

Nothing is imported here: the modules above import each other through parts of the package below.
"""
