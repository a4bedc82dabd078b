"""When static batches are worth it: rows of one length, and a measurement that says so."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from raybatch.errors import ConfigError
from raybatch.records.types import Request

# share of the time that static batches must save: below it the noise of a measurement would decide
LEAST_GAIN = 0.05
# of each way; other work on a host only adds time, and some of so many runs have little of it
LEAST_RUNS = 5
# prompts that differ more than by this share of the longest are not of one length
_MAX_SPREAD = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLengths:
    """What is known of the lengths of some rows.

    Args:
        shortest_prompt: tokens.
        longest_prompt: tokens.
        is_output_equal: all generate the same number of tokens, and nothing ends one of them early.
    """

    shortest_prompt: int
    longest_prompt: int
    is_output_equal: bool

    @classmethod
    def of(cls, requests: Iterable[Request]) -> "RowLengths":
        """Return the lengths of requests.

        Raises:
            ConfigError: there are none.
        """
        prompts, outputs = set[int](), set[int | None]()
        for request in requests:
            sampling = request.sampling
            is_exact = sampling.ignore_eos and not sampling.stop and not sampling.stop_token_ids
            prompts.add(len(request.prompt_token_ids))
            outputs.add(sampling.max_tokens if is_exact else None)
        if not prompts:
            raise ConfigError("there are no rows whose lengths could be compared")
        return cls(
            shortest_prompt=min(prompts),
            longest_prompt=max(prompts),
            is_output_equal=len(outputs) == 1 and None not in outputs,
        )

    @property
    def is_homogeneous(self) -> bool:
        """Whether no row of a batch would wait long for the others."""
        spread = self.longest_prompt - self.shortest_prompt
        return self.is_output_equal and spread <= _MAX_SPREAD * self.longest_prompt


def prefers_static(
    lengths: RowLengths, *, static_s: Sequence[float], continuous_s: Sequence[float]
) -> bool:
    """Return whether static batches should run these rows.

    Rows of several lengths never wait for each other, whatever was measured; others do where the
    quickest run of static batches takes 5 % less than the quickest of the other way.

    Args:
        lengths: of the rows.
        static_s: seconds of the same rows in static batches, run by run, in turns with the others.
        continuous_s: the same where each row that ends makes room for the next.

    Raises:
        ConfigError: fewer than five runs of one of both ways.
    """
    if min(len(static_s), len(continuous_s)) < LEAST_RUNS:
        raise ConfigError(
            f"static batches are chosen by {LEAST_RUNS} runs of each way at least, got "
            f"{len(static_s)} and {len(continuous_s)}"
        )
    is_quicker = min(static_s) <= (1 - LEAST_GAIN) * min(continuous_s)
    return lengths.is_homogeneous and is_quicker
