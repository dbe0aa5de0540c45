"""rollmesh in the place of vLLM's worker and model runner: vLLM schedules, the engine computes."""
