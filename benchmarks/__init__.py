"""Benchmarks: rates beside the machine's measured limits, and beside a named peer in the same run.

rollmesh bench --suite cpu       the CPU: the whole table, with targets and peers
python -m benchmarks.machine     this machine's limits: memory read, copy, products
python -m benchmarks.generate    decode and prefill of a dense 0.6B and a MoE 1B shape, beside
                                 transformers
python -m benchmarks.sync        weight sync beside a plain copy
python -m benchmarks.gpu         a GPU: decode, prefill, sync, start and ops beside its own limits
python -m benchmarks.gpu_table   its figures as tables
benchmarks/card_run.sh           fifteen minutes on a GPU: bits, tests, figures, memory checkers"""
