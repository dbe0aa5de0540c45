"""vLLM's platform interface for rollmesh on the CPU and on CUDA, and the checks of vLLM's
config."""
