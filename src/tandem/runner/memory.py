"""How much of a GPU's memory the KV cache gets, and what to lower when there is too little. It touches no device."""

from dataclasses import dataclass

from tandem.errors import DeviceMemoryError

SLACK_BYTES = 256 << 20
"""For what grows later: kernels loaded at first use, scratch memory, fragments."""


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """What was measured on the device, in bytes.

    total        the device's memory.
    outside      what others hold of it: other processes, the driver's context, loaded kernels.
    weights      parameters and tables.
    activations  most that the largest step took on top of them, and attention's scratch memory.
    graphs       what captured decode steps will hold.
    max_tokens   tokens of that largest step.
    state        rows, lanes and staging memory, which follow from settings; see startup.state_bytes.
    """

    total: int
    outside: int
    weights: int
    activations: int
    graphs: int
    max_tokens: int
    state: int = 0

    def free_at(self, utilization: float) -> int:
        """Bytes left for the KV cache: total · utilization, less all that is above and the slack."""
        taken = self.outside + self.weights + self.activations + self.graphs + self.state + SLACK_BYTES
        return int(self.total * utilization) - taken


def cache_blocks(
    facts: MemoryFacts, utilization: float, block_bytes: int, least_blocks: int, asked_bytes: int | None = None
) -> int:
    """Blocks of the KV cache: those of asked_bytes if given, else all that is free.

    Raises DeviceMemoryError, naming the setting to change and a value that will do, if fewer than least_blocks fit.
    """
    free = facts.free_at(utilization)
    least = least_blocks * block_bytes
    if asked_bytes is not None:
        if asked_bytes > facts.free_at(1.0):
            raise DeviceMemoryError(
                f"kv_cache_memory is {_gib(asked_bytes)}; the device has {_gib(max(facts.free_at(1.0), 0))} left.",
                hint=_lower(facts, utilization, least, f"set kv_cache_memory to at most {facts.free_at(1.0)}"),
            )
        free = asked_bytes
    if free < least:
        raise DeviceMemoryError(
            f"the KV cache would get {_gib(max(free, 0))} and needs at least {_gib(least)} ({least_blocks} blocks): of "
            f"{_gib(facts.total)}, {utilization:.0%} may be used; weights take {_gib(facts.weights)}, the largest "
            f"step {_gib(facts.activations)}, graphs {_gib(facts.graphs)}, rows {_gib(facts.state)}, others "
            f"{_gib(facts.outside)}.",
            hint=_lower(facts, utilization, least, f"set kv_cache_memory to at least {least}"),
        )
    return free // block_bytes


def check_weights(known: MemoryFacts, utilization: float) -> None:
    """Before weights are loaded, which takes long: raises DeviceMemoryError if they alone leave no room for a cache.

    known   with no activations and no graphs: these come on top and are not measured yet.
    """
    missing = -known.free_at(utilization)
    if missing < 0:
        return
    needed = utilization + missing / known.total
    more = f"raise gpu_memory_utilization above {needed:.2f}, for the largest step and the KV cache come on top"
    less = "take a smaller model, or a dtype of fewer bytes"
    free = f", or free the device of the {_gib(known.outside)} that others hold" if known.outside > 1 << 30 else ""
    raise DeviceMemoryError(
        f"the weights take {_gib(known.weights)}: of {_gib(known.total)}, {utilization:.0%} may be used, others hold "
        f"{_gib(known.outside)}, and {_gib(SLACK_BYTES)} are kept for what grows.",
        hint=f"{more if needed < 0.96 else less}{free}.",
    )


def _lower(facts: MemoryFacts, utilization: float, least: int, otherwise: str) -> str:
    """What to change, and to what."""
    missing = least - facts.free_at(utilization)
    if missing <= 0:
        return f"{otherwise}."
    needed = utilization + missing / facts.total
    if needed <= 0.97:
        return f"raise gpu_memory_utilization to {min(needed + 0.005, 0.98):.2f}."
    missing = least - facts.free_at(0.97)
    if missing < facts.activations * 0.9:
        tokens = int(facts.max_tokens * (1.0 - missing / facts.activations) * 0.95)
        lower = f"lower max_batch_tokens from {facts.max_tokens} to {max(tokens, 1)}"
        return f"{lower}; set gpu_memory_utilization to 0.97."
    if missing < facts.state * 0.9:
        return (
            "lower max_num_seqs or max_model_len, which rows' block tables follow; set gpu_memory_utilization to 0.97."
        )
    return "take a smaller model, or a dtype of fewer bytes; lowering max_num_seqs and max_batch_tokens is not enough."


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB"
