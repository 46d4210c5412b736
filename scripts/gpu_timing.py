"""How long a captured graph takes on a GPU, for the scripts beside this one. It knows no kernels."""

import statistics

import torch


def micros_a_call(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    """Median microseconds of a replay over its calls, the first of eight left out."""
    times = []
    for _ in range(8):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times[1:])
