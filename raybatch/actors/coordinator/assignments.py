"""What a replica gets for the spans that the queue hands out."""

import logging
from collections import defaultdict
from collections.abc import Sequence

from raybatch.actors.coordinator.mailbox import Inbox
from raybatch.actors.queue.row_queue import RowQueue
from raybatch.actors.wire.records import Assignment, Span

_logger = logging.getLogger(__name__)


def make_assignments(spans: Sequence[Span], queue: RowQueue, inbox: Inbox) -> list[Assignment]:
    """Return the spans by row batch, with tables, groups, places and tokens so far.

    Rows that nobody waits for are taken out.
    """
    places: dict[int, list[int]] = defaultdict(list)
    for place, span in enumerate(spans):
        places[span.batch_id].append(place)
    assignments = []
    for batch_id, of_batch in places.items():
        refs = inbox.refs(batch_id)
        if refs is None:
            # left in, they would count as held for ever by a replica that never sees them
            _logger.error("row batch %d is dropped: nobody waits for it", batch_id)
            inbox.drop_rows(batch_id)
            continue
        batch_spans = tuple(spans[place] for place in of_batch)
        assignments.append(
            Assignment(
                batch_id=batch_id,
                refs=refs,
                spans=batch_spans,
                places=tuple(of_batch),
                groups=queue.groups_of(batch_id, batch_spans),
                begun=inbox.begun(batch_id, batch_spans),
            )
        )
    return assignments
