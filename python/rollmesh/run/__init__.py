"""What makes a training run robust, below the algorithm of rollmesh.grpo: its configuration, data,
files, checkpoints, metrics, signals and user code. Nothing here knows GRPO.
"""
