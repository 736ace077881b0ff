"""The scheduler under a clock that is not real: the engine's own core and KV accounting, with steps that only cost time.

trace.py: which requests come when; costs.py: what a step costs; calibrate.py: measures that with the real engine; virtual.py: the
executor and the clock; run.py: one trace under one policy; report.py: figures, tables and the plot.
Stateless but for what a run collects. Not here: the command line (cli/bench_scheduler.py), the comparison with a real run
(the checkout's benchmarks/simulator.py).
"""
