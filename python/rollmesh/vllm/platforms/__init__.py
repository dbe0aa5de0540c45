"""What vLLM asks of a platform: rollmesh on the CPU and on CUDA, and the checks of vLLM's
config."""
