"""What a page boundary sees and decides: plain records of pages in device and host memory.

A page is `page_tokens` positions of KV cache. Host memory keeps the KV of every sequence that has
any, also while the device has it: at a boundary, before the snapshot is taken, both are equal.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from raybatch.config import VictimOrder
from raybatch.errors import ConfigError, range_text

Status = Literal["active", "suspended", "prefilled", "evicted", "waiting"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryOptions:
    """How pages are reserved, who yields, and when prompts are computed.

    Args:
        initial: device pages beyond its context that a sequence is loaded with.
        extension: device pages that it gets when those that it has end before the next boundary.
        interval: pages of tokens between two boundaries.
        victims: who yields first among equal priorities: the sequence with the least progress, the
            most progress, or the one that came last.
        max_wait: boundaries after which nobody who has waited less is loaded or prefilled before.
        watermark_pages: host pages that stay free while more than one sequence has any.
        margin_pages: host pages that stay free beyond what active sequences grow by.
        headroom_pages: device pages that no sequence may need.
        lookahead: boundaries whose growth stays free in host memory after a prefill round, and
            boundaries that decode between two rounds.
        refill_ratio: sequences of a prefill round at least, as a multiple of those that can decode.
    """

    initial: int = 2
    extension: int = 2
    interval: int = 1
    victims: VictimOrder = "least"
    max_wait: int = 8
    watermark_pages: int = 0
    margin_pages: int = 0
    headroom_pages: int = 0
    lookahead: int = 4
    refill_ratio: float = 0.25

    def __post_init__(self) -> None:
        for name in ("interval", "lookahead"):
            _check_at_least(name, getattr(self, name), 1)
        for name in ("max_wait", "watermark_pages", "margin_pages", "headroom_pages"):
            _check_at_least(name, getattr(self, name), 0)
        _check_at_least("refill_ratio", self.refill_ratio, 0)
        for name in ("initial", "extension"):
            if getattr(self, name) < self.interval:
                raise ConfigError(
                    f"{name} must be at least interval, the pages that a sequence may fill before "
                    f"the next boundary ({self.interval}), got {getattr(self, name)}"
                )
        if self.victims not in get_args(VictimOrder):
            names = ", ".join(get_args(VictimOrder))
            raise ConfigError(f"victims must be one of {names}, got {self.victims!r}")

    @property
    def host_reserve(self) -> int:
        """Host pages that no sequence may need, even alone."""
        return max(self.watermark_pages, self.margin_pages)


@dataclass(frozen=True, kw_only=True, slots=True)
class SequencePages:
    """A sequence at a boundary.

    Args:
        id: unique; a sequence that came later has a larger one.
        status: active (pages on the device and in host memory), suspended (in host memory alone,
            since it yielded), prefilled (the same, since it was prefilled), evicted (no pages; all
            its tokens have to be prefilled again) or waiting (no pages yet).
        context_tokens: tokens whose KV it has; without pages, those to prefill.
        remaining_tokens: that it may still generate; 0 for a sequence that has ended.
        progress_tokens: that it has decoded, part of the context.
        waited: boundaries since it came into its status, for one that is not active.
        priority: larger ones yield later and are taken earlier.
    """

    id: int
    status: Status
    context_tokens: int
    remaining_tokens: int
    device_pages: int = 0
    host_pages: int = 0
    progress_tokens: int = 0
    waited: int = 0
    priority: int = 0

    @property
    def is_pending(self) -> bool:
        """Whether its tokens have to be prefilled before it can decode."""
        return self.status in ("waiting", "evicted")


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundarySnapshot:
    """One engine at a page boundary, after its host memory has caught up with its device.

    Args:
        device_free: of them, in no sequence's hands.
        host_free: of them, in no sequence's hands.
        host_chunk_tokens: growth for which a sequence gets host pages when it is prefilled.
        boundaries_since_prefill: boundaries that decoded since the last prefill round.
    """

    sequences: tuple[SequencePages, ...]
    page_tokens: int
    device_pages: int
    device_free: int
    host_pages: int
    host_free: int
    max_active: int
    host_chunk_tokens: int = 0
    boundaries_since_prefill: int = 0

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class PageGrant:
    """Pages that a sequence gets in addition."""

    id: int
    num_pages: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryPlan:
    """What happens at a boundary; carried out in the order of the fields, ids ascending in each.

    Args:
        release: ended by themselves; all their pages become free.
        over_capacity: cannot get another token even alone: they end with the finish reason
            "capacity" and what they have, and all their pages become free.
        evict: give up all their pages and keep their tokens, which are prefilled again.
        suspend: give up their device pages; host memory has them.
        extend: device pages for active sequences.
        grow: host pages for sequences that will decode.
        load: device pages for suspended and prefilled sequences, which become active.
        prefill: host pages for waiting and evicted sequences. Where there is any, they are
            prefilled before the next boundary and nothing decodes.
    """

    release: tuple[int, ...] = ()
    over_capacity: tuple[int, ...] = ()
    evict: tuple[int, ...] = ()
    suspend: tuple[int, ...] = ()
    extend: tuple[PageGrant, ...] = ()
    grow: tuple[PageGrant, ...] = ()
    load: tuple[PageGrant, ...] = ()
    prefill: tuple[PageGrant, ...] = ()

    @property
    def is_prefill(self) -> bool:
        """Whether the next phase computes prompts instead of decoding."""
        return bool(self.prefill)


def _check_at_least(name: str, value: float, least: int) -> None:
    if not least <= value < float("inf"):
        raise ConfigError(f"{name} must be {range_text(f'at least {least}', value)}, got {value}")
