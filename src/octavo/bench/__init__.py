"""Measuring: a load on any OpenAI-compatible server, the engine in this process, and what a results file carries.

client.py sends one request and notes when its pieces came; load.py decides when requests start; report.py turns what was
seen into figures; own_server.py starts and asks a server of ours; latency.py runs the engine in process; record.py writes
results files.
Stateless but for what a run collects. Not here: the command line (cli/bench.py), which experiments are committed
(the scripts in the checkout's benchmarks/).
"""
