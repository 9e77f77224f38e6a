"""Which order of an epoch holds for all ranks, where a lane has another one.

A sampler that draws from something else than the seeded generators gives every lane another order.
Then the one of the lane that opened the epoch, enumerated once, holds: it is asked for a batch's
indices (ORDER), and any lane for the batch by those (GIVEN), in the place of the first question.
"""

from taas_magic.data.asked import Question
from taas_magic.data.wire import Frame, Kind
from taas_magic.errors import RunLost

_LOST = (
    "epoch {epoch}: the loader's sampler gives another order each time it is asked, and the "
    "fetcher that had drawn this epoch's is gone. A sampler that draws from the generator of "
    "torch, numpy or random survives that"
)


class Orders:
    """The order that holds, and what is asked in the place of other questions.

    Attributes:
        holds: Hash of the order; None as long as none is known, 0: there is none to compare.
    """

    def __init__(self) -> None:
        self.holds: int | None = None
        self._instead: dict[Question, Question] = {}

    def first(self, ask: Question) -> Question:
        """The question in whose place this one is asked, or itself."""
        return self._instead.get(ask, ask) if self._instead else ask

    def next(self, ask: Question, frame: Frame, body: memoryview) -> Question | None:
        """What to ask after an answer; None when it is the answer to the first question.

        Raises:
            RunLost: The order that holds cannot be had any more.
        """
        first = self._instead.pop(ask, ask) if self._instead else ask
        if first is ask and self._is_other(frame):
            instead = Question(Kind.ORDER, ask.epoch, ask.slot)
        elif ask.kind is Kind.ORDER and frame.kind is Kind.VALUE:
            if self._is_other(frame):
                raise RunLost(_LOST.format(epoch=ask.epoch))
            instead = first._replace(kind=Kind.GIVEN, body=bytes(body))
        else:
            return None
        self._instead[instead] = first
        return instead

    def _is_other(self, frame: Frame) -> bool:
        return frame.order != self.holds and frame.order != 0 and self.holds is not None
