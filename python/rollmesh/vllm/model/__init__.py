"""rollmesh's model classes for vLLM's own model runner (VLLM_PLUGINS=rollmesh_model)."""
