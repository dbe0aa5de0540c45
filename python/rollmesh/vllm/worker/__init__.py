"""rollmesh's worker and model runner for vLLM: vLLM schedules, the engine computes."""
