"""A training run around the algorithm of rollmesh.grpo: configuration, data, files, checkpoints,
metrics, signals and user code.
"""
