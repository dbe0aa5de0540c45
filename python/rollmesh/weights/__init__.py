"""The weights of a generator: how a new version comes in and which one serves.

    updates               the sets of one generator: begin, push, commit
    transport             tensors between processes: shared memory, CUDA IPC loans, streams of collectives
    safetensors_folder    a checkpoint as a mapping

Nothing is imported here: the modules above import each other through parts of the package below.
"""
