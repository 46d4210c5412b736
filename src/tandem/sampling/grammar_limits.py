"""What one request's grammar may cost, all of it in one place. It knows no grammar."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Sizes of what a client sends, time and memory of compiling, time of following, llguidance's own limits.

    max_text_bytes   length of the schema, pattern, list or grammar.     max_choices   entries of a choice.
    max_depth        nesting of a JSON schema.
    compile_s        processor seconds until compiling is given up.      compile_bytes memory that it may take.
    max_line         new grammars that may wait for their first slice of time; more are refused.
    num_trial_steps  tokens of an answer that are tried before a grammar is taken.     trial_s  seconds for them.
    step_s           processor seconds of one mask.
    burst_s, mean_s  all masks of a request together may take burst_s + mean_s for each token of its answer.
    slow_s           a request whose masks take longer waits behind those whose masks do not.

    The rest is llguidance's (LLParserLimits); fuel and items bound one mask, states and size bound memory.
    """

    # A schema of a big API has tens of kilobytes. Regular expressions cost most for a byte, so compile_bytes holds too.
    max_text_bytes: int = 256 << 10
    max_choices: int = 4096
    max_depth: int = 64

    # The largest real schemas take 0.3 s and 0.2 GB; `(\p{L}|\p{Han})*` twelve thousand times took 60 s and 8.9 GB.
    compile_s: float = 5.0
    compile_bytes: int = 2 << 30
    max_line: int = 128

    # What explodes does so within a few tokens: `a{1000000}` and endless rules at once, nested repetitions in 5 to 29.
    num_trial_steps: int = 32
    trial_s: float = 0.25

    # A usual mask takes 0.01 to 2 ms. Ambiguous rules take time that grows with each token, past any fuel: only a clock
    # ends them. Forced to 10 ms a token, a hundred such requests still leave a mask to everyone within a second.
    step_s: float = 0.4
    burst_s: float = 0.5
    mean_s: float = 0.01
    slow_s: float = 0.005

    max_items_in_row: int = 10_000  # five times llguidance's own: four for each optional property of an object
    initial_lexer_fuel: int = 1_000_000  # llguidance's own, 20 ms
    step_lexer_fuel: int = 200_000  # llguidance's own, 14 ms; a quarter of it refuses `multipleOf` and unicode classes
    step_max_items: int = 50_000  # llguidance's own, 2.5 ms for honest grammars
    max_lexer_states: int = 50_000  # a fifth of llguidance's own: at 2 kB each 100 MB a request, not 500
    max_grammar_size: int = 500_000  # llguidance's own


PARSER_LIMITS = (
    "max_items_in_row", "initial_lexer_fuel", "step_lexer_fuel", "step_max_items", "max_lexer_states",
    "max_grammar_size",
)  # fmt: skip
