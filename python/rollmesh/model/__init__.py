"""The description of a model, computed from its configuration alone.

spec         ModelSpec, from a Hugging Face config
rope         rope tables of each rope type
placement    which part of each parameter a rank holds
sizes        parameters and the bytes of a rank
"""
