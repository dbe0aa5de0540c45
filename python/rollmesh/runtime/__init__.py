"""The base of all other packages: checks, messages, devices, NVIDIA's libraries and the types of
the C engine.

arguments      checks of arguments          messages     how a value or an error reads in a message
devices        "cpu", "cuda", "cuda:N"      libraries    where NVIDIA's libraries are: nccl, cublas
engine_views   what the engine returns      progress     the progress bar
dtypes         bfloat16 for NumPy
"""
