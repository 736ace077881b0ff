"""A scripted engine for runner.py: nothing of Octavo's, and a clock of its own, so that its rates are known exactly.

Options: gap and first (seconds of a step on that clock), log (a file that gets a JSON line for each thing asked), and faults:
load_error, die_at, hang, tokens (so many instead of those asked for), slow_clock,
noise, child, sleep, spin (a thread that never waits).
"""

import atexit
import json
import os
import subprocess
import sys
import threading
import time


class Engine:
    def __init__(self, model, limits, options):
        self.options, self.vocab_size, self.calls = options, 5000, 0
        self.versions = {"fake": "1.0", "weights": "none", "limits": json.dumps(limits)}
        if "load_error" in options:
            raise ValueError(options["load_error"])
        if options.get("hang") == "load":
            time.sleep(600)
        self.log(load=model, environment=dict(os.environ), isolated=sys.flags.isolated, argv=sys.argv)
        atexit.register(self.log, end=True)
        if options.get("noise"):
            print("I am a library, and I talk", flush=True)
            os.write(1, b'{"ids": [], "times": []}\n')
        if options.get("child"):
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            self.log(child=child.pid)
        if options.get("spin"):
            threading.Thread(target=self.spin, daemon=True).start()

    def spin(self):
        while True:
            pass

    def log(self, **what):
        if "log" in self.options:
            with open(self.options["log"], "a") as file:
                file.write(json.dumps({"name": self.options.get("name"), "pid": os.getpid(), **what}) + "\n")

    def prepare(self, batch, prompt_tokens, tokens):
        self.now = 0.0
        time.perf_counter = lambda: self.now

    def generate(self, prompts, tokens):
        self.calls += 1
        self.log(run=[len(prompts), len(prompts[0]), tokens], prompts=prompts)
        time.sleep(self.options.get("sleep", 0))
        if self.calls == self.options.get("die_at"):
            sys.stderr.write("the engine fell over\n")
            sys.stderr.flush()
            os.kill(os.getpid(), 9)
        if self.options.get("hang") == "run" and self.calls > 1:
            time.sleep(600)
        self.now += self.options.get("first", 1e-6)
        for step in range(self.options.get("tokens", tokens) if self.calls > 1 else tokens):
            if step:
                self.now += self.options.get("gap", 1e-7)
            if self.options.get("slow_clock") and self.calls > 1:
                self.now = 3600.0
            yield [(request, (prompt[0] + step) % 5000) for request, prompt in enumerate(prompts)]
