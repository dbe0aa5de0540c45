"""Requests: sampling parameters, token ids, and the engine's results as RequestOutput.

arguments    checks of prompts, parameters, ids
sampling     SamplingParams
requests     all requests of one engine: add, step, take
loop         the engine's thread and its inbox
calls        generate, submit, poll, score, agenerate, astream
text         tokenizers and stop strings
outputs      RequestOutput and its parts
"""
