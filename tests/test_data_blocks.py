"""Memory for batches: used again when nobody looks at it, never before."""

import os

from taas_magic.data.blocks import Blocks, SharedBlocks, WrittenBlocks


def test_a_block_is_used_again_once_nobody_looks_at_it():
    blocks = Blocks(1 << 20)
    first = blocks.take(5000)
    first[:3] = b"one"
    second = blocks.take(5000)
    second[:3] = b"two"
    assert bytes(first[:3]) == b"one"
    held = blocks.held_bytes
    del first
    third = blocks.take(5000)
    assert (blocks.held_bytes, bytes(second[:3])) == (held, b"two")
    assert bytes(third[:3]) == b"one"


def test_what_is_kept_free_is_bounded_and_what_is_looked_at_stays():
    blocks = Blocks(1 << 20)
    views = [blocks.take(1 << 19) for _ in range(6)]
    for number, view in enumerate(views):
        view[0] = number
    assert blocks.held_bytes <= 1 << 20
    assert [view[0] for view in views] == list(range(6))


def test_shared_blocks_are_named_free_once_when_nobody_looks_at_them_any_more():
    written, shared = WrittenBlocks(1 << 20), SharedBlocks()
    block = written.write([b"batch"], 5)
    shared.add(block.number, os.dup(block.descriptor), 5)
    view = shared.look(block.number, 5)
    assert bytes(view) == b"batch"
    assert shared.free() == []
    del view
    assert shared.free() == [block.number]
    assert shared.free() == []
    written.free(block.number)
    again = written.write([b"other"], 5)
    assert (again.number, again.new) == (block.number, False)
    written.close()


def test_there_is_no_block_beyond_the_limit():
    written = WrittenBlocks(100)
    assert written.write([b"a" * 60], 60) is not None
    assert written.write([b"b" * 60], 60) is None
    written.close()
