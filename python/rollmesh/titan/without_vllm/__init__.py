"""A folder for sys.path, whose module `vllm` stands in for a vLLM that is not installed
(rollmesh.titan)."""
