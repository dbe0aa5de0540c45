"""A request's way in and out: sampling parameters, token ids, the engine's results as
RequestOutput.

arguments    checks of prompts, parameters, ids
sampling     SamplingParams
requests     all requests of one engine: add, step, take
driver       generate, submit, poll, score: steps until requests are done
async_driver agenerate, astream: the same for event loops, by a thread
text         tokenizers and stop strings
outputs      RequestOutput and what is in it
"""
