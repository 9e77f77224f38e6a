"""What a rank makes of answers when links break at the worst moment."""

from types import SimpleNamespace

from taas_magic.data import encode
from taas_magic.data.asked import Question
from taas_magic.data.blocks import Blocks
from taas_magic.data.pull import Pull
from taas_magic.data.shard import Ask
from taas_magic.data.wire import Frame, Kind


class Link:
    """Breaks when it is told; a real one cannot be made to break between two parts of a frame."""

    address = "a lane"
    breaks = False

    def free_blocks(self):
        return []

    def send(self, frames):
        if self.breaks:
            raise ConnectionError("cut")

    def close(self):
        pass


def test_what_one_frame_brought_is_not_asked_again_when_its_link_breaks_meanwhile():
    links, aside = [Link(), Link()], set()
    route = SimpleNamespace(
        pick=lambda slot, streams: 1 if 0 in aside else 0,
        connect=links.__getitem__,
        failed=lambda number, why: aside.add(number),
    )
    pull = Pull(route, Blocks(0))
    pull._orders.holds = 5
    pull.ask([Ask(slot, True) for slot in range(4)])
    links[0].breaks = True
    body = encode.encode(7)
    frame = Frame(Kind.BATCH, 0, 0, 1, len(body.head), body.body_bytes, order=9, batches=3)
    # Of another order than the one that holds, so each is asked for once more: on a broken link.
    pull._take(pull._open[0], frame, memoryview(bytearray(3 * body.body_bytes)))
    asked = sorted(pull._open[1].asked)
    orders = [Question(Kind.ORDER, 0, slot) for slot in range(3)]
    assert asked == sorted([Question(Kind.GET, 0, 3), *orders])
    assert pull.retried == 2
