"""Options of the transformers backend; nothing heavy is imported for them."""

from dataclasses import dataclass
from typing import ClassVar

from raybatch.config import check_whole


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformersOptions:
    """What `backend.options` may hold for the kind "transformers".

    Args:
        attn_implementation: as transformers takes it, such as "sdpa" or "eager"; None leaves the
            choice to it.
        trust_remote_code: run the Python files that come with the model.
        max_num_seqs: sequences that run at once; each is computed alone, so more only take more
            memory.
    """

    WHERE: ClassVar[str] = "backend.options."

    attn_implementation: str | None = None
    trust_remote_code: bool = False
    max_num_seqs: int = 4

    def __post_init__(self) -> None:
        check_whole(self, "max_num_seqs", 1)
