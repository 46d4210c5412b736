"""Measure this machine.

A table of commands; each prints a table, and writes JSON with settings and machine beside the figures if asked.
"""

COMMANDS = {
    "offline": ("tandem.cli.bench_offline", "static, synchronous and tandem batching, and peers, on the same requests"),
    "serve": (
        "tandem.cli.bench_serve",
        "load on a server: TTFT, ITL, TPOT, E2E and goodput, for any OpenAI-compatible one",
    ),
    "host": ("tandem.cli.bench_host", "what the host costs a step, on a device that does nothing"),
    "decode": ("tandem.cli.bench_decode", "time of a decode step over models and batch sizes, beside the memory floor"),
    "seed": ("tandem.cli.bench_seed", "the experiment: does the device wait for the host at depths 1, 2, 3?"),
}
EPILOG = """
examples:
  tandem bench offline --requests 1 8 32 --compare transformers
  tandem bench host
  tandem bench COMMAND --help
"""
